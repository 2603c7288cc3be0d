"""Two tensors: equal, drifted within budget, or changed.

    equal     the same bytes
    drifted   floats of one shape and dtype with max |a - b| <= budget max |a|, NaN and infinities in the same places
    changed   all else; integers, bools and bytes have no budget

The budget is relative to the largest value of the stored tensor and covers what another processor or another order of
additions does to a model, not what another formula does.

ULP: how many representable numbers apart, counted on the ordered bit patterns, so that 0 lies between -tiny and +tiny.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvverify.golden.files import FLOATS, wide
from kvverify.golden.records import statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvverify.golden.files import Stored

__all__ = ["BUDGET", "Difference", "Verdict", "compare", "compare_files"]

Verdict = Literal["equal", "drifted", "changed", "added", "removed"]

BUDGET = {"F64": 1e-12, "F32": 2.0**-14, "BF16": 2.0**-6, "F16": 2.0**-9}
"""Largest difference over the tensor's largest value that counts as drift. The 16-bit ones are two roundings."""

STRIP = 48
"""Cells of the strip that shows where in a tensor the differences lie."""


@dataclass(frozen=True)
class Difference:
    """How one tensor differs. ulp is None where there is none to count; strip holds largest errors over the budget."""

    name: str
    verdict: Verdict
    shape: str
    changed: float = 0.0
    ulp: int | None = None
    relative: float = 0.0
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None
    sha256: tuple[str, str] = ("", "")
    strip: tuple[float, ...] = ()


def compare_files(before: dict[str, Stored], after: dict[str, Stored]) -> list[Difference]:
    """Compare two files tensor by tensor, in the order of the names, equal tensors included."""
    return [compare(name, before.get(name), after.get(name)) for name in sorted({*before, *after})]


def compare(name: str, before: Stored | None, after: Stored | None) -> Difference:
    """Compare two tensors of one name, of which either may be missing."""
    if before is None or after is None:
        present = after if before is None else before
        assert present is not None
        verdict: Verdict = "added" if before is None else "removed"
        return Difference(name, verdict, _kind(present), changed=1.0)
    if before == after:
        return Difference(name, "equal", _kind(before))
    told: dict[str, Any] = {
        "before": statistics(before),
        "after": statistics(after),
        "sha256": (_hash(before), _hash(after)),
    }
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return Difference(name, "changed", f"{_kind(before)} → {_kind(after)}", changed=1.0, **told)
    old, new = wide(before).reshape(-1), wide(after).reshape(-1)
    finite = np.isfinite(old) & np.isfinite(new)
    error = np.abs(np.where(finite, new, 0) - np.where(finite, old, 0))
    same_rest = np.array_equal(old[~finite], new[~finite], equal_nan=True)
    largest = float(np.abs(old[finite]).max(initial=0.0))
    relative = float(error.max(initial=0.0)) / largest if largest else float(bool(error.any()))
    within = before.dtype in FLOATS and same_rest and relative <= BUDGET[before.dtype]
    moved = before.array.reshape(-1).view(f"u{before.array.itemsize}") != after.array.reshape(-1).view(
        f"u{after.array.itemsize}"
    )
    return Difference(
        name,
        "drifted" if within else "changed",
        _kind(before),
        changed=float(moved.mean()),
        ulp=_ulp(before, after, finite) if before.dtype in FLOATS else None,
        relative=relative,
        strip=_strip(np.where(finite, error, 0) if before.dtype in FLOATS else moved.astype(np.float64)),
        **told,
    )


def _kind(stored: Stored) -> str:
    return f"{stored.dtype.lower()}{list(stored.shape)}"


def _hash(stored: Stored) -> str:
    import hashlib

    return hashlib.sha256(stored.data).hexdigest()


def _ulp(before: Stored, after: Stored, finite: NDArray[np.bool_]) -> int:
    sides = []
    for stored in (before, after):
        bits = stored.array.reshape(-1)[finite]
        width = 8 * bits.itemsize
        signed = bits.view(f"i{bits.itemsize}").astype(object) if width == 64 else bits.view(f"i{bits.itemsize}")
        # Negative floats count down from -0: mirrored, the patterns are in the order of the values.
        patterns = [int(value) for value in signed.tolist()]
        sides.append([value if value >= 0 else -(2 ** (width - 1)) - value for value in patterns])
    return max((abs(a - b) for a, b in zip(*sides, strict=True)), default=0)


def _strip(error: NDArray[np.float64]) -> tuple[float, ...]:
    """Largest error of each of `STRIP` equal parts in row-major order, over the largest of all."""
    parts = np.array_split(error, min(STRIP, max(1, len(error))))
    highest = float(error.max(initial=0.0)) or 1.0
    return tuple(round(float(part.max(initial=0.0)) / highest, 3) for part in parts)
