"""Allocation: which blocks step down the ladder, and how far. Levels are rung indices and never fall.

Damage of a block at a rung is d_b(L) = m_b e_b(L); a step down from rung i has the marginal ratio

    r = (d(i + 1) - d(i)) / (bits(i) - bits(i + 1))        added damage per saved bit.

`budget`     the published form: the smallest lambda such that every cold block takes the maximal PREFIX of steps from
             its CURRENT level with ratio <= lambda, and the total meets the budget. All steps at lambda are taken.
`hull`       the same on the lower convex hull of each block's curve: Lagrangian-optimal. The prefix form, run with the
             bits that the hull used as its budget, never has less damage; at equal budgets it may win by using slack.
`tolerance`  the closed form: eps_b = tau / (N m_b), snapped UP to the ladder, so that sum_b m_b eps_b <= tau.

Within the budget nothing moves. When the floor of all cold blocks is still above it, everything cold goes to the floor
and the status says "infeasible".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from kvverify.geodesia.ladder import LADDER

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Allocation", "Status", "budget", "damage", "hull", "retired_blocks", "tolerance", "total_bits"]

Status = Literal["unchanged", "met", "infeasible"]


@dataclass(frozen=True, eq=False)
class Allocation:
    """The new rung of each block, their bits, the threshold lambda that admitted the steps (-inf: none), and status."""

    level: Tensor  # [blocks]
    bits: float
    threshold: float
    status: Status


def damage(mass: Tensor, error: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return d_b(L) = m_b^gamma e_b(L) in float64.

    Shapes: mass[blocks], error[blocks, levels] -> [blocks, levels].
    """
    return mass.double()[:, None] ** gamma * error.double()


def total_bits(level: Tensor, cost: Tensor) -> float:
    """Bits of all blocks at their rungs.

    Shapes: level[blocks], cost[levels].
    """
    return float(cost.double()[level].sum())


def budget(
    mass: Tensor,
    error: Tensor,
    level: Tensor,
    hot: Tensor,
    cost: Tensor,
    *,
    budget_bits: float,
    gamma: float = 1.0,
) -> Allocation:
    """The published form: prefixes of steps by marginal damage (see the module's docstring).

    Shapes: mass[blocks], error[blocks, levels], level[blocks], hot bool[blocks], cost[levels].
    """
    return _meet(_one_rung_ratios, mass, error, level, hot, cost, budget_bits, gamma)


def hull(
    mass: Tensor,
    error: Tensor,
    level: Tensor,
    hot: Tensor,
    cost: Tensor,
    *,
    budget_bits: float,
    gamma: float = 1.0,
) -> Allocation:
    """The same threshold on each block's lower convex hull from its current level; stops at hull vertices only.

    Shapes: mass[blocks], error[blocks, levels], level[blocks], hot bool[blocks], cost[levels].
    """
    return _meet(_hull_ratios, mass, error, level, hot, cost, budget_bits, gamma)


def tolerance(
    mass: Tensor,
    extent: Tensor,
    *,
    tau: float,
    scale: float,
    query_norm: float,
) -> Tensor:
    """Return the rung of each block by the closed form, snapped up to 2, 4, 8 or 16 bits.

    eps = tau / (N m_b), b* = log2(scale ||q|| e_b / (2 eps) + 1), with `extent` e_b = || range of the block's keys ||_2
    and ||q|| the current query's norm, the largest of its group. Then sum_b m_b scale ||q|| e_b / (2 (2^b - 1)) <= tau.
    To hold on the stored format, pass the stored ranges, || 255 step ||_2. (Snapping to the NEAREST rung, as printed,
    breaks the inequality.)

    Shapes: mass[blocks], extent[blocks] -> [blocks].
    """
    for name, value in (("tau", tau), ("scale", scale)):
        if not value > 0:
            raise ValueError(f"{name} is {value}, expected a positive number")
    _require_mass(mass)
    # log2(x + 1) <= b is x <= 2^b - 1: comparing there keeps the guarantee free of the logarithm's rounding.
    demand = len(mass) * mass.double() * scale * query_norm * extent.double() / (2 * tau)
    level = torch.zeros(len(mass), dtype=torch.int64, device=mass.device)
    for rung in (1, 2, 3):
        level[demand <= 2 ** LADDER[rung] - 1] = rung
    return level


def retired_blocks(length: int, *, block: int, retire_after: int = 512) -> int:
    """How many leading blocks have left the recent window of `retire_after` tokens: decided once, then fixed."""
    return max(0, length - retire_after) // block


def _one_rung_ratios(loss: Tensor, cost: Tensor, level: Tensor) -> Tensor:
    """Ratio at [b, i] of the step i -> i + 1, made monotone along the ladder from the current level.

    A prefix is admitted exactly when its running maximum is below the threshold.
    """
    ratio = (loss[:, 1:] - loss[:, :-1]) / (cost[:-1] - cost[1:])
    taken = torch.arange(ratio.shape[1], device=loss.device) < level[:, None]
    return ratio.masked_fill(taken, -torch.inf).cummax(1).values


def _hull_ratios(loss: Tensor, cost: Tensor, level: Tensor) -> Tensor:
    """Ratio at [b, i] of the hull segment that covers the step i -> i + 1 (all its steps are taken together)."""
    rungs = loss.shape[1]
    ratio = torch.full((len(loss), rungs - 1), -torch.inf, dtype=torch.float64, device=loss.device)
    rung = torch.arange(rungs, device=loss.device)
    vertex = level.clone()
    for _ in range(rungs - 1):
        rise = loss - loss.gather(1, vertex[:, None])
        slope = (rise / (cost[vertex][:, None] - cost)).masked_fill(rung <= vertex[:, None], torch.inf)
        best = slope.amin(1, keepdim=True)
        # Of collinear vertices the farthest: its segment covers the others.
        following = torch.where((slope == best) & (rung > vertex[:, None]), rung, vertex[:, None]).amax(1)
        covered = (rung[:-1] >= vertex[:, None]) & (rung[:-1] < following[:, None])
        ratio = torch.where(covered, best, ratio)
        vertex = following
    # Slopes of a hull rise; the maximum only repairs the rounding of equal ones.
    return ratio.cummax(1).values


def _meet(
    ratios: Callable[[Tensor, Tensor, Tensor], Tensor],
    mass: Tensor,
    error: Tensor,
    level: Tensor,
    hot: Tensor,
    cost: Tensor,
    budget_bits: float,
    gamma: float,
) -> Allocation:
    _require_inputs(mass, error, level, hot, cost)
    cost = cost.double()
    used = total_bits(level, cost)
    if used <= budget_bits:
        return Allocation(level.clone(), used, -torch.inf, "unchanged")
    ratio = ratios(damage(mass, error, gamma=gamma), cost, level)
    step = torch.arange(len(cost) - 1, device=level.device)
    open_steps = (step >= level[:, None]) & ~hot[:, None]
    order = ratio[open_steps].sort()
    saved = (cost[:-1] - cost[1:]).expand_as(ratio)[open_steps][order.indices].cumsum(0)
    enough = saved >= used - budget_bits
    status: Status = "met" if bool(enough.any()) else "infeasible"
    threshold = float(order.values[enough][0]) if status == "met" else torch.inf
    lowered = level + (open_steps & (ratio <= threshold)).sum(1)
    return Allocation(lowered, total_bits(lowered, cost), threshold, status)


def _require_inputs(mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor) -> None:
    blocks, rungs = error.shape
    for name, tensor, shape in (("mass", mass, (blocks,)), ("level", level, (blocks,)), ("hot", hot, (blocks,))):
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape} to match error")
    _require_mass(mass)
    if not bool((error >= 0).all()) or not bool(error.isfinite().all()):
        raise ValueError(f"error contains {float(error.min())}, expected finite values of at least 0")
    if hot.dtype != torch.bool:
        raise TypeError(f"hot has dtype {hot.dtype}, expected torch.bool")
    if blocks and not (int(level.min()) >= 0 and int(level.max()) < rungs):
        raise ValueError(f"level spans {int(level.min())} to {int(level.max())}, expected 0 to {rungs - 1}")
    if cost.shape != (rungs,) or not bool((cost[:-1] > cost[1:]).all()):
        raise ValueError(f"cost is {cost.tolist()}, expected {rungs} strictly falling numbers of bits")


def _require_mass(mass: Tensor) -> None:
    if not bool((mass >= 0).all()) or not bool(mass.isfinite().all()):
        raise ValueError(f"mass contains {float(mass.min())}, expected finite values of at least 0")
