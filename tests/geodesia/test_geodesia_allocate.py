"""Allocation: budget, prefix rule, no-op, monotone, hull, tolerance."""

import itertools

import pytest
import torch
from geodesia_cases import UNIT, normal, quick
from hypothesis import given
from hypothesis import strategies as st

from kvverify.geodesia import allocate
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.ladder import LADDER, STEP_RATIO, dequantize, quantize
from kvverify.geodesia.policy import allocate as allocate_levels

COST = torch.tensor(Geometry(dim=128).costs, dtype=torch.float64)
FORMS = [allocate.budget, allocate.hull]


def problem(blocks, seed, start):
    generator = torch.Generator().manual_seed(seed)
    mass = torch.rand(blocks, generator=generator, dtype=torch.float64)
    mass /= mass.sum()
    # Independent errors give curves that are neither convex nor monotone; the exact rung has none.
    error = torch.rand(blocks, len(LADDER), generator=generator, dtype=torch.float64)
    error[:, 0] = 0
    level = torch.randint(0, start + 1, (blocks,), generator=generator)
    hot = torch.rand(blocks, generator=generator) < 0.2
    return mass, error, level, hot, COST


problems = st.builds(problem, st.integers(1, 12), st.integers(0, 99), st.integers(0, 4))
rates = st.sampled_from([0.1, 0.5, 1.0, 2.5, 4.5, 8.0, 12.0, 16.0])


def bits_of(rate, blocks):
    return rate * len(blocks) * float(COST[0]) / 16


@pytest.mark.parametrize("form", FORMS)
@quick(150)
@given(problems, rates)
def test_levels_never_rise_and_hot_blocks_stay(form, given_problem, rate):
    _, _, level, hot, _ = given_problem
    found = form(*given_problem, budget_bits=bits_of(rate, level))
    assert bool((found.level >= level).all())
    assert torch.equal(found.level[hot], level[hot])
    assert found.bits == float(COST[found.level].sum())


@pytest.mark.parametrize("form", FORMS)
@quick(150)
@given(problems, rates)
def test_the_budget_is_met_or_everything_cold_is_on_the_floor(form, given_problem, rate):
    _, _, level, hot, _ = given_problem
    budget_bits = bits_of(rate, level)
    found = form(*given_problem, budget_bits=budget_bits)
    if found.status == "infeasible":
        assert found.bits > budget_bits
        assert bool((found.level[~hot] == len(LADDER) - 1).all())
    else:
        assert found.bits <= budget_bits


@pytest.mark.parametrize("form", FORMS)
@quick(100)
@given(problems, rates)
def test_nothing_moves_within_the_budget(form, given_problem, rate):
    level = given_problem[2]
    budget_bits = bits_of(rate, level)
    found = form(*given_problem, budget_bits=budget_bits)
    within = float(COST[level].sum()) <= budget_bits
    assert (found.status == "unchanged") == within
    if within:
        assert torch.equal(found.level, level)


def prefix_by_hand(mass, error, level, hot, cost, threshold):
    """The published rule for one threshold, as a loop."""
    result = level.clone()
    for block in range(len(mass)):
        while not hot[block] and result[block] < len(cost) - 1:
            rung = int(result[block])
            added = mass[block] * error[block, rung + 1] - mass[block] * error[block, rung]
            if added / (cost[rung] - cost[rung + 1]) > threshold:
                break
            result[block] += 1
    return result


@quick(150)
@given(problems, rates)
def test_current_prefix_is_the_smallest_threshold_that_meets_the_budget(given_problem, rate):
    level = given_problem[2]
    budget_bits = bits_of(rate, level)
    found = allocate.budget(*given_problem, budget_bits=budget_bits)
    if found.status != "met":
        return
    assert torch.equal(found.level, prefix_by_hand(*given_problem, found.threshold))
    # Undoing every step that was admitted at the final threshold exceeds the budget.
    below = torch.nextafter(torch.tensor(found.threshold, dtype=torch.float64), torch.tensor(-torch.inf).double())
    assert float(COST[prefix_by_hand(*given_problem, below)].sum()) > budget_bits


def test_budget_is_met_exactly_under_ties():
    blocks = 4
    mass, error = torch.full((blocks,), 0.25), torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]).repeat(blocks, 1)
    cost = torch.tensor([16.0, 8.0, 4.0, 2.0, 1.0])
    level, hot = torch.zeros(blocks, dtype=torch.int64), torch.zeros(blocks, dtype=torch.bool)
    # All first steps tie, so a budget short by one bit takes all of them.
    assert allocate_levels(mass, error, level, hot, cost, budget_bits=63).tolist() == [1, 1, 1, 1]
    assert allocate_levels(mass, error, level, hot, cost, budget_bits=64).tolist() == [0, 0, 0, 0]


def test_prefix_rule_does_not_reach_a_cheap_step_behind_a_dear_one():
    mass, level, hot = torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    error = torch.tensor([[0.0, 100.0, 100.0, 100.0, 100.0], [0.0, 8.0, 16.0, 24.0, 32.0]])
    cost = torch.tensor([16.0, 8.0, 4.0, 2.0, 1.0])
    # Block 0 has free steps after its first, dear one; they may not be counted without it.
    assert allocate_levels(mass, error, level, hot, cost, budget_bits=24).tolist() == [0, 1]


def test_retighten_a_block_that_was_demoted_steps_down_again():
    mass, hot = torch.ones(2, dtype=torch.float64) / 2, torch.zeros(2, dtype=torch.bool)
    error = torch.tensor([[0.0, 1.0, 3.0, 9.0, 27.0]]).repeat(2, 1)
    level = torch.zeros(2, dtype=torch.int64)
    for rate in (8.5, 4.5, 2.5, 0.25):
        level = allocate_levels(mass, error, level, hot, COST, budget_bits=bits_of(rate, level))
        assert float(COST[level].sum()) <= bits_of(rate, level)
    assert level.tolist() == [4, 4]


def test_a_block_without_mass_goes_first():
    mass = torch.tensor([0.5, 0.0, 0.5])
    error = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]).repeat(3, 1)
    level, hot = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    assert allocate_levels(mass, error, level, hot, COST, budget_bits=bits_of(11, level)).tolist() == [0, 4, 0]


@pytest.mark.parametrize("form", FORMS)
@quick(100)
@given(problems, rates)
def test_more_mass_never_gets_fewer_bits_at_equal_range(form, given_problem, rate):
    mass, error, level, hot, cost = given_problem
    # A rising curve, the same for all blocks, all starting exact and cold.
    shared = error[0].cumsum(0).expand_as(error)
    cold, exact = torch.zeros_like(hot), torch.zeros_like(level)
    found = form(mass, shared, exact, cold, cost, budget_bits=bits_of(rate, level)).level
    order = mass.sort().indices
    assert bool((found[order].diff() <= 0).all())


@quick(200)
@given(problems, rates)
def test_prefix_form_at_the_bits_of_the_hull_never_has_less_damage(given_problem, rate):
    mass, error, level, _, _ = given_problem
    loss = allocate.damage(mass, error)
    hull = allocate.hull(*given_problem, budget_bits=bits_of(rate, level))
    prefix = allocate.budget(*given_problem, budget_bits=hull.bits)
    total = {form: float(loss.gather(1, found.level[:, None]).sum()) for form, found in (("h", hull), ("p", prefix))}
    # Slopes round to u; a wrong choice among rounded-equal slopes costs at most u of the damages it weighs.
    slack = 8 * len(mass) * UNIT[torch.float64] * float(loss.sum())
    assert total["p"] >= total["h"] - slack


@quick(30)
@given(st.builds(problem, st.integers(1, 4), st.integers(0, 99), st.just(0)), rates)
def test_hull_is_the_least_damage_at_its_own_bits(given_problem, rate):
    mass, error, level, hot, cost = given_problem
    loss = allocate.damage(mass, error)
    hull = allocate.hull(*given_problem, budget_bits=bits_of(rate, level))
    if hull.status == "infeasible":
        return
    choices = [[int(level[b])] if hot[b] else range(int(level[b]), 5) for b in range(len(mass))]
    best = min(
        sum(float(loss[b, rung]) for b, rung in enumerate(rungs))
        for rungs in itertools.product(*choices)
        if sum(float(cost[rung]) for rung in rungs) <= hull.bits
    )
    if hull.status == "unchanged":
        return
    slack = 8 * len(mass) * UNIT[torch.float64] * float(loss.sum())
    assert float(loss.gather(1, hull.level[:, None]).sum()) <= best + slack


def score_bound(mass, extent, level, scale, query_norm):
    """sum_b m_b eps_b with eps_b = scale ||q|| extent / (2 (2^b - 1)), 0 at 16 bits."""
    bits = torch.tensor(LADDER, dtype=torch.float64)[level]
    epsilon = scale * query_norm * extent / (2 * (2**bits - 1))
    return float((mass * torch.where(level == 0, 0.0, epsilon)).sum())


@quick(100)
@given(st.integers(1, 20), st.integers(0, 99), st.sampled_from([1e-3, 0.1, 0.5, 10.0]))
def test_tolerance_guarantee_holds_snapped_up(blocks, seed, tau):
    mass = normal(blocks, seed=seed).softmax(0)
    extent = normal(blocks, seed=seed + 1).abs() * 20
    level = allocate.tolerance(mass, extent, tau=tau, scale=0.1, query_norm=7.0)
    # blocks + 6 roundings of the sum and its terms.
    assert score_bound(mass, extent, level, 0.1, 7.0) <= tau * (1 + (blocks + 6) * UNIT[torch.float64])


def test_tolerance_snapped_to_the_nearest_rung_breaks_the_guarantee():
    mass, extent = torch.tensor([1.0], dtype=torch.float64), torch.tensor([6.5], dtype=torch.float64)
    # b* = log2(6.5 + 1) = 2.91 lies nearest to 2 bits.
    nearest = torch.tensor([3])
    assert score_bound(mass, extent, nearest, 1.0, 1.0) > 0.5
    up = allocate.tolerance(mass, extent, tau=0.5, scale=1.0, query_norm=1.0)
    assert up.tolist() == [2]
    assert score_bound(mass, extent, up, 1.0, 1.0) <= 0.5


def test_tolerance_with_stored_ranges_holds_for_the_stored_keys():
    block, blocks, dim, scale, tau = 8, 6, 4, 0.5, 0.05
    keys = (
        normal(blocks * block, dim, seed=3) * torch.logspace(-2, 1, blocks).double().repeat_interleave(block)[:, None]
        + 900
    )
    mass, query = normal(blocks, seed=4).softmax(0), normal(dim, seed=5)
    _, lo, step = quantize(keys.float(), bits=8, axis="token", group=block)
    stored = (255 * step.double()).norm(dim=1)
    level = allocate.tolerance(mass, stored, tau=tau, scale=scale, query_norm=float(query.norm()))
    moved = torch.zeros(blocks, dtype=torch.float64)
    for b, rung in enumerate(level.tolist()):
        rows = keys[b * block : (b + 1) * block].float()
        if rung:
            codes, lo, step = quantize(rows, bits=LADDER[rung], axis="token", group=block)
            back = dequantize(codes, lo, step, bits=LADDER[rung], axis="token", group=block)
            moved[b] = scale * ((back - rows.double()) @ query).abs().max()
    assert STEP_RATIO.keys() >= {LADDER[r] for r in level.tolist() if r}
    assert 0 < float((mass * moved).sum()) <= tau


def test_a_block_is_retired_once_the_recent_window_has_passed_it():
    assert [allocate.retired_blocks(t, block=64) for t in (0, 512, 575, 576, 640)] == [0, 0, 0, 1, 2]


def test_bad_input_is_named():
    good = problem(3, 0, 0)
    for index, value, message in (
        (0, torch.tensor([1.0, -1.0, 0.0]), "mass contains -1.0, expected finite values of at least 0"),
        (0, torch.ones(2), r"mass has shape \(2,\), expected \(3,\)"),
        (1, good[1] - 1, "error contains -"),
        (2, torch.tensor([0, 5, 0]), "level spans 0 to 5, expected 0 to 4"),
        (4, COST.flip(0), "strictly falling"),
    ):
        wrong = list(good)
        wrong[index] = value
        with pytest.raises(ValueError, match=message):
            allocate.budget(*wrong, budget_bits=0)
    with pytest.raises(ValueError, match="tau is 0, expected a positive number"):
        allocate.tolerance(good[0], good[0], tau=0, scale=1.0, query_norm=1.0)
