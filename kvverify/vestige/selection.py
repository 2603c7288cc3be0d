"""Tier 1, second half: which closed rows stay in the attended set."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_real, require_tensor

__all__ = ["quota", "select", "selection_fault"]


def quota(closed: int, *, fraction: float) -> int:
    """How many closed rows the salience keeps: m = max(1, round(fraction closed)), and 0 where nothing is closed.

    Halves round to even. Sinks are not counted in m. Source: VestigeKV, the deployed variant, with fraction 1/32.
    """
    require_count("closed", closed)
    require_real("fraction", fraction, minimum=0.0, maximum=1.0)
    return min(closed, max(1, round(fraction * closed)))


def select(salience: Tensor, *, keep: int, sinks: int) -> Tensor:
    """The `keep` rows of largest salience over ALL closed rows, united with the first `sinks` rows: bool mask[rows].

    One global selection, never a quota per block, since one block may hold every salient row. salience[rows] has no
    NaN; keep is m, at most the number of rows; sinks are not counted in m, so m <= kept <= m + sinks. Linear in rows.
    Of equal values the earlier row wins, and any other tie-break is as valid: see `selection_fault`. Raises
    ValueError for NaN, a negative count, or keep > rows. Source: VestigeKV section 4.1.
    """
    require_tensor("salience", salience, (None,))
    require_count("keep", keep, maximum=salience.shape[0])
    require_count("sinks", sinks)
    if torch.isnan(salience).any():
        raise ValueError("salience holds NaN: expected values with an order")
    mask = torch.zeros_like(salience, dtype=torch.bool)
    if keep:
        smallest_kept = _order_statistic(salience, keep)
        mask |= salience > smallest_kept
        tied = (salience == smallest_kept).nonzero().flatten()
        mask[tied[: keep - int(mask.sum())]] = True
    mask[:sinks] = True
    return mask


def selection_fault(mask: Tensor, salience: Tensor, *, keep: int, sinks: int) -> str | None:
    """Why bool mask[rows] is not an answer of `select` under any tie-break, or None if it is one."""
    require_tensor("salience", salience, (None,))
    require_tensor("mask", mask, (salience.shape[0],), dtype=torch.bool)
    require_count("keep", keep, maximum=salience.shape[0])
    require_count("sinks", sinks)
    if not mask[:sinks].all():
        return f"row {int((~mask[:sinks]).nonzero()[0])} is a sink and is not kept"
    is_sink = torch.arange(salience.shape[0], device=salience.device) < sinks
    above = tied = torch.zeros_like(mask)
    if keep:
        smallest_kept = _order_statistic(salience, keep)
        above, tied = salience > smallest_kept, salience == smallest_kept
    if not mask[above].all():
        return f"row {int((above & ~mask).nonzero()[0])} is above the {keep}-th value and is not kept"
    below = mask & ~above & ~tied & ~is_sink
    if below.any():
        return f"row {int(below.nonzero()[0])} is below the {keep}-th value and is kept"
    # A sink on the boundary may or may not be one of the m: either reading is a tie-break.
    least, free = int((mask & tied & ~is_sink).sum()), int((tied & is_sink).sum())
    owed = keep - int(above.sum())
    if not least <= owed <= least + free:
        return f"{least} rows with the {keep}-th value are kept beside the sinks: expected {owed - free} to {owed}"
    return None


def _order_statistic(salience: Tensor, keep: int) -> Tensor:
    # Selects without sorting, which keeps the time linear; kthvalue counts from the smallest.
    return salience.kthvalue(salience.shape[0] - keep + 1).values
