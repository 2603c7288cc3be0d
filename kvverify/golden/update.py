"""Writing what was regenerated, for a reason: data, manifest, log, dvc.lock and the remote, all or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvverify.golden import history, manifest, pipeline, remote
from kvverify.golden.diff import FileDiff, chosen_stages, compare_trees
from kvverify.golden.exchange import exchange
from kvverify.golden.regenerate import regenerated
from kvverify.golden.tree import GoldenError, GoldenUsageError, canonical, digest, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvverify.golden.tree import Tree

__all__ = ["Outcome", "update"]

MANIFEST_STAGE = "manifest"


@dataclass(frozen=True)
class Outcome:
    """What an update did: how outputs differ, stages recorded, files removed, and whether it wrote anything."""

    files: tuple[FileDiff, ...]
    stages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    wrote: bool = False


def update(
    tree: Tree,
    *,
    reason: str,
    wanted: Sequence[str] = (),
    everything: bool = False,
    report: Callable[[str], None] = lambda _: None,
    show: Callable[[list[FileDiff]], None] = lambda _: None,
) -> Outcome:
    """Run the stages that are stale (or wanted, or all) and write what they made.

    `show` gets the differences before anything is written. A selection leaves every other entry as it is; only an
    update of all that is stale removes data of stages that are no longer in dvc.yaml. GoldenUsageError without a
    reason, without DVC, or for a word that names no stage; GoldenError where a stage, DVC or the remote fails: then
    everything is as it was.
    """
    if not reason.strip():
        raise GoldenUsageError(
            "--reason is empty, expected why the golden data changes: it is recorded for the reviewer"
        )
    remote.require_dvc(tree)
    chosen = chosen_stages(tree, wanted, everything=everything)
    removed = [] if wanted else _orphans(tree)
    before = manifest.load(tree) if tree.manifest.exists() else None
    _check_others(tree, before, {path for stage in chosen for path in stage.outputs} | set(removed))
    with regenerated(tree, chosen, report) as shadow:
        files = compare_trees(tree, shadow, chosen)
        stale = any(pipeline.why_stale(tree, stage) for stage in chosen)
        if not (removed or stale or any(file.tensors for file in files)) and _is_accepted(tree):
            return Outcome(tuple(files), ())
        show(files)
        written = {path: (shadow.root / path).read_bytes() for stage in chosen for path in stage.outputs}
    targets = [tree.root / path for path in (*written, *removed)]
    with exchange(tree, [*targets, tree.manifest, tree.updates, tree.lock]):
        for path, content in written.items():
            write(tree.root / path, content)
        for path in removed:
            (tree.root / path).unlink()
        _record(tree, chosen, before, reason, files, removed)
        _commit(tree, [stage.name for stage in chosen])
    return Outcome(tuple(files), tuple(stage.name for stage in chosen), tuple(removed), wrote=True)


def _check_others(tree: Tree, before: dict[str, Any] | None, written: set[str]) -> None:
    """Refuse to record data that is not written now and is not as the manifest has it."""
    present = manifest.data_files(tree)
    for name, record in ({} if before is None else before["files"]).items():
        path = f"{tree.name(tree.data)}/{name}"
        if path not in written and (name not in present or digest(present[name]).sha256 != record["sha256"]):
            raise GoldenError(
                f"{path} is not as recorded, expected it whole before an update: run `dvc checkout --force`"
            )


def _is_accepted(tree: Tree) -> bool:
    """Say whether the manifest is the one that the log accepted last."""
    if not (tree.manifest.exists() and tree.updates.exists()):
        return False
    return digest(tree.manifest.read_bytes()).sha256 == history.accepted(tree)


def _orphans(tree: Tree) -> list[str]:
    """Data that no stage of dvc.yaml writes."""
    made = {path for stage in pipeline.stages(tree).values() for path in stage.outputs}
    return [path for name in manifest.data_files(tree) if (path := f"{tree.name(tree.data)}/{name}") not in made]


def _record(
    tree: Tree,
    chosen: Sequence[pipeline.Stage],
    before: dict[str, Any] | None,
    reason: str,
    files: Sequence[FileDiff],
    removed: Sequence[str],
) -> None:
    made = manifest.build(tree, before, chosen)
    manifest.save(tree, made)
    changes = [
        f"{file.path}: {tensor.verdict} {tensor.name} {tensor.shape}"
        + (f", by {tensor.relative:.2e} of the largest value" if tensor.sha256[0] else "")
        for file in files
        for tensor in file.tensors
    ]
    changes += [f"{path}: removed" for path in removed]
    content = history.append(
        tree,
        reason=reason.strip(),
        manifest=canonical(made),
        changes=changes,
        environment=manifest.environment(),
    )
    write(tree.updates, content)


def _commit(tree: Tree, names: Sequence[str]) -> None:
    """Let DVC record the stages as run, and push what they made."""
    known = pipeline.read_yaml(tree, tree.root / "dvc.yaml")["stages"]
    recorded = [*names, *([MANIFEST_STAGE] if MANIFEST_STAGE in known else [])]
    for command in (["commit", "--force", "--quiet", *recorded], ["push", "--quiet"]):
        done = remote.dvc(tree, *command)
        if done.returncode:
            told = " ".join((done.stderr or done.stdout).split())
            raise GoldenError(f"`dvc {command[0]}` failed, everything is as it was: {told}")
