"""Inputs and error bounds that the tests of this folder share."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-53
"""Unit roundoff of float64."""

UNIT_FP32 = 2.0**-24


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthonormal_rows(rank: int, content: int, *, seed: int = 0) -> Tensor:
    return torch.linalg.qr(gaussian(content, rank, seed=seed)).Q.T.contiguous()


def growth(terms: int, unit: float = UNIT) -> float:
    """gamma_n = n u / (1 - n u): relative error of a sum of n products in any order, against the sum of magnitudes."""
    return terms * unit / (1 - terms * unit)


def score_error(query: Tensor, rows: Tensor, *, scale: float, unit: float = UNIT) -> float:
    """A computed score is within this of the exact one: gamma over the dot product, and the product with the scale."""
    norms = query.double().norm(dim=1).max() * rows.double().norm(dim=1).max()
    return float(growth(query.shape[1] + 2, unit) * scale * norms)


def attention_error(query: Tensor, rows: Tensor, *, scale: float, value_dim: int) -> tuple[float, float]:
    """Two float64 evaluations of one attention, in any order, differ by at most (this, this) in (out, lse).

    Each weight e^(s - peak) has a relative error of at most e + 2u(1 + range of s) + u, e = 2 score errors; sums add
    gamma_n.
    """
    slack = 2 * score_error(query, rows, scale=scale)
    largest = float(scale * query.norm(dim=1).max() * rows.norm(dim=1).max())
    relative = 2 * (slack + UNIT * (3 + 4 * largest) + growth(rows.shape[0] + 2))
    return 2 * relative * float(rows[:, :value_dim].abs().max()), relative + 2 * UNIT * (largest + 10)


def rotate(vectors: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """A rotary position embedding (half layout) of vectors[n, 2 pairs]: the control arm that NoPE claims must fail."""
    angle = positions[:, None].to(vectors) * frequencies
    left, right = vectors.chunk(2, dim=1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=1)
