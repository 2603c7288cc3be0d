"""Decode attention over an id list, and the merge of partial results.

    s_i = scale <q, K_i>,  lse = ln sum_i exp(s_i),  out = sum_i exp(s_i - lse) V_i          over the listed rows i

float64 in, float64 arithmetic; otherwise fp32 inside and one rounding of `out` to the storage dtype. Lists are read
in chunks with a running maximum, so memory grows with the chunk and not with the list.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "merge"]

CHUNK = 65_536


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def decode(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to the listed rows: (out[heads, value_dim] in the dtype of the values, lse[heads] in fp32 or wider).

    query[heads, dim], keys[rows, dim], values[rows, value_dim] in one floating dtype; ids[n] int64, -1 is a pad and
    contributes nothing, an id that is listed twice counts twice. lse is a natural logarithm. An empty list gives out
    0, lse -inf. Raises ValueError for wrong ranks, dimensions that do not match, and ids outside [-1, rows).
    """
    _check_decode(query, keys, values, ids)
    wide = _wide(query.dtype)
    listed = ids[ids >= 0]
    peak = query.new_full((query.shape[0],), -torch.inf, dtype=wide)
    mass = torch.zeros_like(peak)
    total = query.new_zeros((query.shape[0], values.shape[1]), dtype=wide)
    for part in listed.split(CHUNK):
        if not part.numel():
            continue
        scores = scale * (query.to(wide) @ keys[part].to(wide).T)
        higher = torch.maximum(peak, scores.amax(-1))
        weights = torch.exp(scores - higher[:, None])
        fade = torch.exp(peak - higher)
        mass = fade * mass + weights.sum(-1)
        total = fade[:, None] * total + weights @ values[part].to(wide)
        peak = higher
    out = total / torch.where(mass > 0, mass, 1.0)[:, None]
    return out.to(values.dtype), peak + torch.log(mass)


def merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join the results over disjoint lists: out = sum_s w_s out_s, w_s = exp(lse_s - lse), lse = ln sum_s exp(lse_s).

    out[splits, heads, dim], lse[splits, heads] -> out[heads, dim] in its own dtype, lse[heads] in fp32 or wider. A
    split with lse -inf is empty: it weighs nothing, whatever its out holds. All splits empty: out 0, lse -inf. Raises
    ValueError for shapes that do not match.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ValueError(
            f"lse has shape {list(lse.shape)} and out {list(out.shape)}: "
            "expected lse[splits, heads] and out[splits, heads, dim]"
        )
    wide = _wide(out.dtype)
    lse = lse.to(_wide(lse.dtype))
    joint = torch.logsumexp(lse, 0) if lse.shape[0] else lse.new_full(lse.shape[1:], -torch.inf)
    weights = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - torch.where(joint == -torch.inf, 0.0, joint)))
    parts = torch.where((lse == -torch.inf)[..., None], 0.0, out.to(wide))
    return (weights.to(wide)[..., None] * parts).sum(0).to(out.dtype), joint


def _check_decode(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor) -> None:
    for name, tensor, rank, shape in (
        ("query", query, 2, "[heads, dim]"),
        ("keys", keys, 2, "[rows, dim]"),
        ("values", values, 2, "[rows, value_dim]"),
        ("ids", ids, 1, "[n]"),
    ):
        if tensor.dim() != rank:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected {name}{shape}")
    if keys.shape[1] != query.shape[1]:
        raise ValueError(f"keys have {keys.shape[1]} dimensions: expected {query.shape[1]}, as the query")
    if values.shape[0] != keys.shape[0]:
        raise ValueError(f"values have {values.shape[0]} rows: expected {keys.shape[0]}, as the keys")
    if ids.dtype != torch.int64:
        raise ValueError(f"ids have dtype {ids.dtype}: expected int64")
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < keys.shape[0]:
        raise ValueError(
            f"ids reach from {int(ids.min())} to {int(ids.max())}: expected ids in [-1, {keys.shape[0]}), -1 for a pad"
        )
