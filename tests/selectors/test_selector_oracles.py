"""Every scored selector against the same rule in plain Python and exact fractions.

Rows are multiples of 1/8, so sums are exact in float64, ties are real ties, and equality can be asked of positions.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selector_cases import THOROUGH, WINDOW, RowsCase, budgets, kept, rows_cases, run

from kvverify.selectors import cam, chunkkv, finch, h2o, snapkv
from kvverify.selectors.merged import merge_probabilities

UNIT = 2.0**-53  # unit roundoff of float64
exact_cases = rows_cases(regimes=("coarse", "equal"), minimum=3).flatmap(
    lambda case: st.tuples(st.just(case), budgets(case.history))
)


def exact(tensor: torch.Tensor):
    return [[[Fraction(x) for x in row] for row in head] for head in tensor.tolist()]


def best(scores, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]


def sum_of_rows(layer, kv_heads, first_row, weights=None):
    """score[kv_head][j]: sum over rows from first_row on, mean over the group."""
    group, queries, history = len(layer) // kv_heads, len(layer[0]), len(layer[0][0])
    weights = weights or [1] * (queries - first_row)
    return [
        [
            sum(
                layer[h * group + g][first_row + i][j] * weight
                for g in range(group)
                for i, weight in enumerate(weights)
            )
            / group
            for j in range(history)
        ]
        for h in range(kv_heads)
    ]


def pooled(scores, kernel: int, pooling: str):
    half, result = kernel // 2, []
    for j in range(len(scores)):
        around = [scores[i] for i in range(j - half, j + half + 1) if 0 <= i < len(scores)]
        result.append(sum(around) / Fraction(kernel) if pooling == "average" else max(around))
    return result


def snap_scores(case, layer, window, kernel, pooling):
    heads = sum_of_rows(layer, case.kv_heads, case.queries - window)
    return [pooled(head[: case.history - window], kernel, pooling) for head in heads]


def window_of(case, budget):
    return min(WINDOW, budget, case.history)


@pytest.mark.parametrize("pooling", ["average", "max"])
@given(exact_cases)
@THOROUGH
def test_snapkv_keeps_what_plain_python_keeps(pooling, drawn):
    case, budget = drawn
    window, total = window_of(case, budget), min(budget, case.history)
    expected = [
        [
            sorted(best(scores, total - window)) + list(range(case.history - window, case.history))
            for scores in snap_scores(case, exact(layer), window, 3, pooling)
        ]
        for layer in case.rows()
    ]
    assert kept(run("snapkv", case, budget, pooling=pooling)) == expected


@given(exact_cases)
@THOROUGH
def test_pyramidkv_keeps_snapkv_of_each_layer_at_its_published_budget(drawn):
    case, budget = drawn
    c, history, layers = budget - window_of(case, budget), case.history, case.layers
    if history <= budget or history < 2 * c or layers == 1:
        counts = [min(budget, history)] * layers
    else:
        high = min(2 * c - c // 20, history - window_of(case, budget))
        step = (high - (2 * c - high)) // (layers - 1)
        counts = [high - layer * step + budget - c for layer in range(layers)]
    selected = kept(run("pyramidkv", case, budget, rounding="published"))
    for layer, count in enumerate(counts):
        alone = RowsCase(history, case.queries, 1, case.kv_heads, case.group, case.regime, case.seed)
        assert selected[layer] == kept(run("snapkv", alone, count, case.rows()[layer : layer + 1]))[0]


@given(exact_cases)
@THOROUGH
def test_chunkkv_takes_whole_chunks_by_mean_and_cuts_the_last(drawn):
    case, budget = drawn
    window, total, chunk = window_of(case, budget), min(budget, case.history), 3
    for layer, heads in zip(case.rows(), kept(run("chunkkv", case, budget, chunk=chunk)), strict=True):
        scores = [sum(column) for column in zip(*snap_scores(case, exact(layer), window, 3, "average"), strict=True)]
        chunks = [list(range(j, min(j + chunk, len(scores)))) for j in range(0, len(scores), chunk)]
        means = [sum(scores[j] for j in members) / len(members) for members in chunks]
        taken = [j for index in best(means, len(chunks)) for j in chunks[index]][: total - window]
        assert heads == [sorted(taken) + list(range(case.history - window, case.history))] * case.kv_heads


def test_a_short_last_chunk_is_scored_by_the_mean_over_itself():
    rows = torch.zeros(1, 1, 1, 9)
    rows[..., :8] = torch.tensor([3.0, 3, 3, 0, 0, 0, 4, 4]) / 8  # chunks 0..2, 3..5 and 6..7; 8 is the window
    assert kept(chunkkv(rows, budget=3, window=1, kernel=1, chunk=3)) == [[[6, 7, 8]]]


@given(exact_cases, st.sampled_from([0, 0.2, Fraction(1, 3), 1]))
@THOROUGH
def test_ada_kv_counts_the_best_of_the_layer_by_head(drawn, floor_share):
    case, budget = drawn
    window, total = window_of(case, budget), min(budget, case.history)
    c, alpha = total - window, Fraction(str(floor_share))
    result = kept(run("ada_kv", case, budget, floor_share=floor_share))
    for layer, heads in zip(case.rows(), result, strict=True):
        scores = snap_scores(case, exact(layer), window, 3, "max")
        entries = [(-score, j, h) for h, head in enumerate(scores) for j, score in enumerate(head)]
        winners = [h for _, _, h in sorted(entries)[: c * case.kv_heads]]
        quotas = [(1 - alpha) * winners.count(h) + alpha * c for h in range(case.kv_heads)]
        counts = [math.floor(quota) for quota in quotas]
        while sum(counts) < c * case.kv_heads:
            missing = max(range(case.kv_heads), key=lambda h: (quotas[h] - counts[h], -h))
            counts[missing] += 1
        for head, scored, count in zip(heads, scores, counts, strict=True):
            assert head == sorted(best(scored, count)) + list(range(case.history - window, case.history))


@pytest.mark.parametrize("normalised", [False, True])
@given(exact_cases)
@THOROUGH
def test_finch_keeps_the_question_and_what_it_reads(normalised, drawn):
    case, budget = drawn
    window, total, history = window_of(case, budget), min(budget, case.history), case.history
    weights = [history - window + i + 1 if normalised else 1 for i in range(window)]
    for layer, heads in zip(case.rows(), kept(run("finch", case, budget, normalised=normalised)), strict=True):
        for head, scores in zip(
            heads, sum_of_rows(exact(layer), case.kv_heads, case.queries - window, weights), strict=True
        ):
            expected = sorted(best(scores[: history - window], total - window))
            assert head == expected + list(range(history - window, history))


def test_finch_weighs_a_row_by_the_positions_it_sees():
    rows = torch.zeros(1, 1, 2, 4)  # the question is 2 and 3, which see 3 and 4 positions
    rows[0, 0, 0, 1], rows[0, 0, 1, 0] = 4 / 8, 3 / 8
    assert kept(finch(rows, budget=3)) == [[[0, 2, 3]]]  # a tie: the lower position, as it is in the mirrored case
    assert kept(finch(rows[..., [1, 0, 2, 3]], budget=3)) == [[[0, 2, 3]]]
    assert kept(finch(rows, budget=3, normalised=False)) == [[[1, 2, 3]]]


@pytest.mark.parametrize("age_corrected", [False, True])
@given(exact_cases)
@THOROUGH
def test_h2o_keeps_the_heavy_half_and_the_recent_half(age_corrected, drawn):
    case, budget = drawn
    total, history = min(budget, case.history), case.history
    recent = total - total // 2
    for layer, heads in zip(case.rows(), kept(run("h2o", case, budget, age_corrected=age_corrected)), strict=True):
        for head, sums in zip(heads, sum_of_rows(exact(layer), case.kv_heads, 0), strict=True):
            seen = [min(case.queries, history - j) if age_corrected else 1 for j in range(history)]
            scores = [total_attention / rows for total_attention, rows in zip(sums, seen, strict=True)]
            expected = sorted(best(scores[: history - recent], total // 2))
            assert head == expected + list(range(history - recent, history))


def test_the_age_correction_lets_a_late_position_win():
    rows = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.3, 0.3, 0.4, 0], [0.1, 0.2, 0.5, 0.2]]])
    # sums 1.9, 1.0, 0.9, 0.2; per row that sees the position 0.475, 0.333, 0.45, 0.2
    assert kept(h2o(rows, budget=3, recent=1)) == [[[0, 1, 3]]]
    assert kept(h2o(rows, budget=3, recent=1, age_corrected=True)) == [[[0, 2, 3]]]


@given(exact_cases, st.integers(0, 5))
@THOROUGH
def test_streaming_llm_keeps_both_ends(drawn, sinks):
    case, budget = drawn
    total = min(budget, case.history)
    if sinks <= total or total in (0, case.history):
        sinks_kept = min(sinks, total)
        expected = [*range(sinks_kept), *range(case.history - total + sinks_kept, case.history)]
        assert kept(run("streaming_llm", case, budget, sinks=sinks)) == [[expected] * case.kv_heads] * case.layers


def test_random_draws_every_position_and_depends_on_the_seed_alone():
    case = RowsCase(20, layers=40)
    first = run("random", case, 5, seed=3)
    assert torch.equal(first.positions, run("random", case, 5, torch.zeros_like(case.rows()), seed=3).positions)
    assert not torch.equal(first.positions, run("random", case, 5, seed=4).positions)
    assert first.positions.unique().tolist() == list(range(20))
    assert not torch.equal(first.positions[0, 0], first.positions[0, 1])


# --- ties ---


def test_equal_pooled_scores_go_to_the_lower_positions():
    rows = torch.zeros(1, 1, 2, 10)
    rows[..., [2, 6]] = 0.5
    assert kept(snapkv(rows, budget=4, window=2, kernel=1)) == [[[2, 6, 8, 9]]]
    assert kept(snapkv(rows, budget=4, window=2, kernel=3)) == [[[1, 2, 8, 9]]]
    assert kept(snapkv(torch.ones(1, 1, 2, 10), budget=4, window=2, kernel=3)) == [[[1, 2, 8, 9]]]  # damped border
    assert kept(snapkv(torch.ones(1, 1, 2, 10), budget=4, window=2, kernel=3, pooling="max")) == [[[0, 1, 8, 9]]]


# --- CaM ---


def plain_cam(rows, values, kv_heads, budget, window, width):
    """Merged values of the kept positions [kv_head][slot][channel], and the terms each was summed from."""
    history = len(rows[0][0])
    total = min(budget, history)
    start = total // 2
    positions = [j for j in range(history) if j < start or j >= history - (total - start)]
    scores = sum_of_rows(rows, kv_heads, len(rows[0]) - min(window, history))
    merged = []
    for head, score in enumerate(scores):
        terms = {i: [list(values[head][i])] for i in positions}
        for j in range(history):
            receivers = [i for i in positions if i > j][:width]
            if j in terms or not receivers:
                continue
            mean = sum(score[i] for i in receivers) / Fraction(len(receivers))
            p = min(Fraction(1), score[j] / mean) if mean else Fraction(score[j] > 0)
            for i in receivers:
                terms[i].append([p * v / len(receivers) for v in values[head][j]])
        merged.append([terms[i] for i in positions])
    return positions, merged


def assert_merged(actual, terms) -> None:
    """Each value against the exact sum of its terms.

    A term carries 4 roundings (ratio, its product with v, the share, and the score's mean), each addition one more.
    """
    for head, slots in enumerate(terms):
        for slot, parts in enumerate(slots):
            for channel, column in enumerate(zip(*parts, strict=True)):
                error = abs(Fraction(actual[head][slot][channel]) - sum(column))
                assert error <= Fraction(UNIT) * (len(column) + 8) * sum(map(abs, column))


@given(exact_cases, st.sampled_from([1, 3, 32]))
@THOROUGH
def test_cam_merges_what_plain_python_merges(drawn, width):
    case, budget = drawn
    values = case.values().double()
    selection = run("cam", case, budget, values=values, width=width)
    for layer in range(case.layers):
        positions, terms = plain_cam(
            exact(case.rows()[layer]), exact(values[layer]), case.kv_heads, budget, WINDOW, width
        )
        assert kept(selection)[layer] == [positions] * case.kv_heads
        assert_merged(selection.values[layer].tolist(), terms)
    assert not bool(selection.log_multiplicity.any())


def test_a_merge_that_forgets_to_share_is_rejected():
    case = RowsCase(12, layers=1, regime="coarse")
    __, terms = plain_cam(exact(case.rows()[0]), exact(case.values()[0]), 2, 6, WINDOW, 3)
    unshared = [
        [[sum(column[1:]) * 3 + column[0] for column in zip(*parts, strict=True)] for parts in head] for head in terms
    ]
    with pytest.raises(AssertionError):
        assert_merged(unshared, terms)


@given(exact_cases)
@THOROUGH
def test_cam_moves_exactly_the_merged_share_of_the_evicted_mass(drawn):
    case, budget = drawn
    values = case.values().double()
    selection = run("cam", case, budget, values=values)
    for layer in range(case.layers):
        positions, terms = plain_cam(exact(case.rows()[layer]), exact(values[layer]), case.kv_heads, budget, WINDOW, 3)
        for head in range(case.kv_heads):
            moved = selection.values[layer, head].sum(0) - values[layer, head, positions].sum(0)
            given_away = [sum(p) for slot in terms[head] for p in zip(*slot[1:], strict=True)]
            expected = [sum(given_away[channel::3]) for channel in range(3)]
            size = sum(abs(x) for slot in terms[head] for part in slot for x in part)
            # A term carries 4 roundings; summing slots adds one for each term and slot, twice for the difference.
            bound = Fraction(UNIT) * (4 + 4 * case.history) * size
            assert all(abs(Fraction(x) - y) <= bound for x, y in zip(moved.tolist(), expected, strict=True))


def test_cam_probability_is_0_without_attention_and_1_where_the_receivers_have_none():
    values = torch.tensor([[[1.0], [8.0], [32.0], [2.0]]])
    rows = torch.tensor([[[0.5, 0.0, 0.5, 0.0]]])
    merged = cam(rows, budget=2, values=values, recent=1, window=1)
    assert kept(merged) == [[[0, 3]]]
    assert merged.values.flatten().tolist() == [1.0, 34.0]  # 8 has no attention, 32 all of it; nothing precedes 0


def test_cam_probability_is_0_for_kept_states_and_where_nothing_follows():
    mask = torch.tensor([True, False, True, False])
    probabilities = merge_probabilities(mask, torch.tensor([[[0.5, 0.25, 0.5, 0.5]]]), 2)
    assert probabilities.flatten().tolist() == [0.0, 0.5, 0.0, 0.0]


def test_cam_keeps_the_dtype_and_every_bit_of_values_that_receive_nothing():
    case = RowsCase(9, regime="coarse")
    values = (case.values() * 0.3).bfloat16()
    selection = run("cam", case, 4, values=values, recent=0, width=2)
    assert kept(selection)[0][0] == [0, 1, 2, 3]  # all kept states come first: nothing follows an evicted one
    assert selection.values.dtype == torch.bfloat16
    assert torch.equal(selection.values, values[:, :, :4])


def test_cam_refuses_values_of_another_shape_and_negative_attention():
    case = RowsCase(9)
    with pytest.raises(
        ValueError, match=r"^values has shape \(2, 2, 8, 3\); expected \(2, 2, 9\) and a value dimension$"
    ):
        run("cam", case, 4, values=case.values()[:, :, :8])
    with pytest.raises(ValueError, match="negative, infinite or NaN"):
        run("cam", case, 4, -case.rows())
