"""Attention over ragged heads equals its definition, token by token; buffers that grow keep what was seen."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvverify.models.exact import Exact, Growing, causal_attention


def by_definition(queries, keys, values, scale, valid, window):
    """Float64, one query and head at a time, over an explicit list of slots."""
    kv, group, count, _ = queries.shape
    slots = keys.shape[1]
    out = torch.empty(kv, group, count, values.shape[2], dtype=torch.float64)
    for head in range(kv):
        for i in range(count):
            own = slots - count + i
            seen = [
                slot
                for slot in range(own + 1)
                if (slot >= valid.shape[1] or valid[head, slot]) and (window is None or own - slot < window)
            ]
            for member in range(group):
                logits = keys[head, seen].double() @ queries[head, member, i].double() * scale
                out[head, member, i] = logits.softmax(0) @ values[head, seen].double()
    return out


@given(
    kv=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 2, 7]),
    count=st.sampled_from([1, 2, 5]),
    held=st.sampled_from([0, 1, 6]),
    later=st.sampled_from([0, 3]),
    window=st.sampled_from([None, 1, 4, 99]),
    kept=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_causal_attention_is_softmax_over_valid_slots_up_to_ones_own(kv, group, count, held, later, window, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(kv, group, count, 8, generator=generator)
    keys = torch.randn(kv, held + later + count, 8, generator=generator)
    values = torch.randn(kv, held + later + count, 4, generator=generator)
    valid = torch.rand(kv, held, generator=generator) < kept
    found = causal_attention(queries, keys, values, scale=0.5, valid=valid, window=window)
    expected = by_definition(queries, keys, values, 0.5, valid, window)
    assert float((found - expected).abs().max()) <= 64 * 2.0**-23
    assert found.shape == (kv, group, count, 4)


def test_an_invalid_slot_is_never_read_even_where_it_holds_huge_numbers():
    queries, keys, values = torch.ones(1, 1, 1, 2), torch.ones(1, 3, 2), torch.ones(1, 3, 2)
    keys[0, 0] = 1e30
    valid = torch.tensor([[False, True]])
    assert torch.equal(causal_attention(queries, keys, values, scale=1.0, valid=valid), torch.ones(1, 1, 1, 2))


@given(sizes=st.lists(st.integers(0, 9), max_size=8), spare=st.integers(0, 5))
def test_a_growing_buffer_holds_what_was_appended_and_earlier_views_keep_their_content(sizes, spare):
    start = torch.arange(6.0).view(2, 1, 3)
    growing, expected, views = Growing(start, spare=spare), start, []
    for number, size in enumerate(sizes):
        more = torch.full((2, size, 3), float(number))
        growing.append(more)
        expected = torch.cat([expected, more], 1)
        views.append((growing.view, expected))
    assert growing.length == expected.shape[1]
    for view, content in views:
        assert torch.equal(view, content)
    assert torch.equal(start, torch.arange(6.0).view(2, 1, 3))


def test_an_exact_cache_served_in_parts_equals_served_at_once():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, 9, 4, generator=generator)
    keys, values = torch.randn(2, 2, 9, 4, generator=generator)
    once = Exact(scale=0.5, window=5).serve(queries, keys, values)
    parts = Exact(scale=0.5, window=5)
    served = [parts.serve(queries[:, :, a:b], keys[:, a:b], values[:, a:b]) for a, b in ((0, 2), (2, 3), (3, 9))]
    assert float((torch.cat(served, 2) - once).abs().max()) <= 16 * 2.0**-23
    assert torch.equal(parts.rows[0], keys)


def test_an_empty_cache_says_so():
    with pytest.raises(ValueError, match="the cache is empty, expected a prompt or a token first"):
        _ = Exact(scale=1 / math.sqrt(2)).rows
