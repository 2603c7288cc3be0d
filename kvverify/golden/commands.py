"""The command `kvverify golden`: verify, diff, update, rebuild. Also `python -m kvverify.golden`, without torch.

Exit codes: 0 ok, 4 usage or something that is not installed, 10 a fault, a change, or something written that is to be
reviewed and verified.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from kvverify.golden import diff as differences
from kvverify.golden import manifest, pipeline
from kvverify.golden.tree import GoldenError, GoldenUsageError, Tree, find_tree, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GOLDEN", "app", "main"]

Result = TypeVar("Result")

GOLDEN = 10
USAGE = 4

app = typer.Typer(
    help="The golden store: check it, show what a change does to it, and update it for a reason.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Root = Annotated[Path, typer.Option("--root", metavar="DIR", help="a folder of the repository")]
Selection = Annotated[list[str] | None, typer.Argument(metavar="[STAGE|MODEL]...", help="default: what is stale")]
Everything = Annotated[bool, typer.Option("--all", help="every stage, stale or not")]


@app.command()
def verify(root: Root = Path()) -> None:
    """Check data, manifest, log, dvc.lock and store; one line per fault, with the command that mends it."""
    from kvverify.golden.remote import dvc_installed, unreferenced
    from kvverify.golden.verify import verify as find_faults

    tree = _tree(root)
    faults = _guarded(lambda: find_faults(tree))
    for fault in faults:
        typer.echo(f"✘ {fault}")
    if faults:
        typer.echo(f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in the golden store of {tree.root}")
        raise typer.Exit(GOLDEN)
    files = manifest.load(tree)["files"]
    spare, command = unreferenced(tree, [record["md5"] for record in files.values()])
    if spare:
        typer.echo(f"{spare} object{'s' if spare > 1 else ''} in golden/store that no output names: run `{command}`")
    tensors = sum(len(record["tensors"]) for record in files.values())
    size = sum(record["bytes"] for record in files.values())
    asked = "DVC agrees" if dvc_installed() else "DVC is not installed and was not asked"
    typer.echo(f"✔ {tensors} tensors in {len(files)} files, {size:,} bytes, are as recorded; {asked}")


@app.command()
def diff(
    selection: Selection = None,
    everything: Everything = False,
    root: Root = Path(),
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="also as one HTML page")] = None,
) -> None:
    """Run stages elsewhere and compare with the stored data, tensor by tensor; golden/data is not touched."""
    from kvverify.golden.page import page, require_jinja2
    from kvverify.golden.regenerate import regenerated

    tree = _tree(root)
    if html is not None:
        _guarded(require_jinja2)  # before stages are run for minutes
    known = _guarded(lambda: pipeline.stages(tree))
    stale = _guarded(lambda: differences.stale_stages(tree, known))
    _say_stale(known, stale)
    chosen = _guarded(lambda: differences.chosen_stages(tree, selection or [], everything=everything))
    if not chosen:
        typer.echo("nothing is stale; --all compares all stages")
        return

    def run() -> list[differences.FileDiff]:
        with regenerated(tree, chosen, lambda line: typer.echo(line, err=True)) as shadow:
            return differences.compare_trees(tree, shadow, chosen)

    files = _guarded(run)
    _show(files)
    if html is not None:
        text = _guarded(lambda: page(files, stale, differences.summary(files)))
        write(html, text.encode())
        typer.echo(f"wrote {html}")
    wanted = selection or (["--all"] if everything else [])  # as chosen_stages has it
    for line in differences.conclusion(known, chosen, stale, files, wanted):
        typer.echo(line)
    if any(file.changed for file in files):
        raise typer.Exit(GOLDEN)


@app.command()
def update(
    selection: Selection = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="why the data changes; recorded")] = "",
    everything: Everything = False,
    undo: Annotated[bool, typer.Option("--undo", help="put back what an interrupted update replaced")] = False,
    root: Root = Path(),
) -> None:
    """Run what is stale and write it: data, manifest, log, dvc.lock, remote. Exits 10 after writing anything."""
    from kvverify.golden import exchange
    from kvverify.golden.update import update as write_all

    tree = _tree(root)
    if undo:
        names = _guarded(lambda: exchange.undo(tree))
        typer.echo(f"put back {', '.join(names)}: run `kvverify golden verify`")
        raise typer.Exit(GOLDEN)
    outcome = _guarded(
        lambda: write_all(
            tree,
            reason=reason,
            wanted=selection or [],
            everything=everything,
            report=lambda line: typer.echo(line, err=True),
            show=_show,
        )
    )
    if not outcome.wrote:
        typer.echo("nothing changed, nothing was written")
        return
    told = pipeline.named(pipeline.stages(tree).values(), outcome.stages)
    typer.echo(f"written, pushed and recorded: {told or 'the manifest'}")
    for path in outcome.removed:
        typer.echo(f"removed {path}")
    typer.echo("review the differences above and run `kvverify golden verify`")
    typer.echo("to accept: commit dvc.lock, golden/ and what caused the change (params.yaml, code) together")
    typer.echo("to reject: run `git checkout dvc.lock golden params.yaml`, then `dvc checkout --force`")
    raise typer.Exit(GOLDEN)


@app.command()
def rebuild(
    root: Root = Path(),
    anyway: Annotated[bool, typer.Option("--anyway", help="although other versions are installed")] = False,
) -> None:
    """Run every stage with the recorded versions, and say: bitwise equal, code change, or platform drift."""
    from kvverify.golden import rebuild as rebuilding
    from kvverify.golden.regenerate import regenerated

    tree = _tree(root)
    other = rebuilding.mismatches(_guarded(lambda: manifest.load(tree))["files"])
    for name, (recorded, here) in other.items():
        typer.echo(f"{name}: recorded {', '.join(sorted(recorded))}, here {here}")
    versions = [name for name in rebuilding.VERSIONS if name in other]
    if versions and not anyway:
        raise _fault(
            f"{', '.join(versions)} differ from the recorded versions: run `nox -s golden_rebuild`, which installs "
            "constraints.txt, or pass --anyway",
            USAGE,
        )
    chosen = _guarded(lambda: differences.chosen_stages(tree, [], everything=True))

    def run() -> list[differences.FileDiff]:
        with regenerated(tree, chosen, lambda line: typer.echo(line, err=True), from_stored=True) as shadow:
            return differences.compare_trees(tree, shadow, chosen)

    files = _guarded(run)
    _show(files)
    found = rebuilding.explain(files, same_platform=not other)
    typer.echo(found)
    if found in ("code change", "unexplained"):
        raise typer.Exit(GOLDEN)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command by itself; every error is one line on stderr and one exit code."""
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False) or 0
    except GoldenError as error:
        print(f"kvverify golden: {error}", file=sys.stderr)
        code = _code(error)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        print(f"kvverify golden: {error.format_message()}", file=sys.stderr)
        code = USAGE
    sys.exit(code)


def _tree(root: Path) -> Tree:
    return _guarded(lambda: find_tree(root))


def _guarded(action: Callable[[], Result]) -> Result:
    try:
        return action()
    except GoldenError as error:
        raise _fault(str(error), _code(error)) from error


def _code(error: GoldenError) -> int:
    return USAGE if isinstance(error, GoldenUsageError) else GOLDEN


def _fault(text: str, code: int) -> typer.Exit:
    typer.echo(f"kvverify golden: {text}", err=True)
    return typer.Exit(code)


def _say_stale(known: dict[str, pipeline.Stage], stale: dict[str, list[str]]) -> None:
    """Tell why stages are stale, once for all stages with the same reasons."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for name, reasons in stale.items():
        grouped.setdefault(tuple(reasons), []).append(name)
    for told, names in grouped.items():
        typer.echo(f"stale: {pipeline.named(known.values(), names)}: {'; '.join(told)}")


def _show(files: Sequence[differences.FileDiff]) -> None:
    for line in differences.table(files):
        typer.echo(line)
    told = differences.summary(files)
    if any(file.tensors for file in files) and not any(file.changed for file in files):
        told += "; drift is what another processor does, and passes"
    typer.echo(told)
