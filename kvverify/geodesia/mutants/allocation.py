"""Known-bad and equivalent kernels: allocation: which blocks step down."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.geodesia import allocate as allocators
from kvverify.geodesia import policy
from kvverify.geodesia.cases import (
    AllocateCase,
    ToleranceCase,
)
from kvverify.geodesia.ladder import LADDER
from kvverify.geodesia.mutants.variants import frugal
from kvverify.geodesia.operators import (
    ALLOCATE,
    TOLERANCE,
)

__all__: list[str] = []


@ALLOCATE.mutant("monotone", case=AllocateCase(lowest=4, rate=12.0))
def starts_from_the_top(mass: Tensor, error: Tensor, level: Tensor, *rest: Tensor, budget_bits: float) -> Tensor:
    return policy.allocate(mass, error, torch.zeros_like(level), *rest, budget_bits=budget_bits)


@ALLOCATE.mutant("monotone")
def demotes_hot_blocks(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    return policy.allocate(mass, error, level, torch.zeros_like(hot), cost, budget_bits=budget_bits)


@ALLOCATE.mutant("slack_noop")
def takes_a_step_within_the_budget(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    budget_bits = min(budget_bits, float(cost[level].sum()) - 1)
    return policy.allocate(mass, error, level, hot, cost, budget_bits=budget_bits)


@ALLOCATE.mutant("retighten", case=AllocateCase(rate=8.5, hot="none"))
def takes_prefixes_from_rung_0(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    return policy.allocate(mass, error, level, hot | (level > 0), cost, budget_bits=budget_bits)


@ALLOCATE.mutant("current_prefix", case=AllocateCase(error="any", blocks=12, rate=6.0, hot="none"))
def jumps_over_dear_steps(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    """Takes the farthest step that is cheap enough by itself, and so the dear ones before it."""
    loss = allocators.damage(mass, error)
    saved = (cost[:-1] - cost[1:]).double()
    steps = torch.arange(len(saved))
    ratio = ((loss[:, 1:] - loss[:, :-1]) / saved).masked_fill((steps < level[:, None]) | hot[:, None], torch.inf)
    lowered = level
    for threshold in ratio[ratio.isfinite()].sort().values:
        if float(cost[lowered].sum()) <= budget_bits:
            break
        cheap = torch.where(ratio <= threshold, steps + 1, 0)
        lowered = torch.maximum(level, cheap.amax(1))
    return lowered.clone()


@ALLOCATE.mutant("current_prefix", case=AllocateCase(blocks=12, rate=6.0, hot="none"))
def forgets_the_mass(mass: Tensor, *rest: Tensor, budget_bits: float) -> Tensor:
    return policy.allocate(torch.ones_like(mass), *rest, budget_bits=budget_bits)


@ALLOCATE.mutant("current_prefix", case=AllocateCase(hot="none"))
def damage_not_divided_by_bits(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    """Ratios without the saved bits: as if every step saved as many."""
    loss = allocators.damage(mass, error)
    even = torch.arange(len(cost), 0, -1)
    lowered = level
    for threshold in (loss[:, 1:] - loss[:, :-1]).flatten().sort().values:
        if float(cost[lowered].sum()) <= budget_bits:
            break
        slope = ((loss[:, 1:] - loss[:, :-1]) / (even[:-1] - even[1:])).masked_fill(
            torch.arange(len(cost) - 1) < level[:, None], -torch.inf
        )
        lowered = (
            level
            + ((slope.cummax(1).values <= threshold) & (torch.arange(len(cost) - 1) >= level[:, None])).sum(1) * ~hot
        )
    return lowered.clone()


@ALLOCATE.mutant("allocation_monotone", "current_prefix", case=AllocateCase(blocks=12, rate=6.0, hot="none"))
def demotes_what_matters_most(mass: Tensor, *rest: Tensor, budget_bits: float) -> Tensor:
    return policy.allocate(mass.amax() - mass, *rest, budget_bits=budget_bits)


@ALLOCATE.mutant("retighten", "hull_damage", case=AllocateCase(rate=6.0, hot="none"))
def ignores_the_budget(mass: Tensor, error: Tensor, level: Tensor, *rest: Tensor, budget_bits: float) -> Tensor:
    return level.clone()


@ALLOCATE.mutant("current_prefix", case=AllocateCase(rate=8.5, hot="none"))
def always_goes_to_the_floor(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    return torch.where(hot, level, len(cost) - 1)


@ALLOCATE.control
def takes_no_more_tied_steps_than_needed(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    """Of steps with equal ratios only as many as the budget asks for."""
    return frugal(mass, error, level, hot, cost, budget_bits)


@ALLOCATE.control
def damages_in_single_precision(
    mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, *, budget_bits: float
) -> Tensor:
    """Damage in fp32, as a kernel computes it."""
    loss = (mass.float()[:, None] * error.float()).double()
    return policy.allocate(torch.ones_like(mass), loss, level, hot, cost, budget_bits=budget_bits)


@TOLERANCE.mutant("tolerance_guarantee", case=ToleranceCase(blocks=1))
def snaps_to_the_nearest_rung(mass: Tensor, extent: Tensor, *, tau: float, scale: float, query_norm: float) -> Tensor:
    wanted = (len(mass) * mass.double() * scale * query_norm * extent.double() / (2 * tau) + 1).log2()
    rungs = torch.tensor(LADDER[:4], dtype=torch.float64)
    return (wanted[:, None] - rungs).abs().argmin(1)


@TOLERANCE.mutant("tolerance_guarantee", case=ToleranceCase(blocks=20, tau=0.1))
def whole_tolerance_for_every_block(mass: Tensor, extent: Tensor, **numbers: float) -> Tensor:
    return allocators.tolerance(mass / len(mass), extent, **numbers)


@TOLERANCE.mutant("coarsest")
def everything_exact(mass: Tensor, extent: Tensor, **numbers: float) -> Tensor:
    return torch.zeros(len(mass), dtype=torch.int64)


@TOLERANCE.mutant("coarsest")
def rungs_count_twice_the_error(mass: Tensor, extent: Tensor, **numbers: float) -> Tensor:
    return allocators.tolerance(2 * mass, extent, **numbers)


@TOLERANCE.control
def by_the_logarithm(mass: Tensor, extent: Tensor, *, tau: float, scale: float, query_norm: float) -> Tensor:
    """log2 and the next rung up, as the closed form is written."""
    wanted = (len(mass) * mass.double() * scale * query_norm * extent.double() / (2 * tau) + 1).log2()
    rungs = torch.tensor(LADDER[:4], dtype=torch.float64)
    enough = rungs >= wanted[:, None]
    return (enough.sum(1) - 1).clamp(min=0)
