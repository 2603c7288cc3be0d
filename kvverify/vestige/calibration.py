"""How the inflation z and the entropy gate are set: three generations of one calibration, each under its own name.

All three read the same `Margins`, taken over queries against the entries AS STORED, sketch and rows already rounded
to their dtypes. Cache rows must not stand in for queries: each row is its own best match, and nothing would be hard.

A target recall tau leaves 1 - tau to lose: half to the gate, alpha = (1 - tau) / 2, and the rest to the inflation,
tau_s = tau / (1 - alpha), 18/19 for tau = 0.90. This arithmetic is rational: in floating point floor(alpha 20) is 0
and not 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_real, require_tensor, working_dtype
from kvverify.vestige.scan import archive_scores

__all__ = [
    "INFLATION_CEILING",
    "LADDER",
    "Margins",
    "conformal_archived",
    "conformal_hard",
    "conformal_rank",
    "entropy_gate",
    "fetch_threshold",
    "ladder",
    "margins",
    "wilson_interval",
]

LADDER = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
INFLATION_CEILING = 8.0
"""The deployed clamp of z, and its value before calibration. It is no guarantee: see `sound_inflation`."""


@dataclass(frozen=True)
class Margins:
    """One value per query, each [queries].

    best_kept, best_archived: best true score over the kept (archived) rows that the query may see, -inf for none.
    index_score, certificate: of that best archived row, at inflation 1.
    """

    best_kept: Tensor
    best_archived: Tensor
    index_score: Tensor
    certificate: Tensor

    @property
    def hard(self) -> Tensor:
        """The queries whose best row of all is archived: bool [queries]."""
        return self.best_archived > self.best_kept

    @property
    def sees_archive(self) -> Tensor:
        """The queries with an archived row in their past: bool [queries]."""
        return self.best_archived > -math.inf


def margins(
    query: Tensor,
    position: Tensor,
    rows: Tensor,
    kept: Tensor,
    sketch: Tensor,
    residual: Tensor,
    basis: Tensor,
    *,
    scale: float,
) -> Margins:
    """Margins of calibration queries against the prefix rows that each may see.

    query[queries, dim], one head each, at position[queries] (int64): it sees rows 0..position. rows[rows, dim] is the
    prefix as stored; bool kept[rows] is True for kept and tail rows, False for archived ones. sketch[rows, rank] and
    residual[rows] are index entries as stored with basis V[rank, content]; those of kept rows are not used.
    """
    require_tensor("rows", rows, (None, None))
    require_count("number of rows", rows.shape[0], minimum=1)
    require_tensor("query", query, (None, rows.shape[1]))
    require_tensor("position", position, (query.shape[0],), dtype=torch.int64)
    require_tensor("kept", kept, (rows.shape[0],), dtype=torch.bool)
    wide = working_dtype(query, rows, basis)
    true = scale * (query.to(wide) @ rows.to(wide).T)
    index_score, certificate = archive_scores(query, rows[:, basis.shape[1] :], sketch, residual, basis, scale=scale)
    causal = torch.arange(rows.shape[0], device=rows.device) <= position[:, None]
    best_archived, row = true.where(causal & ~kept, -math.inf).max(dim=1)
    return Margins(
        best_kept=true.where(causal & kept, -math.inf).amax(dim=1),
        best_archived=best_archived,
        index_score=index_score.gather(1, row[:, None]).flatten(),
        certificate=certificate.gather(1, row[:, None]).flatten(),
    )


def ladder(sample: Margins, *, recall: float = 0.90) -> float:
    """First generation (the paper's): the smallest rung of `LADDER` whose recall on the hard queries reaches `recall`.

    A hard query is recalled when its best row fires: index score + z certificate > best kept. No hard query: 2. No
    rung enough: 8.
    """
    hard = sample.hard
    total = int(hard.sum())
    if total == 0:
        return 2.0
    for inflation in LADDER:
        fired = sample.index_score + inflation * sample.certificate > sample.best_kept
        if int((fired & hard).sum()) >= _rational(recall) * total:
            return inflation
    return INFLATION_CEILING


def conformal_hard(sample: Margins, *, recall: float = 0.90) -> float:
    """Second generation: conformal quantile over the hard queries of z_q = (best kept - index score) / certificate.

    Firing is strict, so on its own sample it recalls the k - 1 smaller ones: (k - 1) / n, just short of the target.
    """
    return _conformal_inflation(sample, sample.best_kept, sample.hard, recall)


def conformal_archived(sample: Margins, *, recall: float = 0.90) -> float:
    """Third generation (current): the same over EVERY query that sees the archive.

    z_q = (best archived - index score) / certificate: what lifts the index score of a row to its true score.
    """
    return _conformal_inflation(sample, sample.best_archived, sample.sees_archive, recall)


def conformal_rank(samples: int, *, recall: float = 0.90) -> int | None:
    """Order statistic of the conformal quantile, from 1: k = ceil((n + 1) tau_s), None where k > n.

    At recall 0.90 that is n < 18.
    """
    require_count("samples", samples)
    rank = math.ceil((samples + 1) * _rational(recall) / (1 - _gate_share(recall)))
    return rank if rank <= samples else None


def entropy_gate(entropy: Tensor, hard: Tensor, *, recall: float = 0.90) -> float:
    """Theta: a head looks into the archive only where its entropy over the attended rows, in nats, exceeds this.

    entropy[queries], bool hard[queries]. Theta is the floor(alpha n)-th smallest entropy, from 1, of the n hard
    queries, so that closing the gate there loses at most a share alpha of them. -inf, always open, for rank 0, for
    too few hard queries to calibrate the inflation, and where the gate would be open for more than 60 % of all
    queries.
    """
    require_tensor("entropy", entropy, (None,))
    require_tensor("hard", hard, (entropy.shape[0],), dtype=torch.bool)
    count = int(hard.sum())
    rank = math.floor(_gate_share(recall) * count)
    if rank == 0 or conformal_rank(count, recall=recall) is None:
        return -math.inf
    theta = float(entropy[hard].sort().values[rank - 1])
    opened = int((entropy > theta).sum())
    return -math.inf if opened > Fraction(3, 5) * entropy.shape[0] else theta


def fetch_threshold(best: Tensor, entropy: Tensor, *, theta: float) -> Tensor:
    """Threshold of the scan, [heads]: best[heads] where entropy[heads] > theta, else +inf, a closed gate.

    A head that attends to nothing (best -inf) always looks, and everything fires.
    """
    require_tensor("best", best, (None,))
    require_tensor("entropy", entropy, (best.shape[0],))
    return best.where((entropy > theta) | (best == -math.inf), math.inf)


def wilson_interval(successes: int, trials: int, *, deviate: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson score interval of a proportion.

    deviate is the standard normal quantile; the default gives 95 %, two-sided.
    """
    require_count("trials", trials, minimum=1)
    require_count("successes", successes, maximum=trials)
    share, spread = successes / trials, deviate**2 / trials
    half = deviate * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    low, high = ((share + spread / 2 + side) / (1 + spread) for side in (-half, half))
    return max(0.0, low), min(1.0, high)


def _rational(recall: float) -> Fraction:
    require_real("recall", recall, minimum=0.0, maximum=1.0)
    return Fraction(recall).limit_denominator(10_000)


def _gate_share(recall: float) -> Fraction:
    return (1 - _rational(recall)) / 2


def _conformal_inflation(sample: Margins, target: Tensor, members: Tensor, recall: float) -> float:
    target, true, known, certificate = (
        part[members] for part in (target, sample.best_archived, sample.index_score, sample.certificate)
    )
    rank = conformal_rank(target.shape[0], recall=recall)
    if rank is None:
        return INFLATION_CEILING
    # A row of which nothing was discarded needs no inflation; if rounding left it short, none can help.
    without = torch.full_like(true, math.inf).where(true > known, -math.inf)
    needed = ((target - known) / certificate).where(certificate > 0, without)
    # A certificate never lowers a score: below 0 the quantile is 0, which only fires more.
    return min(max(float(needed.sort().values[rank - 1]), 0.0), INFLATION_CEILING)
