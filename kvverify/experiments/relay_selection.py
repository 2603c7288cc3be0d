"""What each selector keeps of a history that a model has read, and how relevant it finds every kept state.

The attention selectors compress the history without the question: the last 32 tokens observe, all tokens for H2O. BM25
retrieves by the words of the question alone. FINCH is the published competitor that reassigns positions: it is scored
by the attention of the whole prompt, which is the question and the stem of its answer, and its coordinates are compact.
FINCH so reads more than BM25 does: the stem is close in wording to the statement that has the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvverify.experiments.relay_records import MemoryRecord
from kvverify.models.conversation import History
from kvverify.selectors import Selection, attention_mass, bm25, cam, chunkkv, finch, h2o, pyramidkv, snapkv
from kvverify.selectors.retrieved import bm25_scores, words
from kvverify.selectors.scores import group_sum, window_scores

__all__ = ["SELECTORS", "Observed", "evidence_kept", "finch_selection", "select"]

WINDOW = 32


@dataclass(frozen=True, eq=False)
class Observed:
    """A history and the attention in it, each computed once and only when a selector asks."""

    record: MemoryRecord
    history: History

    @cached_property
    def rows(self) -> Tensor:
        """Attention of the last 32 tokens, [layers, heads, 32, n]."""
        return self.history.rows(WINDOW)

    @cached_property
    def values(self) -> Tensor:
        """All values, [layers, kv, n, value_dim]."""
        return torch.stack(self.history.values)

    @cached_property
    def mass(self) -> Tensor:
        """Attention that each state collects from all queries, [layers, heads, n] in float64, a layer at a time."""
        history = self.history
        each = zip(history.queries, history.keys, history.layers, strict=True)
        return torch.stack([attention_mass(queries, keys, scale=layer.scale) for queries, keys, layer in each])

    def window_relevance(self, window: int) -> Tensor:
        """Attention that each state gets from the last `window` tokens, [layers, kv, n]."""
        return window_scores(self.rows, self.history.kv_heads, window)


Chosen = tuple[Selection, Tensor]
"""A selection, and the relevance [layers, kv, slots] of its states."""


def _window(budget: int) -> int:
    """Half of a budget that is smaller than two windows: the protected window may not fill the cache."""
    return max(1, min(WINDOW, budget // 2))


def _by_window(keep: Callable[..., Selection]) -> Callable[[Observed, str, int], Chosen]:
    def chosen(observed: Observed, question: str, budget: int) -> Chosen:  # noqa: ARG001 - compressed without it
        window = _window(budget)
        selection = keep(observed.rows, budget=budget, kv_heads=observed.history.kv_heads, window=window)
        return selection, _at(selection, observed.window_relevance(window))

    return chosen


def _h2o(observed: Observed, question: str, budget: int) -> Chosen:  # noqa: ARG001 - compressed without the question
    kv_heads = observed.history.kv_heads
    selection = h2o(observed.mass[:, :, None], budget=budget, kv_heads=kv_heads)
    return selection, _at(selection, group_sum(observed.mass, kv_heads))


def _cam(observed: Observed, question: str, budget: int) -> Chosen:  # noqa: ARG001 - compressed without the question
    selection = cam(observed.rows, budget=budget, values=observed.values, kv_heads=observed.history.kv_heads)
    return selection, _at(selection, observed.window_relevance(WINDOW))


def _bm25(observed: Observed, question: str, budget: int) -> Chosen:
    history, units = observed.history, observed.record.units
    shape = len(history.layers), history.kv_heads
    selection = bm25(units, budget=budget, query=question, history=history.length, layers=shape[0], kv_heads=shape[1])
    scores = bm25_scores([words(unit.text) for unit in units], words(question))
    sizes = torch.tensor([unit.stop - unit.start for unit in units])
    by_token = torch.tensor(scores, dtype=torch.float64).repeat_interleave(sizes)
    return selection, _at(selection, by_token.expand(*shape, -1))


SELECTORS: Mapping[str, Callable[[Observed, str, int], Chosen]] = MappingProxyType(
    {
        "bm25": _bm25,
        "snapkv": _by_window(snapkv),
        "h2o": _h2o,
        "pyramidkv": _by_window(pyramidkv),
        "chunkkv": _by_window(chunkkv),
        "cam": _cam,
    }
)
"""(observed, question, budget) -> selection and relevance, of the six selectors that RoPERelay is applied to."""


def select(name: str, observed: Observed, question: str, budget: int) -> Chosen:
    """Let the selector `name` keep `budget` states per KV head; `question` is read by those that retrieve."""
    if name not in SELECTORS:
        raise ValueError(f"selector is {name!r}, expected one of {', '.join(SELECTORS)}")
    return SELECTORS[name](observed, question, budget)


def finch_selection(model: Any, history: History, question: Tensor, budget: int) -> Selection:
    """Keep the `budget` states of the history that question[q] attends to most, per layer and KV head (FINCH).

    question: the tokens of the prompt, question and stem. FINCH reads history and question as one context and keeps
    the question too; the question is asked again here, after the history, so its own states are taken out of the
    selection.
    """
    rows = history.question_rows(model, question)
    kept = finch(rows, budget=budget + len(question), kv_heads=history.kv_heads, window=len(question))
    provenance = replace(kept.provenance, budget=budget, history=history.length)
    slots = slice(0, kept.positions.shape[2] - len(question))
    return Selection(kept.positions[..., slots], kept.log_multiplicity[..., slots], provenance)


def evidence_kept(positions: Tensor, evidence: Tensor) -> float:
    """Share of the evidence that is in the cache: mean over layers, KV heads and evidence tokens.

    positions: int64[layers, kv, slots], -1 where empty. evidence: int64[tokens], source positions.
    """
    if not len(evidence):
        raise ValueError("evidence is empty, expected the position of at least one token")
    return float((positions[..., None] == evidence).any(2).double().mean())


def _at(selection: Selection, scores: Tensor) -> Tensor:
    """Gather scores [layers, kv, n] at the kept states, 0 in empty slots."""
    found = scores.gather(2, selection.positions.clamp(min=0))
    return found.masked_fill(~selection.valid, 0.0)
