"""Attention over cache rows, where a row is its own value: the first columns of C_u are the content c_u."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvverify.attention.policy import decode as decode_attention
from kvverify.vestige.index import query_parts
from kvverify.vestige.inputs import require_count, require_tensor, working_dtype

__all__ = ["Prologue", "attend", "prologue"]


class Prologue(NamedTuple):
    """What one reading of the attended rows gives: see `prologue`."""

    best: Tensor
    entropy: Tensor
    out: Tensor
    lse: Tensor
    query_sketch: Tensor
    query_residual: Tensor


def attend(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    """Softmax attention over exactly the listed rows: score scale <q, C_u>, value the first value_dim columns of C_u.

    query[heads, dim] is absorbed; rows[pool, dim]; ids[n] int64 in any order, -1 = pad, an id listed twice counts
    twice. Returns (out[heads, value_dim] in the dtype of the rows, lse[heads] in natural log, fp32 or wider); an
    empty list gives out 0, lse -inf. Raises ValueError for shapes that do not fit and for ids outside [-1, pool).
    """
    require_tensor("query", query, (None, None))
    require_tensor("rows", rows, (None, query.shape[1]))
    require_tensor("ids", ids, (None,), dtype=torch.int64)
    require_count("value_dim", value_dim, maximum=rows.shape[1])
    return decode_attention(query, rows, rows[:, :value_dim], ids, scale=scale)


def prologue(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    """Everything that a step needs from the rows it attends anyway, in one reading of rows[kept, dim] (kept and tail).

    best[heads]: s*, the best score, -inf for no rows. entropy[heads]: of the softmax over the rows, in nats, 0 for no
    rows. out and lse: as in `attend`. query_sketch[heads, rank] = V q_c and query_residual[heads] = || (I - V^T V)
    q_c ||, with basis V[rank, content]. query[heads, dim] is absorbed. All but `out` are in working precision. Raises
    ValueError for shapes that do not fit.
    """
    wide = working_dtype(query, rows, basis)
    out, lse = attend(query, rows, torch.arange(rows.shape[0], device=rows.device), scale=scale, value_dim=value_dim)
    score = scale * (query.to(wide) @ rows.to(wide).T)
    best = score.amax(dim=1) if rows.shape[0] else torch.full_like(lse, -torch.inf)
    entropy = torch.special.entr(torch.softmax(score, dim=1)).sum(dim=1)
    return Prologue(best, entropy, out, lse, *query_parts(query.to(wide), basis))
