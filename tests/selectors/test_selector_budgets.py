from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selector_cases import THOROUGH

from kvverify.selectors.budgets import adaptive_budgets, budget_from_share, largest_remainder, pyramid_budgets


def assert_nearest(share: Fraction, history: int, budget: int) -> None:
    """The budget is the nearest whole number to share * history, a half upwards."""
    distance = budget - share * history
    assert -Fraction(1, 2) < distance <= Fraction(1, 2), f"{share} of {history} gave {budget}"


@given(st.integers(0, 100), st.integers(0, 10**6))
@THOROUGH
def test_a_share_becomes_the_nearest_number_of_tokens(percent, history):
    assert_nearest(Fraction(percent, 100), history, budget_from_share(percent / 100, history))


def test_truncation_is_rejected_as_a_conversion_of_shares():
    with pytest.raises(AssertionError):
        assert_nearest(Fraction(1, 10), 10, int(10 * (1 - 0.9)))


@pytest.mark.parametrize(
    ("share", "history", "expected"),
    [(1 - 0.9, 10, 1), (0.15, 10, 2), (0.05, 30, 2), (Fraction(1, 3), 7, 2), (0.01, 40, 0), (0, 5, 0), (1, 5, 5)],
)
def test_a_share_counts_as_the_decimal_it_prints_as(share, history, expected):
    assert budget_from_share(share, history) == expected


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), Fraction(3, 2)])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(ValueError, match=r"^share=.*expected a share in 0\.\.1$"):
        budget_from_share(share, 10)


@pytest.mark.parametrize("share", ["10%", None, True])
def test_a_share_that_is_no_number_is_refused(share):
    with pytest.raises(TypeError, match=r"^share=.*expected a share in 0\.\.1$"):
        budget_from_share(share, 10)


@given(st.lists(st.fractions(0, 50, max_denominator=12), min_size=1, max_size=9))
@THOROUGH
def test_largest_remainder_keeps_the_sum_and_moves_no_quota_by_a_whole_state(quotas):
    quotas.append(-sum(quotas) % 1)
    whole = largest_remainder(quotas)
    assert sum(whole) == sum(quotas)
    assert all(abs(count - quota) < 1 for count, quota in zip(whole, quotas, strict=True))


def test_largest_remainder_serves_the_lower_index_first_and_refuses_a_fractional_sum():
    assert largest_remainder([Fraction(1, 2)] * 4) == (1, 1, 0, 0)
    assert largest_remainder([Fraction(1, 4), Fraction(3, 4), Fraction(1)]) == (0, 1, 1)
    with pytest.raises(ValueError, match="quotas sum to 1/2; expected a whole number"):
        largest_remainder([Fraction(1, 2)])


def plain_pyramid(budget: int, history: int, layers: int, window: int) -> list[int]:
    """The published rounding, written from the formula."""
    if history < budget:
        return [history] * layers
    c = budget - window
    if history < 2 * c:
        return [budget] * layers
    low = c // 20
    high = 2 * c - low
    if high >= history - window:
        high = history - window
        low = 2 * c - high
    step = (high - low) // (layers - 1)
    return [high - layer * step + window for layer in range(layers)]


def assert_budget_kept(counts, budget: int, history: int) -> None:
    assert sum(counts) == len(counts) * min(budget, history)
    assert all(0 <= count <= history for count in counts)


pyramids = st.tuples(st.integers(1, 300), st.integers(2, 40), st.integers(0, 40)).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(min(sizes[2], sizes[0]), 320))
)


@given(pyramids)
@THOROUGH
def test_pyramid_layers_sum_to_the_budget_exactly_and_never_grow(pyramid):
    (history, layers, window), budget = pyramid
    budget = max(budget, window)
    counts = pyramid_budgets(budget, history=history, layers=layers, window=window)
    assert_budget_kept(counts, budget, history)
    assert list(counts) == sorted(counts, reverse=True)
    assert all(count >= min(window, history) for count in counts)


@given(pyramids)
@THOROUGH
def test_the_published_pyramid_is_the_formula_with_its_floor_division(pyramid):
    (history, layers, window), budget = pyramid
    budget = max(budget, window)
    published = pyramid_budgets(budget, history=history, layers=layers, window=window, rounding="published")
    assert list(published) == plain_pyramid(budget, history, layers, window)
    excess = sum(published) - layers * min(budget, history)
    assert 0 <= 2 * excess <= layers * (layers - 2)
    exact = pyramid_budgets(budget, history=history, layers=layers, window=window)
    assert published[0] == exact[0]


def test_the_bound_on_the_published_excess_is_reached():
    counts = pyramid_budgets(20, history=400, layers=4, window=0, rounding="published")
    # c = 20, min = 1, max = 39, step = 38 // 3 = 12: two thirds of a state per layer are not taken off
    assert counts == (39, 27, 15, 3)
    assert sum(counts) - 4 * 20 == 4 * 2 // 2


def test_the_published_roundings_are_rejected_by_the_budget_check():
    with pytest.raises(AssertionError):
        assert_budget_kept(pyramid_budgets(20, history=400, layers=4, window=0, rounding="published"), 20, 400)
    with pytest.raises(AssertionError):
        assert_budget_kept(adaptive_budgets([9, 0, 0], floor_share=0.5, rounding="published"), 3, 100)


def test_one_layer_gets_the_budget_under_both_roundings():
    assert pyramid_budgets(5, history=100, layers=1, window=2) == (5,)
    assert pyramid_budgets(5, history=100, layers=1, window=2, rounding="published") == (5,)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.sampled_from([0, 0.2, 0.3, Fraction(1, 3), 1]),
)
@THOROUGH
def test_adaptive_heads_sum_to_the_layer_and_keep_their_floor(shares, floor_share):
    shares[0] += -sum(shares) % len(shares)  # a layer has heads * c states
    mean = sum(shares) // len(shares)
    counts = adaptive_budgets(shares, floor_share=floor_share)
    assert sum(counts) == sum(shares)
    assert all(count <= max(share, mean) for count, share in zip(counts, shares, strict=True))
    guaranteed = Fraction(str(floor_share)) * mean
    assert all(count > guaranteed - 1 for count in counts)
    published = adaptive_budgets(shares, floor_share=floor_share, rounding="published")
    # at most 1/2 from rounding and 1 from int(), and another from the exact form's own rounding
    assert all(abs(ours - theirs) <= 2 for ours, theirs in zip(counts, published, strict=True))


def test_an_unknown_rounding_and_a_window_beyond_the_budget_are_refused():
    with pytest.raises(ValueError, match="rounding='nearest' is unknown; expected 'exact' or 'published'"):
        pyramid_budgets(5, history=9, layers=2, window=1, rounding="nearest")
    with pytest.raises(ValueError, match="window=6 exceeds budget=5"):
        pyramid_budgets(5, history=9, layers=2, window=6)
