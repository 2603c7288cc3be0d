"""What attention over position-free rows may and may not depend on, with a rotary arm that must fail; merging;
leakage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from vestige_cases import UNIT, attention_error, gaussian, growth, orthonormal_rows, rotate, score_error

from kvverify.attention import merge
from kvverify.vestige import attend, prologue
from kvverify.vestige.bounds import leakage_output_bound, leakage_ratio, rotated_page_energy, score_change_bound

SCALE = 192**-0.5
CONTENT, BRANCH = 12, 8
FREQUENCIES = 10_000.0 ** (-torch.arange(BRANCH // 2).double() / (BRANCH // 2))
NO_ROTATION = torch.zeros(BRANCH // 2).double()


def cached(hidden: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rows of a toy layer: hidden[n, CONTENT + BRANCH] is projected, and the branch rotated to its position (not at
    all for NoPE)."""
    projected = hidden @ gaussian(CONTENT + BRANCH, CONTENT + BRANCH, seed=90)
    return torch.cat([projected[:, :CONTENT], rotate(projected[:, CONTENT:], positions, frequencies)], dim=1)


def asked(query: Tensor, position: int, frequencies: Tensor) -> Tensor:
    """A pre-rotary query[heads, dim] asked at a position."""
    at = torch.full((query.shape[0],), position)
    return torch.cat([query[:, :CONTENT], rotate(query[:, CONTENT:], at, frequencies)], dim=1)


def exact(*values: float | list[float]) -> Tensor:
    """float64 from Python numbers, not by way of fp32."""
    return torch.tensor(values, dtype=torch.float64)


def everything(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[0])


@pytest.mark.parametrize("frequencies", [NO_ROTATION, FREQUENCIES], ids=["nope", "rotary"])
def test_attention_is_a_function_of_the_multiset_of_stored_rows(frequencies: Tensor) -> None:
    """Lemma 1. It holds for stored rotated rows too, so it does not tell the two apart."""
    rows = cached(gaussian(40, CONTENT + BRANCH, seed=1), torch.arange(40), frequencies)
    query = asked(gaussian(3, CONTENT + BRANCH, seed=2), 40, frequencies)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    left = attend(query, rows, everything(rows), scale=SCALE, value_dim=CONTENT)
    right = attend(query, rows[order], everything(rows), scale=SCALE, value_dim=CONTENT)
    listed = attend(query, rows, order, scale=SCALE, value_dim=CONTENT)
    for bound, *same in zip(
        attention_error(query, rows, scale=SCALE, value_dim=CONTENT), left, right, listed, strict=True
    ):
        assert (same[0] - same[1]).abs().max() <= bound
        assert (same[0] - same[2]).abs().max() <= bound


@pytest.mark.parametrize(("frequencies", "holds"), [(NO_ROTATION, True), (FREQUENCIES, False)], ids=["nope", "rotary"])
def test_the_ranking_of_rows_is_stationary_without_rotation_only(frequencies: Tensor, holds: bool) -> None:
    """Corollary 1: for a fixed pre-rotary query the order of the rows does not depend on when it is asked."""
    rows = cached(gaussian(64, CONTENT + BRANCH, seed=4), torch.arange(64), frequencies)
    query = gaussian(4, CONTENT + BRANCH, seed=5)
    ranking = [(asked(query, time, frequencies) @ rows.T).argsort(dim=1).tolist() for time in (64, 100, 1000, 5000)]
    assert all(order == ranking[0] for order in ranking) == holds


@pytest.mark.parametrize(("frequencies", "holds"), [(NO_ROTATION, True), (FREQUENCIES, False)], ids=["nope", "rotary"])
def test_one_content_at_two_positions_is_one_row_without_rotation_only(frequencies: Tensor, holds: bool) -> None:
    hidden = gaussian(1, CONTENT + BRANCH, seed=6).expand(2, -1)
    rows = cached(hidden, torch.tensor([3, 700]), frequencies)
    assert torch.equal(rows[0], rows[1]) == holds
    query = asked(gaussian(2, CONTENT + BRANCH, seed=7), 900, frequencies)
    score = query @ rows.T
    gap = (score[:, 0] - score[:, 1]).abs().max()
    assert (gap <= 2 * score_error(query, rows, scale=1.0)) == holds


def test_a_replaced_row_moves_a_score_by_at_most_scale_norm_distance() -> None:
    """Row certificate, and its equality case: a change along the query."""
    rows, query = gaussian(30, 20, seed=8), gaussian(4, 20, seed=9)
    change = gaussian(30, 20, seed=10) * 0.1
    change[0] = query[0] / query[0].norm() * 0.5
    moved = SCALE * (query @ (rows + change).T - query @ rows.T)
    error = 4 * score_error(query, rows + change, scale=SCALE) + 2 * score_error(query, rows, scale=SCALE)
    for row in range(30):
        bound = score_change_bound(query, float(change[row].norm()), scale=SCALE)
        assert (moved[:, row].abs() <= bound + error).all()
    assert abs(float(moved[0, 0] - score_change_bound(query[:1], 0.5, scale=SCALE))) <= error


def test_a_winning_row_is_a_vertex_of_the_hull_of_the_rows() -> None:
    """An argmax row is no convex combination of the others; an interior row is one (so it can win no query). Linear
    programs, 3 dimensions."""
    rows = gaussian(40, 3, seed=11)
    rows = torch.cat([rows, rows[:4].mean(dim=0, keepdim=True)])
    winners = set((gaussian(200, 3, seed=12) @ rows.T).argmax(dim=1).tolist())
    assert len(winners) > 5
    assert not any(in_hull_of_others(rows, row) for row in winners)
    assert in_hull_of_others(rows, 40)
    assert 40 not in winners


def in_hull_of_others(rows: Tensor, row: int) -> bool:
    others = torch.cat([rows[:row], rows[row + 1 :]])
    system = torch.cat([others.T, torch.ones(1, others.shape[0]).double()])
    target = torch.cat([rows[row], torch.ones(1).double()])
    result = linprog(
        [0.0] * others.shape[0], A_eq=system.numpy(), b_eq=target.numpy(), bounds=(0, None), method="highs"
    )
    assert result.status in (0, 2), result.message
    return bool(result.status == 0)


@pytest.mark.parametrize("copies", [2, 3, 17])
def test_equal_rows_are_one_row_with_a_logit_bias(copies: int) -> None:
    """Proposition 1, for the pair (out, lse): m copies = one copy whose lse is raised by ln m."""
    rows, query = gaussian(9, 20, seed=13), gaussian(3, 20, seed=14)
    repeated = torch.cat([torch.arange(9), torch.full((copies - 1,), 4)])
    out, lse = attend(query, rows, repeated, scale=SCALE, value_dim=CONTENT)
    others = attend(query, rows, torch.tensor([0, 1, 2, 3, 5, 6, 7, 8]), scale=SCALE, value_dim=CONTENT)
    single = attend(query, rows, torch.tensor([4]), scale=SCALE, value_dim=CONTENT)
    merged = merge(torch.stack([others[0], single[0]]), torch.stack([others[1], single[1] + math.log(copies)]))
    out_bound, lse_bound = attention_error(query, rows[repeated], scale=SCALE, value_dim=CONTENT)
    assert (merged[0] - out).abs().max() <= 2 * out_bound
    assert (merged[1] - lse).abs().max() <= 2 * lse_bound


def test_an_unchanged_output_alone_does_not_make_a_merge_exact() -> None:
    """Two rows of one content and different branches, alone in the cache: one with any bias gives the output, and a
    wrong lse."""
    rows = exact([1.0, 2.0, 0.0], [1.0, 2.0, 5.0])
    query = exact([0.5, 0.5, 1.0])
    both = attend(query, rows, torch.tensor([0, 1]), scale=1.0, value_dim=2)
    one = attend(query, rows, torch.tensor([0]), scale=1.0, value_dim=2)
    assert (both[0] - one[0]).abs().max() <= 8 * UNIT
    assert abs(float(both[1] - one[1] - math.log(2))) > 1


@pytest.mark.parametrize(("epsilon", "exact"), [(0.0, True), (1e-2, False)])
def test_a_scaled_latent_gives_the_same_normed_content_only_without_epsilon(epsilon: float, exact: bool) -> None:
    latent = gaussian(16, CONTENT, seed=15)

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + epsilon)

    factor = torch.linspace(0.2, 7.0, 16).double()[:, None]
    gap = (normed(factor * latent) - normed(latent)).abs() / normed(latent).abs()
    # Relative: the product (1), the mean of squares (halved by the root), the root, the product, twice.
    assert (gap.max() <= 2 * growth(CONTENT + 6)) == exact


def split_in_two(seed: int, excluded: int, margin: float) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, kept mask, values) of 1-head attention where every excluded score is at least margin below the best
    kept."""
    score = gaussian(excluded + 5, seed=seed)
    kept = torch.arange(excluded + 5) < 5
    score[kept] += 3
    score[~kept] = torch.minimum(score[~kept], score[kept].max() - margin)
    return score, kept, gaussian(excluded + 5, 4, seed=seed + 1)


@given(st.integers(0, 50), st.integers(1, 40), st.sampled_from([0.0, 0.1, 1.0, 4.0]))
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def test_leakage_is_bounded_in_mass_and_in_output(seed: int, excluded: int, margin: float) -> None:
    score, kept, values = split_in_two(seed, excluded, margin)
    mass = score.exp()
    ratio = leakage_ratio(excluded, margin)
    slack = 1 + 4 * growth(excluded + 10)
    assert float(mass[~kept].sum() / mass[kept].sum()) <= ratio * slack
    share = (mass / mass.sum()) @ values - (mass[kept] / mass[kept].sum()) @ values[kept]
    assert float(share.norm()) <= leakage_output_bound(ratio, float(values.norm(dim=1).max())) * slack + 40 * UNIT


def test_the_printed_output_bound_is_false_and_the_corrected_one_is_tight() -> None:
    """Kept v = +1, excluded v = -1, mass ratio 1/2: the error is 2/3, printed bound 1/2, corrected bound 2/3."""
    rows = exact([1.0, 0.0], [-1.0, -math.log(2)])
    query = exact([0.0, 1.0])
    full, _ = attend(query, rows, torch.tensor([0, 1]), scale=1.0, value_dim=1)
    only, _ = attend(query, rows, torch.tensor([0]), scale=1.0, value_dim=1)
    error, ratio = abs(float(full - only)), leakage_ratio(1, math.log(2))
    assert error > ratio + 0.1
    assert abs(error - leakage_output_bound(ratio, 1.0)) <= 16 * UNIT


@pytest.mark.parametrize("page", [1, 2, 4, 8, 16, 32, 128])
def test_a_rotated_page_has_the_energy_of_its_closed_form(page: int) -> None:
    """Against the page itself: rotate one key to P positions and measure. Without rotation the page is a point."""
    key = gaussian(1, BRANCH, seed=16)
    pair_norm = key.reshape(2, -1).norm(dim=0)
    copies = rotate(key.expand(page, -1), torch.arange(page) + 77, FREQUENCIES)
    measured = (copies - copies.mean(dim=0)).square().sum(dim=1).mean()
    # Angles of up to 205 rad err by 205 u, which moves a squared distance, and D^2, by twice that; sums add gamma.
    bound = (growth(page + 20) * 8 + 1000 * UNIT) * float(key.square().sum())
    assert abs(float(measured - rotated_page_energy(pair_norm, FREQUENCIES, page=page))) <= bound
    assert float(rotated_page_energy(pair_norm, NO_ROTATION, page=page)) == 0.0


@pytest.mark.parametrize(
    ("page", "constant"), [(2, 0.2298), (4, 0.2769), (8, 0.2882), (16, 0.2910), (32, 0.29), (512, 0.29)]
)
def test_the_radius_of_a_rotated_page_is_a_constant_share_of_its_fast_pairs(page: int, constant: float) -> None:
    """r_max^2 >= mean squared distance >= constant * sum of ||k_j||^2 over 2/P <= theta_j <= 1.

    Up to P = 16 the constants are the least share cut (not rounded) to four digits: .230 and .277 would be false. It
    grows with P.
    """
    grid = torch.linspace(2 / page, 1.0, 4001, dtype=torch.float64)
    share = torch.stack([rotated_page_energy(exact(1.0), theta[None], page=page) for theta in grid])
    assert constant <= float(share.min()) < constant + (0.0001 if page <= 16 else 0.002)


def test_rows_listed_twice_count_twice_and_pads_not_at_all() -> None:
    rows, query = gaussian(5, 20, seed=17), gaussian(2, 20, seed=18)
    once = attend(query, rows, torch.tensor([1, 3]), scale=SCALE, value_dim=CONTENT)
    padded = attend(query, rows, torch.tensor([-1, 1, -1, 3]), scale=SCALE, value_dim=CONTENT)
    twice = attend(query, rows, torch.tensor([1, 3, 3]), scale=SCALE, value_dim=CONTENT)
    assert torch.equal(once[0], padded[0])
    assert torch.equal(once[1], padded[1])
    assert (twice[1] - once[1]).min() > 0.1


def test_rows_that_are_not_listed_are_never_read() -> None:
    rows = gaussian(6, 20, seed=19)
    poisoned = rows.clone()
    poisoned[[0, 2, 5]] = math.nan
    query, ids = gaussian(2, 20, seed=20), torch.tensor([4, -1, 1, 3])
    clean = attend(query, rows, ids, scale=SCALE, value_dim=CONTENT)
    for left, right in zip(clean, attend(query, poisoned, ids, scale=SCALE, value_dim=CONTENT), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("ids", [[], [-1, -1]])
def test_an_empty_list_gives_zero_and_minus_infinity(ids: list[int]) -> None:
    out, lse = attend(
        gaussian(2, 20), gaussian(3, 20), torch.tensor(ids, dtype=torch.int64), scale=SCALE, value_dim=CONTENT
    )
    assert torch.equal(out, torch.zeros(2, CONTENT).double())
    assert torch.equal(lse, torch.full((2,), -math.inf).double())


def test_the_prologue_gives_what_its_parts_are_defined_as() -> None:
    rows, query, basis = gaussian(23, 20, seed=21), gaussian(3, 20, seed=22), orthonormal_rows(4, CONTENT)
    got = prologue(query, rows, basis, scale=SCALE, value_dim=CONTENT)
    out_bound, lse_bound = attention_error(query, rows, scale=SCALE, value_dim=CONTENT)
    for head in range(3):
        score = [SCALE * math.fsum((query[head] * row).tolist()) for row in rows]
        weight = [math.exp(s) for s in score]
        share = [w / math.fsum(weight) for w in weight]
        assert abs(float(got.best[head]) - max(score)) <= score_error(query, rows, scale=SCALE)
        assert abs(float(got.lse[head]) - math.log(math.fsum(weight))) <= lse_bound
        # dH = -sum (ln p + 1) dp, |ln p| at most ln(1 / least share).
        entropy = -math.fsum(p * math.log(p) for p in share)
        assert abs(float(got.entropy[head]) - entropy) <= lse_bound * (3 - math.log(min(share)))
        value = exact(*share) @ rows[:, :CONTENT]
        assert (got.out[head] - value).abs().max() <= out_bound
    content = query[:, :CONTENT]
    error = growth(64) * float(content.norm(dim=1).max())
    assert (got.query_sketch - content @ basis.T).abs().max() <= error
    assert (
        got.query_residual.square() + got.query_sketch.square().sum(dim=1) - content.square().sum(dim=1)
    ).abs().max() <= (8 * error * float(content.norm(dim=1).max()))


def test_the_prologue_of_nothing_is_the_neutral_element() -> None:
    got = prologue(
        gaussian(2, 20), torch.zeros(0, 20).double(), orthonormal_rows(4, CONTENT), scale=SCALE, value_dim=CONTENT
    )
    minus_infinity = torch.full((2,), -math.inf).double()
    assert torch.equal(got.best, minus_infinity)
    assert torch.equal(got.lse, minus_infinity)
    assert torch.equal(got.entropy, torch.zeros(2).double())
    assert torch.equal(got.out, torch.zeros(2, CONTENT).double())


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_entropy_of_equal_scores_is_the_logarithm_of_their_number(rows: int) -> None:
    got = prologue(torch.zeros(1, 4).double(), gaussian(rows, 4), torch.eye(2, 4).double(), scale=1.0, value_dim=2)
    assert abs(float(got.entropy) - math.log(rows)) <= growth(rows + 4) * (1 + math.log(rows))


def test_attention_is_finite_where_exponentials_overflow() -> None:
    rows = exact([1.0, 5e3], [2.0, 5e3 - 1], [3.0, -5e3])
    got = prologue(exact([0.0, 1.0]), rows, torch.eye(1, 1).double(), scale=1.0, value_dim=1)
    assert float(got.best) == 5e3
    # An lse near 5e3 is known to u * 5e3; the rest is of order 1.
    assert abs(float(got.lse) - 5e3 - math.log1p(math.exp(-1))) <= 5e3 * 4 * UNIT
    weight = math.exp(-1) / (1 + math.exp(-1))
    assert abs(float(got.out) - (1 + weight)) <= 5e3 * 8 * UNIT


@pytest.mark.parametrize(
    ("ids", "value_dim", "message"),
    [
        (torch.tensor([0, 3]), 2, r"ids reach from 0 to 3: expected ids in \[-1, 3\)"),
        (torch.tensor([-2]), 2, r"ids reach from -2 to -2"),
        (torch.tensor([0.0]), 2, r"ids has dtype torch.float32: expected torch.int64"),
        (torch.tensor([0]), 5, r"value_dim is 5: expected 0 to 4"),
    ],
)
def test_bad_input_is_named(ids: Tensor, value_dim: int, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        attend(torch.zeros(1, 4), torch.zeros(3, 4), ids, scale=1.0, value_dim=value_dim)
