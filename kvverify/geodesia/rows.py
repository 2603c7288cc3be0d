"""Rows of keys or values as the cases of Geodesia-KV need them: what real caches have and random tensors lack."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.cases import generator, magnitudes

__all__ = ["EDGE", "rows"]

EDGE = 3e4
"""Near the end of fp16, which holds the scales: 65,504 rounds beyond it in bf16."""


def rows(count: int, dim: int, *, regime: str, seed: int, stream: int = 0) -> Tensor:
    """Return float64[count, dim]."""
    found = torch.randn(count, dim, generator=generator(seed, stream=stream), dtype=torch.float64)
    match regime:
        case "constant":
            found = found[:1].expand_as(found).clone()
        case "offset":
            found = found + torch.linspace(1000, 5000, dim, dtype=torch.float64) * (-1.0) ** torch.arange(dim)
        case "tiny":
            found = found * 1e-6
        case "large":
            found = found * 64
        case "loud":
            found[:, dim // 2 : dim // 2 + 1] *= 1000
        case "mixed":
            found = found * magnitudes(count, seed)[:, None]
        case "ties":
            found = (found * 2).round() / 2
        case "edge":
            found = found.clamp(-1, 1) * EDGE
        case "sink":
            found[:1] *= 12
        case "ramp":
            found = found + torch.linspace(-4, 4, count, dtype=torch.float64)[:, None]
    return found
