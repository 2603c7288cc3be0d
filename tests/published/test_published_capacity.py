"""The published capacity tables and exact rates, recomputed."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from kvverify.capacity import CacheShape, Retained, projected_budget, usable_fraction
from kvverify.geodesia import rates
from kvverify.geodesia.accounting import Geometry, bits_per_value

FACTS = json.loads((Path(__file__).parent / "facts" / "geodesia_capacity.json").read_text())
MODELS = FACTS["models"]
RATES = FACTS["rates"]
T = rates.PUBLISHED_LENGTHS


def shape_of(model):
    return CacheShape(model["layers"], model["kv_heads"], model["head_dim"])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_capacity_tables_are_reproduced(name):
    model, checked = MODELS[name], 0
    shape, budget = shape_of(model), model["cache_budget_bytes"]
    assert shape.values_per_token == model["values_per_token"]
    assert budget == model["free_after_load_bytes"] - model["activation_peak_bytes"]
    for policy in model["policies"].values():
        if "constant_bytes" in policy:
            assert Retained(shape, policy["retained"]).constant_bytes == policy["constant_bytes"]
            continue
        bits = policy["bits_per_value"]
        assert shape.bytes_per_token(bits) == policy["bytes_per_token"]
        assert shape.bytes_per_token(bits) / 1024 == policy["KiB_per_token"]
        assert shape.max_context(budget, bits) == policy["max_context"]
        for context, sequences in policy["concurrency"].items():
            assert shape.concurrency(budget, bits, int(context)) == sequences
            checked += 1
    assert checked == 14


@pytest.mark.parametrize(("name", "kib"), [("Qwen3-8B", 144), ("Qwen2.5-3B", 36)])
def test_full_cache_costs_per_token(name, kib):
    assert shape_of(MODELS[name]).bytes_per_token(16) == kib * 1024


@pytest.mark.parametrize("name", sorted(MODELS))
def test_projections_use_a_fraction_of_at_most_one(name):
    model = MODELS[name]
    shape, derived = shape_of(model), model["derived"]
    fraction = usable_fraction(model["gpu_total_bytes"], 48)
    assert fraction == derived["usable_fraction_nominal48"]
    checked = 0
    for gib, table in derived["projected_if_nominal_48"].items():
        budget = projected_budget(float(gib), fraction, model["weights_bytes"], model["activation_peak_bytes"])
        for policy, context in table.items():
            assert shape.max_context(budget, model["policies"][policy]["bits_per_value"]) == context
            checked += 1
    assert checked == 28
    # As published the card was called a 47 GiB one, of which 1.0085 was usable.
    assert model["usable_fraction_as_used"] > 1
    with pytest.raises(ValueError, match=r"nominal_gib is 47, expected at least the 47.40 GiB measured"):
        usable_fraction(model["gpu_total_bytes"], model["nominal_gib_as_used"])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_projections_follow_from_the_fraction_they_used(name):
    model = MODELS[name]
    for policy in model["policies"].values():
        for gib, context in policy.get("projected", {}).items():
            usable = float(gib) * 2**30 * model["usable_fraction_as_used"]
            budget = usable - model["weights_bytes"] - model["activation_peak_bytes"]
            assert shape_of(model).max_context(budget, policy["bits_per_value"]) == context


@pytest.mark.parametrize("name", sorted(MODELS))
def test_total_memory_at_131072_tokens(name):
    model = MODELS[name]
    for policy, gib in model["derived"]["total_GiB_131072"].items():
        bits = model["policies"][policy]["bits_per_value"]
        # Three operations on numbers below 32.
        assert abs(shape_of(model).total_gib(model["weights_bytes"], bits, 131072) - gib) <= 4 * 32 * 2.0**-53


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_constant_memory_policy_is_not_scaled_with_the_context(name):
    model = MODELS[name]
    cache = Retained(shape_of(model), 2048)
    assert cache.concurrency(model["cache_budget_bytes"]) == model["derived"]["eviction_concurrency_constant_cache"]


def test_kivi_rates_and_their_growth_with_the_chunk():
    assert rates.kivi(T, key_bits=4, value_bits=4).resident == Fraction(RATES["kivi4_q1"]["exact"])
    assert float(rates.kivi(T, key_bits=4, value_bits=4).resident) == RATES["kivi4_q1"]["published"]
    assert float(rates.kivi(T, key_bits=2, value_bits=2).resident) == RATES["kivi2_q1"]["value"]
    for bits, table in ((4, RATES["kivi4_chunk"]), (2, RATES["kivi2_chunk"])):
        for chunk, rate in table.items():
            assert rates.kivi([16384], key_bits=bits, value_bits=bits, chunk=int(chunk)).resident == Fraction(rate)


def test_quest_rates():
    found = rates.quest(T)
    assert found.resident == Fraction(RATES["quest_q1"]["resident_exact"])
    assert found.read == Fraction(RATES["quest_q1"]["read_exact"])
    assert [float(found.resident), float(found.read)] == RATES["quest_q1"]["published"]
    chunked = rates.quest([16384], chunk=64)
    assert (chunked.resident, chunked.read) == tuple(map(Fraction, map(str, RATES["quest_chunk64"].values())))


def test_retained_rates():
    assert rates.retained([16384], tokens=4 + 2048).resident == Fraction(RATES["streaming_T16384"])
    assert rates.retained([16384], tokens=2048 + 64, chunk=64).resident == Fraction(RATES["snapkv_chunk64"])
    assert rates.retained([16384], tokens=2048 + 256, chunk=256).resident == Fraction(RATES["snapkv_chunk256"])
    assert rates.full().resident == rates.full().read == 16


def test_residual_rates():
    assert rates.residual(T, tokens=510) == Fraction(RATES["residual_q1"]["8B_510_tokens"])
    assert float(rates.residual(T, tokens=128)) == RATES["residual_q1"]["3B_128_tokens"]
    assert float(rates.residual([16384], tokens=1665)) == RATES["rd_v2_chunk64"]["residual"]


def test_floor_allocation_is_the_base_rate_of_rd_v2():
    geometry = Geometry(dim=128)
    bits = 3 * geometry.block_bits(0) + 253 * geometry.block_bits(4)
    assert float(bits_per_value(bits, 128, 16384)) == RATES["rd_v2_chunk64"]["base"]
    total = bits_per_value(bits, 128, 16384) + rates.residual([16384], tokens=1665)
    assert float(total) == RATES["rd_v2_chunk64"]["total"]


def test_rung_rates():
    for level, bits in RATES["level_bits_per_value_group64"].items():
        rung = [16, 8, 4, 2, 1].index(int(level))
        geometry = Geometry(dim=128)
        assert bits_per_value(geometry.block_bits(rung), 128, 64) == Fraction(bits)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_level_histograms_cost_what_the_allocator_said(name):
    measured = MODELS[name]["kernel_layout_measurement"]
    geometry = Geometry(dim=128)
    counts = [measured["level_histogram"][str(level)] for level in (16, 8, 4, 2, 1)]
    bits = sum(count * geometry.block_bits(rung) for rung, count in enumerate(counts))
    assert float(bits_per_value(bits, 128, 64 * sum(counts))) == measured["bits_per_value_allocator"]


def test_a_table_refuses_to_mix_chunk_sizes():
    one, many = rates.kivi(T, key_bits=4, value_bits=4), rates.kivi([16384], key_bits=4, value_bits=4, chunk=64)
    assert rates.common_chunk([one, rates.quest(T)]) == 1
    with pytest.raises(ValueError, match=r"rates have chunk sizes \[1, 64\], expected one size for a table"):
        rates.common_chunk([one, many])


def test_bad_input_is_named():
    shape = CacheShape(1, 1, 1)
    with pytest.raises(ValueError, match=r"bits_per_value is 0"):
        shape.bytes_per_token(0)
    with pytest.raises(ValueError, match=r"context is 0"):
        shape.concurrency(1, 16, 0)
    with pytest.raises(ValueError, match=r"fraction is 1.01, expected a usable share of at most 1"):
        projected_budget(48, 1.01, 0, 0)
    with pytest.raises(ValueError, match=r"lengths is \[\]"):
        rates.quest([])
