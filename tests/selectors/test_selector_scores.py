import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selector_cases import THOROUGH

from kvverify.selectors import scores as module
from kvverify.selectors.scores import attention_mass, attention_rows, group_sum, pool, query_sum, top_indices, top_mask

UNIT = 2.0**-53  # unit roundoff of float64


def assert_declared_order(scores: list[float], order: list[int]) -> None:
    assert order == sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: len(order)]


@given(st.lists(st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 1e300, math.inf]), max_size=40), st.data())
@THOROUGH
def test_scores_rank_descending_and_ties_by_lower_index(values, data):
    count = data.draw(st.integers(0, len(values)))
    order = top_indices(torch.tensor(values, dtype=torch.float64), count)
    assert_declared_order(values, order.tolist())
    assert len(order) == count
    assert top_mask(torch.tensor(values, dtype=torch.float64), count).nonzero().flatten().tolist() == sorted(
        order.tolist()
    )


def test_an_order_that_prefers_the_later_of_equals_is_rejected():
    with pytest.raises(AssertionError):
        assert_declared_order([1.0, 2.0, 2.0], [2, 1, 0])


def test_every_head_can_have_its_own_count():
    mask = top_mask(torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0]]), torch.tensor([2, 1]))
    assert mask.tolist() == [[True, False, True], [True, False, False]]


@pytest.mark.parametrize("count", [-1, 4])
def test_a_count_beyond_the_scores_is_refused(count):
    with pytest.raises(ValueError, match=rf"^count={count} is out of range; expected 0\.\.3$"):
        top_indices(torch.zeros(3), count)


def test_nan_has_no_rank():
    with pytest.raises(ValueError, match="hold NaN"):
        top_indices(torch.tensor([0.0, math.nan]), 1)


def assert_equal_columns_tie(sum_queries) -> None:
    """Positions with the same attention have the same score, wherever they lie in memory."""
    generator = torch.Generator().manual_seed(0)
    for queries, history in itertools.product((5, 32, 33), (37, 100, 101)):
        column = torch.rand(1, 1, queries, 1, generator=generator) * torch.logspace(-6, 0, queries).unsqueeze(1)
        sums = sum_queries(column.expand(1, 1, queries, history).contiguous())
        assert sums.unique().numel() == 1, f"{queries} queries, {history} positions"


def test_equal_columns_get_equal_sums():
    assert_equal_columns_tie(query_sum)


def test_a_sum_whose_order_depends_on_the_column_is_rejected():
    def by_place(rows):
        half = rows.shape[-1] // 2
        return torch.cat([sum(rows[..., :half].unbind(2)), sum(rows[..., half:].flip(2).unbind(2))], dim=-1)

    with pytest.raises(AssertionError):
        assert_equal_columns_tie(by_place)


def assert_blind_to_the_order_of_a_group(add) -> None:
    heads = torch.tensor([1e16, 1.0, -1e16, 3.0], dtype=torch.float64)
    results = {add(heads[list(order)].reshape(1, 4, 1), 1).item() for order in itertools.permutations(range(4))}
    assert len(results) == 1


def test_the_sum_of_a_group_does_not_depend_on_the_order_of_its_heads():
    assert_blind_to_the_order_of_a_group(group_sum)


def test_a_sum_in_the_order_of_the_heads_is_rejected():
    with pytest.raises(AssertionError):
        assert_blind_to_the_order_of_a_group(lambda scores, _: sum(scores.unbind(1)))


def test_heads_of_a_group_are_consecutive():
    assert group_sum(torch.tensor([[[1.0], [3.0], [10.0], [30.0]]]), 2).flatten().tolist() == [4.0, 40.0]


def test_average_pooling_counts_the_zeros_beyond_the_border_and_max_pooling_does_not():
    scores = torch.tensor([3.0, 6.0, 9.0])
    assert pool(scores, 3, "average").tolist() == [9.0, 18.0, 15.0]
    assert pool(-scores, 3, "max").tolist() == [-3.0, -3.0, -6.0]
    assert pool(scores, 5, "average").tolist() == [18.0] * 3
    assert pool(scores[:0], 3, "max").tolist() == []


def test_max_pooling_does_not_commute_with_the_sum_over_a_group():
    heads = torch.tensor([[[4.0, 0.0, 0.0], [0.0, 0.0, 2.0]]])
    sum_first = pool(group_sum(heads, 1), 3, "max").flatten().tolist()
    pooled_first = group_sum(pool(heads, 3, "max"), 1).flatten().tolist()
    assert sum_first == [4.0, 4.0, 2.0]
    assert pooled_first == [4.0, 6.0, 2.0]
    assert torch.equal(pool(group_sum(heads, 1), 3, "average"), group_sum(pool(heads, 3, "average"), 1))


@pytest.mark.parametrize("kernel", [2, 64])
def test_even_kernels_are_refused(kernel):
    with pytest.raises(ValueError, match=f"^kernel={kernel} is even; expected an odd size"):
        pool(torch.zeros(9), kernel, "max")


def plain_rows(queries, keys, scale):
    """Causal softmax in plain Python, one entry at a time."""
    heads, count, _ = queries.shape
    history = keys.shape[1]
    result = torch.zeros(heads, count, history, dtype=torch.float64)
    for h, i in itertools.product(range(heads), range(count)):
        key = keys[h // (heads // keys.shape[0])]
        seen = history - count + i + 1
        logits = [scale * sum(a * b for a, b in zip(queries[h, i].tolist(), key[j].tolist())) for j in range(seen)]
        weights = [math.exp(logit - max(logits)) for logit in logits]
        result[h, i, :seen] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return result


@pytest.mark.parametrize("block", [1, 100, 1 << 24])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "history"), [(4, 2, 3, 9), (7, 1, 6, 6), (2, 2, 0, 5), (2, 1, 0, 0)]
)
def test_attention_rows_are_the_causal_softmax_whatever_the_block(monkeypatch, block, heads, kv_heads, count, history):
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", block)
    generator = torch.Generator().manual_seed(3)
    dim, scale = 5, 0.7
    queries = torch.rand(heads, count, dim, generator=generator, dtype=torch.float64) * 2 - 1
    keys = torch.rand(kv_heads, history, dim, generator=generator, dtype=torch.float64) * 2 - 1
    rows = attention_rows(queries, keys, scale=scale)
    # A logit is at most dim * scale and carries dim + 1 roundings, here and in the oracle, its shift one more; the
    # exponential turns that absolute error into a relative one, and exp, sum and division add history + 4 roundings.
    relative = 2 * UNIT * (2 * (dim + 2) * dim * scale + history + 4)
    expected = plain_rows(queries, keys, scale)
    assert bool(((rows - expected).abs() <= relative * expected).all())  # the future is exactly 0
    total = torch.zeros(heads, history, dtype=torch.float64)
    for row in rows.unbind(1):
        total = total + row
    assert torch.equal(attention_mass(queries, keys, scale=scale), total)


def test_attention_rows_of_half_precision_are_computed_in_fp32():
    queries, keys = torch.full((1, 1, 2), 200.0).half(), torch.tensor([[[200.0, 200.0], [200.0, 199.875]]]).half()
    rows = attention_rows(queries, keys, scale=1.0)
    assert rows.dtype == torch.float32
    assert rows[0, 0, 0] > 0.99  # the logits, 80000 and 79975, have no fp16 form


@pytest.mark.parametrize(
    ("queries", "keys", "message"),
    [
        ((2, 3, 4), (2, 2, 4), "queries has 3 positions; expected at most the 2 of keys"),
        ((3, 1, 4), (2, 2, 4), "2 KV heads, which do not divide the 3 heads"),
        ((2, 1, 4), (2, 2, 5), "expected \\[heads, queries, dim\\] and \\[kv_heads, history, dim\\]"),
    ],
)
def test_attention_rows_refuse_shapes_that_do_not_fit(queries, keys, message):
    with pytest.raises(ValueError, match=message):
        attention_rows(torch.zeros(queries), torch.zeros(keys), scale=1.0)
