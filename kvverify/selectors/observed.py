"""Selectors that ask the last queries: SnapKV, and what was built on its observation window.

The window itself is kept by construction: only the positions before it are ranked. Raising its scores above all others
instead (max + 1) protects nothing once the sum no longer changes the maximum, in bfloat16 from 256 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvverify.selectors.budgets import Rounding, adaptive_budgets, check_rounding, pyramid_budgets
from kvverify.selectors.checks import check_budget, check_count, check_rows, protected_count
from kvverify.selectors.scores import group_sum, pool, query_sum, sum_in_order, top_mask, window_scores
from kvverify.selectors.selection import Selection, from_mask

if TYPE_CHECKING:
    from fractions import Fraction

    from torch import Tensor

__all__ = ["ada_kv", "chunkkv", "finch", "pyramidkv", "snapkv"]


def snapkv(
    rows: Tensor,
    *,
    budget: int,
    kv_heads: int | None = None,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "average",
) -> Selection:
    """Keep the last `window` positions and the earlier ones that these attend to most (SnapKV).

    score[j] = pool over j < history - window of (sum over the group and over the window's rows of rows[j]).
    The group comes before the pooling: the two commute for average pooling, not for max pooling.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    kept, window = _window(rows, budget, window)
    scores = _pooled_scores(rows, kv_heads, window, kernel, pooling)
    mask = _with_window(top_mask(scores, kept - window), window)
    return from_mask(mask, "snapkv", budget, parameters={"window": window, "kernel": kernel, "pooling": pooling})


def pyramidkv(
    rows: Tensor,
    *,
    budget: int,
    kv_heads: int | None = None,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "average",
    rounding: Rounding = "exact",
) -> Selection:
    """SnapKV with more states in the first layers than in the last (PyramidKV); `budget` is the mean over the layers.

    The layer budgets are those of `pyramid_budgets`, computed anew from the history of each call.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    _, window = _window(rows, budget, window)
    layers, history = rows.shape[0], rows.shape[3]
    scores = _pooled_scores(rows, kv_heads, window, kernel, pooling)
    budgets = pyramid_budgets(budget, history=history, layers=layers, window=window, rounding=rounding)
    selected = torch.tensor(budgets, device=rows.device).unsqueeze(1).expand(layers, kv_heads) - window
    return from_mask(
        _with_window(top_mask(scores, selected), window),
        "pyramidkv",
        budget,
        parameters={"window": window, "kernel": kernel, "pooling": pooling, "rounding": rounding},
    )


def ada_kv(
    rows: Tensor,
    *,
    budget: int,
    kv_heads: int | None = None,
    window: int = 32,
    kernel: int = 7,
    pooling: str = "max",
    floor_share: float | Fraction = 0.2,
    rounding: Rounding = "exact",
) -> Selection:
    """SnapKV with the budget of a layer shared by its heads (Ada-KV): kv_heads * budget states per layer.

    The kv_heads * (budget - window) best scores of the layer are counted by head, and each head gets the number that
    `adaptive_budgets` makes of its count. Equal scores of several heads count for the lower position, then the
    lower head.
    """
    check_rounding(rounding)
    rows, kv_heads = check_rows(rows, kv_heads)
    kept, window = _window(rows, budget, window)
    scores = _pooled_scores(rows, kv_heads, window, kernel, pooling)
    by_position = scores.transpose(1, 2).flatten(1)  # position-major, so that the lower index is the lower position
    best = top_mask(by_position, kv_heads * (kept - window)).reshape(scores.shape[0], scores.shape[2], kv_heads)
    budgets = [
        adaptive_budgets(shares, floor_share=floor_share, rounding=rounding) for shares in best.sum(dim=1).tolist()
    ]
    selected = torch.tensor(budgets, dtype=torch.int64, device=rows.device).reshape(scores.shape[:2])
    return from_mask(
        _with_window(top_mask(scores, selected), window),
        "ada_kv",
        budget,
        parameters={
            "window": window,
            "kernel": kernel,
            "pooling": pooling,
            "floor_share": floor_share,
            "rounding": rounding,
        },
    )


def chunkkv(
    rows: Tensor,
    *,
    budget: int,
    kv_heads: int | None = None,
    window: int = 32,
    kernel: int = 5,
    pooling: str = "average",
    chunk: int = 20,
) -> Selection:
    """Whole chunks of neighbours instead of single positions (ChunkKV), the same for all heads of a layer.

    The positions before the window are cut into chunks from position 0 on; a chunk's score is the mean over its own
    positions of SnapKV's score, summed over the KV heads. Chunks are taken best first, the earlier of equals;
    the last one taken is cut after the tokens that meet the budget. The window is in no chunk and lifts no neighbour.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    check_count("chunk", chunk, minimum=1)
    kept, window = _window(rows, budget, window)
    scores = sum_in_order(_pooled_scores(rows, kv_heads, window, kernel, pooling).unbind(dim=1))
    columns = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -columns % chunk))
    sizes = (columns - torch.arange(0, columns, chunk, device=rows.device)).clamp(max=chunk)
    means = sum_in_order([padded[:, offset::chunk] for offset in range(chunk)]) / sizes
    # Every position carries its chunk's mean: the tie rule then takes whole chunks, and cuts the last one at its end.
    mask = top_mask(means.repeat_interleave(chunk, dim=-1)[..., :columns], kept - window)
    return from_mask(
        _with_window(mask.unsqueeze(1).expand(-1, kv_heads, -1), window),
        "chunkkv",
        budget,
        parameters={"window": window, "kernel": kernel, "pooling": pooling, "chunk": chunk},
    )


def finch(
    rows: Tensor, *, budget: int, kv_heads: int | None = None, window: int | None = None, normalised: bool = True
) -> Selection:
    """Keep the question and the context positions it attends to most (FINCH), in one pass over the whole context.

    The question is the last `window` positions, by default as many as there are rows; it is kept, and counts in the
    budget. score[j] = sum over the group and the question's rows of rows[j], each row times the number of positions
    it sees when `normalised` (a row that sees more spreads its attention thinner). No pooling. The coordinates that
    FINCH gives the survivors, 0..n-1, are left to the position plan.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    queries, history = rows.shape[2:]
    kept, window = _window(rows, budget, queries if window is None else window)
    if queries < window:
        raise ValueError(f"rows has {queries} queries; expected at least window={window}")
    seen = [float(history - window + index + 1) for index in range(window)]
    question = query_sum(rows[:, :, queries - window :, : history - window], seen if normalised else None)
    scores = group_sum(question, kv_heads)
    mask = _with_window(top_mask(scores, kept - window), window)
    return from_mask(mask, "finch", budget, parameters={"window": window, "normalised": normalised})


def _window(rows: Tensor, budget: int, window: int) -> tuple[int, int]:
    """Return the states a head can keep, and how many of them are the window."""
    history = rows.shape[3]
    kept = check_budget(budget, history)
    check_count("window", window, minimum=min(1, history))
    return kept, protected_count("window", window, kept, history)


def _pooled_scores(rows: Tensor, kv_heads: int, window: int, kernel: int, pooling: str) -> Tensor:
    columns = rows.shape[3] - window
    return pool(window_scores(rows, kv_heads, window)[..., :columns], kernel, pooling)


def _with_window(mask: Tensor, window: int) -> Tensor:
    return torch.cat([mask, mask.new_ones(*mask.shape[:2], window)], dim=-1)
