"""What holds for every selector that reads attention rows, and the known-bad variant that each check rejects."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selector_cases import SCORED_BY_WINDOW, SMALL, THOROUGH, WINDOW, RowsCase, budgets, kept, rows_cases, run
from torch.utils._python_dispatch import TorchDispatchMode

from kvverify.selectors import by_name, pyramid_budgets
from kvverify.selectors.scores import attention_mass, attention_rows, window_scores

every_selector = pytest.mark.parametrize("name", SMALL)
every_window_selector = pytest.mark.parametrize("name", SCORED_BY_WINDOW)
cases_with_budget = rows_cases().flatmap(lambda case: st.tuples(st.just(case), budgets(case.history)))


# --- the budget ---


def assert_budget_met(name: str, counts: torch.Tensor, budget: int, history: int) -> None:
    """Every head keeps the budget: in the mean over layers for pyramidkv, over the heads of a layer for ada_kv."""
    averaged = {"pyramidkv": (0,), "ada_kv": (1,)}.get(name, ())
    size = 1
    for axis in averaged:
        size, counts = size * counts.shape[axis], counts.sum(dim=axis)
    assert counts.unique().tolist() == [size * min(budget, history)], f"{name}: {counts.tolist()}"


@every_selector
@given(cases_with_budget)
@THOROUGH
def test_the_budget_is_met_exactly_under_ties_and_huge_scores(name, drawn):
    case, budget = drawn
    selection = run(name, case, budget)
    assert_budget_met(name, selection.counts, budget, case.history)
    assert selection.provenance.budget == budget
    assert selection.provenance.history == case.history


@every_selector
@pytest.mark.parametrize("history", [0, 1, 2, 13])
def test_budget_0_keeps_nothing_and_a_budget_of_the_history_keeps_everything(name, history):
    case = RowsCase(history, queries=13)  # more rows than positions do not matter
    everything = [[list(range(history))] * case.kv_heads] * case.layers
    assert kept(run(name, case, 0)) == [[[]] * case.kv_heads] * case.layers
    for budget in (max(history, 1), history + 5):
        assert kept(run(name, case, budget)) == everything


@pytest.mark.parametrize("name", ["pyramidkv", "ada_kv"])
def test_the_published_roundings_are_rejected_by_the_budget_check(name):
    case = RowsCase(60, layers=4, kv_heads=3, regime="coarse", seed=2)
    assert_budget_met(name, run(name, case, 18).counts, 18, 60)
    with pytest.raises(AssertionError):
        assert_budget_met(name, run(name, case, 18, rounding="published").counts, 18, 60)


def test_a_truncated_share_is_rejected_by_the_budget_check():
    with pytest.raises(AssertionError):
        assert_budget_met("snapkv", run("snapkv", RowsCase(10), int(10 * (1 - 0.9))).counts, 1, 10)


# --- the protected window ---


def assert_window_kept(positions: list[list[list[int]]], history: int) -> None:
    window = set(range(history - WINDOW, history))
    assert all(window <= set(head) for layer in positions for head in layer)


@every_window_selector
@given(cases_with_budget)
@THOROUGH
def test_the_window_is_kept_under_ties_and_huge_scores(name, drawn):
    case, budget = drawn
    if min(budget, case.history) >= WINDOW:
        assert_window_kept(kept(run(name, case, budget)), case.history)


def test_a_window_protected_by_the_maximum_plus_one_is_rejected():
    scores = torch.full((1, 1, 9), 256.0, dtype=torch.bfloat16)
    scores[..., -WINDOW:] = scores.max() + 1  # 257 has no bfloat16 form
    best = torch.sort(scores, descending=True, stable=True).indices[..., :4].sort().values
    with pytest.raises(AssertionError):
        assert_window_kept(best.tolist(), 9)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [(name, {"window": 6}, "window=6 exceeds budget=5") for name in SCORED_BY_WINDOW]
    + [
        ("streaming_llm", {"sinks": 6}, "sinks=6 exceeds budget=5"),
        ("h2o", {"recent": 6}, "recent=6 exceeds budget=5"),
        ("cam", {"recent": 6}, "recent=6 exceeds budget=5"),
    ],
)
def test_protected_states_beyond_the_budget_are_refused(name, parameters, message):
    with pytest.raises(ValueError, match=f"^{message}; expected the protected states to fit in the budget$"):
        run(name, RowsCase(9, queries=6), 5, **parameters)


# --- source order ---


def assert_source_order(positions: list[list[list[int]]]) -> None:
    assert all(head == sorted(set(head)) for layer in positions for head in layer)


@every_selector
@given(cases_with_budget)
@THOROUGH
def test_positions_are_kept_in_source_order(name, drawn):
    case, budget = drawn
    assert_source_order(kept(run(name, case, budget)))


def test_the_order_of_top_k_is_rejected_by_the_order_check():
    scores = window_scores(RowsCase(12).rows(), 2, WINDOW)
    with pytest.raises(AssertionError):
        assert_source_order(scores.topk(5).indices.tolist())


# --- groups of query heads ---


def assert_blind_to_the_order_in_a_group(select, case: RowsCase) -> None:
    grouped = case.rows().unflatten(1, (case.kv_heads, case.group))
    for shift in range(case.group):
        assert kept(select(grouped.roll(shift, dims=2).flatten(1, 2))) == kept(select(grouped.flatten(1, 2)))


@every_selector
@given(cases_with_budget)
@THOROUGH
def test_the_order_of_the_heads_in_a_group_does_not_matter(name, drawn):
    case, budget = drawn
    assert_blind_to_the_order_in_a_group(lambda rows: run(name, case, budget, rows), case)


def test_the_first_head_speaking_for_its_group_is_rejected():
    case = RowsCase(20)
    with pytest.raises(AssertionError):
        assert_blind_to_the_order_in_a_group(
            lambda rows: by_name["snapkv"](rows[:, :: case.group], budget=6, **SMALL["snapkv"]), case
        )


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("ada_kv", "chunkkv", "random")])
def test_a_kv_head_does_not_see_the_others(name):
    case = RowsCase(20, layers=1, kv_heads=2, group=2)
    first = run(name, replace(case, kv_heads=1), 6, case.rows()[:, :2], **_values_of_first_head(name, case))
    assert kept(run(name, case, 6))[0][0] == kept(first)[0][0]


def _values_of_first_head(name: str, case: RowsCase) -> dict[str, object]:
    return {"values": case.values()[:, :1]} if name == "cam" else {}


@every_selector
def test_a_missing_layers_axis_is_one_layer(name):
    case = RowsCase(11, layers=1)
    changed = {"values": case.values()[0]} if name == "cam" else {}
    assert kept(run(name, case, 4, case.rows()[0], **changed)) == kept(run(name, case, 4))


# --- no state ---


def assert_no_state(make) -> None:
    """Two prompts of different length give the same in either order."""
    one, other = RowsCase(40, layers=3, queries=5, seed=1), RowsCase(15, layers=3, queries=5, seed=2)
    forward, backward = make(), make()
    first, second = forward(one), forward(other)
    assert backward(other) == second
    assert backward(one) == first
    assert forward(one) == first


@every_selector
def test_a_call_leaves_nothing_for_the_next(name):
    before = torch.random.get_rng_state()
    assert_no_state(lambda: lambda case: kept(run(name, case, 9)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_pyramid_that_remembers_its_first_budgets_is_rejected():
    def make():
        remembered: list[tuple[int, ...]] = []

        def select(case):
            if not remembered:
                remembered.append(pyramid_budgets(9, history=case.history, layers=case.layers, window=WINDOW))
            return remembered[0]

        return select

    with pytest.raises(AssertionError):
        assert_no_state(make)


@every_selector
def test_the_inputs_are_left_as_they_are(name):
    case = RowsCase(17)
    rows, values = case.rows(), case.values()
    run(name, case, 6, rows, **({"values": values} if name == "cam" else {}))
    assert torch.equal(rows, case.rows())
    assert torch.equal(values, case.values())


# --- memory ---


class LargestTensor(TorchDispatchMode):
    """Remembers the number of entries of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [value for value in torch.utils._pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
        self.entries = max([self.entries, *(tensor.numel() for tensor in tensors)])
        return result


def assert_linear_memory(select, history: int) -> None:
    """No tensor of more than 16 entries per position; the rows of these tests have 8."""
    with LargestTensor() as largest:
        select(history)
    assert 0 < largest.entries <= 16 * history


LONG = RowsCase(100_000, layers=1, kv_heads=1, group=2, queries=4)


@every_selector
def test_a_history_of_100000_takes_linear_memory(name):
    assert_linear_memory(lambda history: run(name, replace(LONG, history=history), 2048), LONG.history)


@pytest.mark.parametrize("read", [attention_rows, attention_mass])
def test_attention_over_100000_keys_takes_linear_memory(read):
    assert_linear_memory(lambda history: read(torch.ones(2, 8, 4), torch.ones(1, history, 4), scale=0.5), LONG.history)


def test_a_ranking_by_pairs_is_rejected_by_the_memory_check():
    def ranks(history):
        scores = torch.rand(history, generator=torch.Generator().manual_seed(0))
        return (scores.unsqueeze(0) > scores.unsqueeze(1)).sum(dim=1)

    with pytest.raises(AssertionError):
        assert_linear_memory(ranks, 100)


# --- what is refused ---


@every_selector
@pytest.mark.parametrize(
    ("rows", "changed", "error", "message"),
    [
        (torch.zeros(2, 3, 4, 9), {"budget": 2.0}, TypeError, "budget=2.0 is a float; expected a number of states"),
        (torch.zeros(2, 3, 4, 9), {"budget": True}, TypeError, "budget=True is a bool; expected an int"),
        (torch.zeros(2, 3, 4, 9), {"budget": -1}, ValueError, "budget=-1 is out of range; expected at least 0"),
        (torch.zeros(2, 3, 4, 9), {"kv_heads": 2}, ValueError, "kv_heads=2 does not divide the 3 heads of rows"),
        (torch.zeros(2, 3, 4, 9), {"kv_heads": 0}, ValueError, "kv_heads=0 is out of range; expected at least 1"),
        (torch.zeros(4, 9), {}, ValueError, "rows is torch.float32 of shape (4, 9); expected floating point"),
        (torch.zeros(3, 4, 9).long(), {}, ValueError, "rows is torch.int64 of shape (3, 4, 9); expected floating"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(name, rows, changed, error, message):
    arguments = {"budget": 4, **SMALL[name], **changed}
    if name == "cam":
        arguments["values"] = torch.zeros(2, 3, 9, 1) if rows.ndim == 4 else torch.zeros(3, 9, 1)
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        by_name[name](rows, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["h2o", "cam", *SCORED_BY_WINDOW])
@pytest.mark.parametrize("budget", [4, 9])
def test_nan_scores_are_refused_even_where_everything_is_kept(name, budget):
    rows = RowsCase(9).rows()
    rows[0, 0, -1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"hold .*NaN"):
        run(name, RowsCase(9), budget, rows)


@pytest.mark.parametrize("name", ["cam", *SCORED_BY_WINDOW])
def test_a_window_without_its_rows_is_refused(name):
    with pytest.raises(ValueError, match=r"^rows has 3 queries; expected at least window=4$"):
        run(name, RowsCase(9, queries=3), 5, window=4)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "chunkkv", "ada_kv"])
def test_even_kernels_unknown_poolings_and_empty_windows_are_refused(name):
    for changed, message in (
        ({"kernel": 4}, "kernel=4 is even; expected an odd size"),
        ({"pooling": "sum"}, "pooling='sum' is unknown; expected 'average' or 'max'"),
        ({"window": 0}, "window=0 is out of range; expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            run(name, RowsCase(9), 5, **changed)


def test_the_registry_names_its_functions_and_cannot_be_changed():
    assert all(function.__name__ == name for name, function in by_name.items())
    with pytest.raises(TypeError):
        by_name["snapkv"] = partial(by_name["snapkv"], window=1)
