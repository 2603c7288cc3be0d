"""The checks as pytest tests: a decorator for tests of one's own, and what `--pyargs kvverify.conformance` runs.

pytest calls the gate, never the reverse, so a failing claim looks the same here as on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvverify.gate import Session, check_claim, open_session
from kvverify.operator import Claim, Implementation, Operator
from kvverify.report.text import failure_block
from kvverify.verdicts import Verdict

__all__ = ["Check", "checks", "parametrize_with_checks"]


@dataclass(frozen=True)
class Check:
    """One claim on one implementation, to be called: raises AssertionError with the whole failure block."""

    session: Session
    operator: Operator
    claim: Claim

    def verdict(self) -> Verdict:
        """Search for a failing case and tell what was found."""
        return check_claim(self.session, self.operator, self.claim)

    def __call__(self) -> None:
        """Search for a failing case; none may be found."""
        __tracebackhide__ = True
        found = self.verdict()
        if not found.ok:
            raise AssertionError(failure_block(found))

    def __str__(self) -> str:
        return f"{self.operator.name}-{self.claim.name}"


def checks(session: Session) -> list[Check]:
    """Every claim that a session tests, in report order."""
    return [Check(session, operator, claim) for operator, claim in session.claims()]


def parametrize_with_checks(
    implementation: Implementation | str, *, profile: str = "quick", seed: int = 0
) -> pytest.MarkDecorator:
    """Decorate a test so that it runs once per claim, with the check to call as its argument `check`.

        @parametrize_with_checks(impl)
        def test_my_kernels(check):
            check()

    Raises UsageError for an implementation that cannot be tested.
    """
    found = checks(open_session(implementation, profile=profile, seed=seed))
    return pytest.mark.parametrize("check", found, ids=[str(check) for check in found])
