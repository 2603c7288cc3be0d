"""Coordinate plans against positions worked out by hand, and the properties that tell them apart."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvverify.relay import plans
from kvverify.relay.plans import PLANS, SHIFT, Plan, Retained
from kvverify.relay.policy import compact

repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=80)

COMPACT = ("relay", "key_only", "score", "reverse", "random")

# Two layers of two heads; head by head in source order: 3 10 40, then 0 2 7, then none, then 5. So M = 3.
SOURCE = torch.tensor([[[40, 3, -1, 10], [-1, 7, 2, 0]], [[-1, -1, -1, -1], [5, -1, -1, -1]]])
SCORES = torch.tensor([[[0.1, 0.9, 9.0, 0.5], [9.0, 0.5, 0.5, 0.7]], [[9.0] * 4, [0.3, 9.0, 9.0, 9.0]]])
EMPTY = [-1, -1, -1, -1]


@pytest.mark.parametrize(
    ("name", "question", "positions"),
    [
        ("original", 50, SOURCE.tolist()),
        ("relay", 3, [[[2, 0, -1, 1], [-1, 2, 1, 0]], [EMPTY, [2, -1, -1, -1]]]),
        ("rank_sync", 3, [[[2, 0, -1, 1], [-1, 2, 1, 0]], [EMPTY, [0, -1, -1, -1]]]),
        ("key_only", 50, [[[2, 0, -1, 1], [-1, 2, 1, 0]], [EMPTY, [2, -1, -1, -1]]]),
        ("query_only", 2098, SOURCE.tolist()),
        ("common_shift", 2098, [[[2088, 2051, -1, 2058], [-1, 2055, 2050, 2048]], [EMPTY, [2053, -1, -1, -1]]]),
        ("score", 3, [[[0, 2, -1, 1], [-1, 1, 0, 2]], [EMPTY, [2, -1, -1, -1]]]),
        ("reverse", 3, [[[0, 2, -1, 1], [-1, 0, 1, 2]], [EMPTY, [2, -1, -1, -1]]]),
        # Gaps 7 and 30 become 4 and 15, gaps 2 and 5 become 1 and 3: spans 19, 4, none and 0, so the anchor is 20.
        ("half_gap", 20, [[[19, 0, -1, 4], [-1, 19, 16, 15]], [EMPTY, [19, -1, -1, -1]]]),
    ],
)
def test_plans_worked_by_hand(name, question, positions):
    plan = PLANS[name](Retained(SOURCE, 50, SCORES))
    assert plan.positions.tolist() == positions
    assert plan.positions.dtype == torch.int64
    assert (plan.question, plan.name) == (question, name)


def test_the_table_in_the_documentation_lists_the_plans():
    assert re.findall(r"^\| (\w+) +\|", plans.__doc__, re.MULTILINE)[1:] == list(PLANS)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 0), (0, 3, 4)])
def test_a_cache_without_states_has_a_plan(name, shape):
    plan = PLANS[name](Retained(torch.full(shape, -1), 0, torch.zeros(shape)))
    assert torch.equal(plan.positions, torch.full(shape, -1))
    assert plan.question == (SHIFT if name in ("query_only", "common_shift") else 0)


@st.composite
def retained_states(draw):
    """Ragged heads, slots in any order with empty ones between, scores with ties."""
    length, slots = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    heads = []
    for _ in range(draw(st.integers(1, 4))):
        kept = draw(st.lists(st.integers(0, length - 1), unique=True, max_size=min(slots, length)))
        heads.append(draw(st.permutations(kept + [-1] * (slots - len(kept)))))
    source = torch.tensor(heads).unflatten(0, (1, -1))
    scores = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=source.numel(), max_size=source.numel()))
    return Retained(source, length, torch.tensor(scores).view_as(source), seed=draw(st.integers(0, 5)))


def heads_in_source_order(retained, positions):
    """For each head, the positions of its states from the earliest source to the latest."""
    for source, row in zip(retained.source.flatten(0, 1), positions.flatten(0, 1), strict=True):
        yield [int(row[slot]) for slot in source.argsort().tolist() if source[slot] >= 0]


def sources(retained):
    return list(heads_in_source_order(retained, retained.source))


@repeatable
@given(retained_states(), st.sampled_from(list(PLANS)))
def test_every_plan_keeps_the_states_and_asks_after_all_of_them(retained, name):
    plan = PLANS[name](retained)
    assert torch.equal(plan.positions >= 0, retained.valid)
    assert plan.question > int(plan.positions.max())
    for row in heads_in_source_order(retained, plan.positions):
        assert len(set(row)) == len(row)


@repeatable
@given(retained_states(), st.sampled_from(list(PLANS)), st.randoms(use_true_random=False))
def test_a_state_keeps_its_position_wherever_its_slot_is(retained, name, shuffle):
    order = list(range(retained.source.shape[-1]))
    shuffle.shuffle(order)
    moved = Retained(retained.source[..., order], retained.length, retained.scores[..., order], retained.seed)
    assert torch.equal(PLANS[name](moved).positions, PLANS[name](retained).positions[..., order])


@repeatable
@given(retained_states(), st.sampled_from(COMPACT))
def test_compact_plans_fill_one_interval_that_ends_before_the_anchor(retained, name):
    largest = max(map(len, sources(retained)))
    plan = PLANS[name](retained)
    assert plan.question == (retained.length if name == "key_only" else largest)
    for row in heads_in_source_order(retained, plan.positions):
        assert sorted(row) == list(range(largest - len(row), largest))


@repeatable
@given(retained_states())
def test_relay_puts_kept_states_i_and_j_at_distance_j_minus_i(retained):
    plan = PLANS["relay"](retained)
    for row in heads_in_source_order(retained, plan.positions):
        assert [p - row[0] for p in row] == list(range(len(row)))
        assert row[-1:] in ([], [plan.question - 1])


@repeatable
@given(retained_states())
def test_relay_equals_compact_where_slots_are_in_source_order(retained):
    last = torch.where(retained.valid, retained.source, 99).sort(-1).values
    ordered = torch.where(last < 99, last, -1)
    positions, anchor = compact(ordered >= 0)
    plan = PLANS["relay"](Retained(ordered, retained.length))
    assert torch.equal(plan.positions, positions)
    assert plan.question == int(anchor)


@repeatable
@given(retained_states())
def test_rank_sync_starts_every_head_at_zero_and_asks_where_relay_does(retained):
    plan = PLANS["rank_sync"](retained)
    assert plan.question == PLANS["relay"](retained).question
    for row in heads_in_source_order(retained, plan.positions):
        assert row == list(range(len(row)))


@repeatable
@given(retained_states())
def test_score_puts_better_states_nearer_and_equal_ones_in_source_order(retained):
    found = heads_in_source_order(retained, PLANS["score"](retained).positions)
    for row, scores in zip(found, heads_in_source_order(retained, (2 * retained.scores).long()), strict=True):
        ascending = sorted(range(len(row)), key=lambda i: (scores[i], i))
        assert [row[i] for i in ascending] == sorted(row)


def test_scores_may_be_infinite_and_those_of_empty_slots_are_never_read():
    scores = torch.tensor([[[torch.inf, -torch.inf, torch.nan, 0.0]]])
    plan = PLANS["score"](Retained(torch.tensor([[[4, 1, -1, 9]]]), 10, scores))
    assert plan.positions.tolist() == [[[2, 0, -1, 1]]]
    infinite = Retained(torch.tensor([[[-1, 4, 1]]]), 10, torch.full((1, 1, 3), torch.inf))
    assert PLANS["score"](infinite).positions.tolist() == [[[-1, 1, 0]]]


@repeatable
@given(retained_states())
def test_reverse_runs_against_the_source(retained):
    relayed = heads_in_source_order(retained, PLANS["relay"](retained).positions)
    reversed_ = heads_in_source_order(retained, PLANS["reverse"](retained).positions)
    assert [row[::-1] for row in reversed_] == list(relayed)


def test_random_depends_on_the_seed_alone_and_orders_equal_heads_alike():
    source = torch.arange(32).expand(2, 3, 32)
    orders = [PLANS["random"](Retained(source, 32, seed=seed)).positions for seed in (0, 0, 1, 2, 3)]
    assert torch.equal(orders[0], orders[1])
    assert len({tuple(order[0, 0].tolist()) for order in orders}) == 4
    for order in orders:
        assert torch.equal(order, order[:1, :1].expand_as(order))
        assert order[0, 0].tolist() != list(range(32))


def test_random_draws_every_order():
    source = torch.arange(3).view(1, 1, 3)
    drawn = {tuple(PLANS["random"](Retained(source, 3, seed=seed)).positions.flatten().tolist()) for seed in range(60)}
    assert len(drawn) == 6


@repeatable
@given(retained_states())
def test_half_gap_halves_what_was_evicted_between_neighbours(retained):
    plan = PLANS["half_gap"](retained)
    spans = []
    for row, source in zip(heads_in_source_order(retained, plan.positions), sources(retained), strict=True):
        halved = [1 + (late - early - 1) // 2 for early, late in pairwise(source)]
        assert [late - early for early, late in pairwise(row)] == halved
        assert row[-1:] in ([], [plan.question - 1])
        spans += [sum(halved) + 1] if source else []
    assert plan.question == max(spans, default=0)


@repeatable
@given(retained_states())
def test_a_common_shift_changes_no_distance(retained):
    plan, before = PLANS["common_shift"](retained), PLANS["original"](retained)
    held = retained.valid
    assert torch.equal(plan.question - plan.positions[held], before.question - before.positions[held])
    assert int(before.question) + SHIFT == plan.question


@pytest.mark.parametrize("name", ["relay", "rank_sync", "key_only", "half_gap", "score"])
def test_nothing_moves_when_nothing_was_evicted(name):
    whole = Retained(torch.arange(9).expand(2, 2, 9), 9, torch.ones(2, 2, 9))
    plan, original = PLANS[name](whole), PLANS["original"](whole)
    assert torch.equal(plan.positions, original.positions)
    assert plan.question == original.question == 9


def test_a_plan_leaves_the_sources_alone():
    source = SOURCE.clone()
    for plan in PLANS.values():
        plan(Retained(source, 50, SCORES))
    assert torch.equal(source, SOURCE)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"source": [[[1]]]},
            TypeError,
            "source: got list, expected a tensor [layers, heads, slots] of int32 or int64",
        ),
        ({"source": SOURCE.bfloat16()}, TypeError, "source: got torch.bfloat16, expected int32 or int64"),
        ({"source": SOURCE[0]}, ValueError, "source: got shape (2, 4), expected [layers, heads, slots]"),
        ({"source": SOURCE - 1}, ValueError, "source: got position -2, expected at least 0, or -1 for an empty slot"),
        (
            {"source": torch.tensor([[[3, 5, 3]]])},
            ValueError,
            "source: got position 3 twice in one head, expected it once",
        ),
        ({"length": 40}, ValueError, "source: got position 40, expected less than length = 40"),
        ({"length": 50.0}, TypeError, "length: got 50.0, expected an int"),
        ({"length": -1}, ValueError, "length: got -1, expected at least 0"),
        ({"seed": -1}, ValueError, "seed: got -1, expected at least 0"),
        ({"scores": SCORES[:1]}, ValueError, "scores: got shape (1, 2, 4), expected (2, 2, 4), the shape of source"),
        (
            {"scores": SCORES.long()},
            TypeError,
            "scores: got torch.int64, expected float16 or bfloat16 or float32 or float64",
        ),
        ({"scores": SCORES * torch.nan}, ValueError, "scores: got NaN, expected a number for every state"),
    ],
)
def test_retained_names_what_it_refuses(arguments, error, message):
    with pytest.raises(error) as caught:
        Retained(**({"source": SOURCE, "length": 50} | arguments))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("positions", "question", "message"),
    [
        ([[[0, 1, 1]]], 9, "positions: got position 1 twice in one head, expected it once"),
        ([[[0, -3, 1]]], 9, "positions: got position -3, expected at least 0, or -1 for an empty slot"),
        ([[0, 1, 2]], 9, "positions: got shape (1, 3), expected [layers, heads, slots]"),
        ([[[0, 1, 2]]], 2, "question: got 2, expected more than 2, the position of a state"),
    ],
)
def test_a_plan_names_what_it_refuses(positions, question, message):
    with pytest.raises(ValueError, match=r"\A" + re.escape(message) + r"\Z"):
        Plan(torch.tensor(positions), question, "mine")


def test_score_without_scores_is_refused():
    with pytest.raises(ValueError, match=r"^scores: got None, expected the relevance of every state"):
        PLANS["score"](Retained(SOURCE, 50))


def test_two_heads_may_share_positions():
    assert Plan(torch.tensor([[[0, 1], [1, 0]]]), 2, "mine").question == 2
