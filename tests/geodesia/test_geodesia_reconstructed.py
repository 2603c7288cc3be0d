"""The fast cache of a whole model equals the packed store: levels, rows and bytes bit for bit, outputs by roundoff."""

import pytest
import torch
from geodesia_cases import SMALL, dense, normal, roundoff

from kvverify.geodesia import certificate
from kvverify.geodesia.decoding import Decoder, Policy
from kvverify.geodesia.ladder import EXACT, MEAN
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.reconstructed import GradedCache
from kvverify.geodesia.store import reconstruct

HEADS, GROUP, DIM, SCALE = 2, 3, 8, 0.5
TOKENS, STEPS = 60, 14  # blocks of 8: the steps cross two block boundaries
POLICIES = {
    "graded + residual": Policy(
        budget=6.5, scale=SCALE, decay=0.5, sinks=4, window=8, observed=8, residual_fraction=0.1
    ),
    "floor": Policy(budget=0.1, scale=SCALE, window=8, observed=8, residual_fraction=0.1),
    "compressed-Quest": Policy(budget=10.0, scale=SCALE, decay=0.5, window=8, observed=8, page_fraction=0.3),
    "Quest": Policy(budget=16.0, scale=SCALE, window=8, observed=8, page_fraction=0.3),
}
STORED = ("level", "valid", "open_keys", "open_values", "residual_ids", "residual_keys", "box_low", "box_high")


def prompt():
    return normal(HEADS, GROUP, 16, DIM, seed=1), normal(2, HEADS, TOKENS, DIM, seed=2).bfloat16()


def steps():
    for number in range(STEPS):
        new = normal(2, HEADS, DIM, seed=200 + number).bfloat16()
        yield 3 * normal(HEADS, GROUP, DIM, seed=100 + number), new[0], new[1]


def started(name):
    cache, (queries, rows) = GradedCache(POLICIES[name], PagePool(SMALL)), prompt()
    cache.prefill(queries, rows[0], rows[1])
    return cache


@pytest.mark.parametrize("name", POLICIES)
def test_decoded_rows_levels_and_bytes_equal_the_packed_store_bit_for_bit(name):
    cache, decoder = started(name), Decoder(POLICIES[name], PagePool(SMALL))
    queries, rows = prompt()
    decoder.prefill(queries[:, :, -8:], rows[0], rows[1])
    demotions = 0
    for query, key, value in steps():
        before = decoder.cache.level.clone()
        expected, _ = decoder.step(query, key, value)
        demotions += int((decoder.cache.level[:, : before.shape[1]] != before).sum())
        out, packed = cache.step(query, key, value), decoder.cache.packed()
        decoded = torch.stack(reconstruct(packed))
        assert torch.equal(cache.rows.both, decoded)
        for field in STORED:
            mine, theirs = getattr(cache.store, field), getattr(packed, field)
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs), field
        assert cache.footprint.resident == packed.accounted_bits
        assert (cache.decoder.read is None) == (decoder.read is None)
        assert decoder.read is None or torch.equal(cache.decoder.read, decoder.read)
        bound, _ = roundoff(query, decoded[0], decoded[1], scale=SCALE)
        assert float((out - expected).abs().max()) <= bound
    assert (demotions > 0) == (name != "Quest")


def test_quest_pages_are_exact_and_chosen_per_query_head():
    cache = started("Quest")
    union_is_larger = False
    for query, key, value in steps():
        cache.step(query, key, value)
        assert (cache.decoder.cache.level == EXACT).all()
        pages = -(-cache.rows.length // SMALL.block)
        current = (cache.rows.length - 1) // SMALL.block
        expected = max(1, -(-3 * current // 10)) + pages - current
        assert (cache.decoder.read.sum(-1) == expected).all()
        footprint = cache.footprint
        assert footprint.read_per_query_head <= footprint.read_union <= footprint.resident
        union_is_larger |= footprint.read_per_query_head < footprint.read_union
        unread = ~cache.decoder.read.repeat_interleave(SMALL.block, dim=2)[:, :, : cache.rows.length]
        assert not cache.weight[unread].any()
    assert union_is_larger


def test_floor_allocation_takes_every_cold_block_to_its_mean():
    cache = started("floor")
    for query, key, value in steps():
        cache.step(query, key, value)
    assert cache.decoder.status == ["infeasible"] * HEADS
    assert (cache.decoder.cache.level[:, 1:-3] == MEAN).all()
    assert (cache.decoder.cache.level[:, 0] == EXACT).all()


@pytest.mark.parametrize("name", ["graded + residual", "floor"])
def test_bounds_hold_against_the_dense_rows_that_the_cache_no_longer_has(name):
    cache, given = started(name), prompt()[1]
    bounds, printed, errors = [], [], []
    for query, key, value in steps():
        out = cache.step(query, key, value)
        given = torch.cat([given, torch.stack([key, value])[:, :, None]], 2)
        exact, _ = dense(query, given[0], given[1], scale=SCALE)
        bounds.append(cache.bounds(query).flatten())
        printed.append(cache.bounds(query, certificate.printed).flatten())
        errors.append((out - exact).norm(dim=-1).flatten())
    found = certificate.compare(torch.cat(bounds), torch.cat(errors))
    assert (found.checked, found.violations) == (STEPS * HEADS * GROUP, 0)
    assert 1 <= found.smallest < 1e4
    assert (torch.cat(bounds) <= torch.cat(printed) * (1 + 2.0**-40)).all()


def test_bounds_are_refused_where_pages_are_masked():
    cache = started("compressed-Quest")
    query, key, value = next(steps())
    cache.step(query, key, value)
    with pytest.raises(ValueError, match="pages are hard-masked, expected a policy that reads every page"):
        cache.bounds(query)
