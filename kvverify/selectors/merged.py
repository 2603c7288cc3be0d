"""CaM: evicted values live on in their successors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvverify.selectors.checks import check_budget, check_count, check_rows, protected_count
from kvverify.selectors.scores import sum_in_order, window_scores
from kvverify.selectors.selection import Selection, from_mask

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cam", "merge_probabilities", "merge_values"]


def cam(
    rows: Tensor,
    *,
    budget: int,
    values: Tensor,
    kv_heads: int | None = None,
    window: int = 32,
    width: int = 32,
    recent: int | None = None,
) -> Selection:
    """Keep the first and the most recent positions, and merge evicted values into kept ones (CaM, in expectation).

    s = sum over the last `window` rows and over the group (p does not see whether s is a sum or a mean).
    Each evicted j is merged into its receivers, the next n' <= `width` kept positions after it:
        p_j = min(1, s_j / mean of s over the receivers)        v_i += p_j v_j / n'
    CaM draws a merge with probability p_j; this is its expectation, and needs no seed. Nothing follows, nothing is
    merged. Keys and positions are untouched, log_multiplicity stays 0: CaM counts no votes. By default half of the
    budget is recent, the odd state too. A history shorter than the window is observed whole.

    `values[layers, kv_heads, history, value_dim]` (no layers axis where rows has none) keep their dtype; sums
    are float64.
    """
    values = values if rows.ndim == 4 else values.unsqueeze(0)
    rows, kv_heads = check_rows(rows, kv_heads)
    layers, history = rows.shape[0], rows.shape[3]
    if values.ndim != 4 or values.shape[:3] != (layers, kv_heads, history):
        raise ValueError(
            f"values has shape {tuple(values.shape)}; expected {(layers, kv_heads, history)} and a value dimension"
        )
    kept = check_budget(budget, history)
    if recent is None:
        recent = kept - kept // 2
    recent = protected_count("recent", check_count("recent", recent), kept, history)
    window = min(check_count("window", window, minimum=1), history)
    check_count("width", width, minimum=1)

    positions = torch.arange(history, device=rows.device)
    mask = (positions < kept - recent) | (positions >= history - recent)
    scores = window_scores(rows, kv_heads, window)
    return from_mask(
        mask.expand(layers, kv_heads, history),
        "cam",
        budget,
        parameters={"recent": recent, "window": window, "width": width},
        values=merge_values(mask, values, merge_probabilities(mask, scores, width), width),
    )


def merge_probabilities(mask: Tensor, scores: Tensor, width: int) -> Tensor:
    """p_j = min(1, s_j / mean of s over its receivers), float64; 0 for kept states and where no kept one follows.

    `mask[history]` is True where a state is kept, `scores[layers, kv_heads, history]` are >= 0. Receivers without any
    attention take all of a state that has some, p = 1, and nothing of one that has none, p = 0.
    """
    if not bool(((scores >= 0) & (scores < torch.inf)).all()):
        raise ValueError("scores hold a negative, infinite or NaN entry; expected finite attention sums")
    scores, first = scores.double(), _first_receivers(mask)
    receivers = first.unsqueeze(-1) + torch.arange(width, device=mask.device)
    kept_scores = torch.nn.functional.pad(scores[..., mask], (0, width))
    numbers = (int(mask.sum()) - first).clamp(0, width)
    sums = sum_in_order([kept_scores[..., column] for column in receivers.unbind(dim=-1)])
    evicted = scores[..., ~mask]
    ratio = torch.where(evicted > 0, (evicted * numbers / sums).clamp(max=1.0), 0.0)
    probabilities = torch.zeros_like(scores)
    probabilities[..., ~mask] = torch.where(numbers > 0, ratio, 0.0)
    return probabilities


def merge_values(mask: Tensor, values: Tensor, probabilities: Tensor, width: int) -> Tensor:
    """Add p_j v_j / n' of every evicted j to each of its n' receivers; evicted rows are left as they are.

    Evicted states between the same two kept ones share their receivers, so they are added up first, in source order.
    """
    kept = int(mask.sum())
    first = _first_receivers(mask)
    shares = (kept - first).clamp(1, width).unsqueeze(-1)
    given = probabilities[..., ~mask].unsqueeze(-1) * values[:, :, ~mask].double() / shares
    gaps = torch.zeros(*values.shape[:2], kept + 1, values.shape[3], dtype=torch.float64, device=values.device)
    gaps.index_add_(2, first, given)  # gap g lies just before kept state g; gap `kept` has no receiver
    received = values[:, :, mask].double()
    for offset in range(min(width, kept)):
        received[:, :, offset:] += gaps[:, :, : kept - offset]
    merged = values.clone()
    merged[:, :, mask] = received.to(values.dtype)
    return merged


def _first_receivers(mask: Tensor) -> Tensor:
    """For every evicted position the number of kept states before it: the index of the first kept one that follows."""
    return mask.cumsum(dim=-1)[~mask]
