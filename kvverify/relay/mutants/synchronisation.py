"""Sessions that are known to be wrong: each changes what goes into, or comes out of, the reference session."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvverify.relay.claims  # noqa: F401 -- a mutant names claims, so they come first
from kvverify.relay.cases import SessionCase
from kvverify.relay.operators import SESSION
from kvverify.relay.policy import compact, relocate, rotate
from kvverify.relay.session import session

__all__: list[str] = []

Triple = tuple[Tensor, Tensor, Tensor]
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
