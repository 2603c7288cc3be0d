"""Known-bad and equivalent kernels: the quantizer and its stored format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvverify.geodesia import policy
from kvverify.geodesia.cases import (
    DequantizeCase,
    PackCase,
    QuantizeCase,
)
from kvverify.geodesia.ladder import STEP_RATIO
from kvverify.geodesia.operators import (
    DEQUANTIZE,
    PACK,
    QUANTIZE,
)

__all__: list[str] = []


Three = tuple[Tensor, Tensor, Tensor]
OFFSET = QuantizeCase(regime="offset", bits=8)


def by_group(x: Tensor, axis: str, group: int) -> Tensor:
    """View [tokens, dim] as [groups, members, other], float64."""
    along = x if axis == "token" else x.T
    return along.double().reshape(len(along) // group, group, along.shape[1])


def coded(groups: Tensor, lo: Tensor, delta: Tensor, bits: int, axis: str) -> Tensor:
    """Codes of grouped values against any lo and step."""
    position = (groups - lo.double()[:, None]) / torch.where(delta > 0, delta, 1.0).double()[:, None]
    flat = position.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(0, 1)
    return flat if axis == "token" else flat.T.contiguous()


@QUANTIZE.mutant("quantizer_bound", case=OFFSET)
def codes_from_fp32_scales(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    groups = by_group(x, axis, group)
    low = groups.amin(1)
    step = (groups.amax(1) - low) / 255
    codes = coded(groups, low, step * STEP_RATIO[bits], bits, axis)
    return codes, low.half(), step.half()


@QUANTIZE.mutant("quantizer_bound", case=OFFSET)
def scales_rounded_to_nearest(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    groups = by_group(x, axis, group)
    low = groups.amin(1).half()
    step = ((groups.amax(1) - low.double()) / 255).clamp(min=0).half()
    return coded(groups, low, step.double() * STEP_RATIO[bits], bits, axis), low, step


@QUANTIZE.mutant("tight_scales", "nested_ladder", case=QuantizeCase(bits=4))
def fresh_step_on_every_rung(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    groups = by_group(x, axis, group)
    _, low, _ = policy.quantize(x, bits=bits, axis=axis, group=group)
    step = ((groups.amax(1) - low.double()) / (2**bits - 1)).half()
    return coded(groups, low, step.double(), bits, axis), low, step


@QUANTIZE.mutant("tight_scales")
def twice_the_step(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    _, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    groups = by_group(x, axis, group)
    return coded(groups, low, 2 * step.double() * STEP_RATIO[bits], bits, axis), low, 2 * step


@QUANTIZE.mutant("quantizer_bound")
def truncates(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    _, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    groups = by_group(x, axis, group)
    delta = step.double() * STEP_RATIO[bits]
    lowered = groups - 0.5 * delta[:, None]
    return coded(lowered, low, delta, bits, axis), low, step


@QUANTIZE.mutant("constant_groups", case=QuantizeCase(regime="constant"))
def divides_by_a_zero_step(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    _, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    position = (by_group(x, axis, group) - low.double()[:, None]) / (step.double() * STEP_RATIO[bits])[:, None]
    flat = position.nan_to_num(nan=255.0).round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(0, 1)
    return (flat if axis == "token" else flat.T.contiguous()), low, step


@QUANTIZE.mutant("constant_groups", case=QuantizeCase(regime="constant"))
def a_constant_gets_the_smallest_step(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    codes, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    return codes, low, step.clamp(min=1e-4)


@QUANTIZE.mutant("loud_channel", case=QuantizeCase(axis="channel"))
def one_scale_for_all_groups(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    groups = by_group(x, axis, group)
    codes, low, step = policy.quantize(x, bits=bits, axis=axis, group=len(groups) * group)
    return codes, low.expand(len(groups), -1).clone(), step.expand(len(groups), -1).clone()


@QUANTIZE.mutant("loud_channel")
def keys_grouped_over_channels(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    groups = by_group(x, axis, group)
    low, high = (
        side.expand(-1, groups.shape[2]) for side in (groups.amin((1, 2))[:, None], groups.amax((1, 2))[:, None])
    )
    pair = torch.stack([low, high], 1).flatten(0, 1).float()
    _, lo, step = policy.quantize(pair, bits=bits, axis="token", group=2)
    return coded(groups, lo, step.double() * STEP_RATIO[bits], bits, axis), lo, step


@QUANTIZE.mutant("nested_ladder", case=QuantizeCase(bits=2))
def rounds_half_codes_down_twice(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    codes, low, step = policy.quantize(x, bits=8, axis=axis, group=group)
    return codes if bits == 8 else codes // STEP_RATIO[bits], low, step


@QUANTIZE.control
def in_single_precision(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    """Positions in fp32, as a kernel computes them."""
    _, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    along = (x if axis == "token" else x.T).float()
    groups = along.reshape(len(low), group, along.shape[1])
    delta = step.float() * STEP_RATIO[bits]
    position = (groups - low.float()[:, None]) / torch.where(delta > 0, delta, 1.0)[:, None]
    flat = position.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(0, 1)
    return (flat if axis == "token" else flat.T.contiguous()), low, step


@QUANTIZE.control
def ties_rounded_up(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    """Half codes go up, where torch rounds them to even."""
    _, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    delta = step.double() * STEP_RATIO[bits]
    position = (by_group(x, axis, group) - low.double()[:, None]) / torch.where(delta > 0, delta, 1.0)[:, None]
    flat = (position + 0.5).floor().clamp(0, 2**bits - 1).to(torch.uint8).flatten(0, 1)
    return (flat if axis == "token" else flat.T.contiguous()), low, step


@QUANTIZE.control
def step_one_neighbour_larger(x: Tensor, *, bits: int, axis: Any, group: int) -> Three:
    """A step rounded up once more, codes against it: as valid on the stored format."""
    _, low, step = policy.quantize(x, bits=bits, axis=axis, group=group)
    step = torch.where(step > 0, torch.nextafter(step, torch.full_like(step, torch.inf)), step)
    return coded(by_group(x, axis, group), low, step.double() * STEP_RATIO[bits], bits, axis), low, step


@DEQUANTIZE.mutant("stored_format", case=DequantizeCase(bits=4))
def forgets_the_ratio_of_the_rung(
    codes: Tensor, lo: Tensor, step: Tensor, *, bits: int, axis: Any, group: int
) -> Tensor:
    return policy.dequantize(codes, lo, step, bits=8, axis=axis, group=group)


@DEQUANTIZE.mutant("stored_format")
def scale_of_channel_0_for_all(codes: Tensor, lo: Tensor, step: Tensor, *, bits: int, axis: Any, group: int) -> Tensor:
    first = step[:, :1].expand_as(step)
    return policy.dequantize(codes, lo, first, bits=bits, axis=axis, group=group)


@DEQUANTIZE.mutant("stored_format", case=DequantizeCase(regime="offset"))
def decodes_in_fp16(codes: Tensor, lo: Tensor, step: Tensor, *, bits: int, axis: Any, group: int) -> Tensor:
    return policy.dequantize(codes, lo, step, bits=bits, axis=axis, group=group).half().float()


@DEQUANTIZE.control
def adds_lo_in_double_precision(codes: Tensor, lo: Tensor, step: Tensor, *, bits: int, axis: Any, group: int) -> Tensor:
    """The reference, rounded once to fp32."""
    return policy.dequantize(codes, lo, step, bits=bits, axis=axis, group=group).float()


@PACK.mutant("pack_round_trip", "first_code_lowest")
def first_code_highest(codes: Tensor, *, bits: int) -> Tensor:
    per_byte = 8 // bits
    flat = torch.nn.functional.pad(codes.flatten(), (0, -codes.numel() % per_byte)).reshape(-1, per_byte)
    return policy.pack(flat.flip(1), bits=bits)


@PACK.mutant("pack_round_trip", case=PackCase(dim=5, tokens=3))
def every_row_starts_a_byte(codes: Tensor, *, bits: int) -> Tensor:
    return policy.pack(torch.nn.functional.pad(codes, (0, -codes.shape[1] % (8 // bits))), bits=bits)


@PACK.mutant("pack_round_trip")
def one_code_a_byte(codes: Tensor, *, bits: int) -> Tensor:
    return codes.flatten().clone()


@PACK.mutant("first_code_lowest", case=PackCase(dim=1, tokens=3, bits=4))
def last_byte_is_padded_with_ones(codes: Tensor, *, bits: int) -> Tensor:
    packed = policy.pack(codes, bits=bits)
    used = codes.numel() * bits % 8
    if used:
        packed[-1] |= (0xFF << used) & 0xFF
    return packed


@PACK.control
def packs_by_sums(codes: Tensor, *, bits: int) -> Tensor:
    """Weighted sums of the codes of a byte instead of shifts."""
    per_byte = 8 // bits
    flat = torch.nn.functional.pad(codes.flatten(), (0, -codes.numel() % per_byte)).reshape(-1, per_byte).long()
    return (flat * 2 ** (bits * torch.arange(per_byte))).sum(1).to(torch.uint8)
