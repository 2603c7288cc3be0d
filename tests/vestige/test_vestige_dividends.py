"""What other cache policies gain where rows carry no position: each holds without rotation, and a rotary arm fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vestige_cases import UNIT, gaussian, growth, rotate, score_error

from kvverify.selectors import snapkv

BRANCH = 8
FREQUENCIES = 10_000.0 ** (-torch.arange(BRANCH // 2).double() / (BRANCH // 2))
NO_ROTATION = torch.zeros(BRANCH // 2).double()
ARMS = pytest.mark.parametrize(
    ("frequencies", "holds"), [(NO_ROTATION, True), (FREQUENCIES, False)], ids=["nope", "rotary"]
)


def weights(query: Tensor, rows: Tensor, time: int, frequencies: Tensor) -> Tensor:
    """Softmax weights [queries, rows] of pre-rotary queries asked at `time` over rows stored at 0, 1, 2, ..."""
    stored = rotate(rows, torch.arange(len(rows)), frequencies)
    asked = rotate(query, torch.full((len(query),), time), frequencies)
    return torch.softmax(asked @ stored.T, dim=1)


def weight_error(query: Tensor, rows: Tensor) -> float:
    """Two float64 evaluations of a weight differ by at most this: twice the error of the exponent, and the sum."""
    return 4 * score_error(query, rows, scale=1.0) + 2 * growth(len(rows) + 4) + 8 * UNIT


@ARMS
def test_the_box_of_a_page_bounds_its_scores_wherever_its_rows_stand(frequencies: Tensor, holds: bool) -> None:
    """Quest: sum_d max(q_d low_d, q_d high_d), with the box of the content as it is before any position."""
    rows = gaussian(1, BRANCH, seed=1) + 0.1 * gaussian(32, BRANCH, seed=7)  # one content: a tight box
    query = gaussian(200, BRANCH, seed=2)
    box = torch.maximum(query * rows.amin(0), query * rows.amax(0)).sum(1)
    scores = rotate(query, torch.full((200,), 500), frequencies) @ rotate(rows, torch.arange(32), frequencies).T
    assert bool((scores.amax(1) <= box + score_error(query, rows, scale=1.0)).all()) == holds


@ARMS
def test_the_expected_mass_of_a_row_has_no_age_term(frequencies: Tensor, holds: bool) -> None:
    """H2O, for queries drawn alike at every time from one set: each time adds the same expected mass to a fixed row
    set."""
    rows, query = gaussian(20, BRANCH, seed=3), gaussian(50, BRANCH, seed=4)
    early, late = (weights(query, rows, time, frequencies).mean(0) for time in (20, 4000))
    assert bool(((early - late).abs() <= weight_error(query, rows)).all()) == holds


@ARMS
def test_the_votes_of_a_window_are_the_same_at_any_time(frequencies: Tensor, holds: bool) -> None:
    """SnapKV, by its own selector: fixed queries keep the same rows whenever they are asked."""
    rows, query = gaussian(64, BRANCH, seed=5), gaussian(8, BRANCH, seed=6)
    kept = [
        snapkv(weights(query, rows, time, frequencies)[None, None], budget=24, window=8, kernel=1).positions.tolist()
        for time in (64, 100, 1000, 5000)
    ]
    assert all(each == kept[0] for each in kept) == holds
