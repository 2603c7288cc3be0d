"""The tolerance rule, by hand.

Powers of two make every expected figure exact in float64, so it is compared with ==.
"""

import math

import pytest
import torch

from kvverify import budget
from kvverify.budget import BAND, PEER_FACTOR, UNIT_ROUNDOFF, judge, smallest_positive, unit_roundoff, unit_size


def numbers(*rows, dtype=torch.float64):
    return torch.tensor(rows, dtype=dtype)


def judged(actual, peer, truth, **how):
    return judge(numbers(*actual), numbers(*peer), numbers(*truth), **{"dtype": torch.bfloat16, **how})


def test_unit_roundoffs_are_half_the_distance_between_neighbours_above_one():
    for dtype, value in UNIT_ROUNDOFF.items():
        assert value == torch.finfo(dtype).eps / 2
        assert unit_roundoff(dtype) == value
    with pytest.raises(ValueError, match=r"torch.int64 has no unit roundoff"):
        unit_roundoff(torch.int64)


def test_the_smallest_number_above_zero_is_that_of_the_dtype():
    for dtype in UNIT_ROUNDOFF:
        zero = torch.zeros((), dtype=dtype)
        assert smallest_positive(dtype) == float(torch.nextafter(zero, zero + 1))


def test_the_allowance_is_three_peer_errors_and_two_bands():
    # peer off by 2^-6 in one of two entries; u = 2^-8, max|truth| = 4, one rounding; condition 2^10 passes fp32.
    allowed = 3 * 2**-6 + 2 * (2**-8 * 4 + 2**-23 * 2**10)
    truth, peer = [[4.0, 0.0]], [[4.0 + 2**-6, 0.0]]
    inside = judged([[4.0 + allowed, 0.0]], peer, truth, condition=2.0**10)
    outside = judged([[4.0 + allowed * (1 + 2**-20), 0.0]], peer, truth, condition=2.0**10)
    assert (inside.ok, inside.used) == (True, 1.0)
    assert not outside.ok
    assert outside.index == (0, 0)


def test_roundings_widen_the_band_only():
    truth = [[1.0]]
    one, three = (judged([[1.0 + 2**-6]], truth, truth, roundings=times) for times in (1, 3))
    assert one.used == 2**-6 / (2 * 2**-8)
    assert three.used == 2**-6 / (2 * 3 * 2**-8)


def test_the_root_mean_square_rejects_what_the_maximum_allows():
    # The peer errs by e in one entry of four: max allows 3e, rms allows 3e/2. Four entries off by 2e break rms alone.
    e = 2.0**-2
    truth = [[1.0, 1.0, 1.0, 1.0]]
    peer = [[1.0 + e, 1.0, 1.0, 1.0]]
    spread = judged([[1.0 + 2 * e] * 4], peer, truth)
    single = judged([[1.0 + 2 * e, 1.0, 1.0, 1.0]], peer, truth)
    assert not spread.ok
    assert spread.arithmetic.startswith("rms error")
    assert single.ok


def test_a_small_unit_cannot_hide_behind_a_large_one():
    truth = [[1000.0, 1000.0], [1e-3, 1e-3]]
    actual = [[1000.0, 1000.0], [2e-3, 1e-3]]
    assert not judged(actual, truth, truth, reduce=1).ok
    assert judged(actual, truth, truth, reduce=1).index == (1, 0)
    assert judged(actual, truth, truth, reduce=2).ok


@pytest.mark.parametrize("reduce", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_missing_or_infinite_number_is_infinitely_wrong(bad, reduce):
    found = judged([[1.0, bad]], [[1.0, 1.0]], [[1.0, 1.0]], reduce=reduce)
    assert not found.ok
    assert found.used == math.inf
    assert found.index == (0, 1)


def test_equal_infinities_agree_and_opposite_ones_do_not():
    truth = [[-math.inf]]
    assert judged(truth, truth, truth, reduce=0).ok
    assert not judged([[math.inf]], truth, truth, reduce=0).ok
    assert not judged([[0.0]], truth, truth, reduce=0).ok


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_peer_without_a_number_is_a_defect_of_the_suite_and_no_licence(bad):
    with pytest.raises(ValueError, match="the peer is infinitely far"):
        judged([[100.0, 1.0]], [[bad, 1.0]], [[1.0, 1.0]])


def test_an_oracle_that_says_nan_is_a_defect_of_the_suite():
    with pytest.raises(ValueError, match="oracle returned NaN"):
        judged([[1.0]], [[1.0]], [[math.nan]])


def test_near_zero_half_the_smallest_number_is_allowed_and_no_more():
    smallest = smallest_positive(torch.float16)
    zero = [[0.0]]
    near = judged([[smallest]], zero, zero, dtype=torch.float16)
    far = judged([[2 * smallest]], zero, zero, dtype=torch.float16)
    assert (near.ok, near.used) == (True, 1.0)  # 2 bands of half the smallest number
    assert not far.ok


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_to_compare_uses_nothing(shape):
    empty = torch.zeros(shape, dtype=torch.float64)
    assert judge(empty, empty, empty, dtype=torch.bfloat16).used == 0.0


def test_a_number_without_axes_is_its_own_unit():
    one = torch.tensor(1.0, dtype=torch.float64)
    assert judge(one, one, one, reduce=0, dtype=torch.float32).ok
    assert not judge(one + 1, one, one, reduce=0, dtype=torch.float32).ok


def test_the_condition_counts_per_unit():
    truth = [[1.0], [1.0]]
    actual = [[1.0 + 2**-5], [1.0 + 2**-5]]
    wide = torch.tensor([2.0**20, 0.0], dtype=torch.float64)
    found = judged(actual, truth, truth, condition=wide)
    assert not found.ok
    assert found.index == (1, 0)


def test_unit_size_ignores_infinities():
    assert unit_size(numbers([1.0, -3.0], [-math.inf, 2.0]), 1).tolist() == [3.0, 2.0]


def test_the_message_holds_the_whole_sum():
    found = judged([[2.0]], [[1.0]], [[1.0]], condition=8.0)
    assert (found.actual, found.truth) == (2.0, 1.0)
    for part in ("max error 1.000e+00", "3 x peer", "2 x (roundings 1", "max|truth| 1.000e+00", "condition 8.000e+00"):
        assert part in found.arithmetic


def test_the_printed_table_is_the_rule():
    told = dict(budget.table())
    assert told["factor on the peer's error"] == str(PEER_FACTOR)
    assert told["factor on the rounding band"] == str(BAND)
    assert told["unit roundoff bfloat16"] == "2^-8"
    assert len(told) == 3 + len(UNIT_ROUNDOFF)
