"""The gate: every claim on every operator that an implementation binds, and the gate's own check of itself.

Theory of operation
-------------------
A `Session` says what is tested and how long; the command line, the pytest plugin and `check` all open one. First the
gate proves that it can fail (`self_check`): each mutant is replayed on its witness case against each claim that must
reject it, kernels that return zeros, unwritten memory or a remembered result among them. A mutant that nothing
rejects, or a claim that rejects nothing, is a defect of the suite and never of the implementation. Then, claim by
claim in the order in which a policy tells them, the implementation is searched for a failing case.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvverify.cases import parse_case, restrict
from kvverify.diagnosis import nearest_mutant
from kvverify.harness import one_line
from kvverify.operator import Claim, Implementation, Operator, registry
from kvverify.search import attempt, attempt_on, search
from kvverify.target import UsageError, resolve
from kvverify.universal import universal_mutants
from kvverify.verdicts import Failure, Report, SelfCheck, Verdict, versions

__all__ = [
    "PROFILES",
    "Profile",
    "Report",
    "Session",
    "check",
    "check_claim",
    "open_session",
    "reproduce",
    "self_check",
]

NOTHING_TESTED = 5


@dataclass(frozen=True)
class Profile:
    """How long a gate looks: drawn cases per claim, and a bound in seconds per claim; a report says what really ran."""

    examples: int
    seconds: float


PROFILES = {
    "quick": Profile(examples=40, seconds=2),
    "ci": Profile(examples=200, seconds=20),
    "nightly": Profile(examples=2_000, seconds=300),
    "soak": Profile(examples=20_000, seconds=3_600),
}


@dataclass(frozen=True)
class Session:
    """What a run tests: an implementation, the operators it binds, how long to look, with which seed, on which device.

    device: only where it was asked for instead of the implementation's own.
    """

    implementation: Implementation
    target: str
    operators: tuple[Operator, ...]
    profile: str = "quick"
    seed: int = 0
    device: str | None = None

    def claims(self) -> list[tuple[Operator, Claim]]:
        """Every claim to be tested, in report order."""
        return [(operator, claim) for operator in self.operators for claim in operator.claims.values()]

    def report(self, proven: SelfCheck, verdicts: Sequence[Verdict], seconds: float) -> Report:
        """The report of this run."""
        chosen = self.implementation
        return Report(
            implementation=chosen.name,
            target=self.target,
            device=chosen.device,
            dtypes=tuple(chosen.dtypes),
            evidence=chosen.evidence_level,
            profile=self.profile,
            seed=self.seed,
            versions=versions(),
            self_check=proven,
            verdicts=tuple(verdicts),
            seconds=seconds,
        )


def open_session(
    implementation: Implementation | str,
    *,
    profile: str = "quick",
    seed: int = 0,
    device: str | None = None,
    folder: str | None = None,
    require_gpu: bool = False,
) -> Session:
    """Resolve and validate what is to be tested. Raises UsageError, in one line, for everything that cannot be."""
    if profile not in PROFILES:
        raise UsageError(f"profile {profile!r} is unknown: expected one of {list(PROFILES)}")
    target = implementation if isinstance(implementation, str) else ""
    chosen = resolve(implementation, folder=folder) if isinstance(implementation, str) else implementation
    if not isinstance(chosen, Implementation):
        raise UsageError(f"implementation is a {type(chosen).__name__}: expected a kvverify.Implementation or a string")
    if device is not None:
        chosen = dataclasses.replace(chosen, device=device)
    _check_device(chosen.device, require_gpu=require_gpu)
    bound = _bound_operators(chosen)
    fields = {spec.name for operator in bound for spec in dataclasses.fields(operator.case)}
    for name in chosen.supports:
        if name not in fields:
            raise UsageError(
                f"supports of {chosen.name!r} names {name!r}, a field of no case: expected some of {sorted(fields)}"
            )
    for operator in bound:
        _check_signature(chosen, operator)
        try:
            restrict(operator.case, chosen.allowed)
        except ValueError as error:
            raise UsageError(f"implementation {chosen.name!r}: {error}") from None
    return Session(chosen, target, tuple(bound), profile, seed, device)


def _check_signature(implementation: Implementation, operator: Operator) -> None:
    """Refuse a callable that cannot be called as the operator is, before every claim says so."""
    inputs = operator.case().build()
    try:
        signature = inspect.signature(implementation.bindings[operator.name])
    except (TypeError, ValueError):
        return  # a built-in or a compiled function tells no signature
    try:
        signature.bind(*inputs.tensors.values(), **inputs.static)
    except TypeError as error:
        raise UsageError(
            f"operator {operator.name!r} of {implementation.name!r} cannot be called as {operator.signature}: {error}"
        ) from None


def _check_device(device: str, *, require_gpu: bool) -> None:
    default = torch.get_default_device()
    if default.type != "cpu":  # cases are built on the CPU, by the same generator everywhere
        raise UsageError(
            f"torch's default device is {str(default)!r}: expected 'cpu'; let the implementation say device=... instead"
        )
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"device {device!r} is unknown: expected for example 'cpu' or 'cuda'") from None
    if kind == "cuda" and torch.cuda.device_count() == 0:
        raise UsageError(f"device {device!r}: torch sees no CUDA device here", exit_code=NOTHING_TESTED)
    try:
        torch.zeros(1, device=device).cpu()
    except Exception as error:
        raise UsageError(f"device {device!r} holds no tensors here: {one_line(error)}") from None
    if require_gpu and kind != "cuda":
        raise UsageError(f"device {device!r}: a GPU was required (--require-gpu)", exit_code=NOTHING_TESTED)


def _bound_operators(implementation: Implementation) -> list[Operator]:
    known = registry()
    for name in implementation.bindings:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {sorted(known)}"
            raise UsageError(f"operator {name!r} of {implementation.name!r} is unknown: {hint}")
    return [operator for name, operator in known.items() if name in implementation.bindings]


def self_check(tested: Collection[Operator]) -> SelfCheck:
    """Replay every mutant of these operators on its witness case against the claims that must reject it."""
    missed, idle, count = [], [], 0
    for operator in tested:
        useful = set()
        for mutant in operator.mutants.values():
            count += 1
            for name in mutant.rejected_by:
                claim = operator.claims[name]
                tried = attempt(operator, claim, mutant.function, mutant.case, in_place=mutant.in_place)
                if tried.violation is None:
                    missed.append(f"{operator.name}: {mutant.name} passes {name} on {mutant.case!r}")
                else:
                    useful.add(name)
        for mutant in universal_mutants(operator):
            count += 1
            claims = (operator.claims[name] for name in mutant.rejected_by)
            if not any(attempt(operator, claim, mutant.function, mutant.case).violation for claim in claims):
                missed.append(f"{operator.name}: {mutant.name} passes every claim on {mutant.case!r}")
        idle += [f"{operator.name}: {name} rejects no mutant" for name in operator.claims if name not in useful]
    return SelfCheck(count, tuple(missed), tuple(idle))


def check_claim(session: Session, operator: Operator, claim: Claim) -> Verdict:
    """Search one claim for a failing case and tell what was found."""
    started = time.monotonic()
    limits = PROFILES[session.profile]
    chosen, seed = session.implementation, session.seed
    examples = -(-limits.examples // operator.weight)
    found = search(operator, claim, chosen, seed=seed, examples=examples, seconds=limits.seconds)
    failure = None
    if found.violation is not None:
        target = session.target or "MODULE:ATTRIBUTE"
        where = (target, operator.name, claim.name, repr(found.case))
        in_python, in_shell = (
            (f", device={session.device!r}", f" --device {session.device}") if session.device else ("", "")
        )
        nearest, compared = nearest_mutant(operator, claim, chosen, seed=seed)
        failure = Failure(
            kind=found.violation.kind,
            message=str(found.violation),
            case=repr(found.case),
            expected=found.violation.expected,
            actual=found.violation.actual,
            budget=found.violation.budget,
            python=f"import kvverify; kvverify.reproduce({', '.join(map(repr, where))}{in_python})",
            command=f'kvverify repro {target} {operator.name} {claim.name} "{found.case!r}"{in_shell}',
            nearest=nearest,
            compared=compared,
        )
    return Verdict(
        operator=operator.name,
        claim=claim.name,
        statement=claim.statement,
        source=claim.source,
        status=claim.status,
        evidence=claim.evidence,
        ok=failure is None,
        examples=found.examples,
        seconds=time.monotonic() - started,
        worst=found.worst,
        failure=failure,
        out_of_time=found.out_of_time,
    )


def check(
    implementation: Implementation | str,
    *,
    profile: str = "quick",
    seed: int = 0,
    device: str | None = None,
    on_verdict: Callable[[Verdict], Any] | None = None,
) -> Report:
    """Gate an implementation, given itself or as "module:attribute", and report.

    profile: "quick", "ci", "nightly" or "soak". seed: which cases are drawn; equal seeds draw equal cases. device:
    overrides the implementation's own. on_verdict: called with each verdict as it falls. Raises UsageError for what
    is unknown (an operator, a profile, a device), and SuiteError when the suite itself fails.
    """
    started = time.monotonic()
    session = open_session(implementation, profile=profile, seed=seed, device=device)
    proven = self_check(session.operators)
    verdicts = []
    for operator, claim in session.claims():
        verdicts.append(check_claim(session, operator, claim))
        if on_verdict:
            on_verdict(verdicts[-1])
    return session.report(proven, verdicts, time.monotonic() - started)


def reproduce(
    implementation: Implementation | str, operator: str, claim: str, case: str, *, device: str | None = None
) -> None:
    """Run one claim on one case, given as the line a report prints; return if it holds, else raise its Violation.

    Raises UsageError when the operator, the claim or the case does not exist, or the implementation does not bind it.
    """
    session = open_session(implementation, device=device)
    bound = {known.name: known for known in session.operators}
    if operator not in bound:
        raise UsageError(f"operator {operator!r} is not bound by {session.implementation.name!r}: {sorted(bound)} are")
    chosen = bound[operator]
    if claim not in chosen.claims:
        raise UsageError(f"claim {claim!r} is unknown to {operator}: expected one of {list(chosen.claims)}")
    try:
        built = parse_case(case, {chosen.case, *(type(captured) for captured in chosen.captured)})
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        built.build()
    except Exception as error:
        raise UsageError(f"case {case!r} does not build: {type(error).__name__}: {one_line(error)}") from None
    tried = attempt_on(session.implementation, chosen, chosen.claims[claim], built)
    if tried.violation is not None:
        raise tried.violation
