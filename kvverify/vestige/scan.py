"""Tier 2, the scan: which archived rows a step needs.

    score_h(u) = scale <q_r, r_u> + scale <V q_c, V c_u> + z scale ||(I - V^T V) q_c|| eta_u / sqrt(content - rank)

The first two terms are the *index score*, the third is the *certificate* times the inflation z. By Cauchy-Schwarz no
row can score above its index score by more than sqrt(content - rank) certificates (21.166 for 448), so a scan with
that inflation misses nothing; a smaller one, such as the deployed 8, is a calibrated bet. On the stored fp16 sketch
the guarantee weakens by the rounding, scale ||V q_c|| ||sketch - V c_u||.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvverify.vestige.index import query_parts
from kvverify.vestige.inputs import require_count, require_real, require_tensor, row_chunks, working_dtype

__all__ = ["archive_scores", "limit_fetch", "scan", "scan_capped", "sound_inflation"]


def sound_inflation(content: int, rank: int) -> float:
    """Return the smallest inflation at which an unrounded index never misses: sqrt(content - rank)."""
    require_count("rank", rank, maximum=content)
    return math.sqrt(content - rank)


def archive_scores(
    query: Tensor, side: Tensor, sketch: Tensor, residual: Tensor, basis: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Index score and certificate (at inflation 1) of every head and archived row, each [heads, rows].

    Arguments as in `scan`. With rank = content nothing is discarded and the certificate is 0.
    """
    wide = _working_dtype(query, side, sketch, residual, basis)
    rank, content = basis.shape
    query_sketch, query_residual = query_parts(query.to(wide), basis)
    branch_score = query[:, content:].to(wide) @ side.to(wide).T
    sketch_score = query_sketch @ sketch.to(wide).T
    spread = scale / sound_inflation(content, rank) if rank < content else 0.0
    return scale * (branch_score + sketch_score), spread * torch.outer(query_residual, residual.to(wide))


def scan(
    query: Tensor,
    side: Tensor,
    sketch: Tensor,
    residual: Tensor,
    basis: Tensor,
    threshold: Tensor,
    *,
    scale: float,
    inflation: float,
) -> Tensor:
    """Positions in the archive of the rows that ANY head asks for, score_h(u) > threshold_h: int64 [fired], ascending.

        score_h(u) = lambda (q_r . r_u + (V q_c) . (V c_u) + z ||(I - V^T V) q_c|| eta_u / sqrt(content - rank))

    with q = [q_c ; q_r] a head's query, r_u the row's side, V c_u its sketch and eta_u its residual. The last term, the
    certificate, is 0 where rank = content: the sketch is then the whole row.

    query[heads, content + branch] is absorbed; side[rows, branch] is the exact branch of the archived rows;
    sketch[rows, rank] and residual[rows] come from `index` with basis V[rank, content]. threshold[heads] is the best
    true score of a head over the rows that it attends: +inf is a closed gate, -inf fires every row, and equality does
    not fire. scale is lambda, 192^-1/2 for Kimi Linear; inflation is z >= 0. Rows are scored in chunks. Raises
    ValueError for shapes that do not fit, a NaN threshold, a negative or infinite inflation. Source: VestigeKV
    section 4.2, equation 4; a threshold per head is the deployed variant.
    """
    hits = [torch.zeros(0, dtype=torch.int64, device=side.device)]
    for start, score, limit in _scored_chunks(query, side, sketch, residual, basis, threshold, scale, inflation):
        hits.append((score > limit).any(dim=0).nonzero().flatten() + start)
    return torch.cat(hits)


def scan_capped(
    query: Tensor,
    side: Tensor,
    sketch: Tensor,
    residual: Tensor,
    basis: Tensor,
    threshold: Tensor,
    *,
    scale: float,
    inflation: float,
    cap: int,
) -> Tensor:
    """`scan`, with at most the `cap` best-scoring fired rows of each head before the union (the paper's harness: 16).

    Of equal scores the earlier row wins.
    """
    require_count("cap", cap)
    heads = query.shape[0]
    best = side.new_zeros(heads, 0, dtype=torch.float64)
    rows = torch.zeros(heads, 0, dtype=torch.int64, device=side.device)
    for start, score, limit in _scored_chunks(query, side, sketch, residual, basis, threshold, scale, inflation):
        # A running top keeps the memory at one chunk; rows that did not fire rank below all that did.
        fired = score.where(score > limit, -math.inf).to(torch.float64)
        positions = torch.arange(start, start + score.shape[1], device=side.device).expand(heads, -1)
        ranked, order = torch.cat([best, fired], dim=1).sort(dim=1, descending=True, stable=True)
        best, rows = ranked[:, :cap], torch.cat([rows, positions], dim=1).gather(1, order)[:, :cap]
    fetched: Tensor = torch.unique(rows[best > -math.inf])
    return fetched


def limit_fetch(fired: Tensor, *, width: int | None) -> tuple[Tensor, bool]:
    """Keep the first `width` of fired[n] in row order, and say whether any was left out.

    A step that left one out must attend everything. width is the size of the fetch buffer, None = no limit.
    """
    require_tensor("fired", fired, (None,), dtype=torch.int64)
    if width is None:
        return fired, False
    require_count("width", width)
    return fired.sort().values[:width], fired.shape[0] > width


def _scored_chunks(
    query: Tensor,
    side: Tensor,
    sketch: Tensor,
    residual: Tensor,
    basis: Tensor,
    threshold: Tensor,
    scale: float,
    inflation: float,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Per chunk of the archive: (its first row, score[heads, chunk], threshold[heads, 1]), in one precision."""
    wide = _working_dtype(query, side, sketch, residual, basis)
    require_tensor("threshold", threshold, (query.shape[0],))
    require_real("inflation", inflation, minimum=0.0)
    if torch.isnan(threshold).any():
        raise ValueError("threshold holds NaN: expected a score per head, +inf for a closed gate")
    wide = torch.promote_types(wide, threshold.dtype)
    for chunk in row_chunks(side.shape[0]):
        known, certificate = archive_scores(
            query.to(wide), side[chunk], sketch[chunk], residual[chunk], basis, scale=scale
        )
        yield chunk.start, known + inflation * certificate, threshold.to(wide)[:, None]


def _working_dtype(query: Tensor, side: Tensor, sketch: Tensor, residual: Tensor, basis: Tensor) -> torch.dtype:
    require_tensor("basis", basis, (None, None))
    require_tensor("side", side, (None, None))
    rows, branch = side.shape
    require_tensor("query", query, (None, basis.shape[1] + branch))
    require_tensor("sketch", sketch, (rows, basis.shape[0]))
    require_tensor("residual", residual, (rows,))
    return working_dtype(query, side, sketch, residual, basis)
