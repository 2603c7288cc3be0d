"""The statistics themselves, on data whose answer is known."""

import itertools
import math
import random

import pytest

from kvverify.stats import (
    bca_interval,
    cluster_bootstrap,
    compare,
    leave_one_out,
    nominal_coverage,
    paired_mean_difference,
    sign_flip_p,
    sign_test_p,
    t_interval,
    windows_needed,
)

MEANS = [0.4, -0.1, 0.3, 0.2, 0.6, -0.2]


def test_sign_flip_p_counts_every_pattern():
    sums = [
        abs(sum(s * m for s, m in zip(signs, MEANS, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    assert sign_flip_p(MEANS) == sum(total >= 1.2 - 1e-12 for total in sums) / 64
    assert sign_flip_p([1.0, 1.0, 1.0]) == 2 / 8
    assert sign_flip_p([0.0, 0.0]) == 1


def test_sign_flip_p_does_not_depend_on_the_scale():
    assert sign_flip_p([m * 1e-9 for m in MEANS]) == sign_flip_p(MEANS)


def test_t_interval_of_two_clusters_by_hand():
    found = t_interval([0.0, 1.0])
    # Mean 1/2, standard error 1/2, t_{.975, 1} = tan(.475 pi), of which scipy 1.15 and 1.16 know ten digits.
    assert abs(found.high - (0.5 + 0.5 * math.tan(0.475 * math.pi))) <= 1e-9
    assert abs(found.low - (0.5 - 0.5 * math.tan(0.475 * math.pi))) <= 1e-9


def test_intervals_shift_with_the_data():
    for interval in (t_interval, bca_interval, lambda means: cluster_bootstrap([[m] for m in means])):
        plain, moved = interval(MEANS), interval([m + 1 for m in MEANS])
        # BCa weighs draws by a normal quantile, whose step between order statistics may flip by one: data spacing / 6.
        assert abs(moved.low - plain.low - 1) <= 0.02
        assert abs(moved.high - plain.high - 1) <= 0.02
        assert plain.low < sum(MEANS) / 6 < plain.high


def test_leave_one_out_is_the_mean_of_the_others():
    for value, without in zip(MEANS, leave_one_out(MEANS), strict=True):
        others = list(MEANS)
        others.remove(value)
        assert abs(without - sum(others) / 5) <= 16 * 2.0**-53


def test_sign_test_leaves_zeros_out():
    assert sign_test_p([1.0, 1.0, 0.0]) == 0.5
    assert sign_test_p([0.0]) == 1.0


@pytest.mark.parametrize(("clusters", "simulated"), [(6, 0.8605), (11, 0.9037)])
def test_nominal_coverage_is_near_the_simulated_one_and_not_below(clusters, simulated):
    assert simulated - 0.005 <= nominal_coverage(clusters) <= simulated + 0.01
    assert nominal_coverage(clusters) < nominal_coverage(1000) < 0.95


def test_percentile_bootstrap_really_covers_less_than_it_says():
    generator, hits, trials = random.Random(1), 0, 150
    for _ in range(trials):
        sample = [[generator.gauss(0, 1)] for _ in range(6)]
        hits += cluster_bootstrap(sample, draws=400).contains(0)
    # 95 % would give 142.5; four standard deviations of the count below it is 131.8.
    assert hits < 138
    assert hits > 110


def test_windows_needed_is_the_first_that_reaches_the_power():
    from scipy import stats

    needed = windows_needed(MEANS)
    effect = (sum(MEANS) / 6) / math.sqrt(sum((m - 0.2) ** 2 for m in MEANS) / 5)

    def power(n):
        critical = stats.t.ppf(0.975, n - 1)
        return stats.nct.sf(critical, n - 1, math.sqrt(n) * effect) + stats.nct.cdf(
            -critical, n - 1, math.sqrt(n) * effect
        )

    assert power(needed) >= 0.8 > power(needed - 1)
    assert windows_needed([1.0, -1.0]) is None
    assert windows_needed([1.0, 1.0]) == 2


def test_paired_mean_difference_draws_whole_clusters_of_unequal_size():
    values, cluster = [1.0, 1.0, 1.0, 0.0, -1.0], ["a", "a", "a", "b", "c"]
    found = paired_mean_difference(values, cluster)
    assert (found.mean, found.clusters, found.values) == (0.4, 3, 5)
    # Only clusters are drawn: all from "a" is 1, all from "c" is -1, and both happen in one draw of 27.
    assert (found.interval.low, found.interval.high) == (-1.0, 1.0)
    same = paired_mean_difference(values[::-1], cluster[::-1])
    assert (same.mean, same.clusters) == (found.mean, found.clusters)


def test_a_clear_effect_survives_and_the_report_says_so():
    found = compare([[0.1 + 0.01 * k] for k in range(8)])
    assert found.failing == ()
    assert str(found).endswith("The claim that the ratio is not 1 survives.")


def test_no_effect_at_all_is_reported_without_a_power():
    found = compare([[1.0], [-1.0], [0.0]])
    assert found.windows_needed is None
    assert "windows needed" not in str(found)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"windows have lengths \[1, 2\], expected one length"):
        compare([[1.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="there are 1 clusters, expected at least 2"):
        t_interval([1.0])
    with pytest.raises(ValueError, match="means has 21 clusters, expected 1 to 20"):
        sign_flip_p([1.0] * 21)
    with pytest.raises(ValueError, match="cluster has 1 entries, expected one for each of 2 values"):
        paired_mean_difference([1.0, 2.0], ["a"])
