"""Statements about a run: demotion, mass, causality, and what is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Inputs, generator
from kvverify.geodesia.claims.following import conditions, follow, judged, malformed, moves
from kvverify.geodesia.decode_operator import DECODE, DecodeCase, decode_condition
from kvverify.geodesia.plain import Trace
from kvverify.geodesia.validity import floor_bits, prefix_fault
from kvverify.run import Run

__all__: list[str] = []

MASS = "Geodesia-KV, attention mass"
DEMOTION = "Geodesia-KV, monotone demotion"
ALLOCATION = "Geodesia-KV, allocation"


@DECODE.claim(evidence="exact", source=DEMOTION)
def monotone(run: Run, case: DecodeCase) -> None:
    """No block ever rises on the ladder, and a hot block does not move."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        for move in moves(inputs, trace):
            if ((move.after < move.before) | (move.hot & (move.after != move.before))).any():
                return f"{move.where}rungs go from {move.before.tolist()} to {move.after.tolist()}"
        return None

    run.valid(*judged(case, rule))


@DECODE.claim(evidence="exact", source=ALLOCATION)
def current_prefix(run: Run, case: DecodeCase) -> None:
    """At every query blocks take prefixes of steps from their current rung, up to the smallest threshold needed."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        for move in moves(inputs, trace):
            if (move.after < move.before).any():
                return f"{move.where}rungs go from {move.before.tolist()} to {move.after.tolist()}"
            parts = (move.before, move.after, move.mass.nan_to_num(), move.error, move.hot, move.cost)
            fault = prefix_fault(*parts, budget_bits=move.allowed)
            if fault:
                return move.where + fault
        return None

    run.valid(*judged(case, rule))


@DECODE.claim(evidence="exact", source=ALLOCATION)
def slack_noop(run: Run, case: DecodeCase) -> None:
    """Nothing moves at a query that finds its blocks within the budget."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        for move in moves(inputs, trace):
            if move.bits(move.before) <= move.allowed and not torch.equal(move.before, move.after):
                return f"{move.where}{move.bits(move.before)} bits were within {move.allowed}, and blocks moved"
        return None

    run.valid(*judged(replace(case, fall=0.0), rule))


@DECODE.claim(evidence="exact", source=ALLOCATION)
def retighten(run: Run, case: DecodeCase) -> None:
    """A budget that falls on a live cache is met at once, or said to be infeasible where even the floor exceeds it."""

    def rule(inputs: Inputs, trace: Trace) -> str | None:
        for move in moves(inputs, trace):
            least = int(floor_bits(move.before, move.hot, move.cost))
            bits = move.bits(move.after)
            if bits > max(move.allowed, least):
                return f"{move.where}{bits} bits where {max(move.allowed, least)} can be met"
            if bool(trace.met[move.head, move.query]) != (bits <= move.allowed):
                return f"{move.where}met is {bool(trace.met[move.head, move.query])} at {bits} bits of {move.allowed}"
        return None

    run.valid(*judged(replace(case, fall=1.5), rule))


@DECODE.claim(evidence="budget", source=MASS)
def mass_simplex(run: Run, case: DecodeCase) -> None:
    """The masses of the blocks sum to one after the prompt and after every query."""
    _, program = follow(run, case.build())

    def summed(op: Callable[..., Any]) -> Trace:
        trace: Trace = program(op)
        return Trace(*trace)._replace(mass=trace.mass.sum(-1, keepdim=True))

    def ones(op: Callable[..., Any]) -> Trace:
        trace = summed(op)
        return trace._replace(mass=torch.ones_like(trace.mass))

    # A sum of weights that each carry the rounding of a softmax over all tokens.
    tokens = case.prompt + case.new
    run.close(summed, truth=ones, condition=[0.0, 0.0, 0.0, 4.0 + tokens / 16, *[0.0] * 6], only=["mass"])


@DECODE.claim(evidence="budget", source=MASS)
def ema_recurrence(run: Run, case: DecodeCase) -> None:
    """m <- decay m + (1 - decay) m_new, from the prompt's observer on, also where a block opens or closes."""
    across = replace(case, prompt=47, new=max(case.new, 4), rate=16.0, fall=0.0, sizes=(8, 8, 8))
    inputs = across.build()
    seen, program = follow(run, inputs)
    run.close(program, condition=conditions(inputs, seen), only=["mass"])


@DECODE.claim(evidence="exact", source="causality: what serves q_i depends on the prefix and q_i only")
def causal(run: Run, case: DecodeCase) -> None:
    """Other later queries, keys and values leave all earlier outputs, levels, masses and bytes, bit for bit."""
    inputs = replace(case, new=max(case.new, 4)).build()
    cut = inputs.keys.shape[1] // 2
    random = generator(case.seed, stream=8)
    changed = {}
    for name in ("queries", "keys", "values"):
        later = inputs.tensors[name].clone()
        part = later[..., cut:, :]
        part.copy_(torch.randn(part.shape, generator=random, dtype=torch.float64).to(later.dtype))
        changed[name] = later

    def earlier(outputs: Any) -> tuple[Tensor, ...]:
        trace = Trace(*outputs)
        by_head = trace.level[:, :cut], trace.mass[:, :cut], trace.met[:, :cut], trace.resident[:cut]
        by_query = (getattr(trace, name)[:, :, :cut] for name in ("out", "lse", "read", "bound", "pages"))
        return (*by_query, *by_head)

    other = earlier(inputs.replace(**changed).call(run.impl))
    run.equal(lambda op: earlier(inputs.call(op)), other, "result of an earlier query")


@DECODE.claim(evidence="budget", source="grouped-query attention: state is kept per KV head")
def gqa_once(run: Run, case: DecodeCase) -> None:
    """The query heads of a group act together, once a query: their order and repetition change nothing."""
    inputs = case.build()
    turned = {name: inputs.tensors[name].flip(1).repeat(1, 2, 1, 1) for name in ("observed", "queries")}
    regrouped = inputs.replace(**turned)
    seen = Trace(*regrouped.call(run.impl))

    def fault(*outputs: Tensor) -> str | None:
        trace = Trace(*outputs)
        broken = malformed(regrouped, trace)
        if broken:
            return broken
        for move in moves(regrouped, trace):
            parts = (move.before, move.after, move.mass.nan_to_num(), move.error, move.hot, move.cost)
            told = prefix_fault(*parts, budget_bits=move.allowed)
            if told:
                return move.where + told
        return None

    run.valid(lambda _: seen, fault)

    def program(op: Callable[..., Any]) -> Trace:
        return seen if op is run.impl else Trace(*inputs.call(partial(op, level=seen.level, kept=seen.kept)))

    run.close(program, condition=conditions(inputs, seen), only=["mass"])


@DECODE.claim(evidence="exact", source="a chunk is served as the loop append, mass, hot set, allocate, serve")
def append_chunking(run: Run, case: DecodeCase) -> None:
    """Tokens that arrive together leave the levels, bytes and reads of the same tokens one by one, bit for bit.

    The published shortcut (mass and hot set from the first query of a call) does not.
    """
    inputs = replace(case, new=max(case.new, 4), chunk=1).build()
    single, _ = follow(run, inputs)
    many = inputs.replace(chunk=max(case.chunk, 3))
    seen, program = follow(run, many)
    names = ("level", "met", "resident", "pages", "read", "kept")
    run.equal(
        lambda _: tuple(getattr(seen, name) for name in names),
        tuple(getattr(single, name) for name in names),
        "decision for a chunk",
    )
    run.close(program, condition=conditions(many, seen), only=["out", "lse", "mass"])


@DECODE.claim(evidence="budget", source=ALLOCATION)
def no_compression_is_dense(run: Run, case: DecodeCase) -> None:
    """With 16 bits a value and every page read, the outputs are attention over the rows as they arrived."""
    inputs = replace(case, rate=16.0, fall=0.0, pages=0.0).build()
    keys, values = (
        torch.cat([inputs.tensors[f"prompt_{side}"], inputs.tensors[side]], 1).double() for side in ("keys", "values")
    )
    position = inputs.prompt_keys.shape[1] + torch.arange(inputs.keys.shape[1])
    future = torch.arange(keys.shape[1]) > position[:, None]
    scores = inputs.scale * torch.einsum("hgnd,htd->hgnt", inputs.queries.double(), keys)
    scores = scores.masked_fill(future, -torch.inf)
    truth = scores.softmax(-1) @ values[:, None], scores.logsumexp(-1)
    exact = torch.zeros(1, 1, 1, dtype=torch.int64)
    run.close(inputs.call, truth=lambda _: truth, condition=decode_condition(inputs, exact))


@DECODE.claim(evidence="budget", source="Geodesia-KV: every token stays represented")
def retained(run: Run, case: DecodeCase) -> None:
    """Outputs are attention over every token so far, decoded ones too, each as its block's rung now holds it."""
    inputs = case.build()
    seen, program = follow(run, inputs)
    run.close(program, condition=conditions(inputs, seen), only=["out", "lse"])


@DECODE.claim(evidence="budget", source="Geodesia-KV: no dense copy survives a demotion")
def own_state_only(run: Run, case: DecodeCase) -> None:
    """Masses and outputs come from what the cache still holds: dense rows of demoted blocks are gone."""
    inputs = replace(case, rate=6.0, decay=0.0, prompt=60).build()
    seen, program = follow(run, inputs)
    run.close(program, condition=conditions(inputs, seen), only=["out", "lse", "mass"])
