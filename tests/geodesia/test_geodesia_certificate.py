"""The certificate under adversaries. `python test_geodesia_certificate.py 200000` runs the long version."""

import math
import sys

import pytest
import torch
from geodesia_cases import quick
from hypothesis import given
from hypothesis import strategies as st

from kvverify.geodesia.certificate import compare, output_bound, printed, supremum, tightened

FORMS = {"printed": printed, "tightened": tightened, "supremum": supremum}


def trial(generator, form, *, scale_values=1.0):
    """One adversarial cache: (bound, true error), with score moves at their limit, signed to hurt."""
    blocks, tokens, dim = int(torch.randint(1, 7, (1,), generator=generator)), 4, 3
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    query, keys = rand(dim), rand(blocks, tokens, dim) * 2
    values = rand(blocks, tokens, dim) * scale_values
    size = rand(blocks, 1, 1).abs() * 10.0 ** int(torch.randint(-4, 1, (1,), generator=generator))
    size *= (rand(blocks, 1, 1) > -0.5).double()
    # Keys move along the query (the worst direction) for some tokens, against it for the others.
    side = torch.where(rand(blocks, tokens, 1) > 0, 1.0, -1.0)
    moved_keys = keys + side * size * query / query.norm()
    moved_values = values + 0.3 * size * rand(blocks, tokens, dim) * scale_values
    exact = (keys @ query).flatten().softmax(0)
    weight = (moved_keys @ query).flatten().softmax(0)
    error = (exact @ values.flatten(0, 1) - weight @ moved_values.flatten(0, 1)).norm()
    bound = output_bound(
        weight.reshape(blocks, tokens).sum(1),
        (moved_keys - keys).norm(dim=2).amax(1),
        (moved_values - values).norm(dim=2).amax(1),
        query_norm=float(query.norm()),
        scale=1.0,
        radius=float((values - values.mean((0, 1))).norm(dim=2).max()),
        form=form,
    )
    return bound, float(error)


def trials(count, form, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.tensor([trial(generator, form) for _ in range(count)], dtype=torch.float64)
    # Below 2^-40 of the values the errors are the roundoff of this test's own softmax.
    real = pairs[:, 1] > 2.0**-40
    return compare(pairs[real, 0], pairs[real, 1])


@pytest.mark.parametrize(("form", "count"), [("printed", 700), ("tightened", 900), ("supremum", 400)])
def test_certificate_is_never_violated(form, count):
    result = trials(count, FORMS[form])
    assert result.checked > 0.9 * count
    assert result.violations == 0
    assert result.smallest >= 1


def distributions(data):
    blocks = data.draw(st.integers(1, 6))
    raw = data.draw(st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 3.0]), min_size=blocks, max_size=blocks))
    weight = torch.tensor(raw, dtype=torch.float64)
    weight[0] += 0.1
    sizes = st.sampled_from([0.0, 1e-9, 1e-3, 0.3, 2.0, 20.0, 100.0])
    epsilon = torch.tensor(data.draw(st.lists(sizes, min_size=blocks, max_size=blocks)), dtype=torch.float64)
    return weight / weight.sum(), epsilon


@quick(150)
@given(st.data())
def test_supremum_is_at_most_tightened_is_at_most_printed(data):
    weight, epsilon = distributions(data)
    # Each form is a few dozen operations: 2^-40 relative is far above their roundoff.
    slack = 1 + 2.0**-40
    assert supremum(weight, epsilon) <= tightened(weight, epsilon) * slack
    assert tightened(weight, epsilon) <= printed(weight, epsilon) * slack
    assert printed(weight, epsilon) <= 2


def brute_force(weight, epsilon, grid=400):
    """max over vertices with at most one fractional block of true mass - compressed mass, doubled."""
    blocks = len(weight)
    best = 0.0
    for chosen in range(2**blocks):
        x = torch.tensor([(chosen >> b) & 1 for b in range(blocks)], dtype=torch.float64)
        for fractional in range(blocks):
            share = x.repeat(grid + 1, 1)
            share[:, fractional] = torch.linspace(0, 1, grid + 1, dtype=torch.float64)
            up = (weight * share * epsilon.exp()).sum(1)
            down = (weight * (1 - share) * (-epsilon).exp()).sum(1)
            best = max(best, float((up / (up + down) - (weight * share).sum(1)).max()))
    return 2 * best


@pytest.mark.parametrize("seed", range(6))
def test_supremum_is_reached_by_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(4, generator=generator, dtype=torch.float64)
    weight /= weight.sum()
    epsilon = torch.rand(4, generator=generator, dtype=torch.float64) * [0.01, 0.5, 3][seed % 3]
    exact, found = supremum(weight, epsilon), brute_force(weight, epsilon)
    assert found <= exact * (1 + 2.0**-40)
    # The grid of 1/400 in one share misses the optimum by a second-order amount, under 1e-4 of it.
    assert found >= exact * (1 - 1e-4)


def test_without_a_demotion_every_form_is_zero():
    weight, epsilon = torch.tensor([0.25, 0.75]), torch.zeros(2)
    assert [form(weight, epsilon) for form in FORMS.values()] == [0, 0, 0]


def test_a_hard_masked_page_leaves_only_the_cap():
    weight, epsilon = torch.tensor([1.0, 0.0]), torch.tensor([0.0, math.inf])
    assert [form(weight, epsilon) for form in FORMS.values()] == [2, 2, 2]


def test_printed_form_equals_its_formula():
    weight, epsilon = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([0.5, 0.125], dtype=torch.float64)
    plus, minus = float((weight * epsilon.exp()).sum()), float((weight * (-epsilon).exp()).sum())
    # M+/M- - M-/M+ loses about two digits to cancellation: 2^-46 leaves a factor of two.
    assert abs(printed(weight, epsilon) - (plus / minus - minus / plus)) <= 2.0**-46


def test_scaling_the_values_scales_bound_and_error_alike():
    for exponent in (-20, 10):
        factor = 2.0**exponent
        for seed in range(20):
            plain = trial(torch.Generator().manual_seed(seed), tightened)
            scaled = trial(torch.Generator().manual_seed(seed), tightened, scale_values=factor)
            # Powers of two commute with every rounding.
            assert scaled == (plain[0] * factor, plain[1] * factor)


def test_compare_counts_what_it_checked_and_finds_a_violation():
    result = compare(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.5, 2.0, 1.0]))
    assert (result.checked, result.violations, result.smallest) == (3, 1, 0.5)
    nan = compare(torch.tensor([math.nan]), torch.tensor([1.0]))
    assert nan.violations == 1
    with pytest.raises(ValueError, match=r"expected at least one"):
        compare(torch.empty(0), torch.empty(0))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"weight sums to 0.5, expected a distribution"):
        tightened(torch.tensor([0.5]), torch.tensor([0.0]))
    with pytest.raises(ValueError, match=r"epsilon contains -1.0"):
        tightened(torch.tensor([1.0]), torch.tensor([-1.0]))


if __name__ == "__main__":
    for name, form in FORMS.items():
        print(name, trials(int(sys.argv[1]), form, seed=1))
