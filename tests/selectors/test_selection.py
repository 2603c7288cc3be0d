import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selector_cases import THOROUGH

from kvverify.selectors import Provenance, Selection, gather
from kvverify.selectors.selection import from_mask


def selection(positions, history=9, **changed) -> Selection:
    tensor = torch.as_tensor(positions)
    arguments = {
        "positions": tensor,
        "log_multiplicity": torch.zeros(tensor.shape),
        "provenance": Provenance("by hand", 3, history),
    }
    return Selection(**{**arguments, **changed})


def test_a_ragged_selection_counts_its_states_and_marks_its_padding():
    ragged = selection([[[0, 4, 8], [5, -1, -1], [-1, -1, -1]]])
    assert ragged.counts.tolist() == [[3, 1, 0]]
    assert ragged.valid.tolist() == [[[True, True, True], [True, False, False], [False, False, False]]]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[[4, 0]]], "ascending"),  # the order of top-k, as SnapKV keeps it
        ([[[4, 4]]], "ascending"),
        ([[[-1, 4]]], "padding on the right"),
        ([[[0, 9]]], r"expected -1 or 0\.\.8"),
        ([[[0, -2]]], r"expected -1 or 0\.\.8"),
        ([[0, 1]], r"expected int64 \[layers, heads, slots\]"),
        ([[[0.0, 1.0]]], "expected int64"),
    ],
)
def test_positions_out_of_order_or_range_cannot_become_a_selection(positions, message):
    with pytest.raises(ValueError, match=message):
        selection(positions)


@pytest.mark.parametrize("name", ["values", "log_multiplicity"])
def test_companions_of_another_shape_cannot_become_a_selection(name):
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        selection([[[0, 1]]], **{name: torch.zeros(1, 1, 3, 2)})


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
@THOROUGH
def test_a_mask_becomes_its_true_positions_in_order(heads):
    result = from_mask(torch.tensor([heads]), "by mask", 1, parameters={})
    expected = [[index for index, keep in enumerate(head) if keep] for head in heads]
    slots = max(len(head) for head in expected)
    assert result.positions.tolist() == [[head + [-1] * (slots - len(head)) for head in expected]]
    assert not bool(result.log_multiplicity.any())


def test_gather_moves_rows_bit_for_bit_and_fills_the_padding():
    keys = torch.randn(1, 2, 9, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    values = torch.arange(18.0).reshape(1, 2, 9, 1)
    keys[:, :, 0] = torch.nan  # the row that an unmasked -1 would read
    kept_keys, kept_values = gather(selection([[[2, 5, 8], [7, -1, -1]]]), keys, values, fill=-3.0)
    assert torch.equal(kept_keys[0, 0], keys[0, 0, [2, 5, 8]])
    assert torch.equal(kept_keys[0, 1, 0], keys[0, 1, 7])
    assert kept_keys[0, 1, 1:].tolist() == [[-3.0] * 3] * 2
    assert kept_values.flatten().tolist() == [2.0, 5.0, 8.0, 16.0, -3.0, -3.0]
    assert kept_keys.dtype == torch.bfloat16


def test_gather_returns_merged_values_in_place_of_the_cache():
    merged = selection([[[1, 2], [3, -1]]], values=torch.tensor([[[[5.0], [6.0]], [[7.0], [0.0]]]]))
    _, kept_values = gather(merged, torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 9, 1), fill=-1.0)
    assert kept_values.flatten().tolist() == [5.0, 6.0, 7.0, -1.0]


def test_gather_refuses_a_cache_of_another_history():
    with pytest.raises(ValueError, match=r"^values has shape \(1, 1, 8, 2\); expected \(1, 1, 9\)"):
        gather(selection([[[0]]]), torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 8, 2))


def test_an_empty_history_is_gathered_to_nothing():
    kept_keys, kept_values = gather(
        selection(torch.zeros(2, 3, 0, dtype=torch.int64), history=0), torch.zeros(2, 3, 0, 4), torch.zeros(2, 3, 0, 5)
    )
    assert kept_keys.shape == (2, 3, 0, 4)
    assert kept_values.shape == (2, 3, 0, 5)
