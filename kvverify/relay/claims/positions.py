"""Compact positions: consecutive, in source order, every head ending at M - 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvverify.relay.cases import CompactCase
from kvverify.relay.operators import COMPACT
from kvverify.run import Run

__all__: list[str] = []

POSITIONS = "RoPERelay, compact positions"


@COMPACT.claim(evidence="exact", source=POSITIONS)
def end(run: Run, case: CompactCase) -> None:
    """The anchor M is the largest count of states in any head, and every head that holds states ends at M - 1."""
    inputs = case.build()
    counts = inputs.valid.sum(-1)
    anchor = counts.max() if counts.numel() else torch.tensor(0)

    def ends(op: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        positions, found = inputs.call(op)
        last = positions.amax(-1) if case.slots else torch.full(counts.shape, -1)
        return last, torch.as_tensor(found)

    run.equal(ends, (torch.where(counts > 0, anchor - 1, -1), anchor), "end of each head, anchor")


@COMPACT.claim(evidence="exact", source=POSITIONS)
def gaps(run: Run, case: CompactCase) -> None:
    """After compaction, states i < j of a head are j - i apart."""
    inputs = case.build()

    def steps(op: Callable[..., Any]) -> Tensor:
        positions = inputs.call(op)[0]
        heads = zip(positions.flatten(0, 1), inputs.valid.flatten(0, 1), strict=True)
        return torch.cat([places[held].diff() for places, held in heads])

    run.equal(steps, lambda _: torch.ones(int((inputs.valid.sum(-1) - 1).clamp(min=0).sum()), dtype=torch.int64), "gap")


@COMPACT.claim(evidence="exact", source=POSITIONS)
def holes(run: Run, case: CompactCase) -> None:
    """A slot without a state has position -1, a slot with one a position that is not negative."""
    inputs = case.build()
    run.equal(lambda op: inputs.call(op)[0] >= 0, inputs.valid, "slot holds a state")


@COMPACT.claim(evidence="exact", source=POSITIONS)
def definition(run: Run, case: CompactCase) -> None:
    """State i of a head with m states stands at (M - m) + i; with heads of one length at i."""
    inputs = case.build()
    run.equal(inputs.call, inputs.call)
