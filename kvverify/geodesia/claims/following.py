"""The statements of Geodesia-KV about a run: what must hold of a sequence, query by query.

A kernel in fp32 may decide a near tie otherwise than float64 does, and everything after it differs. So a claim about
numbers first asks the kernel what it decided (levels, pages, residual tokens), and lets the plain model follow. The
decisions are judged by themselves: from the masses that the kernel reports, as prefixes up to a threshold, with ties
free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs
from kvverify.geodesia.accounting import Geometry, budget_bits, token_bits
from kvverify.geodesia.decode_operator import DecodeCase, decode_condition
from kvverify.geodesia.ladder import LADDER, block_errors
from kvverify.geodesia.mass import hot_set
from kvverify.geodesia.plain import Trace
from kvverify.geodesia.residual import residual_count
from kvverify.run import Program, Run

__all__ = ["Move", "conditions", "follow", "geometry_of", "judged", "malformed", "moves"]


def malformed(inputs: Inputs, trace: Trace) -> str | None:
    """Whether a trace says something that no sequence can have done."""
    kv, group, new = inputs.queries.shape[:3]
    prompt, block = inputs.prompt_keys.shape[1], inputs.block
    total = -(-(prompt + new) // block)
    count = residual_count(inputs.residual, prompt)
    shapes = {"level": (kv, new, (prompt + new) // block), "mass": (kv, new, total), "kept": (kv, count)}
    shapes["pages"] = (kv, group, new, total)
    for name, shape in shapes.items():
        if tuple(getattr(trace, name).shape) != shape:
            return f"{name} has shape {list(getattr(trace, name).shape)}: expected {list(shape)}"
    length = prompt + 1 + torch.arange(new)
    closed = torch.arange(shapes["level"][2]) < (length // block)[:, None]
    wrong = torch.where(closed, (trace.level < 0) | (trace.level >= len(LADDER)), trace.level != -1)
    if wrong.any():
        return "level holds a rung outside the ladder, or none for a closed block, or one for a block not closed yet"
    exists = torch.arange(total) < (-(-length // block))[:, None]
    if (trace.pages & ~exists).any() or not trace.pages.any(-1).all():
        return "pages marks a page that does not exist yet, or none"
    if any(len(set(ids)) < count or not all(0 <= i < prompt for i in ids) for ids in trace.kept.tolist()):
        return f"kept is {trace.kept.tolist()}: expected {count} different tokens of the prompt for each head"
    return None


def follow(run: Run, inputs: Inputs) -> tuple[Trace, Program]:
    """Call the implementation, and return what it did and a program: itself, or the model on the same decisions."""
    seen = Trace(*inputs.call(run.impl))
    run.valid(lambda _: seen, lambda *trace: malformed(inputs, Trace(*trace)))

    def program(op: Callable[..., Any]) -> Trace:
        if op is run.impl:
            return seen
        return Trace(*inputs.call(partial(op, level=seen.level, pages=seen.pages, kept=seen.kept)))

    return seen, program


def conditions(inputs: Inputs, trace: Trace) -> list[float | Tensor]:
    """What fp32 passes through, for each output of the operator."""
    out, lse, mass = decode_condition(inputs, trace.level)
    return [out, lse, 0.0, mass, *[0.0] * 6]


def judged(case: DecodeCase, rule: Callable[[Inputs, Trace], str | None]) -> tuple[Program, Callable[..., str | None]]:
    """Judge a run by a rule, once it is one that can have happened."""
    inputs = case.build()

    def fault(*outputs: Tensor) -> str | None:
        trace = Trace(*outputs)
        return malformed(inputs, trace) or rule(inputs, trace)

    return inputs.call, fault


@dataclass(frozen=True)
class Move:
    """What one KV head did to its rungs at one query."""

    head: int
    query: int
    before: Tensor
    after: Tensor
    mass: Tensor
    error: Tensor
    hot: Tensor
    cost: Tensor
    allowed: int

    @property
    def where(self) -> str:
        """The place, for messages."""
        return f"head {self.head}, query {self.query}: "

    def bits(self, level: Tensor) -> int:
        """Bits of the closed blocks."""
        return int(self.cost[level].sum())


def geometry_of(inputs: Inputs) -> Geometry:
    """Sizes of the cache of one head."""
    return Geometry(dim=inputs.keys.shape[-1], block=inputs.block, group=inputs.group)


def moves(inputs: Inputs, trace: Trace) -> Iterator[Move]:
    """Every change of rungs, with all that decides it: the reported masses, errors of the original keys, the budget."""
    geometry, prompt = geometry_of(inputs), inputs.prompt_keys.shape[1]
    dim, block = geometry.dim, geometry.block
    keys = torch.cat([inputs.prompt_keys, inputs.keys], 1)
    for head, rows in enumerate(keys):
        error = block_errors(rows[: len(rows) // block * block], block=block, group=inputs.group)
        level = torch.zeros(0, dtype=torch.int64)
        for i, rate in enumerate(inputs.rates):
            length = prompt + i + 1
            closed = length // block
            before = torch.nn.functional.pad(level, (0, closed - len(level)))
            level = trace.level[head, i, :closed]
            hot = hot_set(length, length - 1, block=block, sinks=inputs.sinks, window=inputs.window)[:closed]
            allowed = budget_bits(rate, dim, length) - token_bits(dim, length - closed * block)
            mass = trace.mass[head, i, :closed].double()
            yield Move(head, i, before, level, mass, error[:closed], hot, torch.tensor(geometry.costs), allowed)
