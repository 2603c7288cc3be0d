"""Pages and the pool that holds them: one slab of equal pages per rung, each with a free list.

A page is one block of one KV head, laid out as (no padding, native byte order):

    16 bits     K [P, D], V [P, D]                                          in the cache's 16-bit dtype
    8, 4, 2     K codes, V codes (token-major, packed), then fp16 k_lo, k_step [P/g, D], v_lo, v_step [P, D/g]
    1           mean key [D], mean value [D]                                fp16

so a page has exactly `Geometry.block_bits(level) / 8` bytes. A demotion reads the page it has, writes a page of a lower
rung, and frees the old one; a freed page is filled with 0xFF (NaN in fp16 and bf16), so nothing can lean on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvverify.geodesia.ladder import EXACT, LADDER, MEAN, dequantize, pack, quantize, requantize, unpack

if TYPE_CHECKING:
    from kvverify.geodesia.accounting import Geometry

__all__ = ["PagePool", "QuantizedPages", "decode", "demote", "encode", "read_quantized"]

_POISON = 0xFF


@dataclass(frozen=True, eq=False)
class QuantizedPages:
    """The parts of n quantized pages: codes [n, P, D], key scales [n, P/g, D], value scales [n, P, D/g]."""

    key_codes: Tensor  # uint8[n, block, dim]
    value_codes: Tensor  # uint8[n, block, dim]
    key_lo: Tensor  # [n, key_groups, dim]
    key_step: Tensor  # [n, key_groups, dim]
    value_lo: Tensor  # [n, block, value_groups]
    value_step: Tensor  # [n, block, value_groups]

    def reconstruct(self, geometry: Geometry, bits: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, P, D] in float64."""
        shape = self.key_codes.shape
        keys = dequantize(
            self.key_codes.flatten(0, 1),
            self.key_lo.flatten(0, 1),
            self.key_step.flatten(0, 1),
            bits=bits,
            axis="token",
            group=min(geometry.group, geometry.block),
        )
        values = dequantize(
            self.value_codes.flatten(0, 1),
            self.value_lo.flatten(0, 1).T,
            self.value_step.flatten(0, 1).T,
            bits=bits,
            axis="channel",
            group=geometry.group,
        )
        return keys.reshape(shape), values.reshape(shape)


def encode(
    keys: Tensor,
    values: Tensor,
    *,
    level: int,
    geometry: Geometry,
) -> Tensor:
    """Write exact blocks as pages of a rung.

    Shapes: keys[n, block, dim], values[n, block, dim] -> uint8[n, bytes].
    """
    if level == EXACT:
        return _bytes(keys, values)
    if level == MEAN:
        return _mean_page(keys.double(), values.double())
    bits, rows = LADDER[level], len(keys)
    group = min(geometry.group, geometry.block)
    key_codes, key_lo, key_step = quantize(keys.flatten(0, 1), bits=bits, axis="token", group=group)
    value_codes, value_lo, value_step = quantize(values.flatten(0, 1), bits=bits, axis="channel", group=geometry.group)
    parts = QuantizedPages(
        key_codes.reshape(keys.shape),
        value_codes.reshape(values.shape),
        key_lo.reshape(rows, geometry.key_groups, geometry.dim),
        key_step.reshape(rows, geometry.key_groups, geometry.dim),
        value_lo.T.reshape(rows, geometry.block, geometry.value_groups),
        value_step.T.reshape(rows, geometry.block, geometry.value_groups),
    )
    return _quantized_page(parts, bits)


def decode(
    pages: Tensor,
    *,
    level: int,
    geometry: Geometry,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return keys and values in float64: [n, P, D], or [n, 1, D] on the mean rung (one row standing for all).

    Shapes: pages uint8[n, bytes] -> [n, rows, dim], [n, rows, dim].
    """
    if level in {EXACT, MEAN}:
        rows = pages.view(dtype if level == EXACT else torch.float16).reshape(len(pages), 2, -1, geometry.dim)
        return rows[:, 0].double(), rows[:, 1].double()
    return read_quantized(pages, level=level, geometry=geometry).reconstruct(geometry, LADDER[level])


def read_quantized(pages: Tensor, *, level: int, geometry: Geometry) -> QuantizedPages:
    """Split quantized pages into codes and scales.

    Shapes: pages uint8[n, bytes].
    """
    count, block, dim, bits = len(pages), geometry.block, geometry.dim, LADDER[level]
    coded = 2 * block * dim * bits // 8
    codes = unpack(pages[:, :coded].reshape(-1), bits=bits, count=count * 2 * block * dim)
    codes = codes.reshape(count, 2, block, dim)
    scales = pages[:, coded:].contiguous().view(torch.float16)
    per_key, per_value = geometry.key_groups * dim, block * geometry.value_groups
    key_lo, key_step, value_lo, value_step = torch.split(scales, [per_key, per_key, per_value, per_value], dim=1)
    of_keys, of_values = (count, geometry.key_groups, dim), (count, block, geometry.value_groups)
    return QuantizedPages(
        codes[:, 0],
        codes[:, 1],
        key_lo.reshape(of_keys),
        key_step.reshape(of_keys),
        value_lo.reshape(of_values),
        value_step.reshape(of_values),
    )


def demote(
    pages: Tensor,
    *,
    level: int,
    to: int,
    geometry: Geometry,
    dtype: torch.dtype,
) -> Tensor:
    """Rewrite pages on a lower rung from what they hold: exactly nested among 8, 4 and 2 bits.

    Shapes: pages uint8[n, bytes] -> uint8[n, bytes].
    """
    if not level < to < len(LADDER):
        raise ValueError(f"to is {to}, expected a rung below {level} (a larger index, at most {len(LADDER) - 1})")
    if level == EXACT:
        rows = pages.view(dtype).reshape(len(pages), 2, geometry.block, geometry.dim)
        return encode(rows[:, 0], rows[:, 1], level=to, geometry=geometry)
    if to == MEAN:
        return _mean_page(*decode(pages, level=level, geometry=geometry, dtype=dtype))
    old, bits = read_quantized(pages, level=level, geometry=geometry), LADDER[level]
    parts = QuantizedPages(
        requantize(old.key_codes, bits=bits, to=LADDER[to]),
        requantize(old.value_codes, bits=bits, to=LADDER[to]),
        old.key_lo,
        old.key_step,
        old.value_lo,
        old.value_step,
    )
    return _quantized_page(parts, LADDER[to])


class PagePool:
    """The pages of one layer, shared by its sequences.

    A slab grows by doubling when its free list is empty; a fixed pool is the same with growth refused by the caller.
    """

    def __init__(self, geometry: Geometry, *, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in {torch.bfloat16, torch.float16}:
            raise TypeError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float16")
        self.geometry = geometry
        self.dtype = dtype
        self._slabs = [torch.empty(0, bits // 8, dtype=torch.uint8) for bits in geometry.costs]
        self._free: list[list[int]] = [[] for _ in geometry.costs]

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use."""
        return sum((len(slab) - len(free)) * slab.shape[1] for slab, free in zip(self._slabs, self._free, strict=True))

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the slabs, free pages included."""
        return sum(slab.numel() for slab in self._slabs)

    def write(self, pages: Tensor, *, level: int) -> Tensor:
        """Store new pages and return where they are, reusing freed pages first.

        Shapes: pages uint8[n, bytes] -> [n].
        """
        slab, free = self._slabs[level], self._free[level]
        if pages.shape[1] != slab.shape[1]:
            raise ValueError(f"pages have {pages.shape[1]} bytes, expected {slab.shape[1]} on rung {level}")
        if len(pages) > len(free):
            grown = max(2 * len(slab), len(slab) + len(pages) - len(free))
            free[:0] = range(grown - 1, len(slab) - 1, -1)
            slab = torch.cat([slab, slab.new_full((grown - len(slab), slab.shape[1]), _POISON)])
            self._slabs[level] = slab
        where = torch.tensor([free.pop() for _ in range(len(pages))], dtype=torch.int64)
        slab[where] = pages
        return where

    def read(self, where: Tensor, *, level: int) -> Tensor:
        """Return a copy of pages in their packed form.

        Shapes: where[n] -> uint8[n, bytes].
        """
        return self._slabs[level][where]

    def free(self, where: Tensor, *, level: int) -> None:
        """Give pages back and poison them.

        Shapes: where[n].
        """
        ids = where.tolist()
        if len(set(ids)) < len(ids) or not set(ids).isdisjoint(self._free[level]):
            raise ValueError(f"where is {ids}, expected distinct pages in use on rung {level}")
        self._slabs[level][where] = _POISON
        self._free[level].extend(ids)


def _bytes(*parts: Tensor) -> Tensor:
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], dim=1)


def _mean_page(keys: Tensor, values: Tensor) -> Tensor:
    return _bytes(keys.mean(1).to(torch.float16), values.mean(1).to(torch.float16))


def _quantized_page(parts: QuantizedPages, bits: int) -> Tensor:
    codes = torch.stack([parts.key_codes, parts.value_codes], 1)
    packed = pack(codes, bits=bits).reshape(len(codes), -1)
    return torch.cat([packed, _bytes(parts.key_lo, parts.key_step, parts.value_lo, parts.value_step)], dim=1)
