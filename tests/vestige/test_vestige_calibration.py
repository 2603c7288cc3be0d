"""Three calibrations of the inflation, the gate, and the interval that recalls are reported with."""

from __future__ import annotations

import math

import pytest
import torch
from vestige_cases import gaussian, orthonormal_rows

from kvverify.vestige import index, scan
from kvverify.vestige.calibration import (
    LADDER,
    Margins,
    conformal_archived,
    conformal_hard,
    conformal_rank,
    entropy_gate,
    fetch_threshold,
    ladder,
    margins,
    wilson_interval,
)


def sample(
    needed: list[float], *, best_kept: float = 0.0, best_archived: float = 100.0, certificate: float = 1.0
) -> Margins:
    """Queries that need exactly these inflations to reach best_kept: every number is a small dyadic, so nothing
    rounds."""
    index_score = best_kept - torch.tensor(needed, dtype=torch.float64) * certificate
    like = torch.ones_like(index_score)
    return Margins(best_kept * like, best_archived * like, index_score, certificate * like)


@pytest.mark.parametrize(
    ("samples", "rank"),
    [(0, None), (1, None), (17, None), (18, 18), (19, 19), (37, 36), (64, 62), (128, 123), (256, 244), (2048, 1942)],
)
def test_conformal_rank_table(samples: int, rank: int | None) -> None:
    assert conformal_rank(samples) == rank


@pytest.mark.parametrize(
    ("needed", "inflation"),
    [
        ([], 2.0),  # no hard query
        ([-1.0] * 10, 0.0),
        ([0.25] * 10, 0.5),
        ([0.25] * 9 + [100.0], 0.5),  # 9 of 10 is enough
        ([0.25] * 8 + [4.5, 100.0], 5.0),  # 8 of 10 is not
        ([0.5] * 10, 1.0),  # firing is strict: the rung 0.5 only reaches equality
        ([9.0] * 10, 8.0),  # no rung is enough
    ],
)
def test_ladder_takes_the_smallest_rung_that_recalls_nine_in_ten(needed: list[float], inflation: float) -> None:
    assert inflation in LADDER
    assert ladder(sample(needed)) == inflation


def test_conformal_hard_recalls_k_minus_one_of_its_own_sample() -> None:
    """n = 37, k = 36: the 36th smallest need is met with equality, and firing is strict."""
    margin = sample([step / 8 for step in range(1, 38)])
    inflation = conformal_hard(margin)
    assert inflation == 36 / 8
    assert int((margin.index_score + inflation * margin.certificate > margin.best_kept).sum()) == 35


@pytest.mark.parametrize("calibration", [conformal_hard, conformal_archived])
def test_below_eighteen_samples_the_inflation_is_eight(calibration: object) -> None:
    assert callable(calibration)
    assert calibration(sample([0.5] * 17, best_archived=0.25)) == 8.0
    assert calibration(sample([0.5] * 18, best_archived=0.25)) < 8.0


def test_conformal_inflation_is_clamped_to_zero_and_eight() -> None:
    assert conformal_hard(sample([-3.0] * 18)) == 0.0
    assert conformal_hard(sample([9.0] * 18)) == 8.0
    assert conformal_hard(sample([7.5] * 18)) == 7.5


def test_conformal_archived_lifts_to_the_true_score_and_uses_easy_queries() -> None:
    """Kept at 10, archived at 4, index scores 0, -1/8 ... -17/8: nothing is hard, and the worst row needs 4 + 17/8."""
    margin = sample([10 + step / 8 for step in range(18)], best_kept=10.0, best_archived=4.0)
    assert not margin.hard.any()
    assert conformal_hard(margin) == 8.0
    assert conformal_archived(margin) == 4 + 17 / 8


def test_a_query_that_sees_no_archived_row_is_not_counted() -> None:
    seen = sample([1.0] * 18, best_archived=0.0)
    blind = sample([1.0], best_archived=-math.inf)
    joined = Margins(
        *(torch.cat([getattr(part, name) for part in (seen, blind)]) for name in Margins.__dataclass_fields__)
    )
    assert conformal_archived(joined) == conformal_archived(seen) == 1.0


@pytest.mark.parametrize(("index_score", "inflation"), [(100.0, 0.0), (101.0, 0.0), (99.0, 8.0)])
def test_without_a_certificate_a_row_needs_nothing_or_cannot_be_helped(index_score: float, inflation: float) -> None:
    margin = sample([-index_score] * 18, certificate=1.0)
    flat = Margins(margin.best_kept, margin.best_archived, margin.index_score, torch.zeros(18).double())
    assert conformal_hard(flat) == inflation
    assert conformal_archived(flat) == inflation


def prefix(seed: int) -> tuple[torch.Tensor, ...]:
    rows, basis = gaussian(40, 20, seed=seed), orthonormal_rows(3, 12, seed=seed + 1)
    return rows, torch.arange(40) % 4 == 0, *index(rows[:, :12], basis), basis


def test_margins_agree_with_a_loop_over_queries() -> None:
    rows, kept, sketch, residual, basis = prefix(1)
    query, position = gaussian(25, 20, seed=3), torch.arange(25)
    got = margins(query, position, rows, kept, sketch, residual, basis, scale=0.1)
    for number in range(25):
        score = (0.1 * (query[number] @ rows.T)).tolist()
        past = range(number + 1)
        kept_scores = [score[row] for row in past if kept[row]]
        archived = [row for row in past if not kept[row]]
        # One product of 20 terms in another order: gamma_20 of at most 0.1 ||q|| ||k||.
        bound = 40 * 2.0**-53 * 0.1 * float(query[number].norm() * rows.norm(dim=1).max())
        assert abs(float(got.best_kept[number]) - max(kept_scores)) <= bound
        assert bool(got.sees_archive[number]) == bool(archived)
        if archived:
            best = max(archived, key=lambda row: score[row])
            assert abs(float(got.best_archived[number]) - score[best]) <= bound
            assert bool(got.hard[number]) == (score[best] > max(kept_scores))


def test_a_query_is_hard_only_if_an_archived_row_is_strictly_its_best() -> None:
    assert sample([1.0], best_kept=2.0, best_archived=2.0).hard.tolist() == [False]
    assert sample([1.0], best_kept=2.0, best_archived=2.5).hard.tolist() == [True]
    assert sample([1.0], best_kept=-math.inf, best_archived=-math.inf).hard.tolist() == [False]


def test_labels_are_causal() -> None:
    """A future archived row that wins every query must not make an earlier query hard."""
    rows, _, _, _, basis = prefix(2)
    rows = rows.abs()
    rows[30] *= 100
    kept = torch.ones(40, dtype=torch.bool)
    kept[30] = False
    sketch, residual = index(rows[:, :12], basis)
    query, position = gaussian(40, 20, seed=4).abs(), torch.arange(40)
    got = margins(query, position, rows, kept, sketch, residual, basis, scale=0.1)
    assert got.hard.tolist() == [number >= 30 for number in range(40)]


def test_the_calibrated_scan_recalls_what_it_promises_on_the_stored_format() -> None:
    """bf16 rows, fp16 sketch: the scan itself, at the inflation of `conformal_archived`, over queries it was not
    calibrated on.

    Exchangeable queries: coverage is Beta(k, n + 1 - k), mean k / (n + 1) >= 18/19. 0.90 is over four of its
    deviations below.
    """
    rows = gaussian(300, 20, seed=5, dtype=torch.bfloat16)
    basis = orthonormal_rows(3, 12, seed=6).float()
    kept = torch.arange(300) % 16 == 0
    sketch, residual = index(rows[:, :12], basis)
    query, position = gaussian(1200, 20, seed=7, dtype=torch.bfloat16), torch.full((1200,), 299)
    fit, held = (
        margins(part, where, rows, kept, sketch, residual, basis, scale=0.1)
        for part, where in ((query[:600], position[:600]), (query[600:], position[600:]))
    )
    inflation = conformal_archived(fit)
    reached = held.index_score + inflation * held.certificate >= held.best_archived
    assert 0.90 <= float(reached.double().mean()) < 1.0
    old = (~kept).nonzero().flatten()
    recalled = 0
    for number in held.hard.nonzero().flatten().tolist():
        fired = scan(
            query[600 + number : 601 + number],
            rows[old, 12:],
            sketch[old],
            residual[old],
            basis,
            held.best_kept[number : number + 1],
            scale=0.1,
            inflation=inflation,
        )
        best = (query[600 + number].float() @ rows[old].float().T).argmax()
        recalled += int(best) in fired.tolist()
    hard = int(held.hard.sum())
    assert hard > 300
    assert recalled >= 0.90 * hard


def test_cache_rows_as_queries_make_nothing_hard() -> None:
    """Each row is its own best match, so a calibration on keys sees only its own position: with it kept, no hard
    query."""
    rows = torch.nn.functional.normalize(gaussian(40, 20, seed=8), dim=1)
    basis = orthonormal_rows(3, 12)
    sketch, residual = index(rows[:, :12], basis)
    kept = torch.arange(40) % 2 == 0
    mine = kept.nonzero().flatten()
    got = margins(rows[mine], mine, rows, kept, sketch, residual, basis, scale=1.0)
    assert not got.hard.any()


@pytest.mark.parametrize(
    ("hard", "easy", "theta"),
    [
        (17, 100, -math.inf),  # too few hard queries
        (19, 100, -math.inf),  # floor(19 / 20) = 0: not one may be lost
        (20, 100, 1.0),  # floor(20 / 20) = 1, where floating point says 0
        (40, 100, 2.0),
        (40, 0, -math.inf),  # it would be open for 38 of 40
        (40, 23, -math.inf),  # 38 of 63 is more than 60 %
        (40, 24, 2.0),  # 38 of 64 is not
    ],
)
def test_the_gate_is_an_order_statistic_of_the_hard_queries(hard: int, easy: int, theta: float) -> None:
    entropy = torch.cat([torch.arange(1.0, hard + 1).flip(0), torch.zeros(easy)])
    assert entropy_gate(entropy, torch.arange(hard + easy) < hard) == theta


def test_a_closed_gate_is_plus_infinity_and_an_empty_head_is_always_open() -> None:
    best = torch.tensor([3.0, 4.0, 5.0, -math.inf])
    entropy = torch.tensor([1.0, 0.5, 0.2, 0.0])
    assert fetch_threshold(best, entropy, theta=0.5).tolist() == [3.0, math.inf, math.inf, -math.inf]
    assert fetch_threshold(best, entropy, theta=-math.inf).tolist() == best.tolist()


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"), [(21, 24, 0.69, 0.96), (24, 24, 0.86, 1.0), (0, 24, 0.0, 0.14)]
)
def test_wilson_intervals_of_the_published_rates(successes: int, trials: int, low: float, high: float) -> None:
    got_low, got_high = wilson_interval(successes, trials)
    assert (round(got_low, 2), round(got_high, 2)) == (low, high)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conformal_rank(-1), r"samples is -1: expected at least 0"),
        (lambda: conformal_rank(20, recall=1.5), r"recall is 1.5: expected a finite number in \[0.0, 1.0\]"),
        (lambda: wilson_interval(5, 4), r"successes is 5: expected 0 to 4"),
        (lambda: wilson_interval(0, 0), r"trials is 0: expected at least 1"),
        (
            lambda: entropy_gate(torch.zeros(3), torch.zeros(2, dtype=torch.bool)),
            r"hard has shape \[2\]: expected \[3\]",
        ),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
