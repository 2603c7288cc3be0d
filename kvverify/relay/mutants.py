"""Relocations and sessions that are known to be wrong, and a few that are differently right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvverify.relay.operators import COMPACT, RELOCATE, SESSION, CompactCase, RelocateCase, SessionCase
from kvverify.relay.policy import compact, relocate, rotate
from kvverify.relay.session import session

__all__: list[str] = []

Triple = tuple[Tensor, Tensor, Tensor]


# Compact positions


@COMPACT.mutant("end", "definition")
def every_head_starts_at_zero(valid: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(valid, valid.cumsum(-1) - 1, -1), compact(valid)[1]


@COMPACT.mutant("end", "definition")
def anchor_is_the_sum(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    total = valid.sum()
    return torch.where(valid, positions + total - anchor, -1), total


@COMPACT.mutant("end", case=CompactCase(pattern="first head empty"))
def anchor_is_the_first_layers_length(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    first = valid[0, 0].sum()
    return torch.where(valid, positions + first - anchor, -1), first


@COMPACT.mutant("end")
def anchor_counts_empty_slots(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    slots = torch.tensor(valid.shape[-1])
    return torch.where(valid, positions + slots - anchor, -1), slots


@COMPACT.mutant("end", case=CompactCase(pattern="last head longest"))
def each_layer_has_its_own_anchor(valid: Tensor) -> tuple[Tensor, Tensor]:
    places = [compact(layer[None])[0] for layer in valid]
    return torch.cat(places) if places else compact(valid)[0], compact(valid)[1]


@COMPACT.mutant("end")
def anchor_is_the_last_position(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    return positions, anchor - 1


@COMPACT.mutant("gaps", "definition", case=CompactCase(pattern="scattered", slots=64))
def positions_are_slot_indices(valid: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(valid, torch.arange(valid.shape[-1]), -1), torch.tensor(valid.shape[-1])


@COMPACT.mutant("gaps", "definition", case=CompactCase(slots=520, pattern="full"))
def positions_in_bf16(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    return positions.bfloat16().long(), anchor


@COMPACT.mutant("gaps", "definition", case=CompactCase(pattern="full"))
def backwards(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    first = anchor - valid.sum(-1, keepdim=True)
    return torch.where(valid, first + anchor - 1 - positions, -1), anchor


@COMPACT.mutant("holes", case=CompactCase(pattern="first head empty"))
def empty_slots_stand_at_zero(valid: Tensor) -> tuple[Tensor, Tensor]:
    positions, anchor = compact(valid)
    return positions.clamp(min=0), anchor


@COMPACT.control
def counts_from_the_end(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Each state is as far before M as there are states from it to the end of its head."""
    anchor = valid.sum(-1).max() if valid.numel() else torch.tensor(0)
    behind = valid.flip(-1).cumsum(-1).flip(-1)
    return torch.where(valid, anchor - behind, -1), anchor


# Phase relocation


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


# Query synchronisation. A mutant changes what goes into, or comes out of, the reference session.

NAMES = ("keys", "values", "source", "fresh_keys", "fresh_values", "cos_written", "sin_written", "cos", "sin")


def rerun(args: tuple[Tensor, ...], static: dict[str, Any], **changes: Any) -> Triple:
    """Run the reference session with some arguments exchanged."""
    tensors = dict(zip(NAMES, args, strict=True))
    return session(**{**tensors, **static, **changes})


def requestioned(args: tuple[Tensor, ...], static: dict[str, Any], start: int) -> Triple:
    """Run the reference session, but with the continuing tokens at `start`, start + 1, ..."""
    keys, values, positions = rerun(args, static)
    tensors = dict(zip(NAMES, args, strict=True))
    slots, new = tensors["source"].shape[-1], tensors["fresh_keys"].shape[2]
    places = torch.arange(start, start + new).clamp(0, tensors["cos"].shape[1] - 1)
    positions[..., slots:] = torch.arange(start, start + new)
    for layer, fresh in enumerate(tensors["fresh_keys"]):
        cos, sin = tensors["cos"][layer, places], tensors["sin"][layer, places]
        for head, states in enumerate(fresh):
            keys[layer, head, slots:] = rotate(
                states, cos, sin, layout=static["layout"], rotary_dims=static["rotary_dims"]
            )
    return keys, values, positions


def anchor_of(source: Tensor) -> int:
    """M: the largest count of states in any head."""
    return int((source >= 0).sum(-1).max()) if source.numel() else 0


@SESSION.mutant("continuation", "fresh_keys")
def question_stays_at_the_full_length(*args: Tensor, **static: Any) -> Triple:
    return requestioned(args, static, static["length"])


@SESSION.mutant("continuation", "fresh_keys")
def question_starts_at_the_last_state(*args: Tensor, **static: Any) -> Triple:
    return requestioned(args, static, anchor_of(args[2]) - 1)


@SESSION.mutant("continuation", "steps_do_not_matter", "fresh_keys")
def generation_restarts_at_the_full_length(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    slots, first = args[2].shape[-1], static["steps"][0]
    far = requestioned(args, static, static["length"])
    keys[:, :, slots + first :] = far[0][:, :, slots + first :]
    positions[..., slots + first :] = far[2][..., slots + first :]
    return keys, values, positions


@SESSION.mutant("order_and_end", "relocated_once", case=SessionCase(order="score"))
def ranks_by_slot(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    slots = args[2].shape[-1]
    wanted = compact(args[2] >= 0)[0]
    return restood(keys, values, positions, wanted, slots, args, static)


def restood(
    keys: Tensor, values: Tensor, positions: Tensor, wanted: Tensor, slots: int, args: tuple[Tensor, ...], static: Any
) -> Triple:
    """Move the historical keys on from the positions of the reference to the wanted ones."""
    cos, sin = args[7], args[8]
    for layer in range(len(keys)):
        for head in range(keys.shape[1]):
            held = wanted[layer, head] >= 0
            here, there = positions[layer, head, :slots][held], wanted[layer, head][held]
            tables = cos[layer, here], sin[layer, here], cos[layer, there], sin[layer, there]
            history = keys[layer, head, :slots]
            history[held] = relocate(history[held], *tables, layout=static["layout"], rotary_dims=static["rotary_dims"])
    positions[..., :slots] = wanted
    return keys, values, positions


@SESSION.mutant("order_and_end", case=SessionCase(pattern="first head empty", seed=3))
def heads_start_at_zero(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    slots = args[2].shape[-1]
    held = args[2] >= 0
    counts = held.sum(-1, keepdim=True)
    wanted = torch.where(held, positions[..., :slots] - anchor_of(args[2]) + counts, -1)
    return restood(keys, values, positions, wanted, slots, args, static)


@SESSION.mutant("relocated_once", case=SessionCase(slots=64))
def slots_taken_for_positions(*args: Tensor, **static: Any) -> Triple:
    _, values, positions = rerun(args, static)
    held = args[2] >= 0
    slot_numbers = torch.where(held, torch.arange(held.shape[-1]).clamp(max=static["length"] - 1), -1)
    return rerun(args, static, source=slot_numbers)[0], values, positions


@SESSION.mutant("relocated_once", case=SessionCase(steps=(3, 1, 1, 2)))
def relocates_again_for_each_question(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    slots = args[2].shape[-1]
    for _ in range(len(static["steps"]) - 1):
        history = torch.where((args[2] >= 0)[..., None], keys[:, :, :slots], 0)
        again = rerun(args, static, keys=history)
        keys[:, :, :slots] = again[0][:, :, :slots]
    return keys, values, positions


@SESSION.mutant("relocated_once", "full_cache", case=SessionCase(pattern="full"))
def keys_of_the_first_head(*args: Tensor, **static: Any) -> Triple:
    return rerun(args, static, keys=args[0][:, :1].nan_to_num().expand_as(args[0]))


@SESSION.mutant("conserved", case=SessionCase(order="score", pattern="full"))
def values_sorted_along(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    slots = args[2].shape[-1]
    order = args[2].argsort(-1)[..., None].expand(*args[2].shape, values.shape[-1])
    values[:, :, :slots] = values[:, :, :slots].gather(2, order)
    return keys, values, positions


@SESSION.mutant("conserved", case=SessionCase(pattern="full"))
def rotates_values(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    return keys, values.flip(-1), positions


@SESSION.mutant("conserved", case=SessionCase(pattern="first head empty"))
def copies_empty_slots(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    values[:, :, : args[1].shape[2]] = args[1]
    return keys, values, positions


@SESSION.mutant("relocated_once", "fresh_keys", case=SessionCase(pattern="full"))
def table_of_the_first_layer(*args: Tensor, **static: Any) -> Triple:
    first = {name: table[:1].expand_as(table) for name, table in zip(NAMES[5:], args[5:], strict=True)}
    return rerun(args, static, **first)


@SESSION.mutant("frozen_table", case=SessionCase(changed=True, pattern="full"))
def inverts_with_the_table_in_force(*args: Tensor, **static: Any) -> Triple:
    return rerun(args, static, cos_written=args[7], sin_written=args[8])


@SESSION.mutant("fresh_keys", "steps_do_not_matter")
def fresh_keys_enter_unrotated(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    keys[:, :, args[2].shape[-1] :] = args[3]
    return keys, values, positions


@SESSION.mutant("steps_do_not_matter", "fresh_keys")
def every_step_starts_at_the_anchor(*args: Tensor, **static: Any) -> Triple:
    keys, values, positions = rerun(args, static)
    slots, steps = args[2].shape[-1], static["steps"]
    start = 0
    for step in steps:
        part = slice(start, start + step)
        one = rerun(
            args, {**static, "steps": (step,)}, fresh_keys=args[3][:, :, part], fresh_values=args[4][:, :, part]
        )
        keys[:, :, slots + start : slots + start + step] = one[0][:, :, slots:]
        start += step
    return keys, values, positions


@SESSION.control
def session_in_double_precision(*args: Tensor, **static: Any) -> Triple:
    """The reference in float64, rounded once."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in args]
    keys, values, positions = rerun(tuple(wide), static)
    return keys.to(args[0].dtype), values.to(args[1].dtype), positions
