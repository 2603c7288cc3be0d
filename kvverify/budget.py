"""The tolerance rule: how far a result may lie from the truth.

Theory of operation
-------------------
A fixed tolerance is either too loose for a small head or too tight for a large one. Here the truth is a float64
oracle on the same stored inputs, and the allowance is what an honest kernel would have needed on exactly these
inputs:

    allowed = 3 err(peer) + 2 (roundings max(u max|truth|, smallest / 2) + 2^-23 condition)

`peer` is the best honest kernel we know (fp32 inside, one rounding to storage), run on the same inputs. `u` is the
unit roundoff of the output's dtype and `smallest` its smallest number above zero, `roundings` how often the program
under test rounds to storage (three for a composition of two calls and a product), and `condition` the size of the
quantities that fp32 arithmetic had to pass through. Both the largest and the root-mean-square error must be within
their allowance, unit by unit: one head of one token, or one rotary pair of one row, so that a small unit cannot hide
behind a large one. Without the band, or with a factor of one, honest kernels raise alarms; the message prints the
whole sum.

WARNING: the constants below are printed by `kvverify explain budget` and quoted in the README; a test holds the three
together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["BAND", "PEER_FACTOR", "UNIT_ROUNDOFF", "Judgement", "judge", "table", "unit_roundoff", "unit_size"]

PEER_FACTOR = 3
BAND = 2
FP32_EPSILON = 2.0**-23
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""Half the distance between neighbouring numbers just above one."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """The unit roundoff of a floating dtype; ValueError for any other."""
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype {dtype} has no unit roundoff here: expected one of {list(UNIT_ROUNDOFF)}")
    return UNIT_ROUNDOFF[dtype]


def smallest_positive(dtype: torch.dtype) -> float:
    """The smallest number above zero, subnormal ones included: half of it is the least rounding error near zero."""
    limits = torch.finfo(dtype)
    return float(limits.smallest_normal * limits.eps)


def table() -> list[tuple[str, str]]:
    """The rule as rows of (quantity, value), for people."""
    rows = [
        ("factor on the peer's error", str(PEER_FACTOR)),
        ("factor on the rounding band", str(BAND)),
        ("fp32 epsilon", "2^-23"),
    ]
    for dtype, value in UNIT_ROUNDOFF.items():
        rows.append((f"unit roundoff {str(dtype).removeprefix('torch.')}", f"2^{round(math.log2(value))}"))
    return rows


@dataclass(frozen=True)
class Judgement:
    """How one output compares with its allowance at its worst unit.

    `used` is the share of the allowance that was used there (1 = all of it; inf where a number is missing or not
    finite).

    """

    ok: bool
    used: float
    index: tuple[int, ...]
    actual: float
    truth: float
    arithmetic: str


def _per_unit(error: torch.Tensor, reduce: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest and root-mean-square entry of each unit: the trailing `reduce` axes are one unit."""
    flat = error.flatten(start_dim=error.dim() - reduce) if reduce else error.unsqueeze(-1)
    if flat.shape[-1] == 0:
        empty = flat.new_zeros(flat.shape[:-1])
        return empty, empty
    return flat.amax(-1), flat.square().mean(-1).sqrt()


def unit_size(truth: torch.Tensor, reduce: int) -> torch.Tensor:
    """The largest finite absolute value in each unit of the truth: the `max|truth|` of the rule."""
    return _per_unit(torch.where(truth.isinf(), 0.0, truth).abs(), reduce)[0]


def _error(value: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Absolute error; equal infinities agree, NaN or any other infinity is infinitely wrong."""
    error = (value.double() - truth).abs()
    return torch.where(value.double() == truth, 0.0, error).nan_to_num(nan=math.inf, posinf=math.inf)


def judge(
    actual: torch.Tensor,
    peer: torch.Tensor,
    truth: torch.Tensor,
    *,
    reduce: int = 1,
    roundings: float = 1,
    condition: float | torch.Tensor = 0.0,
    dtype: torch.dtype | None = None,
) -> Judgement:
    """Judge `actual` against a float64 `truth`, with the error of `peer` as the measure of what is honest.

    actual, peer, truth: the same shape. reduce: how many trailing axes make one unit. condition: a number or one per
    unit, in the units of the output. dtype: whose unit roundoff counts (default: that of `actual`). Raises ValueError
    when the truth is NaN: an oracle that does not know is a defect of the suite and never a verdict.

    """
    if truth.isnan().any():
        raise ValueError("the oracle returned NaN: a truth must be a number")
    roundoff = unit_roundoff(dtype or actual.dtype)
    size = unit_size(truth, reduce)
    rounding = (roundoff * size).clamp(min=smallest_positive(dtype or actual.dtype) / 2)
    band = BAND * (roundings * rounding + FP32_EPSILON * torch.as_tensor(condition, dtype=torch.float64))
    band = band.expand_as(size)
    if not _error(peer, truth).isfinite().all():
        raise ValueError("the peer is infinitely far from the truth: the case leaves what its dtype can hold")
    if not truth.numel():
        return Judgement(True, 0.0, (), 0.0, 0.0, "nothing to compare")
    worst = (-1.0, "", 0, size, size)
    for name, mine, theirs in zip(
        ("max", "rms"),
        _per_unit(_error(actual, truth), reduce),
        _per_unit(_error(peer, truth), reduce),
        strict=True,
    ):
        allowed = PEER_FACTOR * theirs + band
        used = torch.where(mine == 0, 0.0, mine / allowed).nan_to_num(nan=math.inf, posinf=math.inf)
        at = int(used.argmax())
        if float(used.flatten()[at]) > worst[0]:
            worst = (float(used.flatten()[at]), name, at, mine, theirs)
    used_there, name, at, mine, theirs = worst
    unit = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), mine.shape)) if mine.dim() else ()
    inside = _error(actual, truth)[unit]
    place = (*unit, *(int(i) for i in torch.unravel_index(inside.argmax(), inside.shape))) if reduce else unit
    peer_there, size_there = float(theirs.flatten()[at]), float(size.flatten()[at])
    condition_there = float(torch.as_tensor(condition, dtype=torch.float64).expand_as(size).flatten()[at])
    allowed_there = PEER_FACTOR * peer_there + float(band.flatten()[at])
    arithmetic = (
        f"{name} error {float(mine.flatten()[at]):.3e}, allowed {allowed_there:.3e}"
        f" = {PEER_FACTOR} x peer {peer_there:.3e}"
        f" + {BAND} x (roundings {roundings:g} x u {roundoff:.3e} x max|truth| {size_there:.3e}"
        f" + 2^-23 x condition {condition_there:.3e})"
    )
    return Judgement(
        used_there <= 1.0, used_there, place, float(actual[place].double()), float(truth[place]), arithmetic
    )
