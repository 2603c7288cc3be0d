"""The output certificate: a bound on || o - o^ || that the compressed cache can compute about itself.

    || o - o^ ||  <=  sum_b a^_b dv_b  +  TV2 max_j || v_j - c ||

a^_b: attention weight of block b on the compressed cache; dv_b: largest value error in b; c: any vector; TV2 a bound
on sum_j |a_j - a^_j| given that every score in b moved by at most eps_b = scale ||q|| DK_b. DK_b and dv_b add up
max_j || before - after ||_2 at every demotion (0 while exact). A hard-masked page has eps_b = inf: the cap 2 remains.

Three forms, with M(+-) = sum_b a^_b exp(+-eps_b):

    printed     min(2, M+/M- - M-/M+)
    tightened   min(2 tanh(eps_max / 2), 2 (M+ - 1) / (M+ + M- - 1))
    supremum    2 max_t [t - p(t)], p(t) = min sum_b a^_b x_b over x in [0, 1] with
                sum_b a^_b x_b ((1 - t) exp(eps_b) + t exp(-eps_b)) = t sum_b a^_b exp(-eps_b)

In the supremum x_b is the share of the block whose scores rise; t is that set's true mass, p its compressed mass. For
a fixed t it is a fractional knapsack, filled by descending bracket. Since p(t) / t does not fall, t - p(t) at t' > t is
at most (t - p(t)) t' / t: evaluated on a geometric grid this bounds the supremum from above, to a relative 1e-6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Tightness", "compare", "output_bound", "printed", "supremum", "tightened"]

# Beyond this exp(eps) nears overflow; the cap 2 is sound there and loses nothing that float64 can hold.
_LARGEST_EPSILON = 300.0
_RELATIVE_SLACK = 2.0**-40


@dataclass(frozen=True)
class Tightness:
    """How a bound fared: outputs checked, violations among them, and the median and smallest bound / true error."""

    checked: int
    violations: int
    median: float
    smallest: float


def printed(weight: Tensor, epsilon: Tensor) -> float:
    """Return min(2, M+/M- - M-/M+), the form as printed (about four times loose).

    Shapes: weight[blocks], epsilon[blocks].
    """
    weight, largest = _checked(weight, epsilon)
    if largest > _LARGEST_EPSILON:
        return 2.0
    rise, fall = _excess(weight, epsilon)
    if fall < -0.9:  # M+ >= 1 and M- < 0.1: far above the cap, and 1 + fall may have cancelled to 0
        return 2.0
    return min(2.0, (rise - fall) * (2 + rise + fall) / ((1 + rise) * (1 + fall)))


def tightened(weight: Tensor, epsilon: Tensor) -> float:
    """Return min(2 tanh(eps_max / 2), 2 (M+ - 1) / (M+ + M- - 1)); never above `printed`.

    Shapes: weight[blocks], epsilon[blocks].
    """
    weight, largest = _checked(weight, epsilon)
    if largest > _LARGEST_EPSILON:
        return 2.0
    rise, fall = _excess(weight, epsilon)
    return min(2 * float(torch.tensor(largest / 2, dtype=torch.float64).tanh()), 2 * rise / (1 + rise + fall))


def supremum(weight: Tensor, epsilon: Tensor, *, precision: float = 1e-6) -> float:
    """Return the least upper bound of sum_j |a_j - a^_j|, from above, to a relative `precision`.

    A supremum below 2e-4 (1 - exp(-2 eps_max)) is reported as that number (or as `tightened`, where smaller).

    Shapes: weight[blocks], epsilon[blocks].
    """
    weight, largest = _checked(weight, epsilon)
    cap = tightened(weight, epsilon)
    if largest > _LARGEST_EPSILON or largest == 0:
        return cap
    smallest_mass = 1e-4
    grid = torch.logspace(0, 1, 257, base=1 / smallest_mass, dtype=torch.float64) * smallest_mass
    low, high = grid[:-1], grid[1:]
    # Below the grid: t - p(t) <= t (1 - exp(-2 eps_max)), as no mass can rise by more than exp(2 eps_max).
    below = smallest_mass * -float(torch.tensor(-2 * largest, dtype=torch.float64).expm1())
    while True:
        gain = _gain(low, weight, epsilon)
        bound = gain * high / low
        attained, upper = float(gain.max()), float(bound.max())
        if upper <= attained * (1 + precision) or upper <= below:
            return min(cap, 2 * max(upper, below))
        active = bound > attained
        edges = low[active, None] * (high[active] / low[active])[:, None] ** (torch.arange(9.0).double() / 8)
        low, high = edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)


def output_bound(
    weight: Tensor,
    key_error: Tensor,
    value_error: Tensor,
    *,
    query_norm: float,
    scale: float,
    radius: float,
    form: Callable[[Tensor, Tensor], float] = tightened,
) -> float:
    """Bound || o - o^ ||_2 of one query head; `radius` = max_j || v_j - c ||_2 over every token ever appended.

    Shapes: weight[blocks], key_error[blocks], value_error[blocks].
    """
    epsilon = scale * query_norm * key_error.double()
    return float((weight.double() * value_error.double()).sum()) + form(weight, epsilon) * radius


def compare(bound: Tensor, error: Tensor) -> Tightness:
    """Compare bounds with true errors. The slack is relative (2^-40), so scaling the values changes nothing.

    Shapes: bound[outputs], error[outputs].
    """
    if not len(bound) or bound.shape != error.shape:
        raise ValueError(
            f"bound has shape {tuple(bound.shape)}, expected at least one and error's {tuple(error.shape)}"
        )
    ratio = (bound / error).masked_fill(error == 0, torch.inf)
    broken = ~(bound * (1 + _RELATIVE_SLACK) >= error)  # a NaN is a violation
    return Tightness(len(bound), int(broken.sum()), float(ratio.median()), float(ratio.min()))


def _excess(weight: Tensor, epsilon: Tensor) -> tuple[float, float]:
    """Return (M+ - 1, M- - 1) without cancellation."""
    wide = epsilon.double()
    return float((weight * wide.expm1()).sum()), float((weight * (-wide).expm1()).sum())


def _gain(mass: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Return t - p(t) for each t in `mass`: fill the knapsack of compressed mass by descending bracket."""
    up, down = epsilon.double().exp(), (-epsilon.double()).exp()
    bracket = (1 - mass)[:, None] * up + mass[:, None] * down
    order = bracket.sort(dim=1, descending=True)
    filled = (weight[order.indices] * order.values).cumsum(1)
    needed = mass[:, None] * (weight * down).sum()
    share = ((needed - filled) / (weight[order.indices] * order.values).clamp(min=1e-300) + 1).clamp(0, 1)
    return mass - (weight[order.indices] * share).sum(1)


def _checked(weight: Tensor, epsilon: Tensor) -> tuple[Tensor, float]:
    if weight.shape != epsilon.shape or not len(weight):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected epsilon's {tuple(epsilon.shape)}, not empty"
        )
    if not bool((epsilon >= 0).all()):
        raise ValueError(f"epsilon contains {float(epsilon.min())}, expected numbers of at least 0 (inf: masked)")
    if not bool((weight >= 0).all()) or abs(float(weight.double().sum()) - 1) > 1e-4:
        raise ValueError(f"weight sums to {float(weight.sum())}, expected a distribution over the blocks")
    return weight.double() / weight.double().sum(), float(epsilon.max())
