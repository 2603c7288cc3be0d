"""One decode step of one layer under the whole policy: prologue, gate, scan, fetch, attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.vestige.attend import attend, prologue
from kvverify.vestige.calibration import INFLATION_CEILING, fetch_threshold
from kvverify.vestige.inputs import require_tensor
from kvverify.vestige.scan import limit_fetch, scan, scan_capped

__all__ = ["Retrieval", "Step", "decode"]


@dataclass(frozen=True)
class Retrieval:
    """The tier-2 settings.

    basis: V[rank, content]. inflation: z. theta: entropy gate in nats, -inf = always open. cap: most rows fetched per
    head, None = all that fire. width: rows of the fetch buffer, None = no limit.
    """

    basis: Tensor
    inflation: float = INFLATION_CEILING
    theta: float = -math.inf
    cap: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class Step:
    """Result of `decode`: out[heads, content], lse[heads], pool rows fetched[n], and whether the buffer overflowed."""

    out: Tensor
    lse: Tensor
    fetched: Tensor
    overflow: bool


def decode(
    query: Tensor,
    rows: Tensor,
    attended: Tensor,
    archived: Tensor,
    sketch: Tensor,
    residual: Tensor,
    retrieval: Retrieval,
    *,
    scale: float,
) -> Step:
    """Attend to kept, tail and fetched rows, each once.

    query[heads, content + branch]; rows[pool, content + branch]; attended[n] and archived[a] are disjoint int64 pool
    rows; sketch[a, rank] and residual[a] are index entries in archive order. When more rows fire than the buffer
    holds, the whole archive is fetched: such a step is dense, and never silently truncated. The attention is over one
    list; a kernel may split it and merge, as that is the same. Raises ValueError where a row is both attended and
    archived.
    """
    require_tensor("attended", attended, (None,), dtype=torch.int64)
    require_tensor("archived", archived, (None,), dtype=torch.int64)
    shared = archived[torch.isin(archived, attended)]
    if shared.shape[0]:
        raise ValueError(f"archived holds row {int(shared[0])}, which is attended too: expected disjoint lists")
    basis = retrieval.basis
    content = basis.shape[1]
    start = prologue(query, rows[attended], basis, scale=scale, value_dim=content)
    threshold = fetch_threshold(start.best, start.entropy, theta=retrieval.theta)
    entries = (rows[archived, content:], sketch, residual, basis, threshold)
    if retrieval.cap is None:
        fired = scan(query, *entries, scale=scale, inflation=retrieval.inflation)
    else:
        fired = scan_capped(query, *entries, scale=scale, inflation=retrieval.inflation, cap=retrieval.cap)
    chosen, overflow = limit_fetch(fired, width=retrieval.width)
    fetched = archived if overflow else archived[chosen]
    out, lse = attend(query, rows, torch.cat([attended, fetched]), scale=scale, value_dim=content)
    return Step(out, lse, fetched, overflow)
