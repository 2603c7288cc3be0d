"""`PackedStore`: one sequence of one layer as the flat buffers a kernel reads.

Closed blocks are described by three maps: `level[kv, blocks]` (index into the ladder), `offset[kv, blocks]` (first byte
in `payload`; on the mean rung the row in `centroids`) and `valid[blocks]` (real tokens; a crop can leave a demoted
block short, so token positions are the running sum of `valid`). Scale planes exist for quantized blocks only, in
(kv, block) order: a block's row is its rank among them. The open block is exact. Residual tokens are exact
rows that replace their tokens in demoted blocks, listed per KV head (`residual_count`) in position order.

Every data byte is accounted: `data_bytes * 8 == accounted_bits`. Index bytes are declared beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.geodesia.accounting import Geometry, token_bits
from kvverify.geodesia.ladder import EXACT, LADDER, MEAN, unpack
from kvverify.geodesia.pool import QuantizedPages

__all__ = ["PackedStore", "read_bits", "reconstruct", "residual_of", "stored_blocks"]

_DATA = ("payload", "k_lo", "k_step", "v_lo", "v_step", "centroids", "open_keys", "open_values")
_RESIDUAL = ("residual_keys", "residual_values")
_BOXES = ("box_low", "box_high")
_INDEX = ("level", "offset", "valid", "residual_ids", "residual_count")


@dataclass(frozen=True, eq=False)
class PackedStore:
    """The buffers of one sequence (see the module's docstring for their meaning)."""

    geometry: Geometry
    level: Tensor  # uint8[kv, blocks]
    offset: Tensor  # [kv, blocks]
    valid: Tensor  # [blocks]
    payload: Tensor  # uint8[bytes]
    k_lo: Tensor  # [quantized, key_groups, dim]
    k_step: Tensor  # [quantized, key_groups, dim]
    v_lo: Tensor  # [quantized, block, value_groups]
    v_step: Tensor  # [quantized, block, value_groups]
    centroids: Tensor  # [means, 2, dim]
    open_keys: Tensor  # [kv, open, dim]
    open_values: Tensor  # [kv, open, dim]
    residual_ids: Tensor  # [residual]
    residual_count: Tensor  # [kv]
    residual_keys: Tensor  # [residual, dim]
    residual_values: Tensor  # [residual, dim]
    box_low: Tensor | None = None  # [kv, pages, dim]
    box_high: Tensor | None = None  # [kv, pages, dim]

    @property
    def length(self) -> int:
        """Tokens in the cache, closed and open."""
        return int(self.valid.sum()) + self.open_keys.shape[1]

    @property
    def data_bytes(self) -> int:
        """Bytes of the buffers that hold keys, values and page summaries."""
        return self._bytes(*_DATA, *_RESIDUAL, *_BOXES)

    @property
    def index_bytes(self) -> int:
        """Bytes of the maps: level 1, offset 8 and valid 4 a block; residual ids 8 a token and 4 a KV head."""
        return self._bytes(*_INDEX)

    @property
    def accounted_bits(self) -> int:
        """The closed form: rung bits of every closed block, open block, residual tokens and summaries, all KV heads."""
        dim, heads = self.geometry.dim, self.geometry.kv_heads
        graded = sum(self.geometry.block_bits(level) for level in self.level.flatten().tolist())
        exact = token_bits(dim, heads * self.open_keys.shape[1]) + token_bits(dim, len(self.residual_ids))
        pages = 0 if self.box_low is None else heads * (len(self.valid) + (self.open_keys.shape[1] > 0))
        return graded + exact + pages * token_bits(dim, 1)

    def _bytes(self, *names: str) -> int:
        tensors = (getattr(self, name) for name in names)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def stored_blocks(store: PackedStore, head: int, blocks: Tensor, *, level: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, float64, of blocks of one head that are all on one rung: [n, P, D], or [n, 1, D] on MEAN.

    Shapes: blocks[n].
    """
    geometry = store.geometry
    block, dim, offset = geometry.block, geometry.dim, store.offset[head, blocks]
    if level == MEAN:
        rows = store.centroids[offset].double()
        return rows[:, :1], rows[:, 1:]
    bits = LADDER[level]
    size = 2 * block * dim * bits // 8
    raw = store.payload[offset[:, None] + torch.arange(size)].contiguous()
    if level == EXACT:
        exact = raw.view(store.open_keys.dtype).reshape(-1, 2, block, dim).double()
        return exact[:, 0], exact[:, 1]
    quantized = (store.level != EXACT) & (store.level != MEAN)
    row = (quantized.flatten().cumsum(0) - 1).reshape(quantized.shape)[head, blocks]
    codes = unpack(raw.reshape(-1), bits=bits, count=len(blocks) * 2 * block * dim).reshape(-1, 2, block, dim)
    parts = QuantizedPages(
        codes[:, 0], codes[:, 1], store.k_lo[row], store.k_step[row], store.v_lo[row], store.v_step[row]
    )
    return parts.reconstruct(geometry, bits)


def residual_of(store: PackedStore, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, keys and values of one head's residual tokens (stored dtype)."""
    end = int(store.residual_count[: head + 1].sum())
    rows = slice(end - int(store.residual_count[head]), end)
    return store.residual_ids[rows], store.residual_keys[rows], store.residual_values[rows]


def read_bits(store: PackedStore, read: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits that one query reads, per query head and per KV head, all page summaries included.

    Bits of the pages a head reads with their residual tokens; a KV head's memory traffic is the union over its group.

    Shapes: read bool[kv, group, pages] (the open page included) -> [kv, group], [kv].
    """
    geometry, closed = store.geometry, len(store.valid)
    token = token_bits(geometry.dim, 1)
    pages = torch.zeros(geometry.kv_heads, read.shape[2], dtype=torch.int64)
    pages[:, :closed] = torch.tensor(geometry.costs)[store.level.long()]
    pages[:, closed:] = store.open_keys.shape[1] * token
    ends = store.valid.long().cumsum(0)
    for head in range(geometry.kv_heads):
        home = torch.searchsorted(ends, residual_of(store, head)[0].contiguous(), right=True)
        pages[head].index_add_(0, home, torch.full_like(home, token))
    summaries = 0 if store.box_low is None else store.box_low.shape[1] * token
    return (read * pages[:, None]).sum(2) + summaries, (read.any(1) * pages).sum(1) + summaries


def reconstruct(store: PackedStore) -> tuple[Tensor, Tensor]:
    """Return every token's keys and values as the policy sees them, in float64 (means repeated, residual put back).

    A transient for oracles and tests; attention never builds it.

    Shapes: [kv, tokens, dim], [kv, tokens, dim].
    """
    geometry = store.geometry
    heads = []
    for head in range(geometry.kv_heads):
        sides = torch.empty(2, len(store.valid), geometry.block, geometry.dim, dtype=torch.float64)
        for level in range(len(LADDER)):
            blocks = (store.level[head] == level).nonzero()[:, 0]
            if len(blocks):
                keys, values = stored_blocks(store, head, blocks, level=level)
                sides[0, blocks], sides[1, blocks] = (
                    keys.expand(-1, geometry.block, -1),
                    values.expand_as(sides[1, blocks]),
                )
        real = torch.arange(geometry.block) < store.valid[:, None]
        both = torch.cat([sides[:, real], torch.stack([store.open_keys[head], store.open_values[head]]).double()], 1)
        ids, keys, values = residual_of(store, head)
        both[0, ids], both[1, ids] = keys.double(), values.double()
        heads.append(both)
    stacked = torch.stack(heads, 1)
    return stacked[0], stacked[1]
