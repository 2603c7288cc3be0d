"""Positions that are known to be wrong, and one way to count that is differently right."""

from __future__ import annotations

import torch
from torch import Tensor

import kvverify.relay.claims  # noqa: F401 -- a mutant names claims, so they come first
from kvverify.relay.cases import CompactCase
from kvverify.relay.operators import COMPACT
from kvverify.relay.policy import compact

__all__: list[str] = []


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
