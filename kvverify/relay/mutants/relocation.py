"""Relocations that are known to be wrong, and a few that are differently right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvverify.relay.claims  # noqa: F401 -- a mutant names claims, so they come first
from kvverify.relay.cases import RelocateCase
from kvverify.relay.operators import RELOCATE
from kvverify.relay.policy import relocate, rotate

__all__: list[str] = []


def turned(keys: Tensor, cos: Tensor, sin: Tensor, layout: Any, rotary_dims: int) -> Tensor:
    """Apply (c, s) to the pairs in fp32, whatever the amplitude."""
    return rotate(keys.float(), cos.float(), sin.float(), layout=layout, rotary_dims=rotary_dims)


@RELOCATE.mutant("amplitude", "relocation", "round_trip", case=RelocateCase(amplitude=1.1386))
def forgets_amplitude(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    bare = turned(keys, cos, -sin, layout, rotary_dims)
    return turned(bare, cos_target, sin_target, layout, rotary_dims).to(keys.dtype)


@RELOCATE.mutant("amplitude", "relocation", case=RelocateCase(amplitude=1.1386))
def divides_by_amplitude_twice(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    squared = cos.square() + sin.square()
    return relocate(keys, cos * squared, sin * squared, cos_target, sin_target, layout=layout, rotary_dims=rotary_dims)


@RELOCATE.mutant("amplitude", case=RelocateCase(ratio=1.25))
def ignores_the_target_amplitude(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    # One rotation by the distance moved, which is right only where the amplitude is constant.
    size = (cos.square() + sin.square()).sqrt() * (cos_target.square() + sin_target.square()).sqrt()
    by = (cos_target * cos + sin_target * sin) / size, (sin_target * cos - cos_target * sin) / size
    return turned(keys, *by, layout, rotary_dims).to(keys.dtype)


@RELOCATE.mutant("relocation", "reconstruct", "relative", "one_rotation")
def turns_the_wrong_way(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    return relocate(keys, cos, -sin, cos_target, -sin_target, layout=layout, rotary_dims=rotary_dims)


@RELOCATE.mutant("relocation", "reconstruct")
def takes_the_other_layout(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    other: Any = "interleaved" if layout == "half" else "half"
    return relocate(keys, cos, sin, cos_target, sin_target, layout=other, rotary_dims=rotary_dims)


@RELOCATE.mutant("passthrough", case=RelocateCase(passed=16))
def rotates_all_dims(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    wider = (keys.shape[1] // 2 + cos.shape[1] - 1) // max(cos.shape[1], 1)
    tables = [factor.repeat(1, wider)[:, : keys.shape[1] // 2] for factor in (cos, sin, cos_target, sin_target)]
    return relocate(keys, *tables, layout=layout, rotary_dims=2 * tables[0].shape[1])


@RELOCATE.mutant("relocation", case=RelocateCase(passed=16))
def rotates_the_trailing_dims(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    turned_round = keys.roll(rotary_dims, 1)
    return relocate(turned_round, cos, sin, cos_target, sin_target, layout=layout, rotary_dims=rotary_dims).roll(
        -rotary_dims, 1
    )


@RELOCATE.mutant("passthrough")
def rounds_the_passed_dims(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    out = relocate(keys, cos, sin, cos_target, sin_target, layout=layout, rotary_dims=rotary_dims)
    out[:, rotary_dims:] *= 1 + 2**-7
    return out


@RELOCATE.mutant("relocation", "identity", "round_trip", "composition")
def leaves_the_source_phase(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    return turned(keys, cos_target, sin_target, layout, rotary_dims).to(keys.dtype)


@RELOCATE.mutant("relocation", "identity")
def leaves_the_key_without_phase(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    one, zero = torch.ones_like(cos), torch.zeros_like(sin)
    return relocate(keys, cos, sin, one, zero, layout=layout, rotary_dims=rotary_dims)


@RELOCATE.mutant("relocation", "round_trip", case=RelocateCase(dtype="bf16", rows=65, pairs=32))
def computes_in_storage_dtype(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    half = keys.dtype

    def turn(states: Tensor, c: Tensor, s: Tensor) -> Tensor:
        rotary = states[:, :rotary_dims]
        pairs = torch.stack(rotary.chunk(2, -1), -1) if layout == "half" else rotary.unflatten(-1, (-1, 2))
        first, second = pairs.unbind(-1)
        both = torch.stack([first * c - second * s, second * c + first * s], -1)
        back = torch.cat(both.unbind(-1), -1) if layout == "half" else both.flatten(-2)
        return torch.cat([back, states[:, rotary_dims:]], -1)

    c, s, c_target, s_target = (factor.to(half) for factor in (cos, sin, cos_target, sin_target))
    squared = c * c + s * s
    out = turn(turn(keys.to(half), c / squared, -s / squared), c_target, s_target).to(keys.dtype)
    out[:, rotary_dims:] = keys[:, rotary_dims:]
    return out


@RELOCATE.mutant("relocation", "identity", case=RelocateCase(rows=64, amplitude=1.1386))
def takes_tables_in_bf16(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    tables = [factor.bfloat16().float() for factor in (cos, sin, cos_target, sin_target)]
    # A table in bf16 no longer has c^2 + s^2 = a^2: dividing by a^2, as the config says, leaves up to .54 %.
    squared = (cos.square() + sin.square()).mean()
    bare = turned(keys, tables[0], -tables[1], layout, rotary_dims)
    return (turned(bare, tables[2] / squared, tables[3] / squared, layout, rotary_dims)).to(keys.dtype)


@RELOCATE.mutant("relocation", "equivariant", case=RelocateCase(rows=65))
def skips_the_partial_block(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    out = relocate(keys, cos, sin, cos_target, sin_target, layout=layout, rotary_dims=rotary_dims)
    whole = len(keys) // 64 * 64 if len(keys) > 64 else len(keys)
    out[whole:] = keys[whole:]
    return out


@RELOCATE.mutant("equivariant", "relocation")
def takes_the_first_rows_table(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    tables = [factor[:1].expand_as(factor) for factor in (cos, sin, cos_target, sin_target)]
    return relocate(keys, *tables, layout=layout, rotary_dims=rotary_dims)


@RELOCATE.mutant("relocation", case=RelocateCase(scale="small pair"))
def flushes_small_pairs(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    out = relocate(keys, cos, sin, cos_target, sin_target, layout=layout, rotary_dims=rotary_dims)
    rotary = out[:, :rotary_dims]
    rotary[rotary.abs() < 2e-3 * rotary.abs().amax(-1, keepdim=True)] = 0
    return out


@RELOCATE.control
def one_combined_rotation(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    """Inverse and forward rotation joined in the tables first, in fp32."""
    squared = cos.square() + sin.square()
    by = (cos_target * cos + sin_target * sin) / squared, (sin_target * cos - cos_target * sin) / squared
    return turned(keys, *by, layout, rotary_dims).to(keys.dtype)


@RELOCATE.control
def complex_numbers(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    """Pairs as complex numbers: divide by the source factor, multiply by the target factor."""
    rotary = keys[:, :rotary_dims].float()
    pairs = torch.stack(rotary.chunk(2, -1), -1) if layout == "half" else rotary.unflatten(-1, (-1, 2))
    numbers = (
        torch.complex(pairs[..., 0], pairs[..., 1]) / torch.complex(cos, sin) * torch.complex(cos_target, sin_target)
    )
    back = torch.cat([numbers.real, numbers.imag], -1) if layout == "half" else torch.view_as_real(numbers).flatten(-2)
    out = keys.clone(memory_format=torch.contiguous_format)
    out[:, :rotary_dims] = back.to(keys.dtype)
    return out


@RELOCATE.control
def in_double_precision(
    keys: Tensor, cos: Tensor, sin: Tensor, cos_target: Tensor, sin_target: Tensor, *, layout: Any, rotary_dims: int
) -> Tensor:
    """The reference in float64, rounded once."""
    tables = (factor.double() for factor in (cos, sin, cos_target, sin_target))
    return relocate(keys.double(), *tables, layout=layout, rotary_dims=rotary_dims).to(keys.dtype)
