"""H2O: the positions that collected most attention, and the recent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvverify.selectors.checks import check_budget, check_count, check_rows, protected_count
from kvverify.selectors.scores import group_sum, query_sum, top_mask
from kvverify.selectors.selection import Selection, from_mask

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["h2o"]


def h2o(
    rows: Tensor,
    *,
    budget: int,
    kv_heads: int | None = None,
    recent: int | None = None,
    age_corrected: bool = False,
) -> Selection:
    """Keep the heavy hitters among the older positions and the `recent` last ones (H2O), chosen once.

    score[j] = sum over all rows given, and over the group, of rows[j]. By default half of the budget is recent, the odd
    state too. H2O proper gives a row for every position; `attention_mass` makes that sum without the rows.

    The plain sum favours age: position j is seen by min(queries, history - j) rows, the rows being those of the last
    positions. `age_corrected` divides by that number; it needs the rows themselves, not their sum.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    queries, history = rows.shape[2:]
    kept = check_budget(budget, history)
    if recent is None:
        recent = kept - kept // 2
    recent = protected_count("recent", check_count("recent", recent), kept, history)
    scores = group_sum(query_sum(rows), kv_heads)
    if age_corrected:
        age = torch.arange(history, 0, -1, device=rows.device)
        scores = scores / age.clamp(max=max(queries, 1))
    older = top_mask(scores[..., : history - recent], kept - recent)
    mask = torch.cat([older, older.new_ones(*older.shape[:2], recent)], dim=-1)
    return from_mask(mask, "h2o", budget, parameters={"recent": recent, "age_corrected": age_corrected})
