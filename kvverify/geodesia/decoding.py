"""The policy as a decode loop: append, update the mass, find the hot set, allocate, demote, serve, query by query.

State is kept per KV head: one level map serves the whole group, and it changes at most once per query. The masses come
from what the store itself holds (there is no dense copy to ask), so serving q_i depends on the prefix and q_i only, and
a chunk served by this loop equals its tokens served one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvverify.geodesia import allocate, mass, pages
from kvverify.geodesia.accounting import budget_bits, token_bits
from kvverify.geodesia.attend import attend, block_weights
from kvverify.geodesia.residual import residual, residual_count, residual_pooled
from kvverify.geodesia.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvverify.geodesia.allocate import Allocation, Status
    from kvverify.geodesia.pool import PagePool
    from kvverify.geodesia.store import PackedStore

__all__ = ["Decoder", "Policy"]

_ALLOCATORS: dict[str, Callable[..., Allocation]] = {"budget": allocate.budget, "hull": allocate.hull}
_RESIDUALS: dict[str, Callable[..., Tensor]] = {"paper": residual, "pooled": residual_pooled}


@dataclass(frozen=True)
class Policy:
    """The numbers of a run. `budget` is B in bits per value; the residual and the page summaries come on top of it."""

    budget: float
    scale: float
    decay: float = 0.9
    sinks: int = 4
    window: int = 128
    observed: int = 32
    allocator: Literal["budget", "hull"] = "budget"
    residual_fraction: float = 0.0
    residual_form: Literal["paper", "pooled"] = "paper"
    page_fraction: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("window", 0), ("observed", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, expected a number of tokens of at least {least}")
        for name in ("budget", "scale"):
            _check_number(name, getattr(self, name), above_zero=True)
        for name in ("decay", "residual_fraction"):
            _check_number(name, getattr(self, name), most=1)
        if self.page_fraction is not None:
            _check_number("page_fraction", self.page_fraction, above_zero=True, most=1)
        for name, known in (("allocator", _ALLOCATORS), ("residual_form", _RESIDUALS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")


def _check_number(name: str, value: object, *, above_zero: bool = False, most: float = math.inf) -> None:
    """Refuse what is no finite number from 0, or above it, to `most`."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not 0 <= float(value) <= most or (above_zero and not value):  # type: ignore[arg-type]
        wanted = "above 0" if above_zero else "of at least 0"
        raise ValueError(f"{name} is {value!r}, expected a number {wanted}{'' if most > 1 else ' and at most 1'}")


class Decoder:
    """One sequence under the policy. `mass[kv, blocks]`, `status[kv]` and `read[kv, group, pages]` show its state.

    `store` is what the last query was served from.
    """

    def __init__(self, policy: Policy, pool: PagePool) -> None:
        self.policy = policy
        self.cache = Sequence(pool, boxes=policy.page_fraction is not None)
        self.mass: Tensor = torch.empty(pool.geometry.kv_heads, 0, dtype=torch.float64)
        self.status: list[Status] = []
        self.read: Tensor | None = None
        self.store: PackedStore | None = None

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in the prompt with its last queries: block mass, residual tokens. Nothing is demoted before a query.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        policy, block = self.policy, self.cache.pool.geometry.block
        if self.cache.length:
            raise ValueError(f"the cache already holds {self.cache.length} tokens, expected an empty one at prefill")
        if queries.shape[2] > policy.observed:
            raise ValueError(
                f"queries holds {queries.shape[2]} per head, expected at most observed = {policy.observed}"
            )
        self.cache.append(keys, values)
        seen = [mass.observe(q, k, scale=policy.scale, block=block) for q, k in zip(queries, keys, strict=True)]
        self.mass = torch.stack([blocks for blocks, _ in seen])
        count = residual_count(policy.residual_fraction, keys.shape[1])
        if count:
            choose = _RESIDUALS[policy.residual_form]
            tokens = zip((tokens for _, tokens in seen), values, strict=True)
            self.cache.keep_exact([choose(token_mass, v, block=block, count=count) for token_mass, v in tokens])

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Serve one query, whose own token is appended first; return (output, LSE).

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, dim] -> [kv, group, dim], [kv, group].
        """
        return self._call(query[:, :, None], key[:, None], value[:, None])[0]

    def chunk(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        variant: Literal["sequential", "first_query"] = "sequential",
    ) -> list[tuple[Tensor, Tensor]]:
        """Serve n queries; return one (output, LSE) each. `first_query` is the published shortcut.

        The shortcut updates mass and hot set once, from the first query, and allocates for the whole chunk: its levels
        differ from those of the same tokens served one by one.

        Shapes: queries[kv, group, n, dim], keys[kv, n, dim], values[kv, n, dim].
        """
        if variant == "first_query":
            return self._call(queries, keys, values)
        if variant != "sequential":
            raise ValueError(f"variant is {variant!r}, expected 'sequential' or 'first_query'")
        each = range(keys.shape[1])
        return [self.step(queries[:, :, i], keys[:, i], values[:, i]) for i in each]

    def _call(self, queries: Tensor, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        policy, first = self.policy, self.cache.length
        self.cache.append(keys, values)
        weights = block_weights(queries[:, :, 0], self.cache.packed(), scale=policy.scale, length=first + 1).mean(1)
        self.mass = torch.stack(
            [mass.update(m, new, decay=policy.decay) for m, new in zip(self.mass, weights, strict=True)]
        )
        self._allocate(first)
        self.store = store = self.cache.packed()
        return [self._serve(queries[:, :, i], store, first + i) for i in range(keys.shape[1])]

    def _allocate(self, position: int) -> None:
        cache, geometry, policy = self.cache, self.cache.pool.geometry, self.policy
        closed = len(cache.valid)
        hot = mass.hot_set(cache.length, position, block=geometry.block, sinks=policy.sinks, window=policy.window)
        # The open block is exact and hot, and costs only its real tokens: it leaves the problem with its bits.
        allowed = budget_bits(policy.budget, geometry.dim, cache.length) - token_bits(geometry.dim, cache.open_tokens)
        run, cost = _ALLOCATORS[policy.allocator], torch.tensor(geometry.costs)
        found = [
            run(self.mass[head, :closed], error, level, hot[:closed], cost, budget_bits=allowed)
            for head, (error, level) in enumerate(zip(cache.error, cache.level, strict=True))
        ]
        self.status = [allocation.status for allocation in found]
        cache.demote(torch.stack([allocation.level for allocation in found]))

    def _serve(self, query: Tensor, store: PackedStore, position: int) -> tuple[Tensor, Tensor]:
        self.read = self._pages(query, store, position)
        return attend(query, store, scale=self.policy.scale, pages=self.read, length=position + 1)

    def _pages(self, query: Tensor, store: PackedStore, position: int) -> Tensor | None:
        if self.policy.page_fraction is None or store.box_low is None or store.box_high is None:
            return None
        current = position // store.geometry.block
        keep = pages.page_count(current, self.policy.page_fraction)
        total = store.box_low.shape[1]
        ranked = [
            pages.rank_pages(q, low[:current], high[:current], keep=keep, scale=self.policy.scale)
            for q, low, high in zip(query, store.box_low, store.box_high, strict=True)
        ]
        return torch.stack([pages.read_pages(one, total=total, current=current) for one in ranked])
