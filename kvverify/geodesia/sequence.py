"""`Sequence`: the live cache of one request in one layer. Append, close, demote, crop, release, all incremental.

    open block  --P tokens-->  closed on 16 bits  --demote-->  8 -> 4 -> 2 -> 1 (any rung below, never up)

What must stay in sync: a block closes for all KV heads at once, but each head has its own rung and page. When a block
closes, what the dense rows alone can tell is computed: error proxies, the box, the running radius of the values. When a
block leaves the 16-bit rung, its residual tokens are copied out; from then on no dense row of it exists anywhere.
Key and value errors add up over demotions, so that the certificate holds by the triangle inequality.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvverify.geodesia.ladder import EXACT, HALF_MAX, LADDER, MEAN, block_errors
from kvverify.geodesia.pages import box
from kvverify.geodesia.pool import PagePool, decode, demote, encode, read_quantized
from kvverify.geodesia.store import PackedStore

if TYPE_CHECKING:
    from collections.abc import Sequence as Several

__all__ = ["Sequence"]


class Sequence:
    """One sequence on a shared page pool. Tensors are [kv, ...]; tokens are numbered from 0 in order of arrival."""

    def __init__(self, pool: PagePool, *, boxes: bool = False) -> None:
        geometry = pool.geometry
        heads, dim = geometry.kv_heads, geometry.dim
        self.pool = pool
        self.level: Tensor = torch.empty(heads, 0, dtype=torch.int64)
        self.valid: Tensor = torch.empty(0, dtype=torch.int32)
        self.error: Tensor = torch.empty(heads, 0, len(LADDER), dtype=torch.float64)
        self.key_error: Tensor = torch.empty(heads, 0, dtype=torch.float64)
        self.value_error: Tensor = torch.empty(heads, 0, dtype=torch.float64)
        self.center: Tensor | None = None
        self.radius: Tensor = torch.zeros(heads, dtype=torch.float64)
        self._page: Tensor = torch.empty(heads, 0, dtype=torch.int64)
        self._open: Tensor = torch.empty(2, heads, 0, dim, dtype=pool.dtype)
        self._boxes: Tensor | None = torch.empty(2, heads, 0, dim, dtype=torch.float16) if boxes else None
        self._marked: Tensor = torch.zeros(heads, 0, dtype=torch.bool)
        self._residual: list[dict[int, Tensor]] = [{} for _ in range(heads)]

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self.valid.sum()) + self.open_tokens

    @property
    def open_tokens(self) -> int:
        """Tokens in the open block."""
        return self._open.shape[2]

    @property
    def starts(self) -> Tensor:
        """Position of the first token of each closed block.

        Shapes: [blocks].
        """
        return self.valid.long().cumsum(0) - self.valid

    @property
    def kept(self) -> list[Tensor]:
        """Residual tokens that were chosen for each KV head, whether or not their blocks are still exact."""
        return [marked.nonzero()[:, 0] for marked in self._marked]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens at the end, in the pool's dtype; blocks close as they fill.

        Shapes: keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        geometry = self.pool.geometry
        for name, rows in (("keys", keys), ("values", values)):
            if rows.ndim != 3 or (rows.shape[0], rows.shape[2]) != (geometry.kv_heads, geometry.dim):
                raise ValueError(
                    f"{name} has shape {tuple(rows.shape)}, expected ({geometry.kv_heads}, n, {geometry.dim})"
                )
            if rows.dtype != self.pool.dtype:
                raise TypeError(f"{name} has dtype {rows.dtype}, expected {self.pool.dtype}, the pool's")
            if rows.numel() and not float(rows.abs().max()) <= HALF_MAX:
                raise ValueError(f"{name} contains {float(rows.abs().max())}, expected finite values within 65504")
        if keys.shape != values.shape:
            raise ValueError(f"values has shape {tuple(values.shape)}, expected {tuple(keys.shape)} to match keys")
        if not keys.shape[1]:
            return
        wide = values.double()
        if self.center is None:
            self.center = wide.mean(1)
        self.radius = torch.maximum(self.radius, (wide - self.center[:, None]).norm(dim=-1).amax(1))
        rows = torch.cat([self._open, torch.stack([keys, values])], dim=2)
        whole = rows.shape[2] // geometry.block * geometry.block
        if whole:
            self._close(rows[:, :, :whole])
        self._open = rows[:, :, whole:].clone()

    def demote(self, level: Tensor) -> None:
        """Move closed blocks down to the given rungs; a rung above the present one is a ValueError.

        Shapes: level[kv, blocks].
        """
        if level.shape != self.level.shape:
            raise ValueError(f"level has shape {tuple(level.shape)}, expected {tuple(self.level.shape)}")
        if bool((level < self.level).any()) or (level.numel() and int(level.max()) >= len(LADDER)):
            raise ValueError(
                f"level is {level.tolist()}, expected rungs from {self.level.tolist()} to {len(LADDER) - 1}"
            )
        for old in range(len(LADDER)):
            for new in range(old + 1, len(LADDER)):
                moving = (self.level == old) & (level == new)
                if bool(moving.any()):
                    self._move(moving, old, new)

    def keep_exact(self, ids: Several[Tensor]) -> None:
        """Choose the residual tokens of each KV head, once, while they are exact.

        Shapes: ids[count].
        """
        if bool(self._marked.any()):
            raise ValueError("ids were already chosen, expected one choice per sequence")
        marked = torch.zeros(len(ids), self.length, dtype=torch.bool)
        for head, chosen in enumerate(ids):
            marked[head, chosen] = True
        demoted = (self.level != EXACT).repeat_interleave(self.valid.long(), dim=1)
        if bool((marked[:, : demoted.shape[1]] & demoted).any()):
            raise ValueError("ids contain a token of a demoted block, expected tokens that are still exact")
        self._marked = marked

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens: a cut exact block opens again, a cut demoted one stays with fewer valid."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}, expected 0 to {self.length}")
        ends = self.starts + self.valid
        if length >= int(self.valid.sum()):
            self._open = self._open[:, :, : length - int(self.valid.sum())].clone()
        else:
            whole = int((ends <= length).sum())
            part = length - int(self.starts[whole])
            self._open = self._open[:, :, :0].clone()
            if part and bool((self.level[:, whole] != EXACT).any()):
                self._truncate(whole + 1)
                self.valid[whole] = part
            else:
                if part:
                    pages = self.pool.read(self._page[:, whole], level=EXACT)
                    rows = pages.view(self.pool.dtype).reshape(len(pages), 2, -1, self.pool.geometry.dim)
                    self._open = rows[:, :, :part].transpose(0, 1).clone()
                self._truncate(whole)
        self._marked = self._marked[:, :length]
        self._residual = [{id_: row for id_, row in rows.items() if id_ < length} for rows in self._residual]

    def release(self) -> None:
        """Finish: give every page back to the pool."""
        self.crop(0)

    def packed(self) -> PackedStore:
        """Gather the buffers a kernel reads (a copy of packed bytes; nothing is dequantized)."""
        geometry, heads = self.pool.geometry, range(self.pool.geometry.kv_heads)
        offset = torch.zeros_like(self._page)
        payload: list[Tensor] = []
        centroids: list[Tensor] = []
        scales: list[tuple[Tensor, ...]] = []
        at = 0
        for head, block in ((h, b) for h in heads for b in range(len(self.valid))):
            level = int(self.level[head, block])
            page = self.pool.read(self._page[head, block : block + 1], level=level)
            if level == MEAN:
                offset[head, block] = len(centroids)
                centroids.append(page.view(torch.float16).reshape(2, geometry.dim))
                continue
            offset[head, block] = at
            payload.append(page[0, : 2 * geometry.block * geometry.dim * LADDER[level] // 8])
            at += len(payload[-1])
            if level != EXACT:
                parts = read_quantized(page, level=level, geometry=geometry)
                scales.append((parts.key_lo[0], parts.key_step[0], parts.value_lo[0], parts.value_step[0]))
        half = self._open.new_empty(0, dtype=torch.float16)
        of_keys, of_values = (-1, geometry.key_groups, geometry.dim), (-1, geometry.block, geometry.value_groups)
        planes = [torch.stack(plane) for plane in zip(*scales, strict=True)] if scales else [half] * 4
        ids, keys, values = self._residual_rows()
        boxes = self._all_boxes()
        return PackedStore(
            geometry=geometry,
            level=self.level.to(torch.uint8),
            offset=offset,
            valid=self.valid.clone(),
            payload=torch.cat(payload) if payload else torch.empty(0, dtype=torch.uint8),
            k_lo=_shaped(planes[0], of_keys),
            k_step=_shaped(planes[1], of_keys),
            v_lo=_shaped(planes[2], of_values),
            v_step=_shaped(planes[3], of_values),
            centroids=torch.stack(centroids) if centroids else half.reshape(0, 2, geometry.dim),
            open_keys=self._open[0].clone(),
            open_values=self._open[1].clone(),
            residual_ids=ids,
            residual_count=torch.tensor([len(rows) for rows in self._residual], dtype=torch.int32),
            residual_keys=keys,
            residual_values=values,
            box_low=None if boxes is None else boxes[0],
            box_high=None if boxes is None else boxes[1],
        )

    def _close(self, rows: Tensor) -> None:
        geometry, heads = self.pool.geometry, self.pool.geometry.kv_heads
        blocks = rows.shape[2] // geometry.block
        split = rows.reshape(2, heads * blocks, geometry.block, geometry.dim)
        where = self.pool.write(encode(split[0], split[1], level=EXACT, geometry=geometry), level=EXACT)
        errors = [block_errors(keys, block=geometry.block, group=geometry.group) for keys in rows[0]]
        zeros = torch.zeros(heads, blocks, dtype=torch.float64)
        self._page = torch.cat([self._page, where.reshape(heads, blocks)], 1)
        self.level = torch.cat([self.level, zeros.long()], 1)
        self.valid = torch.cat([self.valid, torch.full((blocks,), geometry.block, dtype=torch.int32)])
        self.error = torch.cat([self.error, torch.stack(errors)], 1)
        self.key_error, self.value_error = (torch.cat([t, zeros], 1) for t in (self.key_error, self.value_error))
        if self._boxes is not None:
            self._boxes = torch.cat([self._boxes, _boxes_of(rows[0], geometry.block)], 2)

    def _move(self, moving: Tensor, old: int, new: int) -> None:
        geometry, dtype = self.pool.geometry, self.pool.dtype
        where = self._page[moving]
        before = self.pool.read(where, level=old)
        after = demote(before, level=old, to=new, geometry=geometry, dtype=dtype)
        was = decode(before, level=old, geometry=geometry, dtype=dtype)
        now = decode(after, level=new, geometry=geometry, dtype=dtype)
        self.key_error[moving] += (was[0] - now[0]).norm(dim=-1).amax(1)
        self.value_error[moving] += (was[1] - now[1]).norm(dim=-1).amax(1)
        if old == EXACT:
            self._copy_residual(moving, before)
        self._page[moving] = self.pool.write(after, level=new)
        self.pool.free(where, level=old)
        self.level[moving] = new

    def _copy_residual(self, moving: Tensor, pages: Tensor) -> None:
        rows = pages.view(self.pool.dtype).reshape(len(pages), 2, -1, self.pool.geometry.dim)
        for (head, block), page in zip(moving.nonzero().tolist(), rows, strict=True):
            start = int(self.starts[block])
            for place in self._marked[head, start : start + int(self.valid[block])].nonzero()[:, 0].tolist():
                self._residual[head][start + place] = page[:, place].clone()

    def _truncate(self, blocks: int) -> None:
        for head in range(self.pool.geometry.kv_heads):
            for block in range(blocks, len(self.valid)):
                self.pool.free(self._page[head, block : block + 1], level=int(self.level[head, block]))
        self._page, self.level, self.error = self._page[:, :blocks], self.level[:, :blocks], self.error[:, :blocks]
        self.key_error, self.value_error = self.key_error[:, :blocks], self.value_error[:, :blocks]
        self.valid = self.valid[:blocks].clone()
        if self._boxes is not None:
            self._boxes = self._boxes[:, :, :blocks]

    def _residual_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        pairs = [(id_, rows[id_]) for rows in self._residual for id_ in sorted(rows)]
        if not pairs:
            none = self._open.new_empty(0, self.pool.geometry.dim)
            return torch.empty(0, dtype=torch.int64), none, none.clone()
        both = torch.stack([row for _, row in pairs], 1)
        return torch.tensor([id_ for id_, _ in pairs]), both[0], both[1]

    def _all_boxes(self) -> Tensor | None:
        if self._boxes is None or not self.open_tokens:
            return self._boxes
        return torch.cat([self._boxes, _boxes_of(self._open[0], self.pool.geometry.block)], 2)


def _boxes_of(keys: Tensor, block: int) -> Tensor:
    pairs = [box(rows, block=block) for rows in keys]
    return torch.stack([torch.stack([low for low, _ in pairs]), torch.stack([high for _, high in pairs])])


def _shaped(plane: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return plane.reshape(0, *shape[1:]) if not plane.numel() else plane.reshape(shape)
