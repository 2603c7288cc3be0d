"""Runs that read, hold or certify something else than they say; and runs that are differently right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvverify.geodesia import plain
from kvverify.geodesia.accounting import Geometry, token_bits
from kvverify.geodesia.certificate import printed, supremum
from kvverify.geodesia.decode_operator import DECODE, DecodeCase
from kvverify.geodesia.ladder import EXACT
from kvverify.geodesia.mutants.variants import Uncertain, frugal, honest, kernel, sizes
from kvverify.geodesia.pages import box, page_count, rank_pages, read_pages
from kvverify.geodesia.plain import PlainHead, Trace

__all__: list[str] = []

DEMOTED = DecodeCase(rate=10.0)


# Pages


@DECODE.mutant("current_readable", case=DecodeCase(pages=0.25, prompt=47))
def does_not_read_the_current_page(*args: Tensor, **static: Any) -> Trace:
    class Past(PlainHead):
        def choose_pages(self, query: Tensor) -> Tensor:
            read = super().choose_pages(query)
            if read.shape[1] > 1:
                read[:, -1] = False
            return read

    return kernel(Past)(*args, **static)


@DECODE.mutant("page_count", case=DecodeCase(pages=0.25, prompt=60))
def ranks_the_current_page_with_the_others(*args: Tensor, **static: Any) -> Trace:
    class Together(PlainHead):
        def choose_pages(self, query: Tensor) -> Tensor:
            if self.setting.page_fraction is None:
                return super().choose_pages(query)
            total = -(-self.length // self.setting.block)
            low, high = box(self.original[0], block=self.setting.block)
            keep = page_count(total, self.setting.page_fraction)
            chosen = rank_pages(query, low, high, keep=keep, scale=self.setting.scale)
            return read_pages(chosen, total=total, current=total - 1)

    return kernel(Together)(*args, **static)


@DECODE.mutant("original_boxes", case=DecodeCase(pages=0.25, rate=6.0, group=7))
def boxes_of_quantized_keys(*args: Tensor, **static: Any) -> Trace:
    class Stored(PlainHead):
        def choose_pages(self, query: Tensor) -> Tensor:
            original, self.original = self.original, self.page
            read = super().choose_pages(query)
            self.original = original
            return read

    return kernel(Stored)(*args, **static)


# Bytes


@DECODE.mutant("read_at_most_resident", case=DecodeCase(pages=0.25))
def read_rate_omits_the_current_page(*args: Tensor, **static: Any) -> Trace:
    trace = honest(*args, **static)
    geometry, prompt, new = sizes(args, static)
    tokens = (prompt + torch.arange(new)) % geometry.block + 1
    return trace._replace(read=trace.read - token_bits(geometry.dim, 1) * tokens)


@DECODE.mutant("bytes_equal_accounting", case=DecodeCase(pages=0.25))
def resident_is_what_is_read(*args: Tensor, **static: Any) -> Trace:
    trace = honest(*args, **static)
    return trace._replace(resident=trace.read.amax(1).sum(0))


@DECODE.mutant("bytes_equal_accounting")
def query_heads_counted_as_kv_heads(*args: Tensor, **static: Any) -> Trace:
    trace = honest(*args, **static)
    return trace._replace(resident=trace.resident * args[3].shape[1])


def recosted(args: tuple[Tensor, ...], static: dict[str, Any], extra: Callable[[Geometry, int], int]) -> Trace:
    """The trace with so many more bits for each closed block on a rung."""
    trace = honest(*args, **static)
    more = torch.tensor([*(extra(sizes(args, static)[0], rung) for rung in range(5)), 0])  # rung -1: not closed yet
    return trace._replace(resident=trace.resident + more[trace.level].sum((0, 2)))


@DECODE.mutant("bytes_equal_accounting", "residual_cost", case=DEMOTED)
def scales_are_not_counted(*args: Tensor, **static: Any) -> Trace:
    def less(geometry: Geometry, rung: int) -> int:
        scales = 32 * (geometry.key_groups * geometry.dim + geometry.block * geometry.value_groups)
        return -scales if rung in (1, 2, 3) else 0

    return recosted(args, static, less)


@DECODE.mutant("bytes_equal_accounting")
def scale_planes_for_exact_blocks(*args: Tensor, **static: Any) -> Trace:
    def more(geometry: Geometry, rung: int) -> int:
        scales = 32 * (geometry.key_groups * geometry.dim + geometry.block * geometry.value_groups)
        return 0 if rung in (1, 2, 3) else scales

    return recosted(args, static, more)


@DECODE.mutant("bytes_equal_accounting", case=DEMOTED)
def counted_as_6_bits_and_stored_as_8(*args: Tensor, **static: Any) -> Trace:
    return recosted(args, static, lambda geometry, rung: -4 * geometry.block * geometry.dim * (rung in (1, 2)))


@DECODE.mutant("residual_cost", case=DecodeCase(residual=0.2))
def stores_residual_tokens_twice(*args: Tensor, **static: Any) -> Trace:
    trace = honest(*args, **static)
    geometry, _, new = sizes(args, static)
    home = trace.kept // geometry.block
    padded = torch.nn.functional.pad(trace.level, (0, 1))
    still_exact = padded.gather(2, home[:, None].expand(-1, new, -1).clamp(max=trace.level.shape[2])) == EXACT
    return trace._replace(resident=trace.resident + token_bits(geometry.dim, 1) * still_exact.sum((0, 2)))


# Certificate


@DECODE.mutant("certificate", case=DEMOTED)
def moved_keys_are_left_out_of_the_certificate(*args: Tensor, **static: Any) -> Trace:
    class ValuesOnly(Uncertain):
        def errors(self, key_error: Tensor, value_error: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(key_error), value_error

    return kernel(ValuesOnly)(*args, **static)


@DECODE.mutant("certificate", case=DecodeCase(rate=16.0, pages=0.25))
def unread_pages_are_left_out_of_the_certificate(*args: Tensor, **static: Any) -> Trace:
    class ReadOnly(Uncertain):
        def errors(self, key_error: Tensor, value_error: Tensor) -> tuple[Tensor, Tensor]:
            return key_error.masked_fill(key_error.isinf(), 0), value_error

    return kernel(ReadOnly)(*args, **static)


@DECODE.mutant("certificate_tightened", case=DecodeCase(rate=12.0))
def certificate_as_printed(*args: Tensor, **static: Any) -> Trace:
    class Printed(Uncertain):
        def numbers(self, query: Tensor) -> dict[str, Any]:
            return {**super().numbers(query), "form": printed}

    return kernel(Printed)(*args, **static)


@DECODE.mutant("certificate_tightened", case=DecodeCase(rate=16.0))
def certificate_with_absolute_slack(*args: Tensor, **static: Any) -> Trace:
    trace = honest(*args, **static)
    return trace._replace(bound=trace.bound + 1e-3)


# Differently right


@DECODE.control
def in_double_precision(*args: Tensor, **static: Any) -> Trace:
    """The model in float64."""
    trace = plain.decode(*args, **static)
    return trace._replace(out=trace.out.to(args[3].dtype))


@DECODE.control
def certificate_by_the_supremum(*args: Tensor, **static: Any) -> Trace:
    """The exact supremum of the total variation: never above the tightened form."""

    class Supremum(Uncertain):
        def numbers(self, query: Tensor) -> dict[str, Any]:
            return {**super().numbers(query), "form": lambda *sides: supremum(*sides, precision=1e-3)}

    return kernel(Supremum)(*args, **static)


@DECODE.control
def values_measured_from_zero(*args: Tensor, **static: Any) -> Trace:
    """Another centre of the values: any is sound."""

    class FromZero(PlainHead):
        def radius(self) -> float:
            return float(self.original[1].norm(dim=-1).max())

    return kernel(FromZero)(*args, **static)


@DECODE.control
def takes_no_more_tied_steps_than_needed(*args: Tensor, **static: Any) -> Trace:
    """Of steps with equal ratios only as many as the budget asks for, the last blocks first."""

    class Frugal(PlainHead):
        def allocate(self, rate: float) -> Tensor:
            return frugal(
                self.mass[: len(self.level)], self.error, self.level, self.hot(), self.cost, self.allowed(rate)
            )

    return kernel(Frugal)(*args, **static)
