"""The decode loop: causality, one map per KV head, chunks, own state only, budgets, certificate on a live cache."""

from itertools import pairwise

import pytest
import torch
from geodesia_cases import SMALL, dense, normal, roundoff

from kvverify.geodesia.accounting import budget_bits, token_bits
from kvverify.geodesia.attend import block_weights
from kvverify.geodesia.certificate import compare, output_bound, printed, tightened
from kvverify.geodesia.decoding import Decoder, Policy
from kvverify.geodesia.ladder import MEAN
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.store import read_bits, reconstruct

PROMPT, STEPS, GROUP = 92, 24, 3
PLAIN = Policy(budget=9.0, scale=0.5, window=8, observed=8, decay=0.5)


def stream(seed=0):
    total = PROMPT + STEPS
    queries = normal(SMALL.kv_heads, GROUP, total, SMALL.dim, seed=seed) * 2
    rows = [normal(SMALL.kv_heads, total, SMALL.dim, seed=seed + i) for i in (1, 2)]
    return tuple(rows.bfloat16() for rows in (queries, *rows))


def prefilled(policy, rows):
    queries, keys, values = rows
    decoder = Decoder(policy, PagePool(SMALL))
    decoder.prefill(queries[:, :, PROMPT - policy.observed : PROMPT], keys[:, :PROMPT], values[:, :PROMPT])
    return decoder


def run(policy, rows, steps=STEPS):
    """Serve the steps one by one: decoder, outputs, and the level map after every step."""
    decoder, outputs, levels = prefilled(policy, rows), [], []
    queries, keys, values = rows
    for i in range(PROMPT, PROMPT + steps):
        outputs.append(decoder.step(queries[:, :, i], keys[:, i], values[:, i]))
        levels.append(decoder.cache.level.clone())
    return decoder, outputs, levels


def test_levels_never_rise_and_every_rung_is_used():
    _, _, levels = run(PLAIN, stream())
    for before, after in pairwise(levels):
        assert bool((after[:, : before.shape[1]] >= before).all())
    assert set(levels[-1].flatten().tolist()) >= {0, 1, MEAN}


def test_mass_stays_a_simplex_and_follows_the_recurrence():
    rows = stream()
    decoder, _, _ = run(PLAIN, rows, steps=3)
    before = decoder.mass
    i = PROMPT + 3
    decoder.step(rows[0][:, :, i], rows[1][:, i], rows[2][:, i])
    # The map of the step acted after the mass: no level moved in it, so the store is the one the mass was read from.
    new = block_weights(rows[0][:, :, i], decoder.cache.packed(), scale=PLAIN.scale).mean(1)
    padded = torch.nn.functional.pad(before, (0, new.shape[1] - before.shape[1]))
    expected = 0.5 * padded + 0.5 * new
    assert torch.equal(decoder.mass, expected)
    # Means and sums of about 100 weights, some 60 updates: under 1000 roundings.
    assert float((decoder.mass.sum(1) - 1).abs().max()) <= 1000 * 2.0**-53


def test_causal_later_tokens_change_no_earlier_output_or_level():
    rows, other = stream(), stream(seed=50)
    cut = PROMPT + STEPS // 2
    mixed = tuple(torch.cat([a[..., :cut, :], b[..., cut:, :]], -2) for a, b in zip(rows, other, strict=True))
    _, outputs, levels = run(PLAIN, rows)
    _, mixed_outputs, mixed_levels = run(PLAIN, mixed)
    for i in range(STEPS // 2):
        assert torch.equal(levels[i], mixed_levels[i])
        assert all(torch.equal(a, b) for a, b in zip(outputs[i], mixed_outputs[i], strict=True))
    assert not torch.equal(outputs[-1][0], mixed_outputs[-1][0])


def test_append_chunking_equals_token_by_token():
    rows = stream()
    single, outputs, _ = run(PLAIN, rows)
    for size in (1, 5, 24):
        chunked = prefilled(PLAIN, rows)
        served = []
        for i in range(PROMPT, PROMPT + STEPS, size):
            part = slice(i, min(i + size, PROMPT + STEPS))
            served += chunked.chunk(rows[0][:, :, part], rows[1][:, part], rows[2][:, part])
        assert torch.equal(chunked.cache.packed().payload, single.cache.packed().payload)
        assert torch.equal(chunked.cache.level, single.cache.level)
        assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(served, outputs, strict=True))


def test_first_query_shortcut_is_not_token_by_token():
    rows = stream()
    single, _, _ = run(PLAIN, rows)
    shortcut = prefilled(PLAIN, rows)
    part = slice(PROMPT, PROMPT + STEPS)
    served = shortcut.chunk(rows[0][:, :, part], rows[1][:, part], rows[2][:, part], variant="first_query")
    assert len(served) == STEPS
    assert not torch.equal(shortcut.cache.level, single.cache.level)
    # Each query still sees its own past only.
    keys, values = (side[:, : PROMPT + 1] for side in reconstruct(shortcut.cache.packed()))
    query = rows[0][:, :, PROMPT].double()
    expected, _ = dense(query, keys, values, scale=PLAIN.scale)
    assert float((served[0][0] - expected).abs().max()) <= roundoff(query, keys, values, scale=PLAIN.scale)[0]


def test_one_level_map_serves_the_group_whatever_its_order_or_size():
    queries, keys, values = stream()
    _, _, levels = run(PLAIN, (queries, keys, values))
    _, _, doubled = run(PLAIN, (queries.repeat(1, 2, 1, 1), keys, values))
    _, _, reversed_ = run(PLAIN, (queries.flip(1), keys, values))
    for step in range(STEPS):
        assert torch.equal(levels[step], doubled[step])
        assert torch.equal(levels[step], reversed_[step])


def test_each_kv_head_has_its_own_map():
    decoder, _, _ = run(PLAIN, stream())
    assert not torch.equal(decoder.cache.level[0], decoder.cache.level[1])


def graded_bits(decoder, head):
    costs = torch.tensor(SMALL.costs)
    return int(costs[decoder.cache.level[head]].sum()) + token_bits(SMALL.dim, decoder.cache.open_tokens)


@pytest.mark.parametrize("allocator", ["budget", "hull"])
def test_budget_holds_on_real_tokens_or_is_called_infeasible(allocator):
    seen = set()
    for rate in (2.0, 7.0, 9.0, 12.0):
        policy = Policy(budget=rate, scale=0.5, window=8, observed=8, allocator=allocator)
        decoder, _, _ = run(policy, stream())
        for head in range(SMALL.kv_heads):
            seen.add(decoder.status[head])
            met = graded_bits(decoder, head) <= budget_bits(rate, SMALL.dim, decoder.cache.length)
            assert met == (decoder.status[head] != "infeasible")
    assert "infeasible" in seen
    assert seen & {"met", "unchanged"}


def test_a_budget_lowered_on_a_live_cache_is_reached():
    decoder, _, _ = run(PLAIN, stream(), steps=10)
    queries, keys, values = stream()
    for rate in (8.0, 7.0, 6.5):
        i = decoder.cache.length
        decoder.policy = Policy(budget=rate, scale=0.5, window=8, observed=8)
        decoder.step(queries[:, :, i], keys[:, i], values[:, i])
        for head in range(SMALL.kv_heads):
            assert decoder.status[head] != "infeasible"
            assert graded_bits(decoder, head) <= budget_bits(rate, SMALL.dim, decoder.cache.length)


def test_a_budget_of_sixteen_bits_moves_nothing():
    decoder, outputs, _ = run(Policy(budget=16, scale=0.5, observed=8), stream())
    assert not decoder.cache.level.any()
    assert decoder.status == ["unchanged", "unchanged"]
    query = stream()[0][:, :, -1].double()
    keys, values = (rows.double() for rows in stream()[1:])
    expected, _ = dense(query, keys, values, scale=0.5)
    assert float((outputs[-1][0] - expected).abs().max()) <= roundoff(query, keys, values, scale=0.5)[0]


def test_only_the_caches_own_state_is_used():
    rows = [side.clone() for side in stream()]
    decoder = prefilled(PLAIN, rows)
    expected = run(PLAIN, stream())[1]
    # The prompt's dense rows are gone for good: poison them, as the pool poisons every page it frees.
    for side in rows:
        side[..., :PROMPT, :] = torch.nan
    for i in range(PROMPT, PROMPT + STEPS):
        out, lse = decoder.step(rows[0][:, :, i], rows[1][:, i], rows[2][:, i])
        assert torch.equal(out, expected[i - PROMPT][0])
        assert torch.equal(lse, expected[i - PROMPT][1])


@pytest.mark.parametrize("form", ["paper", "pooled"])
def test_residual_tokens_stay_exact_and_are_never_stored_twice(form):
    policy = Policy(budget=7.0, scale=0.5, window=8, observed=8, residual_fraction=0.2, residual_form=form)
    rows = stream()
    decoder, _, _ = run(policy, rows)
    store = decoder.cache.packed()
    keys, _ = reconstruct(store)
    assert 0 < len(store.residual_ids) <= SMALL.kv_heads * 19
    at = 0
    for head, count in enumerate(store.residual_count.tolist()):
        ids = store.residual_ids[at : at + count]
        at += count
        assert torch.equal(keys[head, ids], rows[1][head, ids].double())
        assert bool((store.level[head, ids // SMALL.block] > 0).all())
    assert store.data_bytes * 8 == store.accounted_bits


def test_page_selection_reads_the_current_page_and_no_future_one():
    policy = Policy(budget=9.0, scale=0.5, window=8, observed=8, page_fraction=0.25)
    rows = stream()
    decoder = prefilled(policy, rows)
    for i in range(PROMPT, PROMPT + STEPS):
        decoder.step(rows[0][:, :, i], rows[1][:, i], rows[2][:, i])
        current = i // SMALL.block
        assert bool(decoder.read[..., current].all())
        assert decoder.read.shape[-1] == current + 1
        assert bool((decoder.read[..., :current].sum(-1) == max(1, -(-current // 4))).all())
    store = decoder.cache.packed()
    one, union = read_bits(store, decoder.read)
    everything, resident = read_bits(store, torch.ones_like(decoder.read))
    assert int(resident.sum()) == store.accounted_bits
    assert torch.equal(everything, resident[:, None].expand_as(everything))
    assert bool((one < resident[:, None]).all())
    assert bool((one.amax(1) <= union).all())
    assert bool((union <= resident).all())
    # By hand, for one query head: its pages, the open page's tokens, and two fp16 rows for every page.
    pages = store.box_low.shape[1]
    listed = decoder.read[1, 2].nonzero()[:, 0].tolist()
    closed = sum(SMALL.block_bits(int(store.level[1, page])) for page in listed if page < len(store.valid))
    assert int(one[1, 2]) == closed + token_bits(SMALL.dim, decoder.cache.open_tokens + pages)


@pytest.mark.parametrize("form", [printed, tightened])
def test_the_cache_certifies_its_own_output_error(form):
    rows = stream()
    decoder = prefilled(PLAIN, rows)
    bounds, errors = [], []
    for i in range(PROMPT, PROMPT + STEPS):
        query = rows[0][:, :, i]
        out, _ = decoder.step(query, rows[1][:, i], rows[2][:, i])
        weights = block_weights(query, decoder.cache.packed(), scale=PLAIN.scale)
        true, _ = dense(query, rows[1][:, : i + 1], rows[2][:, : i + 1], scale=PLAIN.scale)
        open_block = (0, int(decoder.cache.open_tokens > 0))
        for head in range(SMALL.kv_heads):
            key_error = torch.nn.functional.pad(decoder.cache.key_error[head], open_block)
            value_error = torch.nn.functional.pad(decoder.cache.value_error[head], open_block)
            for member in range(GROUP):
                bounds.append(
                    output_bound(
                        weights[head, member],
                        key_error,
                        value_error,
                        query_norm=float(query[head, member].double().norm()),
                        scale=PLAIN.scale,
                        radius=float(decoder.cache.radius[head]),
                        form=form,
                    )
                )
                errors.append(float((out[head, member] - true[head, member]).norm()))
    result = compare(torch.tensor(bounds, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64))
    assert result.checked == STEPS * SMALL.kv_heads * GROUP
    assert result.violations == 0
    assert result.median < 100


def test_bad_use_is_named():
    rows = stream()
    decoder = prefilled(PLAIN, rows)
    with pytest.raises(ValueError, match="expected an empty one at prefill"):
        decoder.prefill(rows[0], rows[1], rows[2])
    with pytest.raises(ValueError, match="variant is 'fast'"):
        decoder.chunk(*rows, variant="fast")
    with pytest.raises(ValueError, match="expected at most observed = 8"):
        Decoder(PLAIN, PagePool(SMALL)).prefill(*rows)
