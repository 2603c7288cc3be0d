"""Block mass: simplex, observer, moving average, hot set."""

import pytest
import torch
from geodesia_cases import UNIT, normal, quick
from hypothesis import given
from hypothesis import strategies as st

from kvverify.geodesia.mass import block_sums, hot_set, observe, update

U = UNIT[torch.float64]


@quick(40)
@given(
    st.sampled_from([1, 7, 8, 9, 30]), st.sampled_from([1, 2, 7]), st.sampled_from([0.1, 1.0, 30.0]), st.integers(0, 9)
)
def test_mass_is_a_simplex_and_tokens_sum_to_heads_times_queries(tokens, group, scale, seed):
    observed = min(tokens, 5)
    blocks, token_mass = observe(
        normal(group, observed, 4, seed=seed), normal(tokens, 4, seed=seed + 1), scale=scale, block=8
    )
    assert len(blocks) == -(-tokens // 8)
    assert bool((blocks >= 0).all())
    # Softmax rows sum to 1 within (tokens + 2) u, and so do their mean and their sum.
    assert abs(float(blocks.sum()) - 1) <= 2 * (tokens + group * observed + 2) * U
    assert abs(float(token_mass.sum()) / (group * observed) - 1) <= 2 * (tokens + group * observed + 2) * U


def test_observer_is_the_mean_over_group_and_queries_of_the_causal_softmax():
    queries, keys = normal(2, 3, 4, seed=1), normal(10, 4, seed=2)
    weights = torch.zeros(10, dtype=torch.float64)
    for head in range(2):
        for i in range(3):
            seen = 10 - 3 + i + 1
            weights[:seen] += (0.5 * keys[:seen] @ queries[head, i]).softmax(0)
    blocks, token_mass = observe(queries, keys, scale=0.5, block=4)
    # Scores below 10 from 4 products: weights agree within 2 * 6 * 10 u each, six of them.
    assert float((token_mass - weights).abs().max()) <= 720 * U
    assert float((blocks - block_sums(weights / 6, block=4)).abs().max()) <= 720 * U


def test_observer_sees_no_later_key():
    queries, keys = normal(1, 1, 4), normal(6, 4)
    _, token_mass = observe(normal(1, 3, 4), keys, scale=1.0, block=2)
    assert bool((token_mass > 0).all())
    early, _ = observe(queries, keys[:5], scale=1.0, block=2)
    assert len(early) == 3


def test_ema_recurrence_across_a_block_boundary():
    mass = torch.tensor([0.75, 0.25], dtype=torch.float64)
    new = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert update(mass, new, decay=0.5).tolist() == [0.625, 0.25, 0.125]
    assert update(mass, mass, decay=0.5).tolist() == [0.75, 0.25]


def test_hot_set_is_sinks_neighbourhood_and_window():
    hot = hot_set(64 * 10, 64 * 10 - 1, block=64)
    assert hot.nonzero()[:, 0].tolist() == [0, 8, 9]
    chunked = hot_set(64 * 10, 64 * 5, block=64)
    assert chunked.nonzero()[:, 0].tolist() == [0, 4, 5, 6, 7, 8, 9]
    assert hot_set(64 * 10, 64 * 10 - 1, block=64, sinks=65).nonzero()[:, 0].tolist() == [0, 1, 8, 9]
    assert hot_set(1, 0, block=64).tolist() == [True]


def test_the_published_floor_keeps_three_of_256_blocks_exact():
    assert int(hot_set(16384, 16320, block=64).sum()) == 3


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"decay is 1.5, expected a number from 0 to 1"):
        update(torch.ones(1), torch.ones(1), decay=1.5)
    with pytest.raises(ValueError, match=r"query_position is 8, expected 0 to 7"):
        hot_set(8, 8, block=4)
    with pytest.raises(ValueError, match=r"5 observed queries, expected 1 to 4"):
        observe(torch.zeros(1, 5, 2), torch.zeros(4, 2), scale=1.0, block=2)
