"""One fault of a golden tree as one line: where, what, and the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvverify.golden.tree import GoldenError

__all__ = ["Fault", "from_error", "grouped", "handful"]

_HANDFUL = 4


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: where, what was found and expected, and the command to run.

    `further` goes on in words where one command is not all: an alternative, or what comes after it.
    """

    place: str
    problem: str
    command: str
    further: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}; run `{self.command}`{self.further and ', ' + self.further}"


def handful(items: Sequence[str], separator: str = ", ") -> str:
    """Join the first few of many items, and say how many more there are."""
    told = separator.join(items[:_HANDFUL])
    return told if len(items) <= _HANDFUL else f"{told} and {len(items) - _HANDFUL} more"


def grouped(faults: Iterable[Fault]) -> list[Fault]:
    """Make one fault of all that have the same place and command, in the order of the first of each."""
    found: dict[Fault, list[str]] = {}
    for fault in faults:
        found.setdefault(replace(fault, problem=""), []).append(fault.problem)
    return [replace(fault, problem=handful(problems, "; ")) for fault, problems in found.items()]


def from_error(error: GoldenError) -> Fault:
    """Make a fault of an error whose text is PLACE PROBLEM: run `COMMAND`."""
    place, _, told = str(error).partition(" ")
    problem, _, command = told.rpartition(": run `")
    return Fault(place, problem, command.removesuffix("`"))
