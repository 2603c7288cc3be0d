"""What a model made of a history: keys, values and queries, and the session of the states that a selector keeps.

A layer with a sliding window keeps the last states of its window, whatever the selector chose for it, because the model
has no others; compact positions end where those of the other layers end, so distances within its window stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvverify.models.attention_layers import AttentionLayer, attention_layers
from kvverify.models.exact import Exact
from kvverify.models.layer_caches import Consecutive
from kvverify.models.rotary import probe, require_same_table, rotary_tables
from kvverify.models.serving import Served, attending, serving
from kvverify.relay.plans import SHIFT, Retained
from kvverify.relay.policy import RotaryTable
from kvverify.relay.session import RelaySession, begin
from kvverify.selectors import Selection, attention_rows

__all__ = ["History", "read_history"]


@dataclass(frozen=True, eq=False)
class History:
    """What a model made of tokens[n]: per attention layer, what it cached and asked.

    keys[layer]: [kv, n, dim] as cached, after rotation. values[layer]: [kv, n, value_dim]. For latent attention these
    are the rows [branch ; content] and the content, with one KV head. queries[layer]: [heads, n, dim] after rotation.
    logits: [vocab] after the last token. tables: the rotary factors of each layer, for positions up to
    n + `plans.SHIFT` at least. states: the transformers cache, in which linear-attention layers keep theirs.
    """

    tokens: Tensor
    layers: tuple[AttentionLayer, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    queries: tuple[Tensor, ...]
    logits: Tensor
    tables: tuple[RotaryTable, ...]
    states: Any

    @property
    def length(self) -> int:
        """Number of tokens, L."""
        return len(self.tokens)

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return len(self.keys[0])

    def rows(self, last: int = 32, *, layer: int | None = None) -> Tensor:
        """Attention after the softmax of the last tokens over the history: what selectors ask for.

        Returns [layers, heads, last, n], or [heads, last, n] of one layer: with many tokens a layer at a time is what
        fits in memory. `last` beyond the history means all of it.
        """
        if last < 1:
            raise ValueError(f"last is {last}, expected at least one token")
        if layer is not None and layer not in range(len(self.layers)):
            raise ValueError(f"layer is {layer}, expected 0 to {len(self.layers) - 1}, an attention layer")
        numbers = range(len(self.layers)) if layer is None else [layer]
        found = [attention_rows(self.queries[i][:, -last:], self.keys[i], scale=self.layers[i].scale) for i in numbers]
        return torch.stack(found) if layer is None else found[0]

    def question_rows(self, model: Any, question: Tensor) -> Tensor:
        """Attention of a question's tokens[q] over the history and themselves, [layers, heads, q, n + q].

        The question stands right after the uncompressed history, as a selector that looks at it (FINCH) has it.
        """
        caches = [_Asked(self, number) for number in range(len(self.layers))]
        with self._full(model, caches) as served:
            served(question)
        return torch.stack([cache.rows_seen() for cache in caches])

    def session(
        self, selection: Selection | None = None, *, scores: Tensor | None = None, seed: int = 0
    ) -> RelaySession:
        """Begin a session with the states of `selection` (None: all), in state "selected".

        scores: [layers, kv, slots], of the slots of the selection, for the plan `score`; the states of a sliding window
        keep source order under it. seed: for the plan `random`.
        """
        positions, values = self._kept(selection)
        keys = torch.stack([_take(k, p) for k, p in zip(self.keys, positions, strict=True)])
        if scores is not None:
            scores = self._scores_kept(scores, positions, selection)
        retained = Retained(positions, self.length, scores=scores, seed=seed)
        return begin(keys, values, retained, self.tables)

    def _kept(self, selection: Selection | None) -> tuple[Tensor, Tensor]:
        """Positions [layers, kv, slots] and values kept, those of windows in the place of what was chosen there."""
        shape = len(self.layers), self.kv_heads
        if not isinstance(selection, Selection | None):
            raise ValueError(f"selection is a {type(selection).__name__}, expected a Selection or None, for everything")
        if selection is None:
            positions = torch.arange(self.length, device=self.tokens.device).expand(*shape, -1)
        else:
            positions = selection.positions.to(self.tokens.device)
            history = selection.provenance.history
            if positions.shape[:2] != shape or history != self.length:
                raise ValueError(
                    f"selection is of {tuple(positions.shape[:2])} layers and heads over {history} tokens, "
                    f"expected {shape} over {self.length}"
                )
            if selection.log_multiplicity.any():
                raise ValueError("selection: its states have multiplicities, expected 0 everywhere: none are applied")
        windows = [None if layer.window is None else min(layer.window - 1, self.length) for layer in self.layers]
        wider = max([0, *(window for window in windows if window is not None)]) - positions.shape[2]
        positions = torch.nn.functional.pad(positions, (0, max(0, wider)), value=-1).clone()
        merged = None if selection is None else selection.values
        kept = []
        for number, window in enumerate(windows):
            if window is not None:
                # At the end: a window counts slots, and between these states and the next token there is none.
                last = torch.arange(self.length - window, self.length, device=positions.device)
                positions[number] = torch.nn.functional.pad(last, (positions.shape[2] - window, 0), value=-1)
            taken = _take(self.values[number], positions[number])
            if merged is not None and window is None:
                taken[:, : merged.shape[2]] = merged[number].to(taken.dtype)
            kept.append(taken)
        return positions, torch.stack(kept)

    def _scores_kept(self, scores: Tensor, positions: Tensor, selection: Selection | None) -> Tensor:
        wanted = (positions if selection is None else selection.positions).shape
        if scores.shape != wanted:
            raise ValueError(f"scores has shape {list(scores.shape)}, expected {list(wanted)}, as the selection")
        scores = torch.nn.functional.pad(scores, (0, positions.shape[2] - scores.shape[2]))
        windows = torch.tensor([layer.window is not None for layer in self.layers], device=scores.device)
        return torch.where(windows[:, None, None], positions.to(scores.dtype), scores)

    @contextmanager
    def _full(self, model: Any, caches: Sequence[_Asked]) -> Iterator[Served]:
        row = Consecutive(caches)
        row.open(self.length, generated=False)
        with attending(model, [row], begun=True, states=deepcopy(self.states)) as served:
            yield served


def read_history(model: Any, tokens: Tensor, *, chunk: int | None = None) -> History:
    """Let `model` read tokens[n], `chunk` of them a forward (None: all), and keep what it cached and asked.

    ValueError where keys cannot be relocated later: what `models.rotary.probe` refuses, and rotary tables that change
    with the length of the sequence within the reach of the plans.
    """
    layers = attention_layers(model)
    caches = [_Taken() for _ in layers]
    with serving(model, [caches], observed=len(tokens)) as served:
        logits = served.prefill(tokens, chunk=chunk)[0, -1]
        states = served.states
    reach = len(tokens) + SHIFT
    return History(
        tokens=tokens,
        layers=layers,
        keys=tuple(cache.keys for cache in caches),
        values=tuple(cache.values for cache in caches),
        queries=tuple(cache.queries.flatten(0, 1) for cache in caches),
        logits=logits,
        tables=tuple(_table(model, layer.index, reach) for layer in layers),
        states=states,
    )


class _Taken:
    """A layer cache that shows what it was given."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        self.queries, self.keys, self.values = queries, keys, values

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002 - nothing is served
        raise ValueError("the cache is being read: expected no token to be served from it")


class _Asked(Exact):
    """The full cache of a layer of a history, which remembers the queries that it serves."""

    def __init__(self, history: History, number: int) -> None:
        layer = history.layers[number]
        super().__init__(scale=layer.scale, window=layer.window)
        self.layer = layer
        self.queries: Tensor = torch.empty(0)
        self.prefill(torch.empty(0), history.keys[number], history.values[number])

    def serve(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.queries = queries
        return super().serve(queries, keys, values)

    def rows_seen(self) -> Tensor:
        return attention_rows(self.queries.flatten(0, 1), self.rows[0], scale=self.layer.scale)


_tables: weakref.WeakKeyDictionary[Any, dict[int, RotaryTable]] = weakref.WeakKeyDictionary()


def _table(model: Any, index: int, reach: int) -> RotaryTable:
    """The model's table of a layer for at least `reach` positions; asked once, and again where it is too short."""
    known = _tables.setdefault(model, {})
    if index not in known or len(known[index].cos) < reach:
        size = 1 << (reach - 1).bit_length()
        require_same_table(model, written_at=1, now=size, layer=index)
        cos, sin = rotary_tables(model, torch.arange(size, device=model.device), layer=index, length=size)
        known[index] = RotaryTable(cos, sin, probe(model, layer=index).layout)
    return known[index]


def _take(rows: Tensor, positions: Tensor) -> Tensor:
    """Gather rows[kv, n, dim] at positions[kv, slots], 0 where there is none."""
    index = positions.clamp(min=0)[..., None].expand(*positions.shape, rows.shape[-1])
    return rows.gather(1, index).masked_fill((positions < 0)[..., None], 0)
