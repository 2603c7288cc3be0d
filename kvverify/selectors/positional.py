"""Selectors that look at no score: the two ends of the history, and a draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvverify.selectors.checks import check_budget, check_count, check_rows, protected_count
from kvverify.selectors.scores import top_mask
from kvverify.selectors.selection import Selection, from_mask

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["random", "streaming_llm"]


def streaming_llm(rows: Tensor, *, budget: int, kv_heads: int | None = None, sinks: int = 4) -> Selection:
    """Keep the first `sinks` positions and the most recent ones (StreamingLLM).

    Of `rows` only the shape is read, so rows without queries will do: `torch.empty(layers, heads, 0, history)`.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    layers, history = rows.shape[0], rows.shape[3]
    kept = check_budget(budget, history)
    sinks = protected_count("sinks", check_count("sinks", sinks), kept, history)
    positions = torch.arange(history, device=rows.device)
    mask = (positions < sinks) | (positions >= history - (kept - sinks))
    return from_mask(mask.expand(layers, kv_heads, history), "streaming_llm", budget, parameters={"sinks": sinks})


def random(rows: Tensor, *, budget: int, kv_heads: int | None = None, seed: int = 0) -> Selection:
    """Draw uniformly without replacement, anew for every layer and KV head: the floor any score has to beat.

    Of `rows` only the shape is read. The draw depends on the seed and the shape alone, on every device, and leaves
    the global generator as it was.
    """
    rows, kv_heads = check_rows(rows, kv_heads)
    layers, history = rows.shape[0], rows.shape[3]
    kept = check_budget(budget, history)
    generator = torch.Generator().manual_seed(check_count("seed", seed))
    draw = torch.rand(layers, kv_heads, history, dtype=torch.float64, generator=generator)
    return from_mask(top_mask(draw, kept).to(rows.device), "random", budget, parameters={"seed": seed})
