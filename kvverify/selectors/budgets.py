"""How many states: shares of a history, and budgets divided over layers and heads without losing one to rounding."""

from __future__ import annotations

from fractions import Fraction
from math import floor
from numbers import Real
from typing import TYPE_CHECKING, Literal

from kvverify.selectors.checks import check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Rounding", "adaptive_budgets", "as_fraction", "budget_from_share", "largest_remainder", "pyramid_budgets"]

Rounding = Literal["exact", "published"]
_STEEPNESS = 20  # PyramidKV's beta: the smallest layer budget is the mean budget over this


def budget_from_share(share: float | Fraction, history: int) -> int:
    """floor(share * history + 1/2): the nearest number of tokens, a half rounded up.

    `share` in 0..1 is taken as the decimal number it prints as, so 0.15 of 10 is exactly 1.5 and gives 2, although
    the nearest binary number lies below. Truncation is the trap this replaces: int(10 * (1 - 0.9)) is 0, not 1.
    A share that is worth less than half a token gives 0.
    """
    exact = as_fraction("share", share)
    return floor(exact * check_count("history", history) + Fraction(1, 2))


def as_fraction(name: str, share: float | Fraction) -> Fraction:
    """Return a share in 0..1 as an exact fraction; a float counts as the decimal it prints as."""
    if isinstance(share, bool) or not isinstance(share, Real):
        raise TypeError(f"{name}={share!r} is a {type(share).__name__}; expected a share in 0..1")
    if not 0 <= share <= 1:  # NaN too
        raise ValueError(f"{name}={share!r} is out of range; expected a share in 0..1")
    return share if isinstance(share, Fraction) else Fraction(str(float(share)))


def largest_remainder(quotas: Sequence[Fraction]) -> tuple[int, ...]:
    """Round quotas to whole numbers with the same sum.

    All are rounded down, and what is missing goes to the largest remainders, one each; of equal remainders the lower
    index is served first. The quotas have to sum to a whole number.
    """
    total = sum(quotas, Fraction(0))
    if total.denominator != 1:
        raise ValueError(f"quotas sum to {total}; expected a whole number")
    whole = [floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: whole[index] - quotas[index])
    served = set(by_remainder[: int(total) - sum(whole)])
    return tuple(count + (index in served) for index, count in enumerate(whole))


def pyramid_budgets(
    budget: int, *, history: int, layers: int, window: int, rounding: Rounding = "exact"
) -> tuple[int, ...]:
    """States per KV head of each layer, window included, declining linearly from the first layer to the last.

    PyramidKV: with c = budget - window, min = c // 20, max = 2c - min, the last two clamped to max <= history - window
    with min + max = 2c kept, layer l has max - l (max - min) / (layers - 1) beside the window. A history shorter
    than 2c gets c everywhere, one that the budget covers is kept whole.

    "exact" rounds these quotas to the mean they have, so the layers sum to layers * budget. "published" divides with //
    instead: step = (max - min) // (layers - 1), up to layers (layers - 2) / 2 states too many in all. A single layer
    gets the budget; the published division is by zero there.
    """
    check_rounding(rounding)
    check_count("layers", layers, minimum=1)
    if check_count("budget", budget) >= check_count("history", history):
        return (history,) * layers
    selected = budget - check_count("window", window)
    if selected < 0:
        raise ValueError(f"window={window} exceeds budget={budget}; expected the window to fit in the budget")
    if layers == 1 or history < 2 * selected:
        return (budget,) * layers
    lowest = selected // _STEEPNESS
    highest = min(2 * selected - lowest, history - window)
    lowest = 2 * selected - highest
    if rounding == "published":
        step = (highest - lowest) // (layers - 1)
        return tuple(highest - layer * step + window for layer in range(layers))
    decline = Fraction(highest - lowest, layers - 1)
    return tuple(count + window for count in largest_remainder([highest - layer * decline for layer in range(layers)]))


def adaptive_budgets(
    shares: Sequence[int], *, floor_share: float | Fraction, rounding: Rounding = "exact"
) -> tuple[int, ...]:
    """Ada-KV's budgets of the heads of one layer, from how many of the layer's best states lie in each.

    `shares` n_h sum to heads * c; head h gets (1 - a) n_h + a c, a being `floor_share`. "exact" rounds these with
    their sum kept. "published" takes round((1 - a) n_h + int(a c)) in floating point, a half to even, and can miss the
    sum by a few.
    """
    check_rounding(rounding)
    exact_share = as_fraction("floor_share", floor_share)
    mean = Fraction(sum(shares), len(shares))
    if rounding == "published":
        guaranteed = int(float(mean) * float(floor_share))
        return tuple(round(count * (1 - float(floor_share)) + guaranteed) for count in shares)
    return largest_remainder([(1 - exact_share) * count + exact_share * mean for count in shares])


def check_rounding(rounding: str) -> None:
    """Refuse a rounding that is not one of the two named forms."""
    if rounding not in ("exact", "published"):
        raise ValueError(f"rounding={rounding!r} is unknown; expected 'exact' or 'published'")
