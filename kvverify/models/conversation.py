"""RoPERelay on a model: read a history, keep what a selector chose, relocate, ask, answer, ask again.

    history = read_history(model, tokens)
    session = history.session(snapkv(history.rows(), budget=100, kv_heads=history.kv_heads))
    session = session.relocate()                       # or session.relocate(PLANS["half_gap"](session.retained))
    with conversing(model, [session]) as talk:
        talk.ask(question)
        answers = talk.generate(32, stop=(end,))

A session is a frozen record (`kvverify.relay.session`) and the cache of one row. Several sessions are several rows of
one batch: the ten plans of one selected cache are asked the same question in one forward each. `talk.sessions` are the
sessions as they stand now; the ones given are as they were, so another `conversing` asks another question of the same
history.

Positions come from the session, M onwards, and are given to the model. Which states a query sees is decided by slots:
all of the history that is held, and the tokens since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvverify.models.attention_layers import AttentionLayer, attention_layers
from kvverify.models.exact import Growing, causal_attention
from kvverify.models.history import History, read_history
from kvverify.models.serving import Served, attending
from kvverify.relay.session import RelaySession

__all__ = ["Conversation", "History", "conversing", "read_history"]


@dataclass(frozen=True, eq=False)
class Conversation:
    """Sessions in the rows of one batch. Made by `conversing`."""

    served: Served
    rows: Sequence[_RelayRow]

    def ask(self, tokens: Tensor) -> Tensor:
        """Read a question in every row; return the logits [rows, n, vocab] after each token.

        Shapes: tokens[n], the same for all rows, or tokens[rows, n].
        """
        return self.served(tokens)

    def generate(self, limit: int, *, stop: Collection[int] = ()) -> list[list[int]]:
        """Answer greedily in every row, as `Served.generate`."""
        return self.served.generate(limit, stop=stop)

    @property
    def sessions(self) -> tuple[RelaySession, ...]:
        """The sessions as they stand now. ValueError where a row holds what was not said, or a forward failed."""
        self.served.require_open(reading=True)
        return tuple(row.session for row in self.rows)


@contextmanager
def conversing(
    model: Any, sessions: Sequence[RelaySession], *, history: History | None = None
) -> Iterator[Conversation]:
    """Let relocated sessions serve the model's attention inside the block, one row each.

    history: where the sessions come from; needed for a model with linear-attention layers, whose state is not theirs.
    Such a state stands after the history: a session that has gone on from there cannot be taken up again.
    """
    layers = attention_layers(model)
    for session in [sessions] if isinstance(sessions, RelaySession) else sessions:
        if not isinstance(session, RelaySession) or isinstance(sessions, RelaySession):
            raise ValueError(
                f"sessions: got {type(sessions).__name__} of {type(session).__name__}, expected a list of sessions"
            )
        if len(session.keys) != len(layers):
            raise ValueError(
                f"sessions: one has {len(session.keys)} layers, expected {len(layers)}, those of the model"
            )
    if len(layers) < model.config.num_hidden_layers:
        _check_linear(sessions, history)
    rows = [_RelayRow(session, layers) for session in sessions]
    states = None if history is None else deepcopy(history.states)
    with attending(model, rows, begun=True, states=states) as served:
        yield Conversation(served, rows)


def _check_linear(sessions: Sequence[RelaySession], history: History | None) -> None:
    """Refuse what the state of linear-attention layers after `history` does not go with."""
    if history is None:
        raise ValueError("history is None, expected the one of the sessions: the model has linear-attention layers")
    for session in sessions:
        if session.retained.length != history.length:
            raise ValueError(
                f"sessions: one is of {session.retained.length} tokens, expected {history.length} of history"
            )
        if session.rows > session.retained.source.shape[2]:
            raise ValueError(
                "sessions: one has gone on since its history, expected one that was only relocated: the state of the "
                "linear-attention layers is not kept in it"
            )


class _RelayRow:
    """A session as a row: its rows in buffers that grow, its positions those that the session gives."""

    def __init__(self, session: RelaySession, layers: Sequence[AttentionLayer]) -> None:
        if session.state == "selected":
            raise ValueError("sessions: one is in state 'selected', expected it relocated (any plan, `original` too)")
        self.session = session
        self.keys = Growing(session.keys)
        self.values = Growing(session.values)
        valid = session.positions >= 0
        self.layers = [
            _RelayLayer(layer, number, self.keys, self.values, valid[number]) for number, layer in enumerate(layers)
        ]

    def open(self, count: int, *, generated: bool) -> range:
        self.session = self.session.generate() if generated else self.session.ask(count)
        self.keys.extend(count)
        self.values.extend(count)
        return self.session.pending

    def close(self) -> None:
        self.session = self.session.grow(self.keys.view, self.values.view)


class _RelayLayer:
    """One layer of a row: the states of the history that are held, and every token since."""

    def __init__(self, layer: AttentionLayer, number: int, keys: Growing, values: Growing, valid: Tensor) -> None:
        self._layer = layer
        self._number = number
        self._keys = keys
        self._values = values
        self._ragged = None if bool(valid.all()) else valid

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:  # noqa: ARG002 - no prompt is taken
        raise ValueError("the cache is that of a session: expected a history, and no prompt")

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.serve(query[:, :, None], key[:, None], value[:, None])[:, :, 0]

    def serve(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        held = self._keys.view[self._number], self._values.view[self._number]
        for rows, new in zip(held, (keys, values), strict=True):
            if (rows.shape[0], rows.shape[2]) != (new.shape[0], new.shape[2]):
                found, wanted = [[*t.shape[::2]] for t in (rows, new)]
                raise ValueError(f"sessions: one has heads and dims {found}, expected {wanted}, those of the model")
            rows[:, -new.shape[1] :] = new
        layer = self._layer
        return causal_attention(queries, *held, scale=layer.scale, valid=self._ragged, window=layer.window)
