import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selector_cases import THOROUGH, kept

from kvverify.selectors import HistoryUnit, bm25
from kvverify.selectors.retrieved import bm25_scores, words

UNIT = 2.0**-53  # unit roundoff of float64


def units_of(*texts_and_lengths: tuple[str, int], gap: int = 0) -> list[HistoryUnit]:
    units, start = [], 0
    for text, length in texts_and_lengths:
        units.append(HistoryUnit(text, start, start + length))
        start += length + gap
    return units


def okapi(documents, query, k1, b):
    """BM25 from the formula."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query:
            df = sum(word in other for other in documents)
            tf = document.count(word)
            if tf:
                idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
                score += idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


def greedy(units, scores, budget):
    tokens = []
    for index in sorted(range(len(units)), key=lambda i: (-scores[i], i)):
        if len(tokens) + units[index].stop - units[index].start > budget:
            break
        tokens += range(units[index].start, units[index].stop)
    return sorted(tokens)


vocabulary = st.sampled_from(["red", "blue", "green", "one"])
documents_drawn = st.lists(st.lists(vocabulary, max_size=6), min_size=1, max_size=7)


@given(documents_drawn, st.lists(vocabulary | st.just("unknown"), max_size=4), st.sampled_from([(1.5, 0.75), (1.2, 0)]))
@THOROUGH
def test_scores_are_the_okapi_formula(documents, query, parameters):
    k1, b = parameters
    if not any(documents):
        assert bm25_scores(documents, query, k1=k1, b=b) == [0.0] * len(documents)
        return
    scores = bm25_scores(documents, query, k1=k1, b=b)
    for score, expected in zip(scores, okapi(documents, query, k1, b), strict=True):
        # a term has about ten roundings and ln(1 + x), x >= 1/15, enlarges those of x at most sixteenfold; both sides
        assert abs(score - expected) <= 2 * UNIT * (10 + 3 * 16 + len(query)) * expected


@given(documents_drawn, st.lists(vocabulary, max_size=3), st.integers(0, 30), st.integers(0, 3))
@THOROUGH
def test_units_are_taken_best_first_until_one_overflows(documents, query, budget, gap):
    units = units_of(*((" ".join(document), len(document)) for document in documents), gap=gap)
    selection = bm25(units, budget=budget, query=" ".join(query), layers=2, kv_heads=3)
    expected = greedy(units, bm25_scores(documents, query), min(budget, units[-1].stop))
    assert kept(selection) == [[expected] * 3] * 2
    assert len(expected) <= budget


@given(documents_drawn, st.lists(vocabulary, min_size=1, max_size=3))
@THOROUGH
def test_equal_units_have_equal_scores(documents, query):
    scores = bm25_scores(documents + documents, query)
    assert scores[: len(documents)] == scores[len(documents) :]


def test_the_earlier_of_equal_units_wins_and_source_order_is_kept():
    units = units_of(("blue", 2), ("red", 3), ("red", 3), ("red red", 2))
    assert kept(bm25(units, budget=5, query="red")) == [[[2, 3, 4, 8, 9]]]


def test_a_unit_that_overflows_ends_the_selection_though_a_shorter_one_would_fit():
    units = units_of(("red red red", 2), ("red", 5), ("blue", 1))
    assert kept(bm25(units, budget=4, query="red")) == [[[0, 1]]]
    assert kept(bm25(units, budget=8, query="red")) == [[list(range(8))]]


@pytest.mark.parametrize("query", ["", "unheard of", "?!"])
def test_a_query_that_matches_nothing_takes_the_earliest_units(query):
    units = units_of(("red", 3), ("blue", 3), ("green", 3))
    assert kept(bm25(units, budget=7, query=query)) == [[[0, 1, 2, 3, 4, 5]]]


def test_sinks_count_in_the_budget_and_are_not_paid_twice():
    units = units_of(("blue", 4), ("green", 3), ("red", 3))
    assert kept(bm25(units, budget=5, query="red", sinks=2)) == [[[0, 1, 7, 8, 9]]]
    assert kept(bm25(units, budget=4, query="blue", sinks=2)) == [[[0, 1, 2, 3]]]
    with pytest.raises(ValueError, match="sinks=5 exceeds budget=4"):
        bm25(units, budget=4, query="red", sinks=5)


def test_tokens_outside_the_units_are_not_kept():
    units = [HistoryUnit("red", 2, 4), HistoryUnit("blue", 6, 7)]
    assert kept(bm25(units, budget=99, query="red", history=12)) == [[[2, 3, 6]]]


def test_no_units_no_words_and_no_budget_keep_nothing():
    assert bm25([], budget=5, query="red").positions.shape == (1, 1, 0)
    assert kept(bm25(units_of(("", 0)), budget=5, query="red")) == [[[]]]
    assert kept(bm25(units_of(("red", 3)), budget=0, query="red")) == [[[]]]


def test_words_are_case_folded_and_keep_single_letters():
    assert words("I saw a RED-ish STRASSE, Straße 7.") == ["i", "saw", "a", "red", "ish", "strasse", "strasse", "7"]


@pytest.mark.parametrize(
    ("units", "changed", "message"),
    [
        ([HistoryUnit("a", 0, 3), HistoryUnit("b", 2, 4)], {}, r"units\[1\] spans 2\.\.4; expected start >= 3"),
        ([HistoryUnit("a", 3, 2)], {}, r"units\[0\] spans 3\.\.2; expected start >= 0 and stop >= start"),
        ([HistoryUnit("a", 0, 3)], {"history": 2}, "history=2 ends before the last unit; expected at least 3"),
        ([HistoryUnit("a", 0, 3)], {"budget": -1}, "budget=-1 is out of range; expected at least 0"),
    ],
)
def test_units_that_overlap_or_leave_the_history_are_refused(units, changed, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        bm25(units, **{"budget": 2, "query": "a", **changed})


def test_a_missing_library_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"pip install 'kvverify\[selectors\]'"):
        bm25(units_of(("red", 1)), budget=1, query="red")
