"""Attention over a packed store: dequantize a few blocks at a time inside an online softmax, then merge the splits.

Each stored row carries its multiplicity n: it adds n exp(s) to the softmax. A token row has n = 1 (0 past the valid
tokens of its block, or where a residual row replaces it); the one row of a mean block has n = its valid tokens less its
residual tokens, so the block keeps the weight of all its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvverify.attention.policy import merge
from kvverify.geodesia.ladder import LADDER, MEAN
from kvverify.geodesia.store import PackedStore, residual_of, stored_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StoredRows", "attend", "block_weights", "stored_rows"]

_BLOCKS_AT_ONCE = 16


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Some rows of one KV head: what they hold, how many tokens each stands for, its first position and its block."""

    keys: Tensor  # [rows, dim]
    values: Tensor  # [rows, dim]
    multiplicity: Tensor  # [rows]
    position: Tensor  # [rows]
    block: Tensor  # [rows]


def attend(
    query: Tensor,
    store: PackedStore,
    *,
    scale: float,
    pages: Tensor | None = None,
    length: int | None = None,
    splits: int = 1,
    accumulate: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Return (output, natural-log LSE) of every query head, in the `accumulate` dtype.

    `pages` marks the blocks each head may read, the open one included (None: all); the rest score -inf. `length` hides
    the positions from it on. An empty store gives output 0 and LSE -inf.

    Shapes: query[kv, group, dim], pages bool[kv, group, pages] -> [kv, group, dim], [kv, group].
    """
    heads, group, dim = query.shape
    if (heads, dim) != (store.geometry.kv_heads, store.geometry.dim):
        raise ValueError(
            f"query has shape {tuple(query.shape)}, expected ({store.geometry.kv_heads}, group, {store.geometry.dim})"
        )
    if splits < 1:
        raise ValueError(f"splits is {splits}, expected at least 1")
    total = _page_total(store)
    edges = [total * split // splits for split in range(splits + 1)]
    outs, lses = [], []
    for first, last in pairwise(edges):
        partial = [
            _split(
                query[head].to(accumulate),
                store,
                head,
                first,
                last,
                scale,
                None if pages is None else pages[head],
                length,
            )
            for head in range(heads)
        ]
        outs.append(torch.cat([out for out, _ in partial]))
        lses.append(torch.cat([lse for _, lse in partial]))
    out, lse = merge(torch.stack(outs), torch.stack(lses))
    return out.reshape(heads, group, dim), lse.reshape(heads, group)


def block_weights(
    query: Tensor,
    store: PackedStore,
    *,
    scale: float,
    length: int | None = None,
) -> Tensor:
    """Return each head's softmax weight per block (the open one last), float64, on what the store itself holds.

    Shapes: query[kv, group, dim] -> [kv, group, pages].
    """
    weights = []
    for head in range(store.geometry.kv_heads):
        logit, block = [], []
        for rows in _stored_in_parts(store, head, 0, _page_total(store)):
            logit.append(_logits(query[head].double(), rows, scale, None, length))
            block.append(rows.block)
        weight = torch.cat(logit, 1).softmax(1)
        weights.append(weight.new_zeros(len(weight), _page_total(store)).index_add_(1, torch.cat(block), weight))
    return torch.stack(weights)


def stored_rows(store: PackedStore, head: int, first: int, last: int) -> StoredRows:
    """Return the rows of blocks first..last - 1 of one KV head; the block after the closed ones is the open block."""
    geometry, closed = store.geometry, len(store.valid)
    valid = store.valid.long()
    starts = valid.cumsum(0) - valid
    ids, residual_keys, residual_values = residual_of(store, head)
    home = torch.searchsorted(starts + valid, ids.contiguous(), right=True)
    chosen = (home >= first) & (home < last)
    parts = [_token_rows(residual_keys[chosen], residual_values[chosen], ids[chosen], home[chosen])]
    index = torch.arange(first, min(last, closed))
    for level in range(len(LADDER)):
        blocks = index[store.level[head, index] == level]
        if not len(blocks):
            continue
        keys, values = stored_blocks(store, head, blocks, level=level)
        place = torch.arange(geometry.block)
        stands = place < valid[blocks][:, None]
        stands &= ~torch.isin(starts[blocks][:, None] + place, ids)
        if level == MEAN:
            stands, place = stands.sum(1, keepdim=True), place[:1]
        position = starts[blocks][:, None] + place
        parts.append(
            StoredRows(
                keys.flatten(0, 1),
                values.flatten(0, 1),
                stands.flatten().long(),
                position.flatten(),
                blocks[:, None].expand_as(position).flatten(),
            )
        )
    if last > closed:
        position = int(valid.sum()) + torch.arange(store.open_keys.shape[1])
        parts.append(
            _token_rows(store.open_keys[head], store.open_values[head], position, torch.full_like(position, closed))
        )
    fields = ("keys", "values", "multiplicity", "position", "block")
    return StoredRows(*(torch.cat([getattr(part, field) for part in parts]) for field in fields))


def _split(
    query: Tensor,
    store: PackedStore,
    head: int,
    first: int,
    last: int,
    scale: float,
    pages: Tensor | None,
    length: int | None,
) -> tuple[Tensor, Tensor]:
    """Online softmax over a range of blocks: running maximum, sum and weighted values; an empty range is (0, -inf)."""
    peak = query.new_full((len(query),), -torch.inf)
    mass = torch.zeros_like(peak)
    total = torch.zeros_like(query)
    for rows in _stored_in_parts(store, head, first, last):
        logits = _logits(query, rows, scale, pages, length)
        higher = torch.maximum(peak, logits.amax(1))
        safe = higher.masked_fill(higher == -torch.inf, 0)
        weight = (logits - safe[:, None]).exp()
        fade = (peak - safe).exp()
        mass = fade * mass + weight.sum(1)
        total = fade[:, None] * total + weight @ rows.values.to(query.dtype)
        peak = higher
    return total / mass.masked_fill(mass == 0, 1)[:, None], peak + mass.log()


def _logits(query: Tensor, rows: StoredRows, scale: float, pages: Tensor | None, length: int | None) -> Tensor:
    """Scores plus the logarithm of the multiplicity; -inf where a row may not be read."""
    logits = scale * query @ rows.keys.to(query.dtype).T + rows.multiplicity.to(query.dtype).log()
    if length is not None:
        logits = logits.masked_fill(rows.position >= length, -torch.inf)
    return logits if pages is None else logits.masked_fill(~pages[:, rows.block], -torch.inf)


def _stored_in_parts(store: PackedStore, head: int, first: int, last: int) -> Iterator[StoredRows]:
    for begin in range(first, last, _BLOCKS_AT_ONCE):
        yield stored_rows(store, head, begin, min(last, begin + _BLOCKS_AT_ONCE))


def _page_total(store: PackedStore) -> int:
    return len(store.valid) + (store.open_keys.shape[1] > 0)


def _token_rows(keys: Tensor, values: Tensor, position: Tensor, block: Tensor) -> StoredRows:
    return StoredRows(keys.double(), values.double(), torch.ones_like(position), position, block)
