"""Facts that are planted in a history, and what is asked about them, drawn from word lists of this project.

Four kinds of question, after the kinds of memory that RoPERelay is judged on:

    fact        one sentence says it
    update      a later sentence replaces an earlier one, and the present state is asked
    temporal    dated events: the month of one, or which of two came first
    cross       two sentences of different sessions have to be joined

A value is drawn from a list of at least a dozen, independently of the person, so a reader without the history can do no
better than chance: below 1 in 11 for a value of a list, 1 in 2 for which came first, and 1 in 6 for a month, because
the later of two events is asked for (with six sessions it is in December with probability 1/6). Every person has one
attribute of one kind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["KINDS", "MONTHS", "Fact", "draw_facts", "draw_names"]

KINDS = ("fact", "update", "temporal", "cross")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

FIRST_NAMES = (
    "Mira", "Tobin", "Lena", "Anton", "Clara", "Rufus", "Edda", "Jonas", "Petra", "Silas", "Nadia", "Oscar", "Greta",
    "Felix", "Wanda", "Hugo", "Irene", "Boris", "Tessa", "Conrad", "Olga", "Victor", "Paula", "Simon",
)  # fmt: skip
LAST_NAMES = (
    "Marsh", "Reed", "Frost", "Voss", "Hale", "Lind", "Quill", "Thorn", "Brandt", "Wells", "Moss", "Kern", "Stone",
    "Ash", "Field", "Crane", "Dale", "Finch", "Glass", "Holm", "Ivers", "Lake", "North", "Pike",
)  # fmt: skip

DRINKS = (
    "cocoa", "cider", "lemonade", "coffee", "milk", "tea", "wine", "beer", "water", "juice", "punch", "brandy",
)  # fmt: skip
COLOURS = (
    "green", "purple", "orange", "yellow", "pink", "grey", "blue", "red", "white", "black", "brown", "silver",
)  # fmt: skip
ANIMALS = (
    "goat", "parrot", "rabbit", "turtle", "horse", "donkey", "snake", "pigeon", "duck", "sheep", "frog", "hamster",
)  # fmt: skip
TOWNS = (
    "Oslo", "Lisbon", "Cairo", "Quebec", "Lima", "Dublin", "Prague", "Havana", "Boston", "Vienna", "Naples", "Geneva",
)  # fmt: skip
JOBS = (
    "baker", "pilot", "nurse", "lawyer", "farmer", "tailor", "teacher", "sailor", "painter", "dentist", "miner",
    "barber",
)  # fmt: skip
INSTRUMENTS = (
    "cello", "flute", "harp", "piano", "violin", "trumpet", "organ", "guitar", "clarinet", "banjo", "drum", "oboe",
)  # fmt: skip
EVENTS = (
    "regatta", "opera", "auction", "wedding", "carnival", "funeral", "concert", "trial", "race", "banquet", "fair",
    "parade",
)  # fmt: skip

# statement, question, stem of the answer, values
_FACTS = (
    ("{name}'s favourite drink is {value}.", "What is {name}'s favourite drink?",
     "{name}'s favourite drink is", DRINKS),
    ("{name} painted the kitchen {value}.", "Which colour did {name} paint the kitchen?",
     "{name} painted the kitchen", COLOURS),
    ("{name} keeps a pet {value}.", "Which animal does {name} keep as a pet?", "{name} keeps a pet", ANIMALS),
)  # fmt: skip
# earlier statement, later statement, question, stem, values
_UPDATES = (
    ("{name} lives in {value}.", "{name} has moved and now lives in {value}.", "Where does {name} live now?",
     "{name} has moved and now lives in", TOWNS),
    ("{name} works as a {value}.", "{name} has changed jobs and now works as a {value}.",
     "What does {name} work as now?", "{name} has changed jobs and now works as a", JOBS),
    ("{name} drives a {value} car.", "{name} has a new car and now drives a {value} one.",
     "Which colour is the car that {name} drives now?", "{name} has a new car and now drives a", COLOURS),
)  # fmt: skip
# link between two people, attribute of the other one, question, stem, values
_JOINS = (
    ("{name}'s sister is {other}.", "{other} plays the {value}.", "Which instrument does {name}'s sister play?",
     "{name}'s sister plays the", INSTRUMENTS),
    ("{name} shares an office with {other}.", "{other} comes from {value}.",
     "Where does the person come from who shares an office with {name}?",
     "{name} shares an office with a person who comes from", TOWNS),
    ("{name} is married to {other}.", "{other} owns a {value}.", "Which animal does {name}'s spouse own?",
     "{name}'s spouse owns a", ANIMALS),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """What is planted, in the order of the sessions, and what is asked about it.

    statements: sentences; "{date}" in one stands for the date of the session that it falls into.
    evidence: which of the statements answer the question (an outdated one does not).
    answer: "{month}" stands for the month of the statement that is the evidence.
    stem: the start of a sentence that the answer completes.
    """

    kind: str
    statements: tuple[str, ...]
    question: str
    stem: str
    answer: str
    evidence: tuple[int, ...]


def draw_names(random: random.Random, count: int) -> list[str]:
    """Draw people, no two of whom share a first or a last name."""
    if not 0 <= count <= len(FIRST_NAMES):
        raise ValueError(f"count is {count}, expected 0 to {len(FIRST_NAMES)}, the number of first names")
    firsts, lasts = random.sample(FIRST_NAMES, count), random.sample(LAST_NAMES, count)
    return [f"{first} {last}" for first, last in zip(firsts, lasts, strict=True)]


def draw_facts(random: random.Random, number: int, *, groups: int = 2) -> list[Fact]:
    """Draw `groups` facts of every kind, in the order of `KINDS`; `number` alternates the two temporal questions.

    The facts of a group share their wording with the others of their kind, so a name is needed to tell them apart.
    """
    names = iter(draw_names(random, groups * (len(KINDS) + 1)))
    fact, update, join = random.choice(_FACTS), random.choice(_UPDATES), random.choice(_JOINS)
    facts = [_single(*fact[:3], next(names), value) for value in random.sample(fact[3], groups)]
    values = random.sample(update[4], 2 * groups)
    facts += [_update(update, next(names), *values[2 * group : 2 * group + 2]) for group in range(groups)]
    events = random.sample(EVENTS, 2 * groups)
    order = number % 2 == 1
    facts += [
        _temporal(random, next(names), *events[2 * group : 2 * group + 2], order=order) for group in range(groups)
    ]
    facts += [_join(join, next(names), next(names), value) for value in random.sample(join[4], groups)]
    return facts


def _single(statement: str, question: str, stem: str, name: str, value: str) -> Fact:
    filled = statement.format(name=name, value=value)
    return Fact("fact", (filled,), question.format(name=name), stem.format(name=name), value, (0,))


def _update(words: tuple[str, str, str, str, tuple[str, ...]], name: str, old: str, new: str) -> Fact:
    earlier, later, question, stem, _ = words
    statements = earlier.format(name=name, value=old), later.format(name=name, value=new)
    return Fact("update", statements, question.format(name=name), stem.format(name=name), new, (1,))


def _temporal(random: random.Random, name: str, first: str, second: str, *, order: bool) -> Fact:
    statements = tuple(f"On {{date}}, {name} went to the {event}." for event in (first, second))
    if not order:
        question, stem = f"In which month did {name} go to the {second}?", f"{name} went to the {second} in"
        return Fact("temporal", statements, question, stem, "{month}", (1,))
    options = " or to the ".join(random.sample((first, second), 2))
    question = f"Where did {name} go first, to the {options}?"
    return Fact("temporal", statements, question, f"{name} first went to the", first, (0, 1))


def _join(words: tuple[str, str, str, str, tuple[str, ...]], name: str, other: str, value: str) -> Fact:
    link, attribute, question, stem, _ = words
    statements = link.format(name=name, other=other), attribute.format(other=other, value=value)
    return Fact("cross", statements, question.format(name=name), stem.format(name=name), value, (0, 1))
