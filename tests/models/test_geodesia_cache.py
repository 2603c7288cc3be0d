"""Geodesia-KV on models: at 16 bits it is the exact cache; below, what the packed store holds, however it is fed."""

from itertools import pairwise

import pytest
import torch
from model_cases import exact_caches, floor, median_difference, model, text

from kvverify.geodesia.baselines import Full
from kvverify.models.attention_layers import attention_layers
from kvverify.models.geodesia_cache import GeodesiaCache, geodesia_caches, resident_bits
from kvverify.models.serving import serving

FAMILIES = ("llama", "qwen2_yarn", "qwen3", "gemma3", "glm4")
LENGTH, QUESTION = 44, 9


def packed(net, budget, **options):
    return geodesia_caches(net, budget=budget, block=8, group=8, window=8, observed=8, **options)


def rounded(net):
    """The exact cache with rows in bfloat16, where the model keeps all rows."""
    layers = zip(attention_layers(net), exact_caches(net), strict=True)
    return [exact if layer.window is not None else Full(scale=layer.scale) for layer, exact in layers]


def said(net, rows, tokens, *, chunk=None, at_a_time=None):
    """Logits [rows, n, vocab] of the question and greedy answers."""
    with serving(net, rows, observed=8) as served:
        served.prefill(tokens[:LENGTH], chunk=chunk)
        parts = tokens[LENGTH:].split(at_a_time or QUESTION)
        logits = torch.cat([served(part) for part in parts], 1)
        return logits, served.generate(8)


@pytest.mark.parametrize("name", FAMILIES)
def test_at_16_bits_it_is_the_exact_cache_bit_for_bit(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    logits, answers = said(net, [packed(net, 16.0), rounded(net), exact_caches(net)], tokens)
    assert float((logits[0] - logits[1]).abs().max()) <= 64 * 2.0**-23 * float(logits[1].abs().max())
    assert answers[0] == answers[1]
    # Nor are the 16-bit rows far from the model's own: 2^-9 relative in each key and value.
    targets = tokens[LENGTH + 1 :]
    assert 0 < median_difference(logits[0, :-1], logits[2, :-1], targets) < 0.2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chunked_prompt_and_a_streamed_question_leave_levels_and_answers_alone(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    one, other = (packed(net, 5.0, residual_fraction=0.05) for _ in range(2))
    logits, answers = said(net, [one], tokens)
    streamed, answers_streamed = said(net, [other], tokens, chunk=13, at_a_time=1)
    assert answers == answers_streamed
    levels = [[c.decoder.cache.level for c in caches if isinstance(c, GeodesiaCache)] for caches in (one, other)]
    for mine, theirs in zip(*levels, strict=True):
        assert torch.equal(mine, theirs)
        assert (mine > 0).any(), "nothing was compressed"
    # Rounding keys to 16 bits makes two right forwards that differ in their last bits differ more: the exact cache
    # with rows in bfloat16, fed in the same two ways, is what the policy may be compared with.
    exact, _ = said(net, [rounded(net)], tokens)
    exact_streamed, _ = said(net, [rounded(net)], tokens, chunk=13, at_a_time=1)
    targets = tokens[LENGTH + 1 :]
    peer = median_difference(exact[0, :-1], exact_streamed[0, :-1], targets)
    moved = median_difference(logits[0, :-1], streamed[0, :-1], targets)
    assert moved <= 3 * peer + floor(net, tokens, LENGTH)


def test_fewer_bits_of_budget_are_fewer_bits_in_the_buffers():
    net, tokens = model("llama"), text("llama", LENGTH + QUESTION)
    rows = [packed(net, budget) for budget in (16.0, 8.0, 5.0)]
    said(net, rows, tokens)
    bits = [resident_bits(row) for row in rows]
    assert all(more > less for more, less in pairwise(bits)), bits
    tokens_held = LENGTH + QUESTION + 7  # the last token said has not been read
    values = 2 * tokens_held * 16 * net.config.num_key_value_heads * net.config.num_hidden_layers
    assert bits[0] == 16 * values


@pytest.mark.parametrize("name", ["deepseek_v2", "kimi_linear"])
def test_latents_are_refused(name):
    with pytest.raises(ValueError, match=r"layer \d caches latents, expected keys and values of their own"):
        geodesia_caches(model(name), budget=4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": -3}, "sinks is -3, expected a number of tokens of at least 0"),
        ({"window": 2.5}, "window is 2.5, expected a number of tokens of at least 0"),
        ({"observed": 0}, "observed is 0, expected a number of tokens of at least 1"),
        ({"budget": -1}, "budget is -1, expected a number above 0"),
        ({"budget": float("nan")}, "budget is nan, expected a number above 0"),
        ({"budget": "4.5"}, "budget is '4.5', expected a number above 0"),
        ({"decay": 5.0}, "decay is 5.0, expected a number of at least 0 and at most 1"),
        ({"residual_fraction": 2.0}, "residual_fraction is 2.0, expected a number of at least 0 and at most 1"),
        ({"page_fraction": 0.0}, "page_fraction is 0.0, expected a number above 0 and at most 1"),
        ({"allocator": "greedy"}, "allocator is 'greedy', expected one of budget, hull"),
        ({"residual_form": "x"}, "residual_form is 'x', expected one of paper, pooled"),
    ],
)
def test_settings_that_make_no_policy_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        geodesia_caches(model("llama"), **{"budget": 5.0, "block": 8, "group": 8} | options)
