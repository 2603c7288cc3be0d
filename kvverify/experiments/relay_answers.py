"""Answers from one selected cache under every coordinate plan: RoPERelay's main table, in small.

A history is read once. For every selector and retention its states are selected once, and the plans of that one cache
are the rows of a batch that is asked the question: same states, same values, same bytes. Each row answers greedily,
and the reference answer is scored by teacher forcing from the same question forward. The full cache is one more row.

Results are one file per history, `history_NNN.json`, each written in one step: an interrupted run loses one history,
and a run with the same settings goes on where the last one stopped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvverify.experiments.relay_records import MemoryQuestion, MemoryRecord, build_record, paragraphs
from kvverify.experiments.relay_scoring import PROMPT, Prompt, build_prompt, clean_answer, mean_nll
from kvverify.experiments.relay_selection import SELECTORS, Observed, evidence_kept, finch_selection, select
from kvverify.experiments.windows import sha256_of
from kvverify.models.conversation import conversing, read_history
from kvverify.relay.plans import PLANS
from kvverify.relay.session import RelaySession
from kvverify.selectors import budget_from_share

__all__ = ["RANDOM_SEEDS", "Reader", "Settings", "answer", "planned", "read_results", "run", "run_record"]

RANDOM_SEEDS = 5
FINCH_PLANS: tuple[str, ...] = ("original", "relay")
"""FINCH's own coordinates are those of `relay`, its heads being of one length; `original` leaves them out."""


@dataclass(frozen=True)
class Settings:
    """What a run is: all that could change a number in its files."""

    selectors: tuple[str, ...] = tuple(SELECTORS)
    retentions: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2)
    plans: tuple[str, ...] = tuple(PLANS)
    finch: bool = True
    tokens: int = 2048
    sessions: int = 6
    answer_limit: int = 6
    prompt: str = PROMPT
    model: str = ""

    def __post_init__(self) -> None:
        for name, chosen, known in (("selectors", self.selectors, SELECTORS), ("plans", self.plans, PLANS)):
            for unknown in [value for value in chosen if value not in known][:1]:
                raise ValueError(f"{name} holds {unknown!r}, expected names of {', '.join(known)}")
        for share in [share for share in self.retentions if not 0 < share < 1][:1]:
            raise ValueError(f"retentions holds {share}, expected shares of the history between 0 and 1")
        try:
            self.prompt.format(question="", stem="")
        except (ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"prompt is {self.prompt!r}, expected no fields but {{question}} and {{stem}}") from error

    @property
    def record(self) -> dict[str, Any]:
        """The settings as JSON gives them back."""
        found: dict[str, Any] = json.loads(json.dumps(vars(self)))
        return found


@dataclass(frozen=True, eq=False)
class Reader:
    """A model with its words.

    encode(text) -> token ids without special ones. decode(ids) -> text. stop: the tokens that end an answer.
    texts: the paragraphs that histories are made of.
    """

    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop: tuple[int, ...]
    texts: Sequence[str] = field(default_factory=paragraphs)


def planned(session: RelaySession, scores: Tensor | None, plans: Sequence[str]) -> dict[str, RelaySession]:
    """Relocate one selected session by every plan, `random` by each of its seeds ("random 0" ...).

    scores: relevance [layers, kv, slots], which only plan `score` reads.
    """
    found = {}
    for name in plans:
        for seed in range(RANDOM_SEEDS if name == "random" else 1):
            retained = replace(session.retained, scores=scores, seed=seed)
            found[f"{name} {seed}" if name == "random" else name] = session.relocate(PLANS[name](retained))
    return found


def answer(
    reader: Reader, sessions: Sequence[RelaySession], prompt: Prompt, *, limit: int
) -> tuple[list[str], list[float]]:
    """Ask every session the same question; return its greedy answer, and the NLL per token of the reference answer."""
    with conversing(reader.model, sessions) as talk:
        logits = [talk.ask(prompt.question)[:, -1:]]
        asked = talk.sessions
        said = talk.generate(limit, stop=reader.stop)
    if len(prompt.answer) > 1:
        with conversing(reader.model, asked) as talk:
            logits.append(talk.ask(prompt.answer[:-1]))
    return [clean_answer(reader.decode(tokens)) for tokens in said], mean_nll(logits, prompt.answer)


def run_record(reader: Reader, settings: Settings, record: MemoryRecord) -> dict[str, Any]:
    """Ask all questions of one record in all cells; return what its file holds."""
    history = read_history(reader.model, record.tokens)
    observed = Observed(record, history)
    questions = [_run_question(reader, settings, observed, question) for question in record.questions]
    return {
        "settings": settings.record,
        "number": record.number,
        "tokens": history.length,
        "tokens_sha256": sha256_of(record.tokens),
        "date": record.date,
        "torch": torch.__version__.partition("+")[0],
        "questions": questions,
    }


def _run_question(reader: Reader, settings: Settings, observed: Observed, question: MemoryQuestion) -> dict[str, Any]:
    history = observed.history
    prompt = build_prompt(reader.encode, question, settings.prompt)
    evidence = question.evidence_positions(history.tokens.device)
    asked = list(settings.selectors) + ["finch"] * settings.finch
    cells = []
    for share in settings.retentions:
        budget = budget_from_share(share, history.length)
        for name in asked:
            scores, plans = None, FINCH_PLANS
            if name == "finch":
                selection = finch_selection(reader.model, history, prompt.question, budget)
            else:
                (selection, scores), plans = select(name, observed, question.text, budget), settings.plans
            sessions = planned(history.session(selection), scores, plans)
            answers = answer(reader, list(sessions.values()), prompt, limit=settings.answer_limit)
            cells.append(
                {
                    "selector": name,
                    "retention": share,
                    "budget": budget,
                    "kept": round(float(selection.counts.double().mean()), 2),
                    "evidence_kept": round(evidence_kept(selection.positions, evidence), 4),
                    "plans": _rows(list(sessions), *answers),
                }
            )
    whole = history.session()
    full = [whole.relocate(PLANS["original"](whole.retained))]
    return {
        "name": question.name,
        "kind": question.kind,
        "question": question.text,
        "reference": question.answer,
        "full": _rows(["full"], *answer(reader, full, prompt, limit=settings.answer_limit))["full"],
        "cells": cells,
    }


def _rows(names: Sequence[str], answers: Sequence[str], nll: Sequence[float]) -> dict[str, list[str | float]]:
    return {name: [text, round(value, 5)] for name, text, value in zip(names, answers, nll, strict=True)}


def run(reader: Reader, settings: Settings, numbers: Sequence[int], folder: Path) -> Iterator[tuple[int, bool]]:
    """Answer the records of these numbers into `folder`; yield each number, and whether it was there already.

    ValueError if a file of other settings, another history, other questions or other seeds is there: two runs cannot
    share a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        path = folder / f"history_{number:03}.json"
        record = build_record(reader.encode, reader.texts, number, limit=settings.tokens, sessions=settings.sessions)
        if path.exists():
            _check_same(path, settings, record)
            yield number, True
            continue
        partial = path.with_suffix(".partial")
        partial.write_text(_as_json(run_record(reader, settings, record)), encoding="utf-8")
        os.replace(partial, path)
        yield number, False


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Read the histories of a run, by number; ValueError if there is none or they are of different settings."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("history_*.json"))]
    if not found:
        raise ValueError(f"folder {folder} holds no history_*.json, expected at least one")
    for other in found[1:]:
        if other["settings"] != found[0]["settings"]:
            raise ValueError(
                f"history {other['number']} has other settings than {found[0]['number']}, expected one run"
            )
    return found


def _check_same(path: Path, settings: Settings, record: MemoryRecord) -> None:
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.record.items():
        if found["settings"].get(name) != value:
            raise ValueError(
                f"{path.name} was made with {name} = {found['settings'].get(name)!r}, expected {value!r}: "
                "give another --out, or the same settings"
            )
    if found["tokens_sha256"] != sha256_of(record.tokens):
        raise ValueError(f"{path.name} is of another history {record.number}, expected the one built now")
    stored = [(question["question"], question["reference"]) for question in found["questions"]]
    for place, pair in enumerate(zip_longest(stored, [(asked.text, asked.answer) for asked in record.questions])):
        if pair[0] != pair[1]:
            raise ValueError(
                f"{path.name} has as question {place} and reference {pair[0]!r}, expected {pair[1]!r}, "
                "the one built now"
            )
    seeds = [f"random {seed}" for seed in range(RANDOM_SEEDS)]
    for cell in (cell for question in found["questions"] for cell in question["cells"]):
        drawn = [name for name in cell["plans"] if name.startswith("random")]
        if cell["selector"] != "finch" and "random" in settings.plans and drawn != seeds:
            raise ValueError(
                f"{path.name} has of plan random at {cell['selector']} {cell['retention']} the seeds {drawn}, "
                f"expected {seeds}"
            )


def _as_json(found: Mapping[str, Any]) -> str:
    """Write one line per cell, so that a difference can be read."""
    head = {name: value for name, value in found.items() if name != "questions"}
    lines = [json.dumps(head, ensure_ascii=False)[:-1] + ', "questions": [']
    for place, question in enumerate(found["questions"]):
        start = {name: value for name, value in question.items() if name != "cells"}
        lines.append(" " + json.dumps(start, ensure_ascii=False)[:-1] + ', "cells": [')
        cells = [json.dumps(cell, ensure_ascii=False) for cell in question["cells"]]
        lines.append(",\n".join(f"  {cell}" for cell in cells))
        lines.append(" ]}" + ("," if place + 1 < len(found["questions"]) else ""))
    return "\n".join([*lines, "]}"]) + "\n"
