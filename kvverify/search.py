"""Looking for a case on which a claim does not hold, and making it small.

Theory of operation
-------------------
`attempt` runs one claim on one case. `search` first tries the fixed cases of an operator (its default case, and
captured caches), then cases drawn by Hypothesis, and shrinks the first failure by Hypothesis too. Every setting is
passed explicitly, since a user's Hypothesis profile would be inherited otherwise, and the seed is a checksum of
(seed, operator, claim), so that a claim sees the same cases whichever other claims run. What a case did is
remembered: shrinking never runs a case twice, an implementation that answers differently each time cannot confuse
Hypothesis, and once the shrinking allowance is spent every new case counts as passing, which ends the shrinking with
the smallest failure known.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, configuration, settings
from hypothesis import strategies as st

from kvverify.cases import Case, cases
from kvverify.harness import Caller, Violation, one_line
from kvverify.operator import Claim, Implementation, Operator
from kvverify.run import Run

__all__ = ["Attempt", "Found", "SuiteError", "accepts", "attempt", "attempt_on", "draw", "failing_cases", "search"]

SHRINK_CASES = 300
SHRINK_SECONDS = 4.0
REPEAT_EVERY = 8


class SuiteError(Exception):
    """The suite itself failed: a claim, an oracle or a case raised something that is no Violation."""


@dataclass(frozen=True)
class Attempt:
    """One claim on one case: the violation, if any, the largest share of a budget used, and what came back."""

    violation: Violation | None
    worst: float
    results: tuple[tuple[torch.Tensor, ...], ...]


@dataclass(frozen=True)
class Found:
    """What a search found: cases run, the largest share of a budget used, the smallest failure, and if time ran out."""

    examples: int
    worst: float
    case: Case | None = None
    violation: Violation | None = None
    out_of_time: bool = False


def accepts(case: Case, allowed: Mapping[str, Collection[Any]]) -> bool:
    """Whether an implementation with these allowed field values is to be tried on this case."""
    return all(getattr(case, name) in values for name, values in allowed.items() if hasattr(case, name))


def attempt(
    operator: Operator,
    claim: Claim,
    function: Callable[..., Any],
    case: Case,
    *,
    device: str = "cpu",
    in_place: bool = False,
    repeat_slow: bool = True,
) -> Attempt:
    """Run one claim on one case. Raises SuiteError when anything but the implementation fails.

    An exception that is no Violation is the implementation's doing if the honest peer causes none on the same case: the
    claim could make nothing of what came back, such as a position that no table has.
    """
    caller = Caller(operator, function, case, device=device, in_place=in_place, repeat_slow=repeat_slow)
    run = Run(operator, caller)
    try:
        claim.function(run, case)
    except Violation as violation:
        return Attempt(violation, run.worst, tuple(run.results))
    except Exception as error:
        told = f"{type(error).__name__}: {one_line(error)}"
        if function is operator.peer or attempt(operator, claim, operator.peer, case).violation is not None:
            raise SuiteError(f"{operator.name} {claim.name} on {case!r}: {told}") from error
        unusable = Violation("unusable result", f"the claim can make nothing of what came back: {told}")
        return Attempt(unusable, run.worst, tuple(run.results))
    if not caller.calls:
        raise SuiteError(f"{operator.name} {claim.name} on {case!r} never called the implementation")
    return Attempt(None, run.worst, tuple(run.results))


def attempt_on(
    implementation: Implementation, operator: Operator, claim: Claim, case: Case, *, repeat_slow: bool = True
) -> Attempt:
    """Run one claim on one case with what an implementation binds, where and how it says it runs."""
    return attempt(
        operator,
        claim,
        implementation.bindings[operator.name],
        case,
        device=implementation.device,
        in_place=operator.name in implementation.in_place,
        repeat_slow=repeat_slow,
    )


@contextmanager
def _storage_elsewhere() -> Iterator[None]:
    """Hypothesis writes the constants it finds into the working directory; a gate leaves no such traces."""
    if "HYPOTHESIS_STORAGE_DIRECTORY" in os.environ:
        yield
        return
    place = configuration.storage_directory(intent_to_write=False)
    before: Any = getattr(place, "home_directory", place)  # older versions return the folder itself
    with tempfile.TemporaryDirectory(prefix="kvverify-") as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(before)


def draw(
    strategy: st.SearchStrategy[Case], visit: Callable[[Case], None], *, seed: int, examples: int, shrink: bool = True
) -> None:
    """Visit drawn cases, also inside another `@given`; a Violation of `visit` is shrunk and raised again."""

    def trial() -> None:
        @hypothesis.seed(seed)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            verbosity=Verbosity.quiet,
            backend="hypothesis",
        )
        @hypothesis.given(strategy)
        def one(case: Case) -> None:
            visit(case)

        one()

    with _storage_elsewhere():
        if hypothesis.currently_in_test_context():
            with ThreadPoolExecutor(1) as pool:  # Hypothesis refuses to nest, but a thread has a context of its own
                pool.submit(trial).result()
        else:
            trial()


def claim_seed(seed: int, operator: Operator, claim: Claim) -> int:
    """A seed for one claim that depends on nothing but the names and the run's seed."""
    return zlib.crc32(f"{seed}:{operator.name}:{claim.name}".encode())


def search(
    operator: Operator, claim: Claim, implementation: Implementation, *, seed: int, examples: int, seconds: float
) -> Found:
    """Look for a failing case among the fixed ones and `examples` drawn ones, for at most `seconds`, and shrink it."""
    allowed = implementation.allowed
    known: dict[str, tuple[Violation | None, float]] = {}
    failures: list[tuple[Case, Violation]] = []
    stop, out_of_time = time.monotonic() + seconds, False

    def visit(case: Case) -> None:
        nonlocal stop, out_of_time
        if repr(case) not in known:
            if known and (time.monotonic() > stop or len(failures) > SHRINK_CASES):
                out_of_time = not failures
                return
            repeat_slow = len(known) % REPEAT_EVERY == 0
            tried = attempt_on(implementation, operator, claim, case, repeat_slow=repeat_slow)
            known[repr(case)] = tried.violation, tried.worst  # not the results: a soak would fill the memory
        violation, _ = known[repr(case)]
        if violation is not None:
            if not failures:
                stop = time.monotonic() + SHRINK_SECONDS
            failures.append((case, violation))
            raise violation

    smallest: tuple[Case | None, Violation | None] = (None, None)
    try:
        for case in (operator.case(), *operator.captured):
            if accepts(case, allowed):
                visit(case)
        draw(cases(operator.case, allowed), visit, seed=claim_seed(seed, operator, claim), examples=examples)
    except (Violation, hypothesis.errors.Flaky) as error:
        smallest = next((failure for failure in failures if failure[1] is error), failures[-1])
    worst = max((worst for _, worst in known.values()), default=0.0)
    return Found(len(known), worst, *smallest, out_of_time=out_of_time)


def failing_cases(
    operator: Operator, claim: Claim, implementation: Implementation, *, seed: int, enough: int, seconds: float
) -> list[tuple[Case, Attempt]]:
    """Drawn cases on which an implementation fails a claim, up to `enough`, looking for at most `seconds`."""
    found: dict[str, tuple[Case, Attempt]] = {}
    stop = time.monotonic() + seconds

    def visit(case: Case) -> None:
        if len(found) >= enough or time.monotonic() > stop or repr(case) in found:
            return
        tried = attempt_on(implementation, operator, claim, case)
        if tried.violation is not None:
            found[repr(case)] = (case, tried)

    strategy = cases(operator.case, implementation.allowed)
    draw(strategy, visit, seed=claim_seed(seed, operator, claim) + 1, examples=40 * enough, shrink=False)
    return list(found.values())
