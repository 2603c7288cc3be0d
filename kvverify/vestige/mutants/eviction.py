"""Salience and selection that are known to be wrong, and a few that are differently right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvverify.vestige.cases import SalienceCase, SelectCase
from kvverify.vestige.operators import SALIENCE, SELECT
from kvverify.vestige.policy import salience, select
from kvverify.vestige.salience import salience_by_projection

__all__ = ["best"]


# Salience


def by_windows(branch: Tensor, block: int | None, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a measure[span, columns] -> [span] to every window, in fp32."""
    window = len(branch) if block is None else block
    if not len(branch):
        return torch.zeros(0)
    return torch.cat([measure(part.float().contiguous()) for part in branch.split(window)])


def row_norm(rows: Tensor) -> Tensor:
    """The norm of each row."""
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norm


def filtered(branch: Tensor, block: int | None, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The norm that is left by `change`, which sets bins of the spectrum [bins, columns] to zero."""

    def measure(part: Tensor) -> Tensor:
        return row_norm(torch.fft.irfft(change(torch.fft.rfft(part, dim=0)), n=len(part), dim=0))

    return by_windows(branch, block, measure)


def cut(spectrum: Tensor, low: int, high: int | None) -> Tensor:
    """Bins low..high-1 and nothing else."""
    left = torch.zeros_like(spectrum)
    left[low:high] = spectrum[low:high]
    return left


@SALIENCE.mutant("immutable", "high_band")
def transforms_the_whole_prefix(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return salience(branch, bandwidth=bandwidth, block=None)


@SALIENCE.mutant("band_edge", "high_band", "band_energy")
def band_is_one_bin_too_wide(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return filtered(branch, block, lambda spectrum: cut(spectrum, bandwidth + 1, None))


@SALIENCE.mutant("band_edge", "low_band_is_invisible")
def band_is_one_bin_too_narrow(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return filtered(branch, block, lambda spectrum: cut(spectrum, bandwidth - 1, None))


@SALIENCE.mutant("band_edge", "band_energy", "closed_form")
def keeps_the_low_band(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return filtered(branch, block, lambda spectrum: cut(spectrum, 0, bandwidth))


@SALIENCE.mutant("low_band_is_invisible", "high_band", case=SalienceCase(regime="offset"))
def leaves_the_mean_in(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    def measure(part: Tensor) -> Tensor:
        high = torch.fft.irfft(cut(torch.fft.rfft(part, dim=0), bandwidth, None), n=len(part), dim=0)
        return row_norm(high + part.mean(dim=0))

    return by_windows(branch, block, measure)


@SALIENCE.mutant("high_band", "closed_form", case=SalienceCase(regime="trend"))
def removes_the_mean_only(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return salience(branch, bandwidth=1, block=block)


@SALIENCE.mutant("high_band", "closed_form", case=SalienceCase(window=15))
def inverts_without_the_length(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    def measure(part: Tensor) -> Tensor:
        high = torch.fft.irfft(cut(torch.fft.rfft(part, dim=0), bandwidth, None), dim=0).norm(dim=1)
        return torch.cat([high, torch.zeros(len(part) - len(high))])

    return by_windows(branch, block, measure)


@SALIENCE.mutant("homogeneous", "high_band")
def forgets_the_root(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return salience(branch, bandwidth=bandwidth, block=block).square()


@SALIENCE.mutant("homogeneous", "high_band")
def normalises_the_window(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return by_windows(
        salience(branch, bandwidth=bandwidth, block=block)[:, None], block, lambda part: (part / part.norm())[:, 0]
    )


@SALIENCE.mutant("shift", "high_band")
def tapers_the_window(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    def measure(part: Tensor) -> Tensor:
        return salience(part * torch.hann_window(len(part))[:, None], bandwidth=bandwidth, block=None)

    return by_windows(branch, block, measure)


@SALIENCE.mutant("high_band", "band_energy", case=SalienceCase(dtype="bf16", window=64))
def computes_in_storage_dtype(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    half = branch.dtype

    def measure(part: Tensor) -> Tensor:
        low = torch.fft.irfft(cut(torch.fft.rfft(part, dim=0), 0, bandwidth), n=len(part), dim=0)
        return row_norm((part.to(half) - low.to(half)).float())

    return by_windows(branch, block, measure)


@SALIENCE.mutant("high_band", case=SalienceCase(memory="strided"))
def ignores_the_row_stride(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    packed = branch.as_strided(branch.shape, (branch.shape[1], 1)).nan_to_num()
    return salience(packed, bandwidth=bandwidth, block=block)


@SALIENCE.mutant("high_band", case=SalienceCase(regime="needles", seed=3))
def clips_needles(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return salience(branch.clamp(-4, 4), bandwidth=bandwidth, block=block)


@SALIENCE.mutant("high_band", case=SalienceCase(columns=16))
def reads_the_first_columns(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    return salience(branch[:, :8], bandwidth=bandwidth, block=block)


@SALIENCE.control
def by_projection(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    """The closed form, two thin products in place of two transforms."""
    return salience_by_projection(branch, bandwidth=bandwidth, block=block)


@SALIENCE.control
def by_the_high_band(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    """Keeps the high bins, instead of subtracting the low ones from the row."""
    return filtered(branch, block, lambda spectrum: cut(spectrum, bandwidth, None))


@SALIENCE.control
def salience_in_double_precision(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    """float64, rounded once."""
    return salience(branch.double(), bandwidth=bandwidth, block=block).float()


# Selection


def best(values: Tensor, count: int) -> Tensor:
    """The `count` largest of values, earlier rows first among equals: bool mask."""
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[values.argsort(descending=True, stable=True)[:count]] = True
    return mask


@SELECT.mutant("top")
def keeps_the_smallest(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(-salience, keep=keep, sinks=sinks)


@SELECT.mutant("top")
def keeps_the_first_rows(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(torch.zeros_like(salience), keep=keep, sinks=sinks)


@SELECT.mutant("top", case=SelectCase(sinks=4, regime="low sinks"))
def counts_sinks_in(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(torch.cat([torch.full_like(salience[:sinks], torch.inf), salience[sinks:]]), keep=keep, sinks=0)


@SELECT.mutant("sinks", "top", case=SelectCase(regime="low sinks"))
def forgets_the_sinks(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(salience, keep=keep, sinks=0)


@SELECT.mutant("sinks", case=SelectCase(regime="low sinks"))
def keeps_the_last_rows_as_sinks(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(salience, keep=keep, sinks=0) | (torch.arange(len(salience)) >= len(salience) - sinks)


@SELECT.mutant("top", case=SelectCase(rows=64, regime="last block"))
def has_a_quota_per_block(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    parts = salience.tensor_split(4)
    share = [keep // 4 + (part < keep % 4) for part in range(4)]
    mask = torch.cat([best(part, count) for part, count in zip(parts, share, strict=True)])
    mask[:sinks] = True
    return mask


@SELECT.mutant("count", "top")
def keeps_three_more(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(salience, keep=min(keep + 3, len(salience)), sinks=sinks)


@SELECT.mutant("final_for_fixed_count", "count", case=SelectCase(rows=64, sinks=0))
def keeps_a_share_of_the_rows(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(salience, keep=min(len(salience) // 4, len(salience)), sinks=sinks)


@SELECT.mutant("count", "top", case=SelectCase(regime="equal", sinks=0))
def keeps_all_that_tie(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    last = salience[best(salience, keep)].min() if keep else torch.inf
    return (salience >= last) | (torch.arange(len(salience)) < sinks)


@SELECT.mutant("count", "top", case=SelectCase(regime="equal", sinks=0))
def drops_all_that_tie(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    last = salience[best(salience, keep)].min() if keep else torch.inf
    return (salience > last) | (torch.arange(len(salience)) < sinks)


@SELECT.mutant("top", case=SelectCase(rows=33, regime="near"))
def ranks_in_bf16(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(salience.bfloat16(), keep=keep, sinks=sinks)


@SELECT.mutant("top", case=SelectCase(rows=257, kept="third"))
def ranks_by_coarse_bins(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    top = salience[salience.isfinite()].amax() if salience.isfinite().any() else salience.new_ones(())
    return select((salience / top.clamp(min=1e-30) * 16).floor(), keep=keep, sinks=sinks)


@SELECT.mutant("top", case=SelectCase(rows=65, regime="infinite"))
def takes_infinity_for_unscored(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    return select(salience.nan_to_num(posinf=0.0), keep=keep, sinks=sinks)


@SELECT.control
def later_ties_win(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    """Of equal values the later row is kept."""
    return best(salience.flip(0), keep).flip(0) | (torch.arange(len(salience)) < sinks)


@SELECT.control
def ties_avoid_sinks(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    """Of equal values a row that is no sink is kept."""
    order = torch.cat([torch.arange(min(sinks, len(salience)), len(salience)), torch.arange(min(sinks, len(salience)))])
    mask = torch.zeros(len(salience), dtype=torch.bool)
    mask[order[best(salience[order], keep)]] = True
    mask[:sinks] = True
    return mask
