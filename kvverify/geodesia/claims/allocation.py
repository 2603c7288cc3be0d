"""Allocation: which blocks step down."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.geodesia import allocate as allocators
from kvverify.geodesia.cases import (
    AllocateCase,
    ToleranceCase,
)
from kvverify.geodesia.claims.quantizer import first
from kvverify.geodesia.ladder import LADDER, MEAN
from kvverify.geodesia.operators import (
    ALLOCATE,
    TOLERANCE,
)
from kvverify.geodesia.validity import FP32_EPSILON, floor_bits, prefix_fault, step_ratios
from kvverify.run import Run

__all__: list[str] = []

ALLOCATION = "Geodesia-KV, allocation"


@ALLOCATE.claim(evidence="exact", source="Geodesia-KV, monotone demotion")
def monotone(run: Run, case: AllocateCase) -> None:
    """No block gets more bits than it has, and a hot block keeps its rung."""
    inputs = case.build()

    def fault(level: Tensor) -> str | None:
        outside = (level < inputs.level) | (level >= len(LADDER)) | (inputs.hot & (level != inputs.level))
        return first(outside, lambda at: f"block {at} goes from rung {int(inputs.level[at])} to {int(level[at])}")

    run.valid(inputs.call, fault)


@ALLOCATE.claim(evidence="exact", source=ALLOCATION)
def slack_noop(run: Run, case: AllocateCase) -> None:
    """Nothing moves when the blocks are already within the budget."""
    inputs = case.build()
    used = int(allocators.total_bits(inputs.level, inputs.cost))
    run.equal(inputs.replace(budget_bits=used).call, inputs.level)


@ALLOCATE.claim(evidence="exact", source=ALLOCATION)
def retighten(run: Run, case: AllocateCase) -> None:
    """A budget that falls on blocks already demoted is met, unless even the floor of all cold blocks is above it."""
    inputs = case.build()
    lowered = inputs.call(run.impl).clamp(0, len(LADDER) - 1)
    again = inputs.replace(level=torch.maximum(lowered, inputs.level), budget_bits=inputs.budget_bits * 2 // 3)

    def fault(level: Tensor) -> str | None:
        bits = allocators.total_bits(level.clamp(0, len(LADDER) - 1), inputs.cost)
        least = floor_bits(again.level, inputs.hot, inputs.cost)
        allowed = max(least, again.budget_bits)
        return f"{bits:g} bits where {allowed:g} can be met" if bits > allowed else None

    run.valid(again.call, fault)


def legal(inputs: Inputs, level: Tensor) -> str | None:
    """Whether levels can be costed at all: rungs from the current one on."""
    outside = (level < inputs.level) | (level >= len(LADDER))
    return first(outside, lambda at: f"block {at} goes from rung {int(inputs.level[at])} to {int(level[at])}")


@ALLOCATE.claim(evidence="exact", source=ALLOCATION)
def current_prefix(run: Run, case: AllocateCase) -> None:
    """Blocks take prefixes of steps from their current rung, up to the smallest ratio of damage to bits that will do.

    The smallest: undoing all steps of the largest ratio taken exceeds the budget. Tied steps may be taken in any order,
    and only as many as are needed; ratios are tied within fp32 rounding.
    """
    inputs = case.build()
    mass, error, before, hot, cost = inputs.tensors.values()

    def fault(level: Tensor) -> str | None:
        budget = inputs.budget_bits
        return legal(inputs, level) or prefix_fault(before, level, mass, error, hot, cost, budget_bits=budget)

    run.valid(inputs.call, fault)


@ALLOCATE.claim(evidence="exact", source=ALLOCATION)
def allocation_monotone(run: Run, case: AllocateCase) -> None:
    """Of two cold blocks with equal ranges, the one with clearly more mass never gets fewer bits."""
    inputs = replace(case, error="equal" if case.error == "any" else case.error, lowest=0).build()
    error = inputs.error[:1].expand_as(inputs.error).contiguous()
    alike = inputs.replace(error=error)
    ratio, slack = step_ratios(alike.mass, error, alike.level, alike.cost)
    above = (ratio - slack)[:, None, :1] > (ratio + slack)[None, :, :1]
    above = above[..., 0] & ~alike.hot & ~alike.hot[:, None]

    def fault(level: Tensor) -> str | None:
        worse = above & (level[:, None] > level)
        return first(worse, lambda a, b: f"block {a} has more mass than block {b} and is on a lower rung")

    run.valid(alike.call, fault)


@ALLOCATE.claim(evidence="exact", source=ALLOCATION, status="corrected")
def hull_damage(run: Run, case: AllocateCase) -> None:
    """Given the bits that the lower convex hull used as its budget, prefixes never do less damage than the hull.

    Corrected: at equal budgets they may, by using slack that the hull leaves.
    """
    inputs = case.build()
    hull = allocators.hull(*inputs.tensors.values(), budget_bits=inputs.budget_bits)
    loss = allocators.damage(inputs.mass, inputs.error)
    least = float(loss.gather(1, hull.level[:, None]).sum())

    def fault(level: Tensor) -> str | None:
        broken = legal(inputs, level)
        if broken or hull.status != "met":
            return broken
        found = float(loss.gather(1, level[:, None]).sum())
        slack = 8 * len(level) * 2.0**-53 * float(loss.sum())
        return (
            f"damage {found:.6g} within the hull's bits, the hull's is {least:.6g}" if found < least - slack else None
        )

    run.valid(inputs.replace(budget_bits=hull.bits).call, fault)


@TOLERANCE.claim(evidence="exact", source="Geodesia-KV, closed-form allocation", status="corrected")
def tolerance_guarantee(run: Run, case: ToleranceCase) -> None:
    """Snapped up to the ladder, the mean score error stays within the tolerance: sum_b m_b eps_b <= tau.

    Corrected: snapped to the nearest rung, as printed, it does not (0.958 for a tolerance of 0.5).
    """
    inputs = case.build()

    def fault(level: Tensor) -> str | None:
        if not ((level >= 0) & (level < MEAN)).all():
            return f"level is {level.tolist()}: expected rungs of 16, 8, 4 or 2 bits"
        total = float(demand(inputs, level).sum())
        slack = len(level) * 4 * FP32_EPSILON
        return f"sum of m eps is {total:.6g}, tau is {case.tau:g}" if total > case.tau * (1 + slack) else None

    run.valid(inputs.call, fault)


@TOLERANCE.claim(evidence="exact", source="Geodesia-KV, closed-form allocation")
def coarsest(run: Run, case: ToleranceCase) -> None:
    """No block has more bits than its share of the tolerance asks for: one rung lower it would exceed tau / N."""
    inputs = case.build()

    def fault(level: Tensor) -> str | None:
        if not ((level >= 0) & (level < MEAN)).all():
            return f"level is {level.tolist()}: expected rungs of 16, 8, 4 or 2 bits"
        lower = demand(inputs, (level + 1).clamp(max=3))
        wasteful = (level < 3) & (lower * len(level) < case.tau * (1 - 8 * FP32_EPSILON))
        return first(wasteful, lambda at: f"block {at} has {LADDER[level[at]]} bits and could have fewer")

    run.valid(inputs.call, fault)


def demand(inputs: Inputs, level: Tensor) -> Tensor:
    """m_b eps_b at a rung, with eps_b = scale ||q|| extent / (2 (2^b - 1)), 0 at 16 bits."""
    levels = 2.0 ** torch.tensor(LADDER, dtype=torch.float64)[level] - 1
    eps = inputs.scale * inputs.query_norm * inputs.extent.double() / (2 * levels)
    mass: Tensor = inputs.mass.double()
    return mass * torch.where(level == 0, 0.0, eps)
