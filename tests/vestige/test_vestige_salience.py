"""Section 4.1 of the paper: what sigma is, in both forms, and what it does not see."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vestige_cases import UNIT, UNIT_FP32, gaussian, growth

from kvverify.vestige import salience
from kvverify.vestige.salience import low_band_basis, salience_by_projection

FORMS = pytest.mark.parametrize("form", [salience, salience_by_projection])
windows = st.sampled_from([2, 3, 4, 5, 7, 8, 15, 16, 31, 33, 64, 97, 128])


def form_error(window: Tensor, bandwidth: int, unit: float = UNIT) -> float:
    """Bound on the error of one sigma, either form.

    Projection: each coefficient errs by gamma_W ||r_c|| and a row of A has 1-norm at most sqrt(K). Transform: two
    passes of log2 W stages, each a few units of the norm; a prime W goes through three transforms of up to 4 W
    (Bluestein).
    """
    rows, columns = window.shape[0], 2 * bandwidth - 1
    stages = 16 * (math.log2(4 * rows) + 1)
    scale = float(window.double().norm())
    return (2 * math.sqrt(columns) * growth(rows + columns + 8, unit) + stages * unit) * scale


def tone(window: int, bin_number: int, *, phase: float = 0.3) -> Tensor:
    """A cosine in exactly one bin, as a one-channel branch[window, 1]."""
    angle = 2 * math.pi * (torch.arange(window) * bin_number % window).double() / window
    return torch.cos(angle + phase)[:, None]


@given(windows, st.data())
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
def test_closed_form_equals_transform_form(window: int, data: st.DataObject) -> None:
    bandwidth = data.draw(st.integers(1, window // 2))
    branch = gaussian(window, 5, seed=window)
    gap = salience(branch, bandwidth=bandwidth, block=None) - salience_by_projection(
        branch, bandwidth=bandwidth, block=None
    )
    assert gap.abs().max() <= 2 * form_error(branch, bandwidth)


@given(windows, st.data())
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
def test_squares_sum_to_the_energy_above_the_band(window: int, data: st.DataObject) -> None:
    """Parseval, with the bins that a real transform stores once counted twice, on odd and even windows."""
    bandwidth = data.draw(st.integers(1, window // 2))
    branch = gaussian(window, 3, seed=window + 1)
    power = torch.fft.fft(branch, dim=0).abs().square().sum(dim=1) / window
    bins = torch.arange(window)
    energy = power[torch.minimum(bins, window - bins) >= bandwidth].sum()
    sigma = salience(branch, bandwidth=bandwidth, block=None)
    # |sum of (s + e)^2 - s^2| <= 2 e sum s + W e^2, and sum s <= sqrt(W) ||R||; twice: both sides are computed.
    error = form_error(branch, bandwidth)
    bound = 2 * (2 * error * math.sqrt(window) * float(branch.norm()) + window * error**2)
    assert abs(float(sigma.square().sum() - energy)) <= bound


@FORMS
@pytest.mark.parametrize("window", [16, 17, 64, 65])
def test_the_band_edge_is_exclusive_below_and_inclusive_above(form: object, window: int) -> None:
    bandwidth = 5
    low, high = tone(window, bandwidth - 1), tone(window, bandwidth)
    error = form_error(high, bandwidth) + 4 * UNIT
    assert salience_of(form, low, bandwidth).max() <= error
    assert (salience_of(form, high, bandwidth) - high.abs()[:, 0]).abs().max() <= error


@FORMS
@pytest.mark.parametrize("window", [24, 25])
def test_a_signal_below_the_band_is_invisible(form: object, window: int) -> None:
    branch = gaussian(window, 4, seed=3)
    trend = low_band_basis(window, 6) @ gaussian(11, 4, seed=4) * 10
    gap = salience_of(form, branch + trend, 6) - salience_of(form, branch, 6)
    assert gap.abs().max() <= 2 * form_error(branch, 6) + form_error(trend, 6)


@FORMS
def test_sigma_is_homogeneous_and_shifts_with_its_rows(form: object) -> None:
    branch = gaussian(21, 4, seed=5)
    sigma, error = salience_of(form, branch, 4), form_error(branch, 4)
    assert torch.equal(salience_of(form, branch * 8, 4), 8 * sigma)  # a power of two commutes with rounding
    assert (salience_of(form, branch * -3, 4) - 3 * sigma).abs().max() <= 8 * error
    assert (salience_of(form, branch.roll(6, dims=0), 4) - sigma.roll(6)).abs().max() <= 2 * error


def test_bandwidth_one_removes_the_mean() -> None:
    branch = gaussian(19, 3, seed=6)
    gap = salience(branch, bandwidth=1, block=None) - (branch - branch.mean(dim=0)).norm(dim=1)
    assert gap.abs().max() <= 2 * form_error(branch, 1)


@FORMS
@pytest.mark.parametrize(("window", "bandwidth"), [(8, 5), (9, 5), (1, 1), (2, 2)])
def test_beyond_half_the_window_sigma_is_exactly_zero(form: object, window: int, bandwidth: int) -> None:
    assert torch.equal(salience_of(form, gaussian(window, 2), bandwidth), torch.zeros(window, dtype=torch.float64))


@FORMS
def test_at_half_the_window_the_highest_bin_is_left(form: object) -> None:
    alternating = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)[:, None]
    assert (salience_of(form, alternating, 4) - 1).abs().max() <= form_error(alternating, 4)


@FORMS
def test_a_closed_block_keeps_its_bits_whatever_follows(form: object) -> None:
    pool = gaussian(48, 20, seed=7, dtype=torch.float32)
    branch = pool[:, 13:]
    whole = salience_of(form, branch, 4, block=16)
    for closed in (16, 32, 48):
        assert torch.equal(salience_of(form, branch[:closed], 4, block=16), whole[:closed])
        assert torch.equal(
            salience_of(form, branch[closed - 16 : closed].clone(), 4, block=16), whole[closed - 16 : closed]
        )


def test_the_prefix_form_is_another_operator() -> None:
    """Appending rows moves its values, and the block form is not its restriction: control for the test above."""
    branch = gaussian(64, 4, seed=8)
    prefix = salience(branch, bandwidth=4, block=None)
    error = 2 * form_error(branch, 4)
    assert (salience(branch[:32], bandwidth=4, block=None) - prefix[:32]).abs().max() > 1e6 * error
    assert (salience(branch, bandwidth=4, block=32) - prefix).abs().max() > 1e6 * error


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_storage_dtypes_are_widened_before_the_first_operation(form: object, dtype: torch.dtype) -> None:
    branch = gaussian(64, 8, seed=9, dtype=dtype)
    sigma = salience_of(form, branch, 5, block=32)
    assert sigma.dtype == torch.float32
    exact = salience(branch.double(), bandwidth=5, block=32)
    assert (sigma - exact).abs().max() <= form_error(branch, 5, UNIT_FP32) + form_error(branch, 5)


def test_the_branch_may_be_a_strided_view_of_a_poisoned_pool() -> None:
    branch = gaussian(32, 6, seed=10)
    pool = torch.full((64, 24), math.nan, dtype=torch.float64)
    pool[::2, 5:23:3] = branch
    view = pool[::2, 5:23:3]
    assert torch.equal(salience(view, bandwidth=3, block=16), salience(branch, bandwidth=3, block=16))


@pytest.mark.parametrize(("window", "bandwidth"), [(8, 4), (9, 4), (64, 16), (4096, 16)])
def test_the_low_band_basis_is_orthonormal(window: int, bandwidth: int) -> None:
    basis = low_band_basis(window, bandwidth)
    assert basis.shape == (window, 2 * bandwidth - 1)
    # Each entry errs by at most 8 u sqrt(2 / W): angle, cosine, scale.
    defect = basis.T @ basis - torch.eye(2 * bandwidth - 1, dtype=torch.float64)
    assert defect.abs().max() <= growth(window) + 32 * UNIT


def test_a_needle_stands_out_wherever_it_is() -> None:
    """One salient row in a slow trend is the top of its block, at the head, the middle and the end."""
    slow = low_band_basis(64, 4) @ gaussian(7, 8, seed=11) * 4
    for place in (0, 1, 31, 62, 63):
        branch = slow.clone()
        branch[place] += 1.0
        assert int(salience(branch, bandwidth=8, block=64).argmax()) == place


@pytest.mark.parametrize(
    ("branch", "bandwidth", "block", "message"),
    [
        (torch.zeros(10, 2), 2, 4, r"branch has 10 rows: expected whole blocks of 4"),
        (torch.zeros(8, 2), 0, 4, r"bandwidth is 0: expected at least 1"),
        (torch.zeros(8, 2), 2, 0, r"block is 0: expected at least 1"),
        (torch.zeros(8), 2, 4, r"branch has shape \[8\]: expected \[any, any\]"),
        (torch.full((8, 2), math.nan), 2, 4, r"branch holds NaN"),
        (torch.zeros(8, 2, dtype=torch.int64), 2, 4, r"branch has dtype torch.int64: expected a floating dtype"),
        (torch.zeros(8, 2), 2.0, 4, r"bandwidth is 2.0: expected an int"),
    ],
)
def test_bad_input_is_named(branch: Tensor, bandwidth: int, block: int, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        salience(branch, bandwidth=bandwidth, block=block)


def salience_of(form: object, branch: Tensor, bandwidth: int, *, block: int | None = None) -> Tensor:
    assert callable(form)
    return form(branch, bandwidth=bandwidth, block=block)
