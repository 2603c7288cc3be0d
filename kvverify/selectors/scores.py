"""From attention rows to scores, and from scores to the states that stay.

A tie has to be decided by the declared rule, not by rounding. Hence:
- Sums run in float64 and in a declared order, entry by entry. `torch.sum` adds in an order that depends on where a
  column happens to lie in memory, so two columns with the same attention can get different sums.
- The heads of a group are added in the order of their scores: which one is listed first cannot matter.
- Where a paper takes a mean over rows, heads or a kernel, the sum is ranked: the order is the same, and a mean over
  seven heads would be rounded before it is added to its neighbours.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kvverify.selectors.checks import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = [
    "attention_mass",
    "attention_rows",
    "group_sum",
    "pool",
    "query_sum",
    "sum_in_order",
    "top_indices",
    "top_mask",
    "window_scores",
]

_BLOCK_ENTRIES = 1 << 24  # logits held at once by attention_rows and attention_mass: 64 MiB in fp32


def attention_rows(queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """softmax(scale q.k) of the last queries over the whole history: [heads, queries, history].

    `queries[heads, queries, dim]` are those of the last positions of `keys[kv_heads, history, dim]`: query i stands at
    position history - queries + i and sees that position and all before it, the rest is exactly 0. Query head h reads
    KV head h // (heads / kv_heads). fp32 inside, float64 where an input is. Logits are made in blocks: beside the
    result nothing quadratic is held.
    """
    dtype = _check_attention(queries, keys)
    rows = torch.empty(*queries.shape[:2], keys.shape[1], dtype=dtype, device=keys.device)
    for start, block in _row_blocks(queries, keys, scale, dtype):
        rows[:, start : start + block.shape[1]] = block
    return rows


def attention_mass(queries: Tensor, keys: Tensor, *, scale: float) -> Tensor:
    """Sum `attention_rows` over the queries, [heads, history] in float64, without holding the rows.

    With a query for every position this is the score of H2O: `h2o(attention_mass(...)[:, None], ...)`.
    """
    dtype = _check_attention(queries, keys)
    mass = torch.zeros(queries.shape[0], keys.shape[1], dtype=torch.float64, device=keys.device)
    for _, block in _row_blocks(queries, keys, scale, dtype):
        for row in block.unbind(dim=1):
            mass += row
    return mass


def _check_attention(queries: Tensor, keys: Tensor) -> torch.dtype:
    """Refuse shapes that do not fit, and return the dtype to compute in."""
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[2] != keys.shape[2]:
        raise ValueError(
            f"queries has shape {tuple(queries.shape)} and keys {tuple(keys.shape)}; "
            "expected [heads, queries, dim] and [kv_heads, history, dim]"
        )
    (heads, count, _), (kv_heads, history, _) = queries.shape, keys.shape
    if count > history:
        raise ValueError(f"queries has {count} positions; expected at most the {history} of keys")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"keys has {kv_heads} KV heads, which do not divide the {heads} heads of queries")
    return torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), torch.float32)


def _row_blocks(queries: Tensor, keys: Tensor, scale: float, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    (heads, count, dim), (kv_heads, history, _) = queries.shape, keys.shape
    grouped = queries.reshape(kv_heads, heads // kv_heads, count, dim)
    transposed = keys.to(dtype).transpose(1, 2).unsqueeze(1)
    positions = torch.arange(history, device=keys.device)
    step = max(1, _BLOCK_ENTRIES // max(1, heads * history))
    for start, stop in pairwise([*range(0, count, step), count]):
        logits = (grouped[:, :, start:stop].to(dtype) @ transposed) * scale
        seen = positions <= positions[history - count + start : history - count + stop].unsqueeze(1)
        yield start, logits.masked_fill_(~seen, -torch.inf).softmax(dim=-1).reshape(heads, stop - start, history)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + ... in float64, the same order for every entry."""
    total = parts[0].to(torch.float64, copy=True)
    for part in parts[1:]:
        total += part
    return total


def query_sum(rows: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Sum over the queries of `rows[layers, heads, queries, history]`, each times its weight: float64, 0 for none."""
    total = torch.zeros(*rows.shape[:2], rows.shape[3], dtype=torch.float64, device=rows.device)
    for index, row in enumerate(rows.unbind(dim=2)):
        total += row if weights is None else row.double() * weights[index]
    return total


def group_sum(scores: Tensor, kv_heads: int) -> Tensor:
    """Sum over the query heads that share a KV head: [layers, heads, n] -> [layers, kv_heads, n].

    Heads of a group are consecutive. Bit for bit invariant under their order (see the module's opening).
    """
    layers, heads, columns = scores.shape
    group = heads // kv_heads
    ordered = scores.reshape(layers, kv_heads, group, columns).sort(dim=2).values
    return sum_in_order(ordered.unbind(dim=2))


def window_scores(rows: Tensor, kv_heads: int, window: int) -> Tensor:
    """Sum what the last `window` queries of a group's heads give each position.

    `rows[layers, heads, queries, history]` -> float64 [layers, kv_heads, history]. SnapKV's score before pooling.
    """
    queries = rows.shape[2]
    if queries < window:
        raise ValueError(f"rows has {queries} queries; expected at least window={window}")
    return group_sum(query_sum(rows[:, :, queries - window :]), kv_heads)


def pool(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    """One-dimensional pooling over the last axis, stride 1, same length.

    "average" is the sum over the kernel, its constant 1 / kernel left out. Zeros beyond the borders count, as in
    SnapKV, so borders are damped. "max" takes the maximum over the positions there are. An even kernel has no centre:
    ValueError.
    """
    if check_count("kernel", kernel, minimum=1) % 2 == 0:
        raise ValueError(f"kernel={kernel} is even; expected an odd size, which keeps the length")
    if pooling not in ("average", "max"):
        raise ValueError(f"pooling={pooling!r} is unknown; expected 'average' or 'max'")
    border = 0.0 if pooling == "average" else -torch.inf
    padded = torch.nn.functional.pad(scores, (kernel // 2, kernel // 2), value=border)
    shifted = [padded[..., offset : offset + scores.shape[-1]] for offset in range(kernel)]
    if pooling == "average":
        return sum_in_order(shifted)
    highest = shifted[0]
    for other in shifted[1:]:
        highest = torch.maximum(highest, other)
    return highest


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Rank the `count` highest entries of the last axis, best first; of equal scores the lower index comes first.

    `torch.topk` promises no order among ties. NaN has no rank: ValueError.
    """
    if not 0 <= count <= scores.shape[-1]:
        raise ValueError(f"count={count} is out of range; expected 0..{scores.shape[-1]}")
    if bool(torch.isnan(scores).any()):
        raise ValueError(f"scores of shape {tuple(scores.shape)} hold NaN; expected numbers that can be ranked")
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def top_mask(scores: Tensor, counts: int | Tensor) -> Tensor:
    """Mark the highest entries of the last axis, in the order of `top_indices`.

    `counts` is one number, or one per leading entry: int64 of shape `scores.shape[:-1]`.
    """
    order = top_indices(scores, scores.shape[-1])
    ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    wanted = torch.as_tensor(counts, device=scores.device).unsqueeze(-1)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, ranks < wanted)
