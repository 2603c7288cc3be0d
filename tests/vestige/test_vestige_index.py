"""Lemma 2, the soundness of the scan, and what it fires."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vestige_cases import UNIT, gaussian, growth, orthonormal_rows, score_error

from kvverify.vestige import index, scan
from kvverify.vestige.index import calibrated_basis, provisional_basis, query_parts
from kvverify.vestige.inputs import CHUNK_ROWS
from kvverify.vestige.scan import archive_scores, limit_fetch, scan_capped, sound_inflation

SCALE = 192**-0.5
CONTENT, BRANCH, RANK = 24, 5, 6


def archive(rows: int, *, seed: int, rank: int = RANK) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, basis, side, sketch, residual) in float64."""
    stored, basis = gaussian(rows, CONTENT + BRANCH, seed=seed), orthonormal_rows(rank, CONTENT, seed=seed + 1)
    return stored, basis, stored[:, CONTENT:], *index(stored[:, :CONTENT], basis)


@given(st.integers(0, 60), st.sampled_from([0, 1, 6, 23, 24]))
@settings(max_examples=40, derandomize=True, database=None, deadline=None)
def test_the_true_score_is_within_the_strict_certificate_of_the_index_score(seed: int, rank: int) -> None:
    rows, basis, side, sketch, residual = archive(17, seed=seed, rank=rank)
    query = gaussian(3, CONTENT + BRANCH, seed=seed + 2)
    known, certificate = archive_scores(query, side, sketch, residual, basis, scale=SCALE)
    gap = (SCALE * (query @ rows.T) - known).abs() - sound_inflation(CONTENT, rank) * certificate
    # Three products of at most content terms each; V is orthonormal to gamma as well.
    assert gap.max() <= 8 * score_error(query, rows, scale=SCALE)


def test_a_basis_that_is_not_orthonormal_breaks_the_bound() -> None:
    """Control: rows inside the span of V, V shrunk by half. The discarded part is 3/4 of the score, its bound 9/16.

    (Stretched by 2 the bound still holds, 3 against 9: a known-bad basis needs singular values below sqrt(2).)
    """
    basis = orthonormal_rows(RANK, CONTENT, seed=1) / 2
    inside = gaussian(5, RANK, seed=2) @ basis
    sketch, residual = index(inside, basis)
    known, certificate = archive_scores(inside, inside[:, :0], sketch, residual, basis, scale=SCALE)
    excess = SCALE * (inside @ inside.T) - known - sound_inflation(CONTENT, RANK) * certificate
    assert excess.diagonal().min() > 1e6 * score_error(inside, inside, scale=SCALE)


def aligned(count: int, *, content: int, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(basis, query[content], rows[count, content]) whose residuals point along the residual of the query: the worst
    rows."""
    basis = orthonormal_rows(rank, content, seed=seed)
    query = gaussian(content, seed=seed + 1)
    outside = query - basis.T @ (basis @ query)
    rows = gaussian(count, rank, seed=seed + 2) @ basis + gaussian(count, 1, seed=seed + 3).abs() * outside
    return basis, query, rows


def test_the_sound_inflation_is_21_166_for_the_published_shape() -> None:
    assert round(sound_inflation(512, 64), 3) == 21.166


@pytest.mark.parametrize("rank", [6, 20])
def test_a_sound_scan_misses_no_row_even_when_residuals_align(rank: int) -> None:
    basis, query, rows = aligned(300, content=CONTENT, rank=rank, seed=5)
    sketch, residual = index(rows, basis)
    true = SCALE * (rows @ query)
    error = 8 * score_error(query[None], rows, scale=SCALE)
    threshold = true.median()
    fired = scan(
        query[None],
        rows[:, :0],
        sketch,
        residual,
        basis,
        threshold[None],
        scale=SCALE,
        inflation=sound_inflation(CONTENT, rank),
    )
    above = set((true > threshold + error).nonzero().flatten().tolist())
    assert len(above) > 100
    assert above <= set(fired.tolist())


def test_any_smaller_inflation_misses_an_aligned_row_and_so_does_the_deployed_clamp() -> None:
    """d_c = 512, rank 64: query and row both in the discarded space. The clamp 8 sees 8/21.17 of the score, and
    misses."""
    basis = provisional_basis(64, 512).double()
    query, row = torch.zeros(1, 512).double(), torch.zeros(1, 512).double()
    query[0, 100], row[0, 100] = 3.0, 4.0
    sketch, residual = index(row, basis)
    true = SCALE * 12.0
    needed = sound_inflation(512, 64)

    def fires(share_of_score: float, inflation: float) -> bool:
        threshold = torch.tensor([true * share_of_score], dtype=torch.float64)
        hit = scan(query, row[:, :0], sketch, residual, basis, threshold, scale=SCALE, inflation=inflation)
        return hit.tolist() == [0]

    assert not fires(0.5, 8.0)
    assert fires(0.37, 8.0)
    assert fires(0.5, needed)
    assert fires(1 - 1e-12, needed)
    assert not fires(1 - 1e-6, needed * (1 - 1e-5))


def test_the_stored_sketch_may_fall_short_but_only_by_its_rounding() -> None:
    """fp16 sketch, everything else float64: aligned rows just above s* are missed, none above s* + scale ||V q||
    ||rounding||."""
    basis, query, rows = aligned(2_000, content=512, rank=64, seed=9)
    exact, residual = index(rows, basis)
    stored = exact.half().double()
    query_sketch, _ = query_parts(query[None], basis)
    rounding = SCALE * query_sketch.norm() * (stored - exact).norm(dim=1)
    true = SCALE * (rows @ query)
    known, certificate = archive_scores(query[None], rows[:, :0], stored, residual, basis, scale=SCALE)
    short = true - (known + sound_inflation(512, 64) * certificate)[0]
    error = 8 * score_error(query[None], rows, scale=SCALE)
    assert int((short > error).sum()) > 100
    assert (short <= rounding + error).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_stored_as_fp16_and_fp32(dtype: torch.dtype) -> None:
    content, basis = gaussian(9, CONTENT, seed=2, dtype=dtype), orthonormal_rows(RANK, CONTENT).float()
    sketch, residual = index(content, basis)
    exact_sketch, exact_residual = index(content.double(), basis.double())
    assert (sketch.dtype, residual.dtype) == (torch.float16, torch.float32)
    fp32 = growth(2 * CONTENT + 4, 2.0**-24) * content.double().norm(dim=1)
    # fp16 has 2^-11 relative, 2^-25 absolute below its normal range.
    assert ((sketch - exact_sketch).abs() <= 2.0**-11 * exact_sketch.abs() + 2.0**-25 + 2 * fp32[:, None]).all()
    assert ((residual - exact_residual).abs() <= (1 + RANK) * fp32).all()


def test_the_residual_of_a_row_inside_the_basis_keeps_its_digits() -> None:
    """A tiny residual beside a large sketch: the difference of squares would have lost it."""
    basis = provisional_basis(2, 4).double()
    _, residual = index(torch.tensor([[1e6, -3e6, 3e-6, 4e-6]], dtype=torch.float64), basis)
    assert abs(float(residual) - 5e-6) <= 4 * UNIT * 5e-6


def test_at_full_rank_the_certificate_is_zero() -> None:
    rows, basis, side, sketch, residual = archive(7, seed=4, rank=CONTENT)
    _, certificate = archive_scores(rows, side, sketch, residual, basis, scale=SCALE)
    assert torch.equal(certificate, torch.zeros(7, 7, dtype=torch.float64))


def entries() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two heads, three rows, all numbers exact: head 0 scores 1, 2, 3 and head 1 scores 30, 20, 10, with no
    certificate."""
    query = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 10.0]]).double()
    side = torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]).double()
    basis = torch.tensor([[1.0, 0.0]]).double()
    return query, side, torch.zeros(3, 1).double(), torch.zeros(3).double(), basis


@pytest.mark.parametrize(
    ("threshold", "fired"),
    [
        ([2.5, math.inf], [2]),  # a closed gate never fires
        ([2.0, 30.0], [2]),  # equality does not fire
        ([3.0, 15.0], [0, 1]),  # each head has its own threshold: one global 15 or 3 would differ
        ([2.5, 25.0], [0, 2]),  # any head, not all
        ([math.inf, math.inf], []),
        ([-math.inf, math.inf], [0, 1, 2]),  # nothing kept: everything fires
    ],
)
def test_a_row_fires_if_any_open_head_scores_it_strictly_above_its_own_threshold(
    threshold: list[float], fired: list[int]
) -> None:
    result = scan(*entries(), torch.tensor(threshold).double(), scale=1.0, inflation=0.0)
    assert result.tolist() == fired


@pytest.mark.parametrize(("cap", "fired"), [(0, []), (1, [0, 2]), (2, [0, 1, 2]), (9, [0, 1, 2])])
def test_the_cap_is_per_head_before_the_union(cap: int, fired: list[int]) -> None:
    threshold = torch.tensor([1.0, 15.0]).double()
    assert scan_capped(*entries(), threshold, scale=1.0, inflation=0.0, cap=cap).tolist() == fired


def test_the_cap_takes_only_rows_that_fired() -> None:
    threshold = torch.tensor([2.5, math.inf]).double()
    assert scan_capped(*entries(), threshold, scale=1.0, inflation=0.0, cap=3).tolist() == [2]


def test_the_certificate_enters_once_with_its_square_root() -> None:
    """scale 0.5, ||q_res|| 3, eta 4, content - rank 4, z 2: the third term is 2 * 0.5 * 3 * 4 / 2 = 6."""
    basis = provisional_basis(1, 5).double()
    query = torch.tensor([[0.0, 3.0, 0.0, 0.0, 0.0]]).double()
    side, sketch, residual = torch.zeros(1, 0).double(), torch.zeros(1, 1).double(), torch.tensor([4.0]).double()
    for threshold, fired in ((5.999, [0]), (6.0, [])):
        limit = torch.tensor([threshold], dtype=torch.float64)
        assert scan(query, side, sketch, residual, basis, limit, scale=0.5, inflation=2.0).tolist() == fired


def test_chunks_do_not_change_what_fires() -> None:
    """Rows past the first chunk fire as they do alone, and the capped scan finds its best there."""
    rows = CHUNK_ROWS + 5
    side = torch.zeros(rows, 1)
    side[[3, CHUNK_ROWS - 1, CHUNK_ROWS, rows - 1], 0] = torch.tensor([1.0, 2.0, 3.0, 3.0])
    query, basis, threshold = torch.tensor([[0.0, 1.0]]), torch.zeros(0, 1), torch.tensor([0.5])
    entry = (query, side, torch.zeros(rows, 0), torch.zeros(rows), basis, threshold)
    assert scan(*entry, scale=1.0, inflation=0.0).tolist() == [3, CHUNK_ROWS - 1, CHUNK_ROWS, rows - 1]
    assert scan_capped(*entry, scale=1.0, inflation=0.0, cap=1).tolist() == [CHUNK_ROWS]
    assert scan_capped(*entry, scale=1.0, inflation=0.0, cap=3).tolist() == [CHUNK_ROWS - 1, CHUNK_ROWS, rows - 1]


def test_the_buffer_keeps_row_order_and_tells_when_it_overflows() -> None:
    fired = torch.tensor([9, 2, 5])
    assert (limit_fetch(fired, width=2)[0].tolist(), limit_fetch(fired, width=2)[1]) == ([2, 5], True)
    assert (limit_fetch(fired, width=3)[0].tolist(), limit_fetch(fired, width=3)[1]) == ([2, 5, 9], False)
    assert limit_fetch(fired, width=None)[1] is False


def test_an_empty_archive_fires_nothing() -> None:
    query, side, sketch, residual, basis = entries()
    limit = torch.full((2,), -math.inf).double()
    assert scan(query, side[:0], sketch[:0], residual[:0], basis, limit, scale=1.0, inflation=8.0).tolist() == []


def test_the_calibrated_basis_holds_the_directions_of_largest_variance() -> None:
    """Variances 100, 25, 1 on known axes around a large mean: the mean must not be one of the directions."""
    axes = orthonormal_rows(3, 8, seed=3)
    queries = (gaussian(400, 3, seed=4) * torch.tensor([10.0, 5.0, 1.0])) @ axes + 1000 * orthonormal_rows(
        4, 8, seed=3
    )[3]
    basis = calibrated_basis(queries, rank=2)
    assert (basis @ basis.T - torch.eye(2).double()).abs().max() <= growth(64)
    assert (basis @ axes.T)[:, :2].abs().diagonal().min() > 0.99
    centred = queries - queries.mean(dim=0)
    share = (centred @ basis.T).square().sum() / centred.square().sum()
    assert share >= (centred @ axes[:2].T).square().sum() / centred.square().sum() - growth(400)


def test_low_rank_projection_error_is_the_discarded_part_of_the_score() -> None:
    rows, basis, side, sketch, residual = archive(11, seed=6)
    query = gaussian(2, CONTENT + BRANCH, seed=7)
    known, _ = archive_scores(query, side, sketch, residual, basis, scale=SCALE)
    outside = torch.eye(CONTENT).double() - basis.T @ basis
    discarded = SCALE * (query[:, :CONTENT] @ outside @ rows[:, :CONTENT].T)
    gap = SCALE * (query @ rows.T) - known - discarded
    assert gap.abs().max() <= CONTENT * score_error(query, rows, scale=SCALE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"threshold": torch.tensor([1.0])}, r"threshold has shape \[1\]: expected \[2\]"),
        ({"threshold": torch.tensor([1.0, math.nan])}, r"threshold holds NaN"),
        ({"inflation": -1.0}, r"inflation is -1.0: expected a finite number"),
        ({"inflation": math.inf}, r"inflation is inf: expected a finite number"),
        ({"residual": torch.zeros(2)}, r"residual has shape \[2\]: expected \[3\]"),
        ({"sketch": torch.zeros(3, 2)}, r"sketch has shape \[3, 2\]: expected \[3, 1\]"),
        ({"query": torch.zeros(2, 3)}, r"query has shape \[2, 3\]: expected \[any, 4\]"),
        ({"basis": [1.0]}, r"basis is a list: expected a torch.Tensor"),
    ],
)
def test_bad_input_is_named(changed: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = dict(zip(("query", "side", "sketch", "residual", "basis"), entries(), strict=True))
    arguments |= {"threshold": torch.zeros(2), "scale": 1.0, "inflation": 1.0} | changed
    with pytest.raises((ValueError, TypeError), match=message):
        scan(**arguments)  # type: ignore[arg-type]


def test_a_sketch_beyond_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"content has a sketch beyond 65504"):
        index(torch.full((1, 2), 7e4), torch.eye(1, 2))
