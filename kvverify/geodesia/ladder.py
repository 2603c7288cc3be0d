"""The ladder of precisions and the quantizer that is nested on its stored format.

A block of P tokens is held on one rung of `LADDER` (bits per scalar): 16 exact, 8/4/2 quantized, 1 a single mean row.
Rungs are addressed by their index, so a *demotion* raises the index.

Quantizer (asymmetric min/max per group), for b in {8, 4, 2}:

    lo    = largest fp16 <= min(x)                              stored
    step  = smallest fp16 >= (max(x) - lo) / 255                stored, always the 8-bit step
    delta = step * {8: 1, 4: 17, 2: 85}[b]                      derived: 255 = 17 * 15 = 85 * 3
    code  = clamp(round((x - lo) / delta), 0, 2^b - 1)          uint8
    x^    = code * delta + lo,      |x - x^| <= delta / 2

Codes are computed against the stored (rounded) numbers, so the bound holds on the stored format whatever the offset.
A group has step 0 exactly when all its values equal the stored lo; then its codes are 0 and nothing divides by zero.
Because 17 and 85 = 5 * 17 are odd, rounding to 8 bits and then to 4 and 2 gives the same codes as rounding directly.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "EXACT",
    "HALF_MAX",
    "LADDER",
    "MEAN",
    "QUANTIZED",
    "STEP_RATIO",
    "Axis",
    "block_errors",
    "dequantize",
    "half_down",
    "half_up",
    "pack",
    "quantize",
    "requantize",
    "unpack",
]

LADDER = (16, 8, 4, 2, 1)
EXACT = 0
QUANTIZED = (1, 2, 3)
MEAN = 4
STEP_RATIO = {8: 1, 4: 17, 2: 85}
HALF_MAX = 65504.0

Axis = Literal["token", "channel"]


def half_down(x: Tensor) -> Tensor:
    """Round to the largest fp16 that is not above x (elementwise; |x| <= 65504)."""
    _require_half_range(x)
    nearest = x.to(torch.float16)
    below = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf))
    return torch.where(nearest.double() > x.double(), below, nearest)


def half_up(x: Tensor) -> Tensor:
    """Round to the smallest fp16 that is not below x (elementwise; |x| <= 65504)."""
    return -half_down(-x)


def quantize(
    x: Tensor,
    *,
    bits: int,
    axis: Axis,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize by groups; return (codes, lo, step), step being the stored 8-bit step.

    `axis="token"` groups `group` consecutive tokens of one channel (keys): scales [tokens / group, dim].
    `axis="channel"` groups `group` channels of one token (values): scales [dim / group, tokens].
    A group longer than the axis is cut to the axis. Raises ValueError on values fp16 cannot bound (|x| > 65504, NaN).

    Shapes: x[tokens, dim] -> uint8[tokens, dim], [groups, other], [groups, other].
    """
    grouped = _grouped(x, axis, group)
    _require_half_range(grouped)
    low = half_down(grouped.amin(1))
    wide = grouped.double()
    high = wide.amax(1)
    step = ((high - low.double()) / 255).to(torch.float16)
    # Rounded up where the nearest fp16 leaves the maximum out of reach: judged on the product, not on the quotient.
    short = step.double() * 255 + low.double() < high
    step = torch.where(short, torch.nextafter(step, torch.full_like(step, torch.inf)), step)
    delta = step.double() * _ratio(bits)
    position = (wide - low.double()[:, None]) / torch.where(delta > 0, delta, 1.0)[:, None]
    codes = position.round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    return _ungrouped(codes, axis), low, step


def dequantize(
    codes: Tensor,
    lo: Tensor,
    step: Tensor,
    *,
    bits: int,
    axis: Axis,
    group: int,
) -> Tensor:
    """Return x^ = code * step * ratio + lo in float64, where the product and (for ordinary scales) the sum are exact.

    Shapes: codes uint8[tokens, dim], lo[groups, other], step[groups, other] -> [tokens, dim].
    """
    grouped = _grouped(codes, axis, group)
    if lo.shape != (grouped.shape[0], grouped.shape[2]) or step.shape != lo.shape:
        expected = (grouped.shape[0], grouped.shape[2])
        raise ValueError(f"lo and step have shapes {tuple(lo.shape)} and {tuple(step.shape)}, expected {expected}")
    delta = step.double() * _ratio(bits)
    return _ungrouped(grouped.double() * delta[:, None] + lo.double()[:, None], axis)


def requantize(codes: Tensor, *, bits: int, to: int) -> Tensor:
    """Demote codes to fewer bits from the codes alone: round(code / r), r the (odd) ratio of the two steps.

    Equal to quantizing the original values at `to` bits, since r odd means that code / r is never a tie.
    """
    ratio, remainder = divmod(_ratio(to), _ratio(bits))
    if remainder or ratio == 1:
        raise ValueError(f"to is {to}, expected fewer bits than {bits}")
    return ((codes.to(torch.int32) * 2 + ratio) // (2 * ratio)).to(torch.uint8)


def pack(codes: Tensor, *, bits: int) -> Tensor:
    """Pack codes in row-major order into ceil(n * bits / 8) bytes, the first code in the lowest bits.

    Shapes: codes uint8[...] -> uint8[bytes].
    """
    _ratio(bits)
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes have dtype {codes.dtype}, expected torch.uint8")
    flat = codes.reshape(-1)
    if flat.numel() and int(flat.max()) >= 2**bits:
        raise ValueError(f"codes contain {int(flat.max())}, expected less than 2^{bits}")
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % per_byte)).reshape(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (place * bits)
    return packed


def unpack(packed: Tensor, *, bits: int, count: int) -> Tensor:
    """Return the first `count` codes of a packed stream (inverse of `pack`).

    Shapes: packed uint8[bytes] -> uint8[count].
    """
    _ratio(bits)
    if -(-count * bits // 8) != packed.numel():
        raise ValueError(f"count is {count}, expected the number of {bits}-bit codes held by {packed.numel()} bytes")
    mask = 2**bits - 1
    places = [(packed >> (place * bits)) & mask for place in range(8 // bits)]
    return torch.stack(places, -1).reshape(-1)[:count]


def block_errors(keys: Tensor, *, block: int, group: int) -> Tensor:
    """Return the error proxy e_b(L) of each whole block at each rung, float64, in units of the keys.

    e(16) = 0; e(L) = max over token groups of || range / (2 (2^L - 1)) ||_2 over channels;
    e(1) = max_j ||k_j - mean||_2. It is a proxy of the score error: the stored format adds the rounding of its
    scales. The curve need not be convex in the rate.

    Shapes: keys[tokens, dim] -> [blocks, levels].
    """
    tokens, dim = keys.shape
    if tokens % block:
        raise ValueError(f"keys have {tokens} tokens, expected a multiple of block = {block}")
    blocks = keys.double().reshape(tokens // block, block, dim)
    group = min(group, block)
    grouped = blocks.reshape(len(blocks), block // group, group, dim)
    extent = (grouped.amax(2) - grouped.amin(2)).norm(dim=-1).amax(1)
    spread = (blocks - blocks.mean(1, keepdim=True)).norm(dim=-1).amax(1)
    columns = [torch.zeros_like(spread), *(extent / (2 * (2 ** LADDER[rung] - 1)) for rung in QUANTIZED), spread]
    return torch.stack(columns, 1)


def _ratio(bits: int) -> int:
    if bits not in STEP_RATIO:
        raise ValueError(f"bits is {bits}, expected 8, 4 or 2")
    return STEP_RATIO[bits]


def _require_half_range(x: Tensor) -> None:
    if x.numel() and not bool((x.double().abs() <= HALF_MAX).all()):
        raise ValueError(f"x contains {float(x.abs().max())}, expected finite values within the fp16 range (65504)")


def _grouped(x: Tensor, axis: Axis, group: int) -> Tensor:
    """View [tokens, dim] as [groups, members, other] with the grouped axis first."""
    if axis not in {"token", "channel"}:
        raise ValueError(f"axis is {axis!r}, expected 'token' or 'channel'")
    if x.ndim != 2:
        raise ValueError(f"x has {x.ndim} dimensions, expected [tokens, dim]")
    along = x if axis == "token" else x.T
    length = along.shape[0]
    group = min(group, length)
    if group < 1 or length % group:
        raise ValueError(f"group is {group}, expected a positive divisor of the {axis} axis, which has {length}")
    return along.reshape(length // group, group, along.shape[1])


def _ungrouped(grouped: Tensor, axis: Axis) -> Tensor:
    along = grouped.flatten(0, 1)
    return along if axis == "token" else along.T.contiguous()
