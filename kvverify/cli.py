"""The command `kvverify`: list, explain, gate, repro, mutants; more are in `commands` and `scaffold`.

Exit codes mean one thing each: 0 ok, 1 conformance failure, 2 interrupted, 3 internal, 4 usage, 5 nothing tested,
10 golden data stale, corrupt or just written.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from kvverify import budget, commands, scaffold
from kvverify.entry import FAILED, INTERNAL, OK, USAGE, run
from kvverify.gate import PROFILES, Session, check_claim, open_session, reproduce, self_check
from kvverify.golden.commands import app as golden_app
from kvverify.matrix import Row, matrix
from kvverify.operator import POLICIES, Operator, registry
from kvverify.report import (
    failure_blocks,
    header,
    ladder_line,
    matrix_line,
    reserve,
    self_check_line,
    summary,
    write_reports,
)
from kvverify.rules import table
from kvverify.target import UsageError
from kvverify.verdicts import Verdict, versions

__all__ = ["app", "main"]

app = typer.Typer(
    help="The executable specification of KV-cache policies, and a gate for the kernels that implement them.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False, soft_wrap=True, emoji=False)


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the versions")] = False
) -> None:
    """The executable specification of KV-cache policies, and a gate for the kernels that implement them."""
    if version:
        console.print(" ".join(f"{tool} {found}" for tool, found in versions().items()))
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.print(context.get_help())
        raise typer.Exit(USAGE)


@app.command("list")
def list_operators() -> None:
    """List the operators, with their signatures, and how many claims and mutants stand around each."""
    for operator in registry().values():
        console.print(f"[bold]{operator.name}[/bold]  {len(operator.claims)} claims, {len(operator.mutants)} mutants")
        console.print(f"    {escape(operator.signature)}")


@app.command()
def explain(name: Annotated[str, typer.Argument(help="an operator, a policy, or 'budget'")]) -> None:
    """Explain an operator (contract, claims, cases, mutants), a policy (theory of operation) or the budget rule."""
    if name == "budget":
        console.print(escape(inspect.getdoc(budget) or ""))
        for quantity, value in budget.table():
            console.print(f"  {quantity:<30} {value}")
    elif name in POLICIES:
        package = __import__(f"kvverify.{name}", fromlist=["__doc__"])
        console.print(escape(inspect.getdoc(package) or ""))
    else:
        _explain_operator(_operator(name))


def _operator(name: str) -> Operator:
    known = registry()
    if name not in known:
        raise UsageError(f"operator {name!r} is unknown: expected one of {[*known, *POLICIES, 'budget']}")
    return known[name]


def _explain_operator(operator: Operator) -> None:
    console.print(f"[bold]{escape(operator.signature)}[/bold]\n")
    console.print(escape(inspect.getdoc(operator.oracle) or ""))
    console.print(f"\n[bold]cases[/bold] {escape(inspect.getdoc(operator.case) or '')}")
    console.print(f"    default case reads at least {operator.read_bytes(operator.case()):,} bytes")
    console.print("\n[bold]claims[/bold]")
    for claim in operator.claims.values():
        console.print(f"  {claim.name} ({claim.evidence}, {claim.status}): {escape(claim.statement)}")
        console.print(f"      source: {escape(claim.source)}", style="dim")
    console.print("\n[bold]known-bad kernels[/bold]")
    for mutant in operator.mutants.values():
        console.print(f"  {mutant.name}: rejected by {', '.join(mutant.rejected_by)}")
    console.print("\n[bold]equivalent kernels[/bold]")
    for control in operator.controls.values():
        console.print(f"  {control.name}")


@app.command()
def gate(
    implementation: Annotated[str, typer.Argument(metavar="MODULE:ATTRIBUTE", help="what to test")],
    profile: Annotated[str, typer.Option(help=f"one of {', '.join(PROFILES)}")] = "quick",
    seed: Annotated[int, typer.Option(help="which cases are drawn")] = 0,
    device: Annotated[str | None, typer.Option(help="overrides the implementation's device")] = None,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="write JSON, JUnit and Markdown there")] = None,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="exit 5 unless it runs on a GPU")] = False,
) -> None:
    """Gate an implementation: every claim on every operator that it binds."""
    started = time.monotonic()
    session = open_session(implementation, profile=profile, seed=seed, device=device, require_gpu=require_gpu)
    if report is not None:
        reserve(report)
    console.print(escape(header(session)))
    proven = self_check(session.operators)
    console.print(escape(self_check_line(proven)), style="" if proven.ok else "bold red")
    found = session.report(proven, _climb(session), time.monotonic() - started)
    for block in failure_blocks(found):
        console.print("\n" + escape(block))
    console.print("\n" + escape(summary(found)), style="bold green" if found.ok else "bold red")
    if report is not None:
        for path in write_reports(found, report):
            console.print(f"wrote {escape(str(path))}")
    if not proven.ok:
        raise typer.Exit(INTERNAL)
    raise typer.Exit(OK if found.ok else FAILED)


def _climb(session: Session) -> list[Verdict]:
    """Test claim by claim, printing each rung as it is known."""
    verdicts: list[Verdict] = []
    claims = session.claims()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("testing", total=len(claims))
        for operator, claim in claims:
            if not verdicts or verdicts[-1].operator != operator.name:
                progress.console.print(f"[bold]{operator.name}[/bold]")
            verdicts.append(check_claim(session, operator, claim))
            style = "" if verdicts[-1].ok else "bold red"
            progress.console.print(escape(ladder_line(verdicts[-1])), style=style)
            progress.advance(task)
    return verdicts


@app.command()
def repro(
    implementation: Annotated[str, typer.Argument(metavar="MODULE:ATTRIBUTE")],
    operator: Annotated[str, typer.Argument(help="for example relay.relocate")],
    claim: Annotated[str, typer.Argument(help="for example composition")],
    case: Annotated[str, typer.Argument(help="the case as a report prints it")],
    device: Annotated[str | None, typer.Option(help="overrides the implementation's device")] = None,
) -> None:
    """Run one claim on one case: exit 1 and say why if it does not hold."""
    reproduce(implementation, operator, claim, case, device=device)
    console.print(f"{operator} {claim} holds on {escape(case)}")


@app.command()
def mutants(
    policy: Annotated[str | None, typer.Argument(help=f"one of {', '.join(POLICIES)}; default: all")] = None,
    seed: Annotated[int, typer.Option(help="which cases are drawn")] = 0,
    examples: Annotated[int, typer.Option(min=1, help="drawn cases per claim and kernel")] = 60,
    rules: Annotated[
        bool, typer.Option("--rules", help="instead, what other comparison rules would let through")
    ] = False,
) -> None:
    """Run every known-bad kernel against every claim: each named claim must reject it, equivalents must pass."""
    if policy is not None and policy not in POLICIES:
        raise UsageError(f"policy {policy!r} is unknown: expected one of {list(POLICIES)}")
    if rules:
        for line in table(seed=seed):
            console.print(escape(line))
        return
    tested = [operator for name, operator in registry().items() if policy in (None, name.split(".")[0])]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("mutants", total=None)

        def show(row: Row) -> None:
            progress.console.print(escape(matrix_line(row)), style="" if row.ok else "bold red")
            progress.advance(task)

        rows = matrix(tested, seed=seed, examples=examples, on_row=show)
    bad = [row for row in rows if row.kind == "mutant"]
    good = [row for row in rows if row.kind == "control"]
    caught, passed = sum(row.ok for row in bad), sum(row.ok for row in good)
    console.print(
        f"{caught} of {len(bad)} known-bad kernels rejected by every claim they name, "
        f"{passed} of {len(good)} equivalent kernels (=) passed"
    )
    raise typer.Exit(OK if caught == len(bad) and passed == len(good) else FAILED)


commands.register(app)
app.add_typer(golden_app, name="golden")
scaffold.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; every error is one line on stderr and one exit code."""
    run(app, arguments)


if __name__ == "__main__":
    main()
