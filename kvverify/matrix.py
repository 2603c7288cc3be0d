"""The mutant matrix: which claim rejects which known-bad kernel, and that no claim rejects an equivalent one.

Theory of operation
-------------------
The gate replays each mutant on its witness. That proves a claim can fail, not that it would have failed without being
told where to look. Here every mutant meets every claim of its operator on drawn cases, as a stranger's kernel would;
the named claims must reject it (drawn or witness), and the matrix says after how many drawn cases. Every control must
pass every claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import hypothesis

from kvverify.cases import Case, cases
from kvverify.harness import Violation
from kvverify.operator import Claim, Control, Mutant, Operator
from kvverify.search import attempt, claim_seed, draw
from kvverify.universal import universal_mutants

__all__ = ["Row", "matrix"]


@dataclass(frozen=True)
class Row:
    """One kernel and what happened to it.

    kind: "mutant" or "control". named: the claims that must reject it. rejected: claim -> the drawn cases it took (0:
    the default case). missed: named claims that let it pass on the witness (for a control: claims that rejected it).

    """

    operator: str
    name: str
    kind: str
    named: tuple[str, ...]
    rejected: dict[str, int]
    missed: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """A mutant that every named claim rejects, a control that none does."""
        return not self.missed


def _cases_until_rejected(
    operator: Operator, claim: Claim, function: Callable[..., Any], *, in_place: bool, seed: int, examples: int
) -> int | None:
    ran = 0

    def visit(case: Case) -> None:
        nonlocal ran
        tried = attempt(operator, claim, function, case, in_place=in_place, repeat_slow=False)
        if tried.violation is not None:
            raise tried.violation
        ran += 1

    try:
        for case in (operator.case(), *operator.captured):
            visit(case)
        ran = 1
        drawn = -(-examples // operator.weight)
        draw(cases(operator.case), visit, seed=claim_seed(seed, operator, claim), examples=drawn, shrink=False)
    except (Violation, hypothesis.errors.Flaky):
        return ran
    return None


def matrix(
    tested: Iterable[Operator], *, seed: int, examples: int, on_row: Callable[[Row], Any] | None = None
) -> list[Row]:
    """Run every mutant and every control of these operators against every claim on `examples` drawn cases."""
    rows = []
    for operator in tested:
        kernels: list[tuple[Mutant | Control, bool]] = [(control, False) for control in operator.controls.values()]
        bad = (*operator.mutants.values(), *universal_mutants(operator))
        kernels = [*((mutant, mutant.in_place) for mutant in bad), *kernels]
        for kernel, in_place in kernels:
            rejected = {}
            for claim in operator.claims.values():
                ran = _cases_until_rejected(
                    operator, claim, kernel.function, in_place=in_place, seed=seed, examples=examples
                )
                if ran is not None:
                    rejected[claim.name] = ran
            rows.append(_row(operator, kernel, rejected))
            if on_row:
                on_row(rows[-1])
    return rows


def _row(operator: Operator, kernel: Mutant | Control, rejected: dict[str, int]) -> Row:
    if isinstance(kernel, Control):
        return Row(operator.name, kernel.name, "control", (), rejected, tuple(rejected))
    if kernel.name not in operator.mutants:  # a universal one: whichever claim sees it first
        return Row(operator.name, kernel.name, "mutant", (), rejected, () if rejected else ("every claim",))
    missed = []
    for name in kernel.rejected_by:
        claim = operator.claims[name]
        if name not in rejected:
            witnessed = attempt(operator, claim, kernel.function, kernel.case, in_place=kernel.in_place)
            missed += [] if witnessed.violation else [name]
    return Row(operator.name, kernel.name, "mutant", kernel.rejected_by, rejected, tuple(missed))
