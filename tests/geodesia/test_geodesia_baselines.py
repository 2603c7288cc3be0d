"""Baselines on the same attention path: what they hold, what they weigh, and their exact rates as published."""

from fractions import Fraction

import pytest
import torch
from geodesia_cases import dense, normal, roundoff

from kvverify.geodesia import rates
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.baselines import Full, Kivi, SnapKV, StreamingLLM
from kvverify.geodesia.decoding import Policy
from kvverify.geodesia.ladder import STEP_RATIO, quantize
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.reconstructed import GradedCache

HEADS, GROUP, DIM, SCALE = 2, 3, 16, 0.25


def started(cache, tokens, *, observed=8, heads=HEADS, group=GROUP, dim=DIM):
    """Prefill the cache; return it and its keys and values as it rounds them, [2, heads, tokens, dim]."""
    rows = normal(2, heads, tokens, dim, seed=1).bfloat16()
    cache.prefill(normal(heads, group, observed, dim, seed=2), rows[0], rows[1])
    return cache, rows


def step(cache, rows, number, *, heads=HEADS, group=GROUP, dim=DIM):
    query, new = normal(heads, group, dim, seed=10 + number), normal(2, heads, dim, seed=50 + number).bfloat16()
    out = cache.step(query, new[0], new[1])
    return query, out, torch.cat([rows, new[:, :, None]], 2)


def test_full_is_dense_attention_over_every_token():
    cache, rows = started(Full(scale=SCALE), 20)
    for number in range(3):
        query, out, rows = step(cache, rows, number)
        assert torch.equal(cache.rows.both, rows.double())
        expected, _ = dense(query, rows[0], rows[1], scale=SCALE)
        assert float((out - expected).abs().max()) <= roundoff(query, rows[0], rows[1], scale=SCALE)[0]
        assert cache.footprint.resident == 16 * rows.numel()
        # A sum of at most 23 weights.
        assert float((cache.weight.sum(-1) - 1).abs().max()) <= 32 * 2.0**-53


def test_rows_are_rounded_to_the_cache_dtype_and_to_no_other():
    exact = normal(2, HEADS, 5, DIM)
    for dtype in (torch.bfloat16, torch.float64):
        cache = Full(scale=SCALE, dtype=dtype)
        cache.prefill(normal(HEADS, GROUP, 1, DIM), exact[0], exact[1])
        assert torch.equal(cache.rows.both, exact.to(dtype).double())


def test_streaming_llm_holds_and_weighs_the_sinks_and_the_recent_tokens_only():
    cache, rows = started(StreamingLLM(scale=SCALE, sinks=2, recent=5), 20)
    for number in range(3):
        query, out, rows = step(cache, rows, number)
        tokens = rows.shape[2]
        kept = [0, 1, *range(tokens - 5, tokens)]
        gone = [t for t in range(tokens) if t not in kept]
        expected, _ = dense(query, rows[0][:, kept], rows[1][:, kept], scale=SCALE)
        assert float((out - expected).abs().max()) <= roundoff(query, rows[0], rows[1], scale=SCALE)[0]
        assert not cache.rows.both[:, :, gone].any()
        assert not cache.weight[:, :, gone].any()
        resident, _, _ = cache.footprint.per_value(kv_heads=HEADS, dim=DIM, length=tokens)
        assert resident == rates.retained([tokens], tokens=2 + 5).resident


def test_streaming_llm_shorter_than_its_budget_is_full():
    cache, rows = started(StreamingLLM(scale=SCALE, sinks=4, recent=30), 20)
    full, _ = started(Full(scale=SCALE), 20)
    for number in range(2):
        assert torch.equal(step(cache, rows, number)[1], step(full, rows, number)[1])


def test_snapkv_keeps_its_choice_and_every_decoded_token():
    cache, rows = started(SnapKV(scale=SCALE, budget=9, window=4, kernel=3), 40)
    held = cache.readable[:, 0].clone()
    assert held.sum(1).tolist() == [9, 9]
    assert held[:, -4:].all()
    assert not torch.equal(held[0], held[1])  # each KV head chooses for itself
    for number in range(3):
        _, _, rows = step(cache, rows, number)
        expected = torch.nn.functional.pad(held, (0, number + 1), value=True)
        assert torch.equal(cache.weight > 0, expected[:, None].expand_as(cache.weight))
        tokens = rows.shape[2]
        resident, _, _ = cache.footprint.per_value(kv_heads=HEADS, dim=DIM, length=tokens)
        assert resident == rates.retained([tokens], tokens=9 + number + 1).resident


def test_snapkv_keeps_the_token_that_the_last_queries_attend_to():
    keys, queries = torch.zeros(1, 30, DIM), torch.zeros(1, 1, 4, DIM)
    keys[0, 11, 0], queries[..., 0] = 8.0, 8.0
    cache = SnapKV(scale=1.0, budget=5, window=4, kernel=1)
    cache.prefill(queries, keys, torch.zeros_like(keys))
    assert cache.readable[0, 0].nonzero()[:, 0].tolist() == [11, 26, 27, 28, 29]


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_quantizes_all_but_the_recent_tokens_at_every_length(bits):
    cache, rows = started(Kivi(scale=SCALE, bits=bits, group=8, recent=8), 29)
    for number in range(20):
        _, _, rows = step(cache, rows, number)
        end = rows.shape[2] - 8
        assert torch.equal(cache.rows.both[:, :, end:], rows[:, :, end:].double())
        for head in range(HEADS):
            for start in range(0, end, 8):
                stop = min(start + 8, end)
                _, _, step_of_keys = quantize(rows[0, head, start:stop], bits=bits, axis="token", group=8)
                _, _, step_of_values = quantize(rows[1, head, start:stop], bits=bits, axis="channel", group=8)
                moved = (cache.rows.both[:, head, start:stop] - rows[:, head, start:stop].double()).abs()
                # Half a step on the stored format, and the rounding of code * step + lo in float64.
                half = STEP_RATIO[bits] / 2 * (1 + 2.0**-40)
                assert (moved[0] <= half * step_of_keys.double()).all()
                assert (moved[1].reshape(stop - start, -1, 8) <= half * step_of_values.double().T[..., None]).all()
                assert moved.any()


def test_kivi_in_one_prefill_equals_kivi_token_by_token():
    whole, rows = started(Kivi(scale=SCALE, bits=4, group=8, recent=8), 45)
    grown = Kivi(scale=SCALE, bits=4, group=8, recent=8)
    queries = normal(HEADS, GROUP, 1, DIM)
    grown.prefill(queries, rows[0][:, :3], rows[1][:, :3])
    for token in range(3, 45):
        grown.step(queries[:, :, 0], rows[0][:, token], rows[1][:, token])
    assert torch.equal(grown.rows.both, whole.rows.both)


def over_the_protocol(cache):
    """Serve the 63 calls at T = 16,321 .. 16,383 after a prefix of 16,320 tokens, one KV head of 128 dims."""
    sizes = {"heads": 1, "group": 2, "dim": 128}
    _, rows = started(cache, 16_320, observed=64, **sizes)
    found = []
    for number in range(63):
        _, _, _ = step(cache, rows[:, :, :0], number, **sizes)
        found.append(cache.footprint)
    values = 2 * 128 * sum(rates.PUBLISHED_LENGTHS)
    return [sum(getattr(f, name) for f in found) / values for name in ("resident", "read_per_query_head")]


@pytest.mark.slow
def test_rates_over_the_published_protocol_are_the_published_ones():
    assert over_the_protocol(Full(scale=0.1)) == [16, 16]
    assert over_the_protocol(Kivi(scale=0.1, bits=4)) == [Fraction(161968, 32193)] * 2
    assert (
        over_the_protocol(StreamingLLM(scale=0.1, recent=2048))
        == [rates.retained(rates.PUBLISHED_LENGTHS, tokens=2052).resident] * 2
    )
    snapkv = [rates.retained([T], tokens=2048 + T - 16_320).resident * T for T in rates.PUBLISHED_LENGTHS]
    assert over_the_protocol(SnapKV(scale=0.1, budget=2048)) == [sum(snapkv) / sum(rates.PUBLISHED_LENGTHS)] * 2


@pytest.mark.slow
def test_quest_rates_over_the_published_protocol_differ_by_the_empty_part_of_the_current_page_only():
    policy = Policy(budget=16.0, scale=0.1, page_fraction=0.125)
    resident, read = over_the_protocol(GradedCache(policy, PagePool(Geometry(dim=128))))
    assert resident == Fraction(8304, 511)
    # The published figure charges 33 whole pages; here the open page costs its real tokens, T - 16,320 of 64.
    empty = sum(16 * (64 - (T - 16_320)) for T in rates.PUBLISHED_LENGTHS)
    assert read + Fraction(empty, sum(rates.PUBLISHED_LENGTHS)) == Fraction(1184, 511)
