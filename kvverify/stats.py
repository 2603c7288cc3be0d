"""Paired comparisons when the unit of sampling is a cluster (a text window, a document), and there are few of them.

Two policies are scored on the same tokens; d = nll_A - nll_B per token, and exp(mean d) is the ratio of perplexities
A / B (above 1: B is better). Tokens of one window share their prefix and cache, so windows are resampled, not tokens.
A percentile bootstrap over few clusters is too narrow: with n of them it behaves like a normal interval whose variance
is short by (n - 1) / n. `compare` therefore prints the small-sample intervals beside it, always.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = [
    "Comparison",
    "Difference",
    "Interval",
    "bca_interval",
    "cluster_bootstrap",
    "compare",
    "leave_one_out",
    "nominal_coverage",
    "paired_mean_difference",
    "sign_flip_p",
    "sign_test_p",
    "t_interval",
    "windows_needed",
]

DRAWS = 20_000
_EXACT_SIGN_FLIP_LIMIT = 20


@dataclass(frozen=True)
class Interval:
    """A confidence interval on the scale of the differences."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether the value lies inside, ends included."""
        return self.low <= value <= self.high

    def ratio(self) -> Interval:
        """The same interval for the ratio of perplexities, exp of both ends."""
        return Interval(math.exp(self.low), math.exp(self.high))


@dataclass(frozen=True)
class Difference:
    """A paired mean difference with its cluster-bootstrap interval."""

    mean: float
    interval: Interval
    clusters: int
    values: int


@dataclass(frozen=True)
class Comparison:
    """Everything that should stand beside one ratio of perplexities; intervals are of the mean log ratio."""

    mean: float
    bootstrap: Interval
    t: Interval
    bca: Interval
    sign_flip_p: float
    sign_test_p: float
    without_each: tuple[float, ...]
    clusters: int
    wins: int
    coverage: float
    windows_needed: int | None

    @property
    def failing(self) -> tuple[str, ...]:
        """The small-sample views in which "the ratio is not 1" does not hold at 95 %."""
        views = {
            "t interval": self.t.contains(0),
            "BCa": self.bca.contains(0),
            "exact sign-flip test": self.sign_flip_p >= 0.05,
        }
        return tuple(name for name, includes_one in views.items() if includes_one)

    @property
    def survives(self) -> bool:
        """Whether "the ratio is not 1" holds in every small-sample view."""
        return not self.failing

    def __str__(self) -> str:
        lines = [
            f"ratio {math.exp(self.mean):.5f} over {self.clusters} clusters, {self.wins} of them above 1",
            f"  cluster bootstrap  {_shown(self.bootstrap)}  nominal 95 %, covers about {100 * self.coverage:.1f} %",
            f"  t interval         {_shown(self.t)}",
            f"  BCa                {_shown(self.bca)}",
            f"  exact sign-flip p  {self.sign_flip_p:.3f}     sign test p {self.sign_test_p:.3f}",
            f"  leave one out      {_shown(Interval(min(self.without_each), max(self.without_each)))}",
        ]
        if self.windows_needed is not None:
            lines.append(f"  windows needed to resolve this effect (power 80 %): {self.windows_needed}")
        verdict = "survives" if self.survives else f"does not survive: {', '.join(self.failing)}"
        lines.append(f"  The claim that the ratio is not 1 {verdict}.")
        return "\n".join(lines)


def compare(windows: Sequence[Sequence[float]]) -> Comparison:
    """Judge paired differences d = nll_A - nll_B, one sequence per window. Windows must be of one length.

    Equal lengths make the mean of the tokens the mean of the window means, on which t, BCa and the exact tests work.
    """
    if len({len(window) for window in windows}) != 1:
        raise ValueError(f"windows have lengths {sorted({len(w) for w in windows})}, expected one length for all")
    means = [math.fsum(window) / len(window) for window in windows]
    mean = math.fsum(math.fsum(window) for window in windows) / sum(len(window) for window in windows)
    return Comparison(
        mean=mean,
        bootstrap=cluster_bootstrap(windows),
        t=t_interval(means),
        bca=bca_interval(means),
        sign_flip_p=sign_flip_p(means),
        sign_test_p=sign_test_p(means),
        without_each=leave_one_out(means),
        clusters=len(means),
        wins=sum(value > 0 for value in means),
        coverage=nominal_coverage(len(means)),
        windows_needed=windows_needed(means),
    )


def cluster_bootstrap(windows: Sequence[Sequence[float]], *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Percentile 95 % interval of the pooled mean, whole windows drawn with replacement.

    Reproducible to the bit: CPython's `random.Random(seed)`, n calls of randrange(n) a draw, statistic = exact sum /
    count, ends = sorted draws number draws/40 and draws - draws/40 (500 and 19500 of 20,000).
    """
    sums, counts = [math.fsum(window) for window in windows], [len(window) for window in windows]
    _require_clusters(len(sums))
    generator = random.Random(seed)
    means = []
    for _ in range(draws):
        drawn = [generator.randrange(len(sums)) for _ in sums]
        means.append(math.fsum(sums[i] for i in drawn) / sum(counts[i] for i in drawn))
    means.sort()
    tail = draws // 40
    return Interval(means[tail], means[draws - tail])


def t_interval(means: Sequence[float], *, level: float = 0.95) -> Interval:
    """Student interval of the mean of the window means, n - 1 degrees of freedom."""
    _require_clusters(len(means))
    center, error = float(np.mean(means)), float(np.std(means, ddof=1)) / math.sqrt(len(means))
    half = float(_scipy_stats().t.ppf(0.5 + level / 2, len(means) - 1)) * error
    return Interval(center - half, center + half)


def bca_interval(means: Sequence[float], *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """Bias-corrected and accelerated bootstrap 95 % interval (scipy.stats.bootstrap)."""
    _require_clusters(len(means))
    if len(set(means)) == 1:
        return Interval(means[0], means[0])
    found = _scipy_stats().bootstrap(
        (np.asarray(means),), np.mean, n_resamples=draws, method="BCa", rng=np.random.default_rng(seed)
    )
    return Interval(float(found.confidence_interval.low), float(found.confidence_interval.high))


def sign_flip_p(means: Sequence[float]) -> float:
    """Exact two-sided p that the mean is 0 if every sign were equally likely: all 2^n sign patterns are counted."""
    count = len(means)
    if not 1 <= count <= _EXACT_SIGN_FLIP_LIMIT:
        raise ValueError(f"means has {count} clusters, expected 1 to {_EXACT_SIGN_FLIP_LIMIT} for an exact count")
    patterns = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    magnitude = np.abs(means)
    sums = np.abs((1 - 2 * patterns) @ magnitude)
    # The observed pattern must count itself although its sum may have been added in another order.
    observed = abs(math.fsum(means)) - 4 * count * np.finfo(np.float64).eps * float(magnitude.sum())
    return float(np.mean(sums >= observed))


def sign_test_p(means: Sequence[float]) -> float:
    """Exact two-sided binomial p of the number of windows above 0; windows at exactly 0 are left out."""
    moved = [value for value in means if value != 0]
    if not moved:
        return 1.0
    return float(_scipy_stats().binomtest(sum(value > 0 for value in moved), len(moved)).pvalue)


def leave_one_out(means: Sequence[float]) -> tuple[float, ...]:
    """The mean without each window in turn."""
    _require_clusters(len(means))
    total = math.fsum(means)
    return tuple((total - value) / (len(means) - 1) for value in means)


def nominal_coverage(clusters: int, *, level: float = 0.95) -> float:
    """How often a percentile interval over n normal clusters really covers: P(|t_{n-1}| <= z sqrt((n - 1) / n)).

    The bootstrap variance is short by (n - 1) / n and its quantiles are near-normal. A resampled mean has lighter
    tails, so the truth is up to .6 points lower: 86.1 % for 6 clusters and 90.4 % for 11 (20,000 simulated samples).
    """
    _require_clusters(clusters)
    stats = _scipy_stats()
    reach = float(stats.norm.ppf(0.5 + level / 2)) * math.sqrt((clusters - 1) / clusters)
    return float(1 - 2 * stats.t.sf(reach, clusters - 1))


def windows_needed(means: Sequence[float], *, power: float = 0.8, level: float = 0.95) -> int | None:
    """Windows at which a two-sided t test finds an effect of the observed size; None where none was observed.

    The smallest n whose noncentral t has P(|T_{n-1}(sqrt(n) mean / sd)| > t_crit) >= power.
    """
    _require_clusters(len(means))
    mean, deviation = float(np.mean(means)), float(np.std(means, ddof=1))
    if mean == 0:
        return None
    if deviation == 0:
        return 2
    stats = _scipy_stats()
    effect = abs(mean) / deviation

    def reached(count: int) -> bool:
        critical = stats.t.ppf(0.5 + level / 2, count - 1)
        shift = math.sqrt(count) * effect
        return bool(stats.nct.sf(critical, count - 1, shift) + stats.nct.cdf(-critical, count - 1, shift) >= power)

    # Where n is large the noncentral t is normal, so its root brackets the search from above.
    quantiles = float(stats.norm.ppf(0.5 + level / 2) + stats.norm.ppf(power))
    low, high = 1, math.ceil((quantiles / effect) ** 2) + 8
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def paired_mean_difference(
    values: Sequence[float], cluster: Sequence[Hashable], *, draws: int = 10_000, seed: int = 0
) -> Difference:
    """Mean of paired differences with a percentile 95 % interval; whole clusters are drawn, whatever their sizes.

    `cluster` names the cluster of each value. For judged accuracies, F1 and other scores on shared questions.
    """
    if len(values) != len(cluster) or not values:
        raise ValueError(
            f"cluster has {len(cluster)} entries, expected one for each of {len(values)} values, at least one"
        )
    grouped: dict[Hashable, list[float]] = {}
    for value, name in zip(values, cluster, strict=True):
        grouped.setdefault(name, []).append(value)
    mean = math.fsum(values) / len(values)
    interval = cluster_bootstrap(list(grouped.values()), draws=draws, seed=seed)
    return Difference(mean, interval, len(grouped), len(values))


def _shown(interval: Interval) -> str:
    ratio = interval.ratio()
    return f"[{ratio.low:.5f}, {ratio.high:.5f}]"


def _require_clusters(count: int) -> None:
    if count < 2:
        raise ValueError(f"there are {count} clusters, expected at least 2: one cluster says nothing of their spread")


def _scipy_stats() -> Any:
    try:
        return import_module("scipy.stats")
    except ImportError as error:
        raise ImportError("kvverify.stats needs scipy: pip install 'kvverify[stats]'") from error
