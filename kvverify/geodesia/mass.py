"""Attention mass: what the policy believes each block is worth, from past queries only.

    observer   m_b = mean over (query heads of the group x last n prompt queries) of the causal softmax weight in b
    token mass a_j = SUM over the same (heads x queries) of the weight of token j
    decode     m <- decay m + (1 - decay) m_new,   m_new = mean over the group of the current query's weights

State is kept once per KV head. sum_b m_b = 1 holds after the observer and after every update.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_sums", "hot_set", "observe", "update"]


def observe(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Return (block mass, token mass), float64, of the last `observed` queries of a prompt of T tokens.

    Query i of n sits at position T - n + i and sees keys up to and including its own.

    Shapes: queries[group, observed, dim], keys[tokens, dim] -> [blocks], [tokens].
    """
    group, observed, _ = queries.shape
    tokens = keys.shape[0]
    if not 1 <= observed <= tokens:
        raise ValueError(f"queries holds {observed} observed queries, expected 1 to {tokens}, the prompt's length")
    scores = scale * queries.double() @ keys.double().T
    positions = torch.arange(tokens - observed, tokens, device=keys.device)
    future = torch.arange(tokens, device=keys.device) > positions[:, None]
    weight = scores.masked_fill(future, -torch.inf).softmax(-1)
    token_mass = weight.sum((0, 1))
    return block_sums(token_mass, block=block) / (group * observed), token_mass


def block_sums(mass: Tensor, *, block: int) -> Tensor:
    """Sum a per-token mass over blocks of `block` tokens, the last of which may be short.

    Shapes: mass[tokens] -> [blocks].
    """
    padded = torch.nn.functional.pad(mass, (0, -mass.shape[0] % block))
    return padded.reshape(-1, block).sum(1)


def update(mass: Tensor, new: Tensor, *, decay: float) -> Tensor:
    """One step of the moving average; a block that is new enters with mass 0 and the others are not reset.

    Shapes: mass[blocks], new[now] -> [now].
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}, expected a number from 0 to 1")
    if len(new) < len(mass):
        raise ValueError(f"new has {len(new)} blocks, expected at least the {len(mass)} blocks of mass")
    return decay * torch.nn.functional.pad(mass, (0, len(new) - len(mass))) + (1 - decay) * new


def hot_set(length: int, query_position: int, *, block: int, sinks: int = 4, window: int = 128) -> Tensor:
    """Return which of the ceil(T / P) blocks may not be demoted now.

    The first max(1, ceil(sinks / P)) blocks, the blocks from floor(query_position / P) - 1 on, and the last
    max(1, ceil(window / P)) blocks.

    Shapes: bool[blocks].
    """
    if not 0 <= query_position < length:
        raise ValueError(f"query_position is {query_position}, expected 0 to {length - 1}")
    blocks = -(-length // block)
    index = torch.arange(blocks)
    first = max(1, -(-sinks // block))
    last = max(1, -(-window // block))
    return (index < first) | (index >= query_position // block - 1) | (index >= blocks - last)
