"""How a question reads the evidence for its answer, layer by layer, on one selected cache under three plans.

At the last question token, and at the first answer token when it is forced, for each layer and query head:

    margin   phase replay: query and history keys with the content that they have under `original`, at the positions of
             the plan; log of (softmax mass of the evidence / mass of the other kept states of the history)
    share    the real forward under the plan: attention mass of the evidence, question and answer states included
    norm     the real forward: sum over the evidence of a_j ||v_j||

Means over query heads, then over the early, middle and late third of the layers. A head that keeps no evidence, or
nothing else, has no margin; a cache with a layer without any margin is left out (`readable`). Only what the plan
changes differs: states, values and question are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvverify.experiments.relay_answers import Reader, planned
from kvverify.experiments.relay_records import build_record
from kvverify.experiments.relay_scoring import Prompt, build_prompt
from kvverify.experiments.relay_selection import Observed, select
from kvverify.experiments.results import Cell, Chart, Result
from kvverify.models.conversation import History, conversing, read_history
from kvverify.relay.policy import relocate_positions
from kvverify.relay.session import RelaySession
from kvverify.selectors import budget_from_share
from kvverify.stats import paired_mean_difference

__all__ = [
    "BANDS",
    "EVIDENCE_PLANS",
    "MEASURES",
    "MOMENTS",
    "attention_reading",
    "bands",
    "margins",
    "read",
    "readable",
    "run",
    "views",
]

EVIDENCE_PLANS = ("original", "relay", "half_gap")
MEASURES = ("margin", "share", "norm")
MOMENTS = ("question", "answer")
BANDS = ("early", "middle", "late")
PUBLISHED_SHARE = {"early": 0.0252, "middle": 0.0084, "late": 0.0071}
"""Gain of the evidence's share at the last question token (Qwen2-7B, BM25-B8192, 500 questions)."""


def attention_reading(
    query: Tensor, keys: Tensor, values: Tensor, evidence: Tensor, valid: Tensor, scale: float
) -> Tensor:
    """Share of the evidence in the attention of one query, and its sum of a_j ||v_j||: [2], means over query heads.

    query: [kv, group, dim]. keys: [kv, rows, dim]. values: [kv, rows, value_dim]. evidence, valid: bool[kv, rows].
    """
    weights = _logits(query, keys, valid, scale).softmax(-1)
    seen = weights.masked_fill(~evidence[:, None], 0)
    norms = values.double().norm(dim=-1)
    return torch.stack([seen.sum(-1).mean(), (seen * norms[:, None]).sum(-1).mean()])


def margins(query: Tensor, keys: Tensor, evidence: Tensor, valid: Tensor, scale: float) -> Tensor:
    """log(mass of the evidence / mass of the other states), mean over query heads that hold both; NaN if none does.

    Shapes as in `attention_reading`.
    """
    logits = _logits(query, keys, valid, scale)
    found = logits.masked_fill(~evidence[:, None], -torch.inf).logsumexp(-1)
    others = logits.masked_fill(evidence[:, None], -torch.inf).logsumexp(-1)
    both = found.isfinite() & others.isfinite()
    return (found - others)[both].mean()


def bands(values: Tensor) -> list[float]:
    """Mean of [layers] over the early, middle and late third, NaN left out; where 3 does not divide, late is longer."""
    layers = len(values)
    if layers < len(BANDS):
        raise ValueError(f"values are of {layers} layers, expected at least {len(BANDS)}")
    ends = [0, layers // 3, 2 * layers // 3, layers]
    return [float(values[start:stop].nanmean()) for start, stop in pairwise(ends)]


def readable(source: Tensor, evidence: Tensor) -> bool:
    """Whether in every layer some KV head keeps evidence and something else, so that every layer has a margin.

    source: int64[layers, kv, slots], -1 where empty. evidence: int64[tokens], source positions.
    """
    gold = torch.isin(source, evidence)
    others = ~gold & (source >= 0)
    return bool((gold.any(2) & others.any(2)).any(1).all())


def read(
    reader: Reader, history: History, sessions: Mapping[str, RelaySession], prompt: Prompt, evidence: Tensor
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Measure relocated sessions, `original` first: moment -> plan -> measure -> [early, middle, late].

    evidence: int64[tokens], source positions.
    """
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    with conversing(reader.model, list(sessions.values())) as talk:
        watched = [[_Watched(layer) for layer in row.layers] for row in talk.rows]
        for row, layers in zip(talk.rows, watched, strict=True):
            served: list[Any] = row.layers
            served[:] = layers
        for moment, tokens in zip(MOMENTS, (prompt.question, prompt.answer[:1]), strict=True):
            talk.ask(tokens)
            now = dict(zip(sessions, talk.sessions, strict=True))
            queries = [[layer.query for layer in row] for row in watched]
            replayed = {name: _replay(history, now[name], now["original"], queries[0], evidence) for name in now}
            found[moment] = {
                name: {"margin": bands(replayed[name])} | _forward(history, now[name], queries[place], evidence)
                for place, name in enumerate(now)
            }
    return found


def run(
    reader: Reader, numbers: Sequence[int], *, selectors: Sequence[str], retention: float, tokens: int
) -> list[dict[str, Any]]:
    """Read the evidence of every question whose cache is `readable`: one entry per question and selector."""
    found = []
    for number in numbers:
        record = build_record(reader.encode, reader.texts, number, limit=tokens)
        history = read_history(reader.model, record.tokens)
        observed = Observed(record, history)
        for question in record.questions:
            prompt = build_prompt(reader.encode, question)
            evidence = question.evidence_positions(history.tokens.device)
            for name in selectors:
                budget = budget_from_share(retention, history.length)
                selection, scores = select(name, observed, question.text, budget)
                entry: dict[str, Any] = {"history": number, "name": question.name, "selector": name, "read": None}
                session = history.session(selection)
                if readable(session.retained.source, evidence):
                    sessions = planned(session, scores, EVIDENCE_PLANS)
                    entry["read"] = _rounded(read(reader, history, sessions, prompt, evidence))
                found.append(entry)
    return found


def views(entries: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Result]:
    """Make one table per measure, with differences to `original` and intervals whose cluster is the history."""
    return {f"evidence_{measure}": _view(measure, entries, settings) for measure in MEASURES}


def _view(measure: str, entries: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Result:
    rows: list[tuple[Cell, ...]] = []
    for selector in dict.fromkeys(entry["selector"] for entry in entries):
        held = [entry for entry in entries if entry["selector"] == selector and entry["read"] is not None]
        for moment in MOMENTS:
            for place, band in enumerate(BANDS):
                for plan in EVIDENCE_PLANS if held else ():
                    values, base = (
                        [entry["read"][moment][name][measure][place] for entry in held] for name in (plan, "original")
                    )
                    differences = [a - b for a, b in zip(values, base, strict=True)]
                    clusters = [entry["history"] for entry in held]
                    low = high = None
                    if plan != "original" and len(set(clusters)) > 1:
                        interval = paired_mean_difference(differences, clusters).interval
                        low, high = round(interval.low, 5), round(interval.high, 5)
                    published = (measure, plan, moment, selector) == ("share", "relay", "question", "bm25")
                    rows.append(
                        (
                            f"{moment}, {band}",
                            f"{selector} {plan}",
                            round(sum(values) / len(values), 5),
                            None if plan == "original" else round(sum(differences) / len(differences), 5),
                            low,
                            high,
                            PUBLISHED_SHARE[band] if published else None,
                            len(held),
                        )
                    )
    titles = {
        "margin": "Phase replay: log odds of the evidence among the kept states",
        "share": "Attention share of the evidence",
        "norm": "Sum of a_j ||v_j|| over the evidence",
    }
    columns = ("at", "cache", "value", "difference", "low", "high", "published", "questions")
    left_out = sum(entry["read"] is None for entry in entries)
    notes = (f"{left_out} of {len(entries)} caches hold no evidence, or nothing else, in some layer and are left out.",)
    return Result(titles[measure], columns, tuple(rows), Chart("at", "value", "cache"), settings, notes)


class _Watched:
    """A layer of a row that remembers the last query it served, [kv, group, dim]."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.query: Tensor = torch.empty(0)

    def serve(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.query = queries[:, :, -1]
        served: Tensor = self._layer.serve(queries, keys, values)
        return served


def _logits(query: Tensor, keys: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Scaled products in float64, [kv, group, rows], -inf where a slot is empty."""
    logits = scale * (query.double() @ keys.double().transpose(1, 2))
    return logits.masked_fill(~valid[:, None], -torch.inf)


def _forward(
    history: History, session: RelaySession, queries: Sequence[Tensor], evidence: Tensor
) -> dict[str, list[float]]:
    gold, valid = torch.isin(session.source, evidence), session.positions >= 0
    layers = [
        attention_reading(queries[i], session.keys[i], session.values[i], gold[i], valid[i], layer.scale)
        for i, layer in enumerate(history.layers)
    ]
    share, norm = torch.stack(layers).unbind(1)
    return {"share": bands(share), "norm": bands(norm)}


def _replay(
    history: History, session: RelaySession, original: RelaySession, queries: Sequence[Tensor], evidence: Tensor
) -> Tensor:
    """Margin of each layer: the queries of `original` moved to where `session` asks, over its relocated history."""
    slots = slice(0, session.retained.source.shape[2])
    gold = torch.isin(session.source[:, :, slots], evidence)
    found = []
    for i, layer in enumerate(history.layers):
        rows = queries[i].flatten(0, 1)
        old, new = (torch.full((len(rows),), one.next_position - 1, device=rows.device) for one in (original, session))
        query = relocate_positions(rows, old, new, session.tables[i]).view_as(queries[i])
        keys, valid = session.keys[i][:, slots], session.retained.valid[i]
        found.append(margins(query, keys, gold[i], valid, layer.scale))
    return torch.stack(found)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else round(value, 6)
