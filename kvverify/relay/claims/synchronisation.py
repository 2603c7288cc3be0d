"""Query synchronisation: relocate once, ask at M, go on from there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.relay.cases import SessionCase, pairs_of
from kvverify.relay.claims.relocation import through
from kvverify.relay.operators import SESSION
from kvverify.run import Program, Run

__all__: list[str] = []

SYNCHRONISATION = "RoPERelay, query synchronisation"


def positions_of(case: SessionCase) -> tuple[Tensor, int]:
    """Where every retained state belongs, counted in plain Python, and M."""
    source = case.source()
    counts = (source >= 0).sum(-1)
    anchor = int(counts.max()) if counts.numel() else 0
    places = torch.full(source.shape, -1)
    for layer in range(case.layers):
        for head in range(case.heads):
            held = sorted((int(p), slot) for slot, p in enumerate(source[layer, head]) if p >= 0)
            for rank, (_, slot) in enumerate(held):
                places[layer, head, slot] = anchor - len(held) + rank
    return places, anchor


@SESSION.claim(evidence="exact", source=SYNCHRONISATION)
def order_and_end(run: Run, case: SessionCase) -> None:
    """States stand in source order whatever slot they lie in, and every head's history ends at M - 1."""
    places, _ = positions_of(case)
    run.equal(lambda op: case.build().call(op)[2][..., : case.slots], places, "position of slot")


@SESSION.claim(evidence="exact", source=SYNCHRONISATION)
def continuation(run: Run, case: SessionCase) -> None:
    """The question stands at M to M + Q - 1; generated tokens and later questions go on from there, in every head."""
    _, anchor = positions_of(case)
    new = sum(case.steps)
    expected = torch.arange(anchor, anchor + new).expand(case.layers, case.heads, new)
    run.equal(lambda op: case.build().call(op)[2][..., case.slots :], expected, "position of continuing token")


@SESSION.claim(evidence="exact", source="RoPERelay, values, source order and budget are unchanged")
def conserved(run: Run, case: SessionCase) -> None:
    """Every state keeps its slot and its value bit for bit; an empty slot is zero and nothing leaks out of it."""
    inputs = case.build()
    values = torch.cat([inputs.values.masked_fill((inputs.source < 0)[..., None], 0), inputs.fresh_values], 2)
    run.equal(lambda op: inputs.call(op)[1], values, "value")


@SESSION.claim(evidence="budget", source="RoPERelay, historical keys are relocated before question processing")
def relocated_once(run: Run, case: SessionCase) -> None:
    """Historical keys are relocated once, from where they were written, however many forwards follow."""
    inputs = case.build()
    run.close(history(case, inputs), condition=through(run, history(case, inputs)))


@SESSION.claim(evidence="budget", source=SYNCHRONISATION)
def fresh_keys(run: Run, case: SessionCase) -> None:
    """Keys of the question and the answer enter the cache with the phases of their own positions."""
    inputs = case.build()

    def entered(op: Callable[..., Any]) -> Tensor:
        keys = inputs.call(op)[0][:, :, case.slots :]
        return pairs_of(keys, inputs.layout, inputs.rotary_dims)

    run.close(entered, condition=through(run, entered))


@SESSION.claim(evidence="budget", source="transformers: dynamic NTK and LongRoPE change tables under cached keys")
def frozen_table(run: Run, case: SessionCase) -> None:
    """A key is inverted with the table that wrote it, also when the table in force is another."""
    inputs = replace(case, changed=True).build()
    run.close(history(case, inputs), condition=through(run, history(case, inputs)))


@SESSION.claim(evidence="budget", source="consistency: the full cache has no gap to close")
def full_cache(run: Run, case: SessionCase) -> None:
    """Where everything is kept and nothing has changed, relay leaves every key where it was."""
    inputs = replace(case, pattern="full cache", order="source", changed=False).build()
    stored = pairs_of(inputs.keys.double(), inputs.layout, inputs.rotary_dims)
    program = history(case, inputs)
    run.close(program, truth=lambda _: stored, condition=through(run, program))


@SESSION.claim(evidence="budget", source=SYNCHRONISATION)
def steps_do_not_matter(run: Run, case: SessionCase) -> None:
    """One long forward and the same tokens in several leave the same cache."""
    inputs = case.build()
    total = sum(case.steps)

    def keys(steps: tuple[int, ...]) -> Program:
        split = inputs.replace(steps=steps)
        return lambda op: pairs_of(split.call(op)[0], inputs.layout, inputs.rotary_dims)

    run.close(keys((1,) * total), truth=keys((total,)), condition=through(run, keys((total,))))


def history(case: SessionCase, inputs: Inputs) -> Program:
    """The rotary pairs of the historical keys."""
    return lambda op: pairs_of(inputs.call(op)[0][:, :, : case.slots], inputs.layout, inputs.rotary_dims)
