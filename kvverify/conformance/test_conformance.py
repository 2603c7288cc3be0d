"""One test per claim of the implementation given by --kv-impl, after the gate has proved that it can fail."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from kvverify.gate import self_check
from kvverify.report.text import failure_block

if TYPE_CHECKING:
    from kvverify.conformance import Check
    from kvverify.gate import Session

__all__: list[str] = []


def test_the_gate_catches_every_known_bad_kernel(kv_session: Session, record_property: Any) -> None:
    """Each mutant is rejected by the claims it names, and each claim rejects one."""
    proven = self_check(kv_session.operators)
    record_property("kv_self_check", (proven.mutants, proven.missed, proven.idle))
    assert proven.ok, "\n".join(["the suite is defective:", *proven.missed, *proven.idle])


def test_claim(kv_check: Check, record_property: Any) -> None:
    """The implementation satisfies one claim."""
    __tracebackhide__ = True
    found = kv_check.verdict()
    record_property("kv_verdict", dataclasses.asdict(found))
    if not found.ok:
        raise AssertionError(failure_block(found))
