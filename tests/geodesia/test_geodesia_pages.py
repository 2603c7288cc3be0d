"""Residual tokens, boxes and page ranking."""

import pytest
import torch
from geodesia_cases import UNIT, normal, quick
from hypothesis import given
from hypothesis import strategies as st

from kvverify.geodesia.pages import box, page_count, page_scores, rank_pages, read_pages
from kvverify.geodesia.residual import residual, residual_count, residual_pooled, salience


def test_salience_is_mass_times_squared_distance_from_the_block_mean():
    values = torch.tensor([[0.0], [2.0], [5.0]])
    mass = torch.tensor([1.0, 3.0, 7.0])
    assert salience(mass, values, block=2).tolist() == [1.0, 3.0, 0.0]


@quick(40)
@given(st.integers(1, 30), st.integers(0, 99), st.data())
def test_residual_holds_the_tokens_of_largest_salience(tokens, seed, data):
    count = data.draw(st.integers(0, tokens))
    mass, values = normal(tokens, seed=seed).abs(), normal(tokens, 4, seed=seed + 1)
    ids = residual(mass, values, block=8, count=count)
    score = salience(mass, values, block=8)
    rest = torch.ones(tokens, dtype=torch.bool)
    rest[ids] = False
    assert len(set(ids.tolist())) == count
    if 0 < count < tokens:
        assert float(score[ids].min()) >= float(score[rest].max())


def test_pooled_residual_always_keeps_the_recent_prompt_and_prefers_neighbourhoods():
    values = torch.zeros(200, 1)
    values[64::2] = 1.0
    mass = torch.zeros(200)
    mass[80:85] = 1.0
    mass[20] = 1.0
    ids = residual_pooled(mass, values, block=64, count=69)
    assert set(range(136, 200)) <= set(ids.tolist())
    assert {81, 82, 83} <= set(ids.tolist())


@pytest.mark.parametrize(("fraction", "count"), [(0.0078125, 128), (0.03125, 510), (0.102, 1665), (0, 0)])
def test_residual_count_of_the_published_runs(fraction, count):
    assert residual_count(fraction, 16320) == count


@quick(60)
@given(
    st.integers(1, 20),
    st.sampled_from([1e-6, 1e-3, 1.0, 900.0]),
    st.sampled_from([0.0, 5000.0, -777.7]),
    st.integers(0, 99),
)
def test_box_contains_every_key_and_is_tight(tokens, scale, offset, seed):
    keys = (normal(tokens, 4, seed=seed) * scale + offset).float()
    low, high = box(keys, block=8)
    assert low.shape == high.shape == (-(-tokens // 8), 4)
    for page, rows in enumerate(keys.double().split(8)):
        assert bool((low[page].double() <= rows.amin(0)).all())
        assert bool((high[page].double() >= rows.amax(0)).all())
        inward = torch.nextafter(low[page], torch.full_like(low[page], torch.inf)).double()
        assert bool((inward > rows.amin(0)).all())


def test_box_rounded_to_nearest_would_lose_a_key():
    keys = torch.tensor([[1000.3]])
    assert float(keys.half()) > float(keys)
    assert float(box(keys, block=1)[0]) <= float(keys)


@quick(60)
@given(st.sampled_from([1, 2, 7]), st.integers(1, 40), st.integers(0, 99))
def test_no_page_score_is_below_a_score_in_the_page(heads, tokens, seed):
    query, keys = normal(heads, 6, seed=seed), normal(tokens, 6, seed=seed + 1) * 3
    low, high = box(keys, block=8)
    bound = page_scores(query, low, high, scale=0.3)
    scores = 0.3 * query @ keys.T
    # Twelve products against six: both sums are within (12 + 2) u of reach.
    slack = 28 * UNIT[torch.float64] * float(query.norm(dim=1).max() * keys.norm(dim=1).max())
    for page, columns in enumerate(scores.split(8, dim=1)):
        assert bool((columns.amax(1) <= bound[:, page] + slack).all())


def test_page_count_is_exact_in_decimal():
    assert [page_count(n, 0.125) for n in (0, 1, 8, 9, 255)] == [0, 1, 1, 2, 32]
    # 0.07 * 100 is 7.000000000000001 in floating point.
    assert page_count(100, 0.07) == 7


def test_ranking_keeps_the_best_pages_without_repeats_and_breaks_ties_low():
    query = torch.tensor([[1.0], [-1.0]])
    low, high = torch.tensor([[0.0], [2.0], [2.0], [-5.0]]).half(), torch.tensor([[1.0], [3.0], [3.0], [-4.0]]).half()
    assert rank_pages(query, low, high, keep=2, scale=1.0).tolist() == [[1, 2], [3, 0]]
    assert rank_pages(query, low, high, keep=0, scale=1.0).shape == (2, 0)


def test_current_page_is_always_read():
    read = read_pages(torch.tensor([[0], [1]]), total=4, current=3)
    assert read.tolist() == [[True, False, False, True], [False, True, False, True]]
    assert int(read.any(0).sum()) == 3


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="count is 4, expected 0 to 3"):
        residual(torch.ones(3), torch.ones(3, 1), block=2, count=4)
    with pytest.raises(ValueError, match="keep is 2, expected 0 to 1"):
        rank_pages(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), keep=2, scale=1.0)
    with pytest.raises(ValueError, match="fraction is 0, expected a number above 0"):
        page_count(4, 0)
    with pytest.raises(ValueError, match="scale is -1"):
        page_scores(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), scale=-1)
