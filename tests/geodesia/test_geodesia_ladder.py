"""The quantizer on its stored format: bound, nesting, packing, directed rounding, error proxies."""

import math

import pytest
import torch
from geodesia_cases import normal, quick
from hypothesis import given
from hypothesis import strategies as st

from kvverify.geodesia.ladder import (
    LADDER,
    STEP_RATIO,
    block_errors,
    dequantize,
    half_down,
    half_up,
    pack,
    quantize,
    requantize,
    unpack,
)

offsets = st.sampled_from([0.0, 1.0, 10.0, 1000.0, 5000.0, -5000.0])
scales = st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 30.0])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
axes = st.sampled_from(["token", "channel"])


def grouped_error(x, codes, lo, step, bits, axis, group):
    """|x - x^| of each member beside the half step of its group, both exact in float64."""
    error = (dequantize(codes, lo, step, bits=bits, axis=axis, group=group) - x.double()).abs()
    error = error if axis == "token" else error.T
    return error.reshape(lo.shape[0], -1, lo.shape[1]), (step.double() * STEP_RATIO[bits] / 2)[:, None]


def test_pack_puts_the_first_code_in_the_lowest_bits():
    codes = torch.tensor([[1, 2, 3, 0, 1]], dtype=torch.uint8)
    assert pack(codes, bits=2).tolist() == [0b00_11_10_01, 0b01]
    assert pack(codes, bits=4).tolist() == [0x21, 0x03, 0x01]
    assert pack(codes, bits=8).tolist() == [1, 2, 3, 0, 1]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 63, 64])
def test_pack_round_trip(bits, count):
    codes = (torch.arange(count) * 7 % 2**bits).to(torch.uint8)
    packed = pack(codes, bits=bits)
    assert packed.numel() == math.ceil(count * bits / 8)
    assert torch.equal(unpack(packed, bits=bits, count=count), codes)


def test_half_rounding_is_directed_and_tight():
    x = torch.cat([normal(500) * 10.0**k for k in range(-9, 4)])
    low, high = half_down(x), half_up(x)
    assert bool((low.double() <= x).all())
    assert bool((high.double() >= x).all())
    next_up = torch.nextafter(low, torch.full_like(low, torch.inf))
    assert bool((next_up.double() > x).all())
    assert torch.equal(high, torch.where(low.double() == x, low, next_up))


def test_constant_group_has_code_zero_and_step_zero():
    for value in (0.0, 5000.0, -1.5):
        codes, lo, step = quantize(torch.full((8, 4), value), bits=4, axis="token", group=8)
        assert not codes.any()
        assert not step.any()
        assert torch.equal(
            dequantize(codes, lo, step, bits=4, axis="token", group=8), torch.full((8, 4), value).double()
        )


def test_constant_that_fp16_does_not_hold_needs_a_step():
    # Step 0 would leave the whole distance to the stored lo as an error: 5001 is stored as 5000.
    x = torch.full((8, 1), 5001.0)
    codes, lo, step = quantize(x, bits=8, axis="token", group=8)
    assert float(lo) == 5000.0
    assert float(step) > 0
    error, half_step = grouped_error(x, codes, lo, step, 8, "token", 8)
    assert bool((error <= half_step).all())


@quick(150)
@given(offsets, scales, dtypes, axes, st.sampled_from([8, 4, 2]), st.integers(0, 99))
def test_quantizer_bound_holds_on_the_stored_format(offset, scale, dtype, axis, bits, seed):
    x = (normal(16, 8, seed=seed) * scale + offset).to(dtype)
    codes, lo, step = quantize(x, bits=bits, axis=axis, group=8)
    assert codes.dtype == torch.uint8
    assert lo.dtype == step.dtype == torch.float16
    assert int(codes.max()) <= 2**bits - 1
    error, half_step = grouped_error(x, codes, lo, step, bits, axis, 8)
    assert bool((error <= half_step).all())


@quick(150)
@given(offsets, scales, dtypes, axes, st.integers(0, 99))
def test_ladder_is_nested_on_the_stored_format(offset, scale, dtype, axis, seed):
    x = (normal(16, 8, seed=seed) * scale + offset).to(dtype)
    eight, lo, step = quantize(x, bits=8, axis=axis, group=4)
    for bits in (4, 2):
        direct, same_lo, same_step = quantize(x, bits=bits, axis=axis, group=4)
        assert torch.equal(same_lo, lo)
        assert torch.equal(same_step, step)
        assert torch.equal(requantize(eight, bits=8, to=bits), direct)
    four = requantize(eight, bits=8, to=4)
    assert torch.equal(requantize(four, bits=4, to=2), requantize(eight, bits=8, to=2))


def test_requantize_equals_rounding_the_quotient_for_every_code():
    for bits, to in ((8, 4), (8, 2), (4, 2)):
        codes = torch.arange(2**bits, dtype=torch.uint8)
        expected = [round(code * STEP_RATIO[bits] / STEP_RATIO[to]) for code in range(2**bits)]
        assert requantize(codes, bits=bits, to=to).tolist() == expected


def test_codes_against_unstored_scales_would_break_the_bound():
    x = torch.linspace(1000.3, 1001.1, 8)[:, None]
    lo = x.min().to(torch.float16)
    step = ((x.max() - x.min()) / 255).to(torch.float16)
    codes = ((x - x.min()) / ((x.max() - x.min()) / 255)).round()
    assert float((codes.double() * step.double() + lo.double() - x.double()).abs().max()) > float(step) / 2


def test_a_loud_channel_does_not_touch_the_keys_of_the_others():
    x = normal(16, 4, dtype=torch.float32)
    loud = x.clone()
    loud[:, 0] *= 1000
    quiet, loudly = (quantize(k, bits=4, axis="token", group=8) for k in (x, loud))
    for before, after in zip(quiet, loudly, strict=True):
        assert torch.equal(before[:, 1:], after[:, 1:])


def test_block_errors_follow_their_formulas():
    keys = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    errors = block_errors(keys, block=4, group=2)
    expected = [0.0, 4 / 510, 4 / 30, 4 / 6, float((keys - keys.mean(0)).norm(dim=1).max())]
    assert errors.shape == (1, len(LADDER))
    # Two roundings (norm, division) of numbers below 8: 2 * 8 * 2^-53.
    assert float((errors[0] - torch.tensor(expected, dtype=torch.float64)).abs().max()) <= 16 * 2.0**-53


def test_bad_input_is_named():
    x = torch.zeros(8, 4)
    with pytest.raises(ValueError, match="bits is 3, expected 8, 4 or 2"):
        quantize(x, bits=3, axis="token", group=4)
    with pytest.raises(ValueError, match="group is 3, expected a positive divisor of the token axis, which has 8"):
        quantize(x, bits=4, axis="token", group=3)
    with pytest.raises(ValueError, match="axis is 'row'"):
        quantize(x, bits=4, axis="row", group=4)
    with pytest.raises(ValueError, match="x contains nan"):
        quantize(x / 0, bits=4, axis="token", group=4)
    with pytest.raises(ValueError, match="x contains 70000"):
        quantize(x + 70000, bits=4, axis="token", group=4)
    with pytest.raises(ValueError, match="less than 2\\^2"):
        pack(torch.tensor([4], dtype=torch.uint8), bits=2)
    with pytest.raises(ValueError, match="to is 8, expected fewer bits than 4"):
        requantize(torch.zeros(1, dtype=torch.uint8), bits=4, to=8)
