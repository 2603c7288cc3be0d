"""The whole decode step: what is fetched, and what is attended in the end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from vestige_cases import UNIT, UNIT_FP32, attention_error, gaussian, orthonormal_rows

from kvverify.attention import merge
from kvverify.vestige import attend, index, prologue
from kvverify.vestige.partition import EvictionPolicy
from kvverify.vestige.pool import Pool
from kvverify.vestige.scan import sound_inflation
from kvverify.vestige.step import Retrieval, Step, decode

SCALE = 192**-0.5
CONTENT, BRANCH, RANK = 24, 8, 6
BASIS = orthonormal_rows(RANK, CONTENT, seed=70)


def scattered_pool() -> Pool:
    """Slot 1 on the scattered rows of a released one, 77 rows: 64 closed, 19 to 23 kept, a tail of 13."""
    policy = EvictionPolicy(block=32, bandwidth=4, fraction=0.3, sinks=4)
    pool = Pool(120, content=CONTENT, branch=BRANCH, policy=policy, dtype=torch.float64)
    for slot, count in ((0, 40), (2, 30), (0, 15)):
        pool.append(slot, gaussian(count, CONTENT + BRANCH, seed=slot) * 100)
    pool.release(0)
    pool.append(1, gaussian(77, CONTENT + BRANCH, seed=71))
    return pool


def stepped(pool: Pool, query: Tensor, retrieval: Retrieval) -> Step:
    kept, old = pool.attended(1), pool.archived(1)
    entries = index(pool.rows[old, :CONTENT], BASIS)
    return decode(query, pool.rows, kept, old, *entries, retrieval, scale=SCALE)


@pytest.mark.parametrize("inflation", [0.0, 1.0, 4.0])
def test_a_step_attends_kept_tail_and_fetched_each_once(inflation: float) -> None:
    """Against dense attention over the sequence in which only those rows are left, and against split and merge."""
    pool, query = scattered_pool(), gaussian(3, CONTENT + BRANCH, seed=72) * 4
    step = stepped(pool, query, Retrieval(BASIS, inflation=inflation))
    kept = pool.attended(1)
    chosen = set(kept.tolist()) | set(step.fetched.tolist())
    assert len(chosen) == kept.shape[0] + step.fetched.shape[0]
    rows = pool.rows[torch.tensor([row for row in pool.row_of(1).tolist() if row in chosen])]
    dense = attend(query, rows, torch.arange(rows.shape[0]), scale=SCALE, value_dim=CONTENT)
    start = prologue(query, pool.rows[kept], BASIS, scale=SCALE, value_dim=CONTENT)
    fetched = attend(query, pool.rows, step.fetched, scale=SCALE, value_dim=CONTENT)
    split = merge(torch.stack([start.out, fetched[0]]), torch.stack([start.lse, fetched[1]]))
    out_bound, lse_bound = attention_error(query, rows, scale=SCALE, value_dim=CONTENT)
    for out, lse in (dense, split):
        assert (step.out - out).abs().max() <= 2 * out_bound
        assert (step.lse - lse).abs().max() <= 2 * lse_bound


def test_with_the_sound_inflation_no_head_loses_its_best_row() -> None:
    pool, query = scattered_pool(), gaussian(8, CONTENT + BRANCH, seed=73) * 4
    step = stepped(pool, query, Retrieval(BASIS, inflation=sound_inflation(CONTENT, RANK)))
    score = query @ pool.rows[pool.row_of(1)].T
    best = set(pool.row_of(1)[score.argmax(dim=1)].tolist())
    assert best & set(pool.archived(1).tolist()), "no head has its best row in the archive: the case shows nothing"
    assert best <= set(pool.attended(1).tolist()) | set(step.fetched.tolist())


def test_fetched_rows_are_pool_rows_of_the_archive() -> None:
    """Positions in the archive would name other rows here: the slot lies scattered."""
    pool, query = scattered_pool(), gaussian(3, CONTENT + BRANCH, seed=74) * 4
    step = stepped(pool, query, Retrieval(BASIS, inflation=2.0))
    assert 0 < step.fetched.shape[0] < pool.archived(1).shape[0]
    assert set(step.fetched.tolist()) <= set(pool.archived(1).tolist())


def test_an_overflowing_step_attends_everything() -> None:
    pool, query = scattered_pool(), gaussian(3, CONTENT + BRANCH, seed=75) * 4
    free = stepped(pool, query, Retrieval(BASIS, inflation=2.0))
    fits = stepped(pool, query, Retrieval(BASIS, inflation=2.0, width=free.fetched.shape[0]))
    over = stepped(pool, query, Retrieval(BASIS, inflation=2.0, width=free.fetched.shape[0] - 1))
    assert (free.overflow, fits.overflow, over.overflow) == (False, False, True)
    assert torch.equal(fits.out, free.out)
    assert torch.equal(over.fetched, pool.archived(1))
    rows = pool.rows[pool.row_of(1)]
    out, lse = attend(query, rows, torch.arange(77), scale=SCALE, value_dim=CONTENT)
    out_bound, lse_bound = attention_error(query, rows, scale=SCALE, value_dim=CONTENT)
    assert (over.out - out).abs().max() <= out_bound
    assert (over.lse - lse).abs().max() <= lse_bound


def test_a_closed_gate_fetches_nothing_and_the_cap_limits_each_head() -> None:
    pool, query = scattered_pool(), gaussian(2, CONTENT + BRANCH, seed=76) * 4
    assert stepped(pool, query, Retrieval(BASIS, theta=1e9)).fetched.tolist() == []
    free = stepped(pool, query, Retrieval(BASIS, inflation=4.0))
    capped = stepped(pool, query, Retrieval(BASIS, inflation=4.0, cap=2))
    assert 2 <= capped.fetched.shape[0] <= 4 < free.fetched.shape[0]
    assert set(capped.fetched.tolist()) <= set(free.fetched.tolist())


def test_with_nothing_attended_everything_is_fetched() -> None:
    rows, query = gaussian(6, CONTENT + BRANCH, seed=77), gaussian(2, CONTENT + BRANCH, seed=78)
    nothing, old = torch.zeros(0, dtype=torch.int64), torch.arange(6)
    entries = index(rows[:, :CONTENT], BASIS)
    step = decode(query, rows, nothing, old, *entries, Retrieval(BASIS, inflation=0.0, theta=1e9), scale=SCALE)
    assert step.fetched.tolist() == list(range(6))
    empty = decode(query, rows, nothing, nothing, *(e[:0] for e in entries), Retrieval(BASIS), scale=SCALE)
    assert torch.equal(empty.lse, torch.full((2,), -math.inf, dtype=torch.float64))
    assert torch.equal(empty.out, torch.zeros(2, CONTENT, dtype=torch.float64))


def test_a_padded_row_cannot_win_where_all_scores_are_negative() -> None:
    """Stale zero rows of the pool score 0 and would beat every row; none of them may be looked at."""
    rows = torch.zeros(8, CONTENT + BRANCH, dtype=torch.float64)
    rows[:4, CONTENT:] = 1.0
    rows[2, CONTENT:] = 0.5
    query = torch.zeros(1, CONTENT + BRANCH, dtype=torch.float64)
    query[0, CONTENT:] = -1.0
    kept, old = torch.tensor([0, 1]), torch.tensor([2, 3])
    entries = index(rows[old, :CONTENT], BASIS)
    step = decode(query, rows, kept, old, *entries, Retrieval(BASIS, inflation=0.0), scale=1.0)
    assert step.fetched.tolist() == [2]
    # ln(2 e^-8 + e^-4): three terms, each good to 8 u.
    assert abs(float(step.lse) - math.log(2 * math.exp(-8) + math.exp(-4))) <= 64 * UNIT


def test_bf16_rows_are_read_in_fp32() -> None:
    """One rounding of the result to bf16, everything before it in fp32: the float64 step on the same rows is that
    close."""
    rows = gaussian(40, CONTENT + BRANCH, seed=79, dtype=torch.bfloat16)
    query = gaussian(2, CONTENT + BRANCH, seed=80, dtype=torch.bfloat16)
    kept, old = torch.arange(0, 40, 2), torch.arange(1, 40, 2)
    basis = BASIS.float()
    step = decode(
        query, rows, kept, old, *index(rows[old, :CONTENT], basis), Retrieval(basis, inflation=30.0), scale=SCALE
    )
    assert (step.out.dtype, step.lse.dtype) == (torch.bfloat16, torch.float32)
    wide = rows.double()
    ids = torch.cat([kept, step.fetched])
    out, lse = attend(query.double(), wide, ids, scale=SCALE, value_dim=CONTENT)
    out_bound, lse_bound = (
        bound * UNIT_FP32 / UNIT for bound in attention_error(query.double(), wide, scale=SCALE, value_dim=CONTENT)
    )
    assert (step.out.double() - out).abs().max() <= out_bound + 2.0**-8 * float(out.abs().max())
    assert (step.lse.double() - lse).abs().max() <= lse_bound


def test_a_row_on_both_lists_is_refused() -> None:
    rows = gaussian(4, CONTENT + BRANCH)
    with pytest.raises(ValueError, match=r"archived holds row 2, which is attended too: expected disjoint lists"):
        decode(
            rows[:1],
            rows,
            torch.tensor([0, 2]),
            torch.tensor([2, 3]),
            *index(rows[2:, :CONTENT], BASIS),
            Retrieval(BASIS),
            scale=1.0,
        )
