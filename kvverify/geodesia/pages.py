"""Page summaries: a box around the ORIGINAL keys of each block, and the ranking of pages by an upper bound of q . k.

    box    low_d <= min_j k_jd, high_d >= max_j k_jd          fp16, rounded outward
    score  c sum_d max(q_d low_d, q_d high_d)  >=  c q . k_j  for every key in the block (c > 0)

Boxes are taken before quantization. Candidates are the pages closed before the query; the page that holds the query is
always read. Under grouped-query attention every query head ranks for itself and the memory system reads the union.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from kvverify.geodesia.ladder import half_down, half_up

__all__ = ["box", "page_count", "page_scores", "rank_pages", "read_pages"]


def box(
    keys: Tensor,
    *,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Return (low, high) in fp16, rounded outward; a short last block is boxed over its real rows only.

    Shapes: keys[tokens, dim] -> [blocks, dim], [blocks, dim].
    """
    if block < 1:
        raise ValueError(f"block is {block}, expected a positive number of tokens")
    rows = torch.split(keys, block)
    if not len(keys):
        empty = keys.new_empty(0, keys.shape[1], dtype=torch.float16)
        return empty, empty.clone()
    return half_down(torch.stack([r.amin(0) for r in rows])), half_up(torch.stack([r.amax(0) for r in rows]))


def page_count(pages: int, fraction: float) -> int:
    """How many closed pages are read: min(n, max(1, ceil(f n)))."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}, expected a number above 0, up to 1")
    return min(pages, max(1, math.ceil(Fraction(str(fraction)) * pages)))


def page_scores(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Return the upper bound of scale q . k over each box, in float64 (split by the sign of q: two products).

    Shapes: query[heads, dim], low[pages, dim], high[pages, dim] -> [heads, pages].
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}, expected a positive number")
    wide = query.double()
    return scale * (wide.clamp(min=0) @ high.double().T + wide.clamp(max=0) @ low.double().T)


def rank_pages(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    *,
    keep: int,
    scale: float,
) -> Tensor:
    """Return for each head the `keep` pages of highest score, best first (ties: lowest page first).

    Shapes: query[heads, dim], low[pages, dim], high[pages, dim] -> [heads, keep].
    """
    if not 0 <= keep <= len(low):
        raise ValueError(f"keep is {keep}, expected 0 to {len(low)}, the number of candidate pages")
    return page_scores(query, low, high, scale=scale).sort(dim=1, descending=True, stable=True).indices[:, :keep]


def read_pages(pages: Tensor, *, total: int, current: int) -> Tensor:
    """Return which of `total` pages each head reads: its ranked pages and every page from `current` on.

    Shapes: pages[heads, keep] -> bool[heads, total].
    """
    mask = torch.zeros(len(pages), total, dtype=torch.bool, device=pages.device)
    mask.scatter_(1, pages, True)
    mask[:, current:] = True
    return mask
