"""Attention over the packed store against dense attention over its reconstruction."""

import pytest
import torch
from geodesia_cases import GROUPED, SMALL, dense, normal, quick, roundoff
from hypothesis import given
from hypothesis import strategies as st

from kvverify.geodesia.attend import attend, block_weights
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.sequence import Sequence
from kvverify.geodesia.store import reconstruct

SCALE = 0.35


def mixed_store(tokens, *, geometry=SMALL, seed=0, kept=(), levels=True, crop=None, keys=None):
    """A store with a random rung for every block and head."""
    sequence = Sequence(PagePool(geometry))
    shape = (geometry.kv_heads, tokens, geometry.dim)
    keys = normal(*shape, seed=seed) if keys is None else keys
    sequence.append(keys.bfloat16(), normal(*shape, seed=seed + 1).bfloat16())
    if kept:
        sequence.keep_exact([torch.tensor(kept)] * geometry.kv_heads)
    if levels:
        generator = torch.Generator().manual_seed(seed)
        sequence.demote(torch.randint(0, 5, tuple(sequence.level.shape), generator=generator))
    if crop is not None:
        sequence.crop(crop)
    return sequence.packed()


def assert_matches_dense(query, store, dtype=torch.float64, **arguments):
    out, lse = attend(query, store, scale=SCALE, accumulate=dtype, **arguments)
    keys, values = reconstruct(store)
    expected, expected_lse = dense(query, keys, values, scale=SCALE)
    out_bound, lse_bound = roundoff(query, keys, values, scale=SCALE, dtype=dtype)
    assert out.dtype == lse.dtype == dtype
    assert float((out - expected).abs().max()) <= out_bound
    assert float((lse - expected_lse).abs().max()) <= lse_bound


@quick(60)
@given(
    st.sampled_from([1, 7, 8, 9, 16, 41]), st.sampled_from([1, 2, 7]), st.sampled_from([1, 2, 5]), st.integers(0, 99)
)
def test_attend_equals_dense_attention_over_the_reconstruction(tokens, group, splits, seed):
    assert_matches_dense(normal(2, group, 8, seed=seed), mixed_store(tokens, seed=seed), splits=splits)


@pytest.mark.parametrize("crop", [33, 37, 40])
def test_attend_counts_valid_and_residual_tokens_of_every_block_once(crop):
    store = mixed_store(45, seed=3, kept=(0, 1, 9, 10, 17, 35, 36), crop=crop)
    assert len(store.residual_ids)
    assert_matches_dense(normal(2, 3, 8), store)


def test_attend_over_several_groups_of_scales():
    assert_matches_dense(normal(2, 3, 16), mixed_store(70, geometry=GROUPED, seed=5))


def test_no_compression_is_dense_attention_on_the_original_rows():
    store = mixed_store(29, levels=False)
    keys, values = reconstruct(store)
    assert torch.equal(keys, normal(2, 29, 8, seed=0).bfloat16().double())
    assert torch.equal(values, normal(2, 29, 8, seed=1).bfloat16().double())
    assert_matches_dense(normal(2, 3, 8), store)


def test_attend_in_fp32_is_within_a_ten_thousandth():
    query, store = normal(2, 3, 8, dtype=torch.float32), mixed_store(300, seed=7)
    assert_matches_dense(query, store, torch.float32, splits=3)
    out, _ = attend(query, store, scale=SCALE, accumulate=torch.float32)
    exact, _ = attend(query, store, scale=SCALE)
    assert float((out - exact).norm() / exact.norm()) <= 1e-4


def test_running_maximum_survives_keys_that_grow_along_the_sequence():
    # More blocks than are read at once, so the running maximum has to fade what came before.
    keys = normal(2, 200, 8) + torch.linspace(0, 60, 200).double()[:, None]
    assert_matches_dense(normal(2, 2, 8).abs(), mixed_store(200, keys=keys, seed=2))


def test_split_merge_gives_the_unsplit_result_and_empty_splits_weigh_nothing():
    query, store = normal(2, 2, 8), mixed_store(20, seed=4)
    keys, values = reconstruct(store)
    out_bound, lse_bound = roundoff(query, keys, values, scale=SCALE)
    whole = attend(query, store, scale=SCALE)
    for splits in (2, 3, 50):
        out, lse = attend(query, store, scale=SCALE, splits=splits)
        assert float((out - whole[0]).abs().max()) <= out_bound
        assert float((lse - whole[1]).abs().max()) <= lse_bound


def test_an_empty_store_gives_zero_and_minus_infinity():
    out, lse = attend(normal(2, 2, 8), Sequence(PagePool(SMALL)).packed(), scale=SCALE)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def test_masked_pages_weigh_nothing():
    query, store = normal(2, 1, 8), mixed_store(24, seed=6)
    pages = torch.tensor([True, False, True]).expand(2, 1, 3)
    out, lse = attend(query, store, scale=SCALE, pages=pages)
    read = torch.tensor([True, False, True]).repeat_interleave(8)
    keys, values = (rows[:, read] for rows in reconstruct(store))
    expected, expected_lse = dense(query, keys, values, scale=SCALE)
    out_bound, lse_bound = roundoff(query, keys, values, scale=SCALE)
    assert float((out - expected).abs().max()) <= out_bound
    assert float((lse - expected_lse).abs().max()) <= lse_bound


def test_block_weights_are_the_softmax_mass_of_each_block():
    query, store = normal(2, 3, 8), mixed_store(21, seed=8, kept=(2, 12))
    weights = block_weights(query, store, scale=SCALE)
    keys, values = reconstruct(store)
    softmax = (SCALE * torch.einsum("hgd,htd->hgt", query, keys)).softmax(-1)
    expected = torch.stack([part.sum(-1) for part in softmax.split(8, dim=-1)], -1)
    bound, _ = roundoff(query, keys, torch.ones_like(values), scale=SCALE)
    assert float((weights - expected).abs().max()) <= bound


def test_bad_query_is_named():
    store = mixed_store(8)
    with pytest.raises(ValueError, match=r"query has shape \(1, 2, 8\), expected \(2, group, 8\)"):
        attend(normal(1, 2, 8), store, scale=SCALE)
    with pytest.raises(ValueError, match="splits is 0, expected at least 1"):
        attend(normal(2, 2, 8), store, scale=SCALE, splits=0)
