"""What a gate run found, as data. Terminal, JSON, JUnit and Markdown are views of it, in `kvverify.report`."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

__all__ = ["Failure", "Report", "SelfCheck", "Verdict", "versions"]


@dataclass(frozen=True)
class Failure:
    """Why a claim does not hold: the smallest case found, what came and what should have come, how to see it again.

    nearest: the mutant that gives the same results, if there is one. compared: on how many failing cases that was
    asked.
    """

    kind: str
    message: str
    case: str
    expected: str
    actual: str
    budget: str
    python: str
    command: str
    nearest: str | None
    compared: int


@dataclass(frozen=True)
class Verdict:
    """One claim on one operator of one implementation.

    examples: how many cases ran. out_of_time: whether these are fewer than the profile asks for. worst: the largest
    share of a budget used (0 where claims are exact).
    """

    operator: str
    claim: str
    statement: str
    source: str
    status: str
    evidence: str
    ok: bool
    examples: int
    seconds: float
    worst: float
    failure: Failure | None = None
    out_of_time: bool = False

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Verdict:
        """Read a verdict back from `dataclasses.asdict`."""
        failure = told["failure"]
        return cls(**{**told, "failure": None if failure is None else Failure(**failure)})


@dataclass(frozen=True)
class SelfCheck:
    """Whether the gate can fail: mutants replayed, those a named claim let pass, and claims that reject no mutant."""

    mutants: int
    missed: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there were mutants, all were caught, and every claim caught one."""
        return bool(self.mutants) and not self.missed and not self.idle


@dataclass(frozen=True)
class Report:
    """What was tested, on what, and what was found."""

    implementation: str
    target: str
    device: str
    dtypes: tuple[str, ...]
    evidence: str
    profile: str
    seed: int
    versions: dict[str, str]
    self_check: SelfCheck
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something was tested, every claim holds, and the gate proved that it can fail."""
        return self.self_check.ok and bool(self.verdicts) and all(verdict.ok for verdict in self.verdicts)

    def to_json(self) -> str:
        """The report as JSON, with `ok`; `worst` is null where it is infinite, which JSON cannot say."""
        told = {"ok": self.ok, **dataclasses.asdict(self)}
        for verdict in told["verdicts"]:
            verdict["worst"] = verdict["worst"] if math.isfinite(verdict["worst"]) else None
        return json.dumps(told, indent=2, allow_nan=False)

    def __str__(self) -> str:
        from kvverify.report.text import render

        return render(self)


def versions() -> dict[str, str]:
    """What the run ran on."""
    return {
        "kvverify": version("kvverify"),
        "torch": torch.__version__,
        "hypothesis": version("hypothesis"),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
