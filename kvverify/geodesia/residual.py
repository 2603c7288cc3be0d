"""The exact residual: a few prompt tokens kept in 16 bits because a block average would misrepresent them.

    s_j = a_j || v_j - mean of the values of j's block ||_2^2

a_j is the token mass (sum over heads and observed queries). Chosen once, from the prompt alone; costs 2 D 16 bits a
token on top of the budget, and only while the token's block is not exact (no value is stored twice).
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

__all__ = ["residual", "residual_count", "residual_pooled", "salience"]


def salience(
    mass: Tensor,
    values: Tensor,
    *,
    block: int,
) -> Tensor:
    """Return s_j in float64; the last block's mean is over its real tokens only.

    Shapes: mass[tokens], values[tokens, dim] -> [tokens].
    """
    tokens = len(values)
    if mass.shape != (tokens,):
        raise ValueError(f"mass has shape {tuple(mass.shape)}, expected ({tokens},) to match values")
    home = torch.arange(tokens, device=values.device) // block
    wide = values.double()
    total = wide.new_zeros(-(-tokens // block), wide.shape[1]).index_add_(0, home, wide)
    mean = total / torch.bincount(home)[:, None]
    return mass.double() * (wide - mean[home]).square().sum(1)


def residual(
    mass: Tensor,
    values: Tensor,
    *,
    block: int,
    count: int,
) -> Tensor:
    """Paper form: the `count` tokens of largest s_j, ids ascending (ties: lowest id first).

    Shapes: mass[tokens], values[tokens, dim] -> [count].
    """
    return _top(salience(mass, values, block=block), count)


def residual_pooled(
    mass: Tensor,
    values: Tensor,
    *,
    block: int,
    count: int,
    pool: int = 5,
    recent: int = 64,
) -> Tensor:
    """Published-code form: s_j averaged over `pool` neighbours (zeros outside), the last `recent` tokens always in.

    Shapes: mass[tokens], values[tokens, dim] -> [count].
    """
    score = salience(mass, values, block=block)
    score = torch.nn.functional.avg_pool1d(score[None, None], pool, stride=1, padding=pool // 2)[0, 0]
    score[len(score) - min(recent, len(score)) :] = torch.inf
    return _top(score, count)


def residual_count(fraction: float, tokens: int) -> int:
    """Tokens in an exact fraction of a prompt, ceil(fraction * T) (the published runs: 128 and 510 of 16,320)."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is {fraction}, expected a number from 0 to 1")
    return math.ceil(Fraction(str(fraction)) * tokens)


def _top(score: Tensor, count: int) -> Tensor:
    if not 0 <= count <= len(score):
        raise ValueError(f"count is {count}, expected 0 to {len(score)}, the number of tokens")
    return score.sort(descending=True, stable=True).indices[:count].sort().values
