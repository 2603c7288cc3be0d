"""The report as plain lines: header, one line per claim, failure blocks, summary."""

from __future__ import annotations

import textwrap

from kvverify.diagnosis import ENOUGH
from kvverify.gate import Session
from kvverify.matrix import Row
from kvverify.verdicts import Report, SelfCheck, Verdict, versions

__all__ = [
    "failure_block",
    "failure_blocks",
    "header",
    "ladder_line",
    "matrix_line",
    "render",
    "self_check_line",
    "summary",
]

WIDTH = 120


def header(session: Session) -> str:
    """The first lines of a run: what is tested, where, how, and with which versions."""
    chosen = session.implementation
    told = [chosen.name, chosen.device, " ".join(chosen.dtypes), chosen.evidence_level]
    tools = " ".join(f"{tool} {version}" for tool, version in versions().items())
    return " · ".join([*told, f"profile {session.profile}", f"seed {session.seed}"]) + "\n" + tools


def self_check_line(proven: SelfCheck) -> str:
    """How many known-bad kernels the gate caught before it judged anything."""
    caught = proven.mutants - len({line.split(" passes ")[0] for line in proven.missed})
    return (
        f"  {'✔' if proven.ok else '✘'} gate checks itself      {caught} of {proven.mutants} known-bad kernels caught"
    )


def ladder_line(verdict: Verdict) -> str:
    """One claim on one line: verdict, name, cases, the share of the budget used, and its statement shortened."""
    if verdict.failure is not None:
        mark, used = "✘", verdict.failure.kind
    else:
        mark, used = "✔", "exact" if verdict.evidence == "exact" else f"{verdict.worst:4.0%} of budget"
        if verdict.evidence == "budget" and verdict.worst == 0:  # judged by a rule, which says only yes or no
            used = "within its bound"
    if verdict.out_of_time:
        used += ", out of time"
    line = f"  {mark} {verdict.claim:<22} {verdict.examples:>5} cases  {used:<16} "
    return line + textwrap.shorten(verdict.statement, WIDTH - len(line), placeholder=" …")


def matrix_line(row: Row) -> str:
    """One kernel of the mutant matrix: the claims it names, with the drawn cases each took, then how many others."""
    if row.kind == "control":
        outcome = "passes every claim" if row.ok else f"WRONGLY REJECTED by {', '.join(row.missed)}"
        return f"  = {row.operator:<18} {row.name:<40} {outcome}"
    if row.missed:
        return f"  ✘ {row.operator:<18} {row.name:<40} PASSES {', '.join(row.missed)}"
    names = row.named or tuple(row.rejected)[:1]
    told = ", ".join(f"{name} ({row.rejected.get(name, 'witness')})" for name in names)
    others = len(row.rejected) - sum(name in row.rejected for name in names)
    return f"  ✔ {row.operator:<18} {row.name:<40} {told}" + (f" and {others} more" if others else "")


def failure_block(verdict: Verdict) -> str:
    """All that is known of a failure, readable alone."""
    failure = verdict.failure
    if failure is None:
        return ""
    rows = [
        ("claim", verdict.statement),
        ("source", verdict.source),
        ("case", failure.case),
        ("found", failure.message),
        ("budget", failure.budget),
        ("nearest", _nearest(verdict)),
        ("python", failure.python),
        ("shell", failure.command),
    ]
    lines = [f"✘ {verdict.operator} · {verdict.claim} · {failure.kind}"]
    lines += [f"    {name:<8} {text}" for name, text in rows if text]
    return "\n".join(lines)


def failure_blocks(report: Report) -> list[str]:
    """A block per failure, but one only for claims of an operator that fail as one known-bad kernel, or alike."""
    blocks: list[str] = []
    told: dict[tuple[str, str], int] = {}
    for verdict in report.verdicts:
        if verdict.failure is None:
            continue
        cause = (verdict.operator, verdict.failure.nearest or f"{verdict.failure.kind}: {verdict.failure.message}")
        if cause in told:
            blocks[told[cause]] += f"\n    {'also':<8} {verdict.claim}: {verdict.failure.case}"
            continue
        told[cause] = len(blocks)
        blocks.append(failure_block(verdict))
    return blocks


def _nearest(verdict: Verdict) -> str:
    failure = verdict.failure
    if failure is None or not failure.compared:
        return ""
    if failure.compared < ENOUGH:
        return f"only {failure.compared} drawn cases fail: too few to compare with the known-bad kernels"
    if failure.nearest is None:
        return f"none of the known-bad kernels behaves like yours ({failure.compared} failing cases compared)"
    return f"your output equals mutant {failure.nearest} on {failure.compared} of {failure.compared} failing cases"


def summary(report: Report) -> str:
    """The last line: how many claims hold, how long it took, and what that means."""
    held = sum(verdict.ok for verdict in report.verdicts)
    worth = "ok" if report.ok else "NOT OK"
    lines = [
        f"{worth}: {held} of {len(report.verdicts)} claims hold, {report.self_check.mutants} known-bad kernels"
        f" replayed, {report.seconds:.1f} s, evidence level {report.evidence}"
    ]
    lines += [f"suite defect: {line}" for line in (*report.self_check.missed, *report.self_check.idle)]
    return "\n".join(lines)


def render(report: Report) -> str:
    """The whole report as text: the ladder by operator, then each failure, then the summary."""
    lines = [self_check_line(report.self_check)]
    shown = None
    for verdict in report.verdicts:
        if verdict.operator != shown:
            shown = verdict.operator
            lines.append(shown)
        lines.append(ladder_line(verdict))
    lines += failure_blocks(report)
    return "\n".join([*lines, summary(report)])
