"""What is right where there is more than one right answer: top-k under ties, and prefixes up to a threshold.

Each function says what is wrong with an answer, or None. Scores come with the rounding that fp32 may have put on them:
two that lie closer than that are tied, and a kernel may decide as it likes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.geodesia.allocate import damage, total_bits

__all__ = ["FP32_EPSILON", "floor_bits", "prefix_fault", "step_ratios", "top_fault"]

FP32_EPSILON = 2.0**-23


def top_fault(chosen: Tensor, score: Tensor, slack: Tensor, *, count: int) -> str | None:
    """Whether `chosen` are `count` different ids, none of which scores below one that was left out.

    Shapes: chosen[count], score[n], slack[n].
    """
    ids = chosen.tolist()
    if len(ids) != count or len(set(ids)) != count:
        return f"chose {ids}: expected {count} different ids"
    if not all(0 <= i < len(score) for i in ids):
        return f"chose {ids}: expected ids from 0 to {len(score) - 1}"
    left = torch.ones(len(score), dtype=torch.bool)
    left[chosen] = False
    if not ids or not left.any():
        return None
    worst = int(chosen[(score + slack)[chosen].argmin()])
    best = int(torch.where(left, score - slack, -torch.inf).argmax())
    if score[worst] + slack[worst] < score[best] - slack[best]:
        return f"chose {worst} (score {float(score[worst]):.6g}) before {best} (score {float(score[best]):.6g})"
    return None


def step_ratios(mass: Tensor, error: Tensor, level: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Return the running largest ratio of added damage to saved bits, up to each step, and its fp32 rounding.

    A step is admitted with all steps before it, from the current level on: hence the running maximum. Steps already
    taken have ratio -inf.

    Shapes: mass[blocks], error[blocks, levels], level[blocks], cost[levels] -> [blocks, steps], [blocks, steps].
    """
    loss, saved = damage(mass, error), (cost[:-1] - cost[1:]).double()
    taken = torch.arange(len(saved)) < level[:, None]
    ratio = ((loss[:, 1:] - loss[:, :-1]) / saved).masked_fill(taken, -torch.inf).cummax(1).values
    # Two products, a difference and a quotient, each rounded once.
    slack = 4 * FP32_EPSILON * ((loss[:, 1:].abs() + loss[:, :-1].abs()) / saved).masked_fill(taken, 0).cummax(1).values
    return ratio, slack


def floor_bits(level: Tensor, hot: Tensor, cost: Tensor) -> float:
    """Bits when every cold block is on the floor: no allocation has fewer."""
    return total_bits(torch.where(hot, level, len(cost) - 1), cost)


def prefix_fault(
    before: Tensor, after: Tensor, mass: Tensor, error: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> str | None:
    """Whether the steps from `before` to `after` are those of the smallest threshold that meets the budget.

    No step was left out whose ratio is below that of a step taken, and without the dearest steps the budget is not met.
    Where the budget cannot be met, all steps are taken.

    Shapes: before[blocks], after[blocks], mass[blocks], error[blocks, levels], hot[blocks], cost[levels].
    """
    ratio, slack = step_ratios(mass, error, before, cost)
    step = torch.arange(ratio.shape[1])
    taken = (step >= before[:, None]) & (step < after[:, None])
    left = (step >= after[:, None]) & ~hot[:, None]
    bits = total_bits(after, cost)
    if bits > budget_bits:
        return f"{bits:g} bits exceed the budget of {budget_bits:g} with cold steps left" if left.any() else None
    if not taken.any():
        return None
    dearest = torch.where(taken, ratio - slack, -torch.inf).max()
    cheapest = torch.where(left, ratio + slack, torch.inf).min()
    if dearest > cheapest:
        return f"a step of ratio {float(dearest):.6g} was taken before one of {float(cheapest):.6g}"
    # Of tied steps a kernel may take as few as it needs; without any of them the budget must be out of reach.
    saved = (cost[:-1] - cost[1:]).double().expand_as(ratio)
    last = taken & (ratio + slack >= dearest)
    if bits + float(saved[last].sum()) <= budget_bits:
        return f"{bits:g} bits: undoing the dearest steps still meets the budget of {budget_bits:g}"
    return None
