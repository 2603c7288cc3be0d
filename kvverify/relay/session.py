"""Query synchronisation: one selected cache from relocation through questions and answers.

A session is a frozen record; every event returns the next one. Which event may come when is the whole protocol, and it
is the table `TRANSITIONS`:

| state      | event    | next state |
|------------|----------|------------|
| selected   | relocate | relocated  |
| relocated  | ask      | asking     |
| asking     | append   | answering  |
| answering  | generate | generating |
| generating | append   | answering  |
| answering  | ask      | asking     |

`relocate` moves the historical keys, once, from where they were written. A second time would start from positions that
the keys have left, and no row of the table allows it. `ask` and `generate` open a forward: `pending` are the positions
its tokens take. `append` closes it with the keys and values it computed. `generate` is the forward of one token, the
last one answered; the first answer comes from the logits of a question, so there must be one.

Two numbers that agree only before anything is evicted have two types: `Rows` counts slots of the cache, `Position` is a
place on the rotary axis. M is fixed at relocation; the cache grows, M does not: tokens stand at M, M + 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NewType, TypeAlias

import torch
from torch import Tensor

from kvverify.relay.plans import Plan, Retained, relay
from kvverify.relay.policy import (
    FACTOR_DTYPES,
    STORAGE_DTYPES,
    Layout,
    RotaryTable,
    check_device,
    check_instance,
    check_integer,
    check_tensor,
    expect,
    relocate_positions,
    rotate,
)

__all__ = ["TRANSITIONS", "Event", "Position", "RelaySession", "Rows", "State", "begin", "session"]

Rows = NewType("Rows", int)
"""A number of cache slots."""
Position = NewType("Position", int)
"""A place on the rotary axis."""

State: TypeAlias = Literal["selected", "relocated", "asking", "answering", "generating"]
Event: TypeAlias = Literal["relocate", "ask", "append", "generate"]

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("selected", "relocate"): "relocated",
    ("relocated", "ask"): "asking",
    ("asking", "append"): "answering",
    ("answering", "generate"): "generating",
    ("generating", "append"): "answering",
    ("answering", "ask"): "asking",
}


@dataclass(frozen=True, eq=False)
class RelaySession:
    """A selected cache and where its rows stand. `begin` makes one; the events return the next.

    keys: [layers, heads, rows, dim], rotated at `positions`. values: [layers, heads, rows, value_dim]. 0 where empty.
    positions: int64[layers, heads, rows], -1 where empty.
    source: likewise, the places in the text, which relocation keeps: `retained.source`, then length, length + 1, ...
    tables: the rotary factors, one for each layer.
    written_with: for each layer, what the keys were written with, as in `policy.relocate_positions`.
    next_position: where the next token stands: `length` until relocated, then the plan's question and on from there.
    opened: tokens of the forward under way.
    """

    retained: Retained
    keys: Tensor
    values: Tensor
    positions: Tensor
    source: Tensor
    tables: tuple[RotaryTable, ...]
    written_with: tuple[RotaryTable | str | None, ...]
    state: State
    next_position: Position
    opened: Rows = Rows(0)

    @property
    def rows(self) -> Rows:
        """Count the slots of each head, empty ones included."""
        return Rows(self.keys.shape[2])

    @property
    def pending(self) -> range:
        """List the positions of the forward under way: the position ids its tokens take."""
        return range(self.next_position, self.next_position + self.opened)

    def relocate(self, plan: Plan | None = None) -> RelaySession:
        """Move the historical keys to a plan of the retained states, `relay` unless another is given."""
        state = self._after("relocate")
        plan = relay(self.retained) if plan is None else plan
        check_instance("plan", plan, Plan)
        valid = self.retained.valid
        same = plan.positions.shape == valid.shape and torch.equal(plan.positions >= 0, valid)
        expect(same, "plan", "other slots than source has", "a position for each retained state and no other")
        keys = self.keys.clone()
        for layer, (table, written_with) in enumerate(zip(self.tables, self.written_with, strict=True)):
            held = valid[layer]
            moves = self.source[layer][held], plan.positions[layer][held]
            keys[layer][held] = relocate_positions(self.keys[layer][held], *moves, table, written_with=written_with)
        question = Position(plan.question)
        return replace(self, keys=keys, positions=plan.positions.long(), state=state, next_position=question)

    def ask(self, count: int) -> RelaySession:
        """Open a forward of the `count` tokens of a question."""
        check_integer("count", count, least=1)
        return replace(self, state=self._after("ask"), opened=Rows(count))

    def generate(self) -> RelaySession:
        """Open the forward of the one token that was last answered."""
        return replace(self, state=self._after("generate"), opened=Rows(1))

    def append(self, keys: Tensor, values: Tensor) -> RelaySession:
        """Close the forward under way with its keys, not rotated yet, and values [layers, heads, opened, ...]."""
        state = self._after("append")
        _check_states("keys", keys, self.keys, self.opened)
        _check_states("values", values, self.values, self.opened)
        places = torch.arange(self.pending.start, self.pending.stop, device=keys.device)
        rotated = torch.stack([_rotate_layer(*layer, places) for layer in zip(keys, self.tables, strict=True)])
        return self._grown(torch.cat([self.keys, rotated], dim=2), torch.cat([self.values, values], dim=2), state)

    def grow(self, keys: Tensor, values: Tensor) -> RelaySession:
        """Close the forward under way with the cache as a model has grown it, which this session does not copy.

        keys, values: [layers, heads, rows + opened, ...]: the slots of this session, unchanged, and behind them those
        of the new tokens, whose keys the model has rotated at `pending`.
        """
        state = self._after("append")
        _check_states("keys", keys, self.keys, self.rows + self.opened)
        _check_states("values", values, self.values, self.rows + self.opened)
        return self._grown(keys, values, state)

    def _grown(self, keys: Tensor, values: Tensor, state: State) -> RelaySession:
        grown = (*keys.shape[:2], self.opened)
        places = torch.arange(self.pending.start, self.pending.stop, device=keys.device)
        text = torch.arange(self.opened, device=keys.device) + self.retained.length + self.rows - self._history
        return replace(
            self,
            keys=keys,
            values=values,
            positions=torch.cat([self.positions, places.expand(grown)], dim=2),
            source=torch.cat([self.source, text.expand(grown)], dim=2),
            state=state,
            next_position=Position(self.pending.stop),
            opened=Rows(0),
        )

    @property
    def _history(self) -> Rows:
        return Rows(self.retained.source.shape[2])

    def _after(self, event: Event) -> State:
        """Look the event up in the table."""
        allowed = " or ".join(name for state, name in TRANSITIONS if state == self.state)
        expect((self.state, event) in TRANSITIONS, event, f"it in state {self.state!r}", f"{allowed} (see TRANSITIONS)")
        return TRANSITIONS[self.state, event]


def begin(
    keys: Tensor,
    values: Tensor,
    retained: Retained,
    tables: Sequence[RotaryTable],
    *,
    written_with: Sequence[RotaryTable | str] | None = None,
) -> RelaySession:
    """Start from a selected cache whose keys still stand where they were written.

    keys: [layers, heads, slots, dim], rotated at `retained.source`. values: [layers, heads, slots, value_dim].
    An empty slot may hold anything, NaN included; it is never read, and is zero in the session.
    tables: one for each layer (layers can differ, as in Gemma 3), reaching past the last token to come.
    written_with: for each layer, as in `policy.relocate_positions`.
    """
    check_tensor("keys", keys, "layers, heads, slots, dim", STORAGE_DTYPES)
    check_tensor("values", values, "layers, heads, slots, value_dim", STORAGE_DTYPES)
    slots = tuple(retained.source.shape)
    for name, tensor in (("keys", keys), ("values", values)):
        expect(tuple(tensor.shape[:3]) == slots, name, f"shape {tuple(tensor.shape)}", f"{slots} first, as source")
        check_device(name, tensor, retained.source)
    layers = slots[0]
    expect(layers > 0, "keys", "no layers", "at least 1")
    for table in tables if isinstance(tables, Sequence) else (tables,):
        check_instance("tables", tables, Sequence)
        check_instance("tables", table, RotaryTable)
    expect(len(tables) == layers, "tables", f"{len(tables)} of them", f"{layers}, one for each layer")
    recorded = (None,) * layers if written_with is None else tuple(written_with)
    expect(len(recorded) == layers, "written_with", f"{len(recorded)} of them", f"{layers}, one for each layer")
    empty = ~retained.valid.unsqueeze(-1)
    return RelaySession(
        retained=retained,
        keys=keys.masked_fill(empty, 0),
        values=values.masked_fill(empty, 0),
        positions=retained.source.long(),
        source=retained.source.long(),
        tables=tuple(tables),
        written_with=recorded,
        state="selected",
        next_position=Position(retained.length),
    )


def session(
    keys: Tensor,
    values: Tensor,
    source: Tensor,
    fresh_keys: Tensor,
    fresh_values: Tensor,
    cos_written: Tensor,
    sin_written: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    length: int,
    steps: tuple[int, ...],
    layout: Layout,
    rotary_dims: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a whole session: relocate the history once, then let each forward append its tokens at M, M + 1, ...

    keys: [layers, heads, slots, dim], rotated at `source`. values: [layers, heads, slots, value_dim].
    source: int32 or int64 [layers, heads, slots], below `length`, -1 where a slot is empty; slots in any order.
    fresh_keys: [layers, heads, new, dim], the keys of the continuing tokens, not rotated yet.
    fresh_values: [layers, heads, new, value_dim].
    cos_written, sin_written: [layers, positions, pairs] in fp32 or fp64, the table of each layer that wrote `keys`.
    cos, sin: likewise, the table in force, which the compact positions and the new tokens take. It is the same one
    unless the frequencies have changed since (dynamic scaling, LongRoPE's change of list).
    length: tokens of the history.
    steps: tokens of each consecutive forward (a question, generated tokens one by one, a second question). They sum to
    new, and how they divide it changes no bit.

    Returns keys [layers, heads, slots + new, dim], values [layers, heads, slots + new, value_dim] and positions
    int64[layers, heads, slots + new]. The state in slot i stays in slot i; an empty slot is zero, at position -1.
    Source: RoPERelay, query synchronisation.
    """
    retained = Retained(source, length)
    layers = len(source)
    factors = (("cos_written", cos_written), ("sin_written", sin_written), ("cos", cos), ("sin", sin))
    for name, factor in factors:
        check_tensor(name, factor, "layers, positions, pairs", FACTOR_DTYPES)
        expect(len(factor) == layers, name, f"{len(factor)} layers", f"{layers}, the layers of source")
    expect(rotary_dims == 2 * cos.shape[2], "rotary_dims", rotary_dims, f"2 * pairs = {2 * cos.shape[2]}")
    tables, writing = (
        [RotaryTable(*layer, layout) for layer in zip(*sides, strict=True)]
        for sides in ((cos, sin), (cos_written, sin_written))
    )
    current = begin(keys, values, retained, tables, written_with=writing).relocate()

    for step in steps:
        check_integer("steps", step, least=1)
    _check_states("fresh_keys", fresh_keys, keys, sum(steps))
    _check_states("fresh_values", fresh_values, values, sum(steps))
    start = 0
    for step in steps:
        forward = slice(start, start + step)
        opened = current.generate() if step == 1 and current.state == "answering" else current.ask(step)
        current = opened.append(fresh_keys[:, :, forward], fresh_values[:, :, forward])
        start += step
    return current.keys, current.values, current.positions


def _rotate_layer(keys: Tensor, table: RotaryTable, places: Tensor) -> Tensor:
    """Rotate the new keys [heads, opened, dim] of one layer at `places`."""
    limit = len(table.cos)
    expect(int(places[-1]) < limit, "tables", f"{limit} positions", f"one for the token at {int(places[-1])}")
    rows = places.repeat(len(keys))
    factors = table.cos[rows], table.sin[rows]
    flat = keys.reshape(len(rows), keys.shape[-1])
    return rotate(flat, *factors, layout=table.layout, rotary_dims=table.rotary_dims).view_as(keys)


def _check_states(argument: str, states: Tensor, cache: Tensor, count: int) -> None:
    """Refuse new states that do not continue the cache."""
    check_tensor(argument, states, "layers, heads, tokens, dim", (cache.dtype,))
    wanted = (*cache.shape[:2], count, cache.shape[3])
    expect(tuple(states.shape) == wanted, argument, f"shape {tuple(states.shape)}", f"{wanted}")
    check_device(argument, states, cache)
