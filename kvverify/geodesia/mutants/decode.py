"""Runs of the policy that are known to be wrong, most of them published or nearly so, and a few differently right.

A mutant is the plain model with one rule exchanged, or its trace with one number miscounted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvverify.geodesia.accounting import budget_bits, token_bits
from kvverify.geodesia.allocate import budget
from kvverify.geodesia.decode_operator import DECODE, DecodeCase
from kvverify.geodesia.ladder import EXACT, MEAN
from kvverify.geodesia.mass import block_sums, update
from kvverify.geodesia.mutants.variants import honest, kernel
from kvverify.geodesia.plain import PlainHead, Trace

__all__: list[str] = []

IN_CHUNKS = DecodeCase(chunk=3, rate=7.5, prompt=61)


# Causality and the group


@DECODE.mutant("causal")
def looks_at_the_next_query(*args: Tensor, **static: Any) -> Trace:
    ahead = honest(*args[:3], args[3].roll(-1, 2), *args[4:], **static)
    return honest(*args, level=ahead.level, **static)._replace(mass=ahead.mass)


@DECODE.mutant("causal", case=DecodeCase(pages=0.25, prompt=47, new=8))
def ranks_pages_by_keys_to_come(*args: Tensor, **static: Any) -> Trace:
    ahead = honest(*args[:4], args[4].roll(-4, 1), args[5], **static)
    return honest(*args, pages=ahead.pages, **static)


@DECODE.mutant("gqa_once", "current_prefix", case=DecodeCase(group=7, rate=9.0))
def demotes_once_for_each_query_head(*args: Tensor, **static: Any) -> Trace:
    class PerQueryHead(PlainHead):
        def step(self, query: Tensor, row: Tensor, rate: float, level: Any, pages: Any) -> list[Tensor]:
            self.asked = query
            return super().step(query, row, rate, level, pages)

        def allocate(self, rate: float) -> Tensor:
            found = self.level
            for member in self.asked:
                weight = self.attend(member[None], self.held(), torch.ones(1, self.length, dtype=torch.bool))[0][0]
                mass = block_sums(weight, block=self.setting.block)[: len(self.level)]
                allowed = self.allowed(rate)
                found = torch.maximum(
                    found, budget(mass, self.error, self.level, self.hot(), self.cost, budget_bits=allowed).level
                )
            return found

    return kernel(PerQueryHead)(*args, **static)


class FirstHeadOnly(PlainHead):
    """Takes the first query head for the whole group."""

    def new_mass(self, query: Tensor) -> Tensor:
        """Return the weights of one head."""
        return super().new_mass(query[:1])


@DECODE.mutant("gqa_once", "ema_recurrence")
def takes_the_first_head_for_the_group(*args: Tensor, **static: Any) -> Trace:
    return kernel(FirstHeadOnly)(*args, **static)


@DECODE.mutant("current_prefix", case=DecodeCase(rate=9.0, seed=1))
def one_level_map_for_all_heads(*args: Tensor, **static: Any) -> Trace:
    level = honest(*args, **static).level
    return honest(*args, level=level[:1].expand_as(level), **static)


# Mass


@DECODE.mutant("ema_recurrence", "mass_simplex")
def average_starts_from_zero(*args: Tensor, **static: Any) -> Trace:
    class FromZero(PlainHead):
        def prefill(self, observed: Tensor, rows: Tensor, kept: Tensor | None) -> None:
            super().prefill(observed, rows, kept)
            self.mass = torch.zeros_like(self.mass)

    return kernel(FromZero)(*args, **static)


@DECODE.mutant("ema_recurrence")
def average_is_reset_by_a_new_block(*args: Tensor, **static: Any) -> Trace:
    class Resets(PlainHead):
        def update_mass(self, query: Tensor) -> None:
            new = self.new_mass(query)
            self.mass = new if len(new) > len(self.mass) else update(self.mass, new, decay=self.setting.decay)

    return kernel(Resets)(*args, **static)


@DECODE.mutant("ema_recurrence")
def average_is_observed_with_a_mask_aligned_top_left(*args: Tensor, **static: Any) -> Trace:
    class TopLeft(PlainHead):
        def prefill(self, observed: Tensor, rows: Tensor, kept: Tensor | None) -> None:
            super().prefill(observed, rows, kept)
            seen = torch.arange(self.length) <= torch.arange(observed.shape[1])[:, None]
            weight = torch.stack([self.attend(query, rows, seen)[0] for query in observed]).mean((0, 1))
            self.mass = block_sums(weight, block=self.setting.block)

    return kernel(TopLeft)(*args, **static)


@DECODE.mutant("mass_simplex")
def masses_are_summed_over_the_group(*args: Tensor, **static: Any) -> Trace:
    class Sums(PlainHead):
        def new_mass(self, query: Tensor) -> Tensor:
            return super().new_mass(query) * len(query)

    return kernel(Sums)(*args, **static)


@DECODE.mutant("own_state_only", case=DecodeCase(rate=6.0))
def masses_come_from_dense_keys(*args: Tensor, **static: Any) -> Trace:
    class Dense(PlainHead):
        def new_mass(self, query: Tensor) -> Tensor:
            seen = torch.ones(len(query), self.length, dtype=torch.bool)
            return block_sums(self.attend(query, self.original, seen)[0].mean(0), block=self.setting.block)

    return kernel(Dense)(*args, **static)


@DECODE.mutant("own_state_only", "retained", case=DecodeCase(rate=6.0))
def serves_a_dense_copy(*args: Tensor, **static: Any) -> Trace:
    class Dense(PlainHead):
        def held(self) -> Tensor:
            return self.original.clone()

    return kernel(Dense)(*args, **static)


class Shared(PlainHead):
    """A head whose average goes on from whatever was served before it."""

    left_over: Tensor | None = None

    def update_mass(self, query: Tensor) -> None:
        """Start from the state that the last call left."""
        if Shared.left_over is not None:
            self.mass = torch.nn.functional.pad(Shared.left_over, (0, len(self.mass) - len(Shared.left_over)))
        super().update_mass(query)
        Shared.left_over = self.mass


@DECODE.mutant("ema_recurrence")
def state_is_shared_between_prompts(*args: Tensor, **static: Any) -> Trace:
    return kernel(Shared)(*args, **static)


# Allocation


@DECODE.mutant("retighten", case=DecodeCase(rate=9.0, fall=1.5))
def demotes_a_block_once_at_most(*args: Tensor, **static: Any) -> Trace:
    class Once(PlainHead):
        def hot(self) -> Tensor:
            return super().hot() | (self.level != EXACT)

    return kernel(Once)(*args, **static)


@DECODE.mutant("slack_noop", "current_prefix", case=DecodeCase(rate=12.0))
def cannot_stand_still(*args: Tensor, **static: Any) -> Trace:
    class Restless(PlainHead):
        def allowed(self, rate: float) -> int:
            return min(super().allowed(rate), int(self.cost[self.level].sum()) - 1)

    return kernel(Restless)(*args, **static)


@DECODE.mutant("current_prefix", "retighten", case=DecodeCase(prompt=57, new=1, rate=9.0))
def budget_of_padded_tokens(*args: Tensor, **static: Any) -> Trace:
    class Padded(PlainHead):
        def allowed(self, rate: float) -> int:
            padded = -(-self.length // self.setting.block) * self.setting.block
            dim, open_tokens = self.geometry.dim, self.length - len(self.level) * self.setting.block
            return budget_bits(rate, dim, padded) - token_bits(dim, open_tokens)

    return kernel(Padded)(*args, **static)


@DECODE.mutant("monotone", case=DecodeCase(rate=9.0, decay=0.0, regime="wandering"))
def allocates_from_the_top_again(*args: Tensor, **static: Any) -> Trace:
    class Promotes(PlainHead):
        def allocate(self, rate: float) -> Tensor:
            mass, top = self.mass[: len(self.level)], torch.zeros_like(self.level)
            allowed = self.allowed(rate)
            return budget(mass, self.error, top, self.hot(), self.cost, budget_bits=allowed).level

    return kernel(Promotes)(*args, **static)


@DECODE.mutant("retighten", case=DecodeCase(rate=2.0))
def a_short_context_is_reported_as_within_budget(*args: Tensor, **static: Any) -> Trace:
    trace = honest(*args, **static)
    return trace._replace(met=torch.ones_like(trace.met))


# Chunks


@DECODE.mutant("append_chunking", case=DecodeCase(chunk=3, rate=9.0))
def mass_and_levels_of_the_first_query_of_a_chunk(*args: Tensor, **static: Any) -> Trace:
    class FirstQuery(PlainHead):
        def is_first(self) -> bool:
            return (self.length - self.prompt - 1) % self.setting.chunk == 0

        def update_mass(self, query: Tensor) -> None:
            if self.is_first():
                super().update_mass(query)
            else:
                pages = -(-self.length // self.setting.block)
                self.mass = torch.nn.functional.pad(self.mass, (0, pages - len(self.mass)))

        def allocate(self, rate: float) -> Tensor:
            return super().allocate(rate) if self.is_first() else self.level

    return kernel(FirstQuery)(*args, **static)


@DECODE.mutant("append_chunking", case=IN_CHUNKS)
def open_block_is_stale_within_a_chunk(*args: Tensor, **static: Any) -> Trace:
    class Stale(PlainHead):
        def attend(self, query: Tensor, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = torch.arange(self.length) - self.prompt
            now = self.length - self.prompt - 1
            hidden = (at >= now // self.setting.chunk * self.setting.chunk) & (at < now)
            return super().attend(query, rows, seen & ~hidden if now >= 0 else seen)

    return kernel(Stale)(*args, **static)


# What is served


@DECODE.mutant("retained", case=DecodeCase(new=8))
def drops_decoded_tokens(*args: Tensor, **static: Any) -> Trace:
    class Drops(PlainHead):
        def attend(self, query: Tensor, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = torch.arange(self.length)
            return super().attend(query, rows, seen & ((at < self.prompt) | (at == self.length - 1)))

    return kernel(Drops)(*args, **static)


@DECODE.mutant("retained", case=DecodeCase(rate=6.0))
def a_mean_block_counts_as_one_token(*args: Tensor, **static: Any) -> Trace:
    class Once(PlainHead):
        def attend(self, query: Tensor, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = torch.arange(self.length)
            level = torch.nn.functional.pad(self.level, (0, 1))[(at // self.setting.block).clamp(max=len(self.level))]
            return super().attend(query, rows, seen & ((level != MEAN) | (at % self.setting.block == 0)))

    return kernel(Once)(*args, **static)


@DECODE.mutant("no_compression_is_dense", "retained", case=DecodeCase(rate=16.0))
def does_not_see_its_own_token(*args: Tensor, **static: Any) -> Trace:
    class Behind(PlainHead):
        def attend(self, query: Tensor, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().attend(query, rows, seen & (torch.arange(self.length) < max(1, self.length - 1)))

    return kernel(Behind)(*args, **static)
