"""The partition of growing sequences, and the step that reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.run import Program, Run
from kvverify.vestige.operators import STREAM, attend_condition
from kvverify.vestige.policy import attend, salience
from kvverify.vestige.stream import Event, Sequence
from kvverify.vestige.stream_case import StreamCase

__all__: list[str] = []

PARTITION = "VestigeKV section 4.1, partition"


def each_sequence(case: StreamCase) -> list[tuple[int, Sequence]]:
    """Every sequence after every event, as (event, sequence)."""
    return [(event, sequence) for event, now in enumerate(case.sequences()) for sequence in now.values()]


def marked(case: StreamCase, part: slice | Callable[[Sequence], slice]) -> Tensor:
    """1 where a row is in this part of its sequence, after each event: int64[events, rows]."""
    inputs = case.build()
    marks = torch.zeros(len(case.script), len(inputs.rows), dtype=torch.int64)
    for event, sequence in each_sequence(case):
        chosen = part if isinstance(part, slice) else part(sequence)
        marks[event, list(sequence.rows[chosen])] = 1
    return marks


@STREAM.claim(evidence="exact", source=PARTITION)
def partition(run: Run, case: StreamCase) -> None:
    """After every event a row of a live sequence is either attended or archived, once, and a released one neither."""
    inputs = case.build()

    def total(op: Callable[..., Any]) -> Tensor:
        lists: tuple[Tensor, ...] = inputs.call(op)
        return lists[0] + lists[1]

    run.equal(total, marked(case, slice(None)), "lists that hold row")


@STREAM.claim(evidence="exact", source=PARTITION)
def tail(run: Run, case: StreamCase) -> None:
    """Rows behind the last closed block are attended, and so is everything below the dense threshold."""
    inputs = case.build()
    open_rows = marked(case, lambda sequence: slice(sequence.closed, None))
    run.equal(lambda op: inputs.call(op)[0] * open_rows, open_rows, "tail row is attended")


@STREAM.claim(evidence="exact", source=PARTITION)
def quota(run: Run, case: StreamCase) -> None:
    """Of the closed rows m = max(1, round(fraction closed)) are kept, halves to even, and at most the sinks more."""
    inputs = case.build()

    def fault(attended: Tensor) -> str | None:
        for event, sequence in each_sequence(case):
            kept = int(attended[event, list(sequence.rows[: sequence.closed])].sum())
            least = min(sequence.closed, max(1, round(sequence.fraction * sequence.closed)))
            most = min(sequence.closed, least + case.sinks)
            if not least <= kept <= most:
                return f"event {event}: {kept} of {sequence.closed} closed rows are kept: expected {least} to {most}"
        return None

    run.valid(lambda op: inputs.call(op)[0], fault)


@STREAM.claim(evidence="exact", source=PARTITION)
def stream_sinks(run: Run, case: StreamCase) -> None:
    """The first rows of every sequence are attended after every event."""
    inputs = case.build()
    first = marked(case, slice(0, case.sinks))
    run.equal(lambda op: inputs.call(op)[0] * first, first, "sink is attended")


@STREAM.claim(evidence="budget", source=PARTITION)
def most_salient(run: Run, case: StreamCase) -> None:
    """Kept are the most salient of ALL closed rows, by the branch columns and by whole blocks of their own sequence.

    Rows within 2^-17 of the largest branch from the m-th salience may go either way: that covers 32 roundings of fp32
    on each side.
    """
    inputs = case.build()
    branch = inputs.rows.double()[:, case.content :]

    def fault(attended: Tensor) -> str | None:
        for event, sequence in each_sequence(case):
            closed = list(sequence.rows[: sequence.closed])
            if not closed:
                continue
            sigma = salience(branch[closed], bandwidth=case.bandwidth, block=case.block)
            order = sigma.sort(descending=True).values
            last = order[max(1, round(sequence.fraction * len(closed))) - 1]
            near = 2.0**-17 * branch[closed].norm(dim=1).max()
            kept = attended[event, closed] > 0
            lost = ((sigma > last + near) & ~kept).nonzero()
            if len(lost):
                return f"event {event}: row {closed[int(lost[0])]} is above the last kept salience and is not attended"
            extra = (sigma < last - near) & kept
            extra[: case.sinks] = False
            if extra.any():
                row = closed[int(extra.nonzero()[0])]
                return f"event {event}: row {row} is below the last kept salience and is attended"
        return None

    run.valid(lambda op: inputs.call(op)[0], fault)


def at_once(case: StreamCase, inputs: Inputs) -> tuple[Inputs, list[int]]:
    """The sequences that live at the end, each in one append under its last fraction, and the rows they consist of."""
    script: list[Event] = [("append", 0, 0)]
    order: list[int] = []
    for slot, sequence in case.sequences()[-1].items():
        order += sequence.rows
        script += [("append", slot, len(sequence.rows)), ("rebalance", slot, sequence.fraction)]
    return inputs.replace(rows=inputs.rows[order], script=tuple(script)), order


@STREAM.claim(evidence="exact", source="VestigeKV, deployed block form: chunked prefill = one shot")
def chunking(run: Run, case: StreamCase) -> None:
    """What is attended depends on the rows, not on how they were cut into appends."""
    inputs = case.build()
    whole, order = at_once(case, inputs)
    run.equal(lambda op: inputs.call(op)[0][-1, order], whole.call(run.impl)[0][-1], "attended")


@STREAM.claim(evidence="exact", source=PARTITION)
def reuse(run: Run, case: StreamCase) -> None:
    """A slot that is used again knows nothing of the sequence that left it."""
    again = replace(case, events="reuse")
    inputs = again.build()
    whole, order = at_once(again, inputs)
    run.equal(lambda op: inputs.call(op)[0][-1, order], whole.call(run.impl)[0][-1], "attended")


def step_over(case: StreamCase, inputs: Inputs, lists: dict[int, list[int]]) -> tuple[Program, list[Any]]:
    """Truth and conditions of out and lse, where every slot attends exactly these rows."""
    steps, conditions = [], []
    for slot in range(inputs.slots):
        listed = torch.tensor(lists.get(slot, []), dtype=torch.int64)
        arguments = Inputs(
            {"query": inputs.query.double(), "rows": inputs.rows.double(), "ids": listed},
            {"scale": inputs.scale, "value_dim": case.content},
        )
        steps.append(arguments.call(attend))
        conditions.append(attend_condition(arguments))
    out, lse = (torch.stack(side) for side in zip(*steps, strict=True))
    through = [torch.stack(side) for side in zip(*conditions, strict=True)]
    return lambda op: (*inputs.call(op)[:2], out, lse), [0.0, 0.0, *through]


@STREAM.claim(evidence="budget", source="VestigeKV section 4.2: fetched rows join the softmax exactly, each once")
def everything_fetched(run: Run, case: StreamCase) -> None:
    """Where every archived row fires, a step is dense attention over its whole sequence, each row once, bit-exact."""
    inputs = replace(case, gate="open").build()
    lists = {slot: list(sequence.rows) for slot, sequence in case.sequences()[-1].items()}
    truth, through = step_over(case, inputs, lists)
    run.close(inputs.call, truth=truth, condition=through, only=["out", "lse"])


@STREAM.claim(evidence="budget", source="VestigeKV section 4.2: a closed gate fetches nothing")
def nothing_fetched(run: Run, case: StreamCase) -> None:
    """Where the gate is closed, a step attends kept and tail rows, and no other."""
    # Normal rows less their mean have no ties, so that every right partition keeps the same ones.
    clear = replace(case, gate="closed", regime="normal", bandwidth=1)
    inputs = clear.build()
    attended = inputs.call(run.oracle)[0][-1]
    lists = {slot: [row for row in sequence.rows if attended[row]] for slot, sequence in clear.sequences()[-1].items()}
    truth, through = step_over(clear, inputs, lists)
    run.close(inputs.call, truth=truth, condition=through, only=["out", "lse"])
