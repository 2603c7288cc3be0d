"""Naming the known-bad kernel that a failing implementation behaves like.

Theory of operation
-------------------
On at least a dozen failing cases, the implementation's results are compared with those of every mutant and of the
honest peer, run through the same harness. A mutant is named if it breaks the claim in the same kind of way on all of
them and its results lie at a tenth or less of the distance to the peer's. Otherwise the answer is "none", which is
better than a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvverify.operator import Claim, Implementation, Operator
from kvverify.search import Attempt, attempt, failing_cases

__all__ = ["ENOUGH", "nearest_mutant"]

ENOUGH = 12
NEAR = 0.1
SECONDS = 4.0
WRONG = 1e6
"""What a missing number, an infinity or another shape counts as: far away, and the same for two that miss alike."""


def _distance(left: Sequence[tuple[torch.Tensor, ...]], right: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Root of the summed squared differences of all results, call by call."""
    total = WRONG * abs(len(left) - len(right))
    for mine, theirs in zip(left, right, strict=False):
        for one, two in zip(mine, theirs, strict=False):
            if one.shape != two.shape:
                total += WRONG
                continue
            wide = [tensor.double().nan_to_num(nan=WRONG, posinf=2 * WRONG, neginf=-2 * WRONG) for tensor in (one, two)]
            total += float((wide[0] - wide[1]).square().sum())
    return math.sqrt(total)


def nearest_mutant(
    operator: Operator, claim: Claim, implementation: Implementation, *, seed: int
) -> tuple[str | None, int]:
    """The mutant whose results an implementation gives, or None, and on how many failing cases that was compared.

    Fewer than twelve failing cases are too few to compare: (None, 0).
    """
    found = failing_cases(operator, claim, implementation, seed=seed, enough=ENOUGH, seconds=SECONDS)
    if len(found) < ENOUGH:
        return None, 0
    honest = [attempt(operator, claim, operator.peer, case) for case, _ in found]
    far = sum(_distance(mine.results, theirs.results) for (_, mine), theirs in zip(found, honest, strict=True))
    best: tuple[float, str | None] = (NEAR * far, None)
    for mutant in operator.mutants.values():
        apart = 0.0
        for case, mine in found:
            theirs = attempt(operator, claim, mutant.function, case, in_place=mutant.in_place)
            apart += _distance(mine.results, theirs.results) if _alike(mine, theirs) else math.inf
            if apart > best[0]:
                break
        if apart <= best[0]:
            best = (apart, mutant.name)
    return best[1], len(found)


def _alike(mine: Attempt, theirs: Attempt) -> bool:
    return theirs.violation is not None and mine.violation is not None and mine.violation.kind == theirs.violation.kind
