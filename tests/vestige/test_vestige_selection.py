"""Quota, selection, and the judge of a selection."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvverify.vestige import select
from kvverify.vestige.selection import quota, selection_fault

few_values = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=24)


@pytest.mark.parametrize(
    ("closed", "fraction", "expected"),
    # Halves go to the even neighbour, so that floor, ceil and rounding up are each wrong somewhere.
    [
        (0, 1 / 32, 0),
        (1, 1 / 32, 1),
        (4096, 1 / 32, 128),
        (50, 0.03, 2),
        (16, 0.03125 * 3, 2),
        (20, 0.125, 2),
        (28, 0.125, 4),
        (7936, 0.03, 238),
        (100, 0.0, 1),
        (5, 1.0, 5),
    ],
)
def test_quota_rounds_to_even_and_is_at_least_one(closed: int, fraction: float, expected: int) -> None:
    assert quota(closed, fraction=fraction) == expected


@given(few_values, st.data())
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_selection_is_the_sorted_head_and_the_sinks(values: list[float], data: st.DataObject) -> None:
    keep, sinks = data.draw(st.integers(0, len(values))), data.draw(st.integers(0, 6))
    mask = select(torch.tensor(values), keep=keep, sinks=sinks)
    order = sorted(range(len(values)), key=lambda row: (-values[row], row))
    assert set(mask.nonzero().flatten().tolist()) == set(order[:keep]) | set(range(min(sinks, len(values))))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=7), st.data())
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def test_the_judge_accepts_exactly_the_masks_of_some_tie_break(values: list[float], data: st.DataObject) -> None:
    """All masks of up to 7 rows against all orders that a tie-break allows, by brute force."""
    rows, keep = len(values), data.draw(st.integers(0, len(values)))
    sinks = data.draw(st.integers(0, 2))
    subsets = [{row for row in range(rows) if code >> row & 1} for code in range(2**rows)]

    def is_top(chosen: set[int]) -> bool:
        outside = [values[row] for row in range(rows) if row not in chosen]
        return len(chosen) == keep and all(values[row] >= value for row in chosen for value in outside)

    valid = {frozenset(chosen | set(range(min(sinks, rows)))) for chosen in subsets if is_top(chosen)}
    for chosen in subsets:
        mask = torch.tensor([row in chosen for row in range(rows)])
        fault = selection_fault(mask, torch.tensor(values), keep=keep, sinks=sinks)
        assert (fault is None) == (frozenset(chosen) in valid), (chosen, fault)


def test_one_block_may_hold_every_kept_row() -> None:
    sigma = torch.cat([torch.zeros(16), torch.arange(1.0, 9.0), torch.zeros(8)])
    assert select(sigma, keep=8, sinks=0).nonzero().flatten().tolist() == list(range(16, 24))


def test_sinks_are_not_counted_in_the_quota() -> None:
    sigma = torch.arange(32.0)
    assert int(select(sigma, keep=4, sinks=4).sum()) == 8
    assert int(select(sigma.flip(0), keep=4, sinks=4).sum()) == 4


def test_a_frozen_quota_is_final_and_a_growing_one_moves_rows_both_ways() -> None:
    """With m fixed, an archived row never returns as rows are added. With m = fraction * closed it can, and a kept
    one can leave."""
    sigma = torch.cat([torch.tensor([9.0, 8.0, 7.0, 6.0]), torch.tensor([10.0, 11.0, 1.0, 1.0]), torch.zeros(24)])
    fixed = [set(select(sigma[:closed], keep=2, sinks=0).nonzero().flatten().tolist()) for closed in (4, 8, 32)]
    for earlier, later, closed in zip(fixed, fixed[1:], (4, 8), strict=False):
        assert not (set(range(closed)) - earlier) & later
    grown = [
        set(select(sigma[:closed], keep=quota(closed, fraction=1 / 4), sinks=0).nonzero().flatten().tolist())
        for closed in (4, 8, 32)
    ]
    assert grown == [{0}, {4, 5}, {0, 1, 2, 3, 4, 5, 6, 7}]


@pytest.mark.parametrize(
    ("values", "keep", "sinks", "message"),
    [
        ([1.0, 2.0], 3, 0, r"keep is 3: expected 0 to 2"),
        ([1.0, 2.0], 1, -1, r"sinks is -1: expected at least 0"),
        ([1.0, math.nan], 1, 0, r"salience holds NaN"),
        ([1.0, 2.0], True, 0, r"keep is True: expected an int"),
    ],
)
def test_bad_input_is_named(values: list[float], keep: int, sinks: int, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        select(torch.tensor(values), keep=keep, sinks=sinks)
