"""What regenerating would change: stages that are stale, run elsewhere and compared tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvverify.golden import pipeline
from kvverify.golden.compare import Difference, compare_files
from kvverify.golden.files import read_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvverify.golden.tree import Tree

__all__ = ["FileDiff", "chosen_stages", "compare_trees", "conclusion", "stale_stages", "summary", "table"]


@dataclass(frozen=True)
class FileDiff:
    """One output of a stage, compared; `tensors` holds those that differ, `equal` counts the others."""

    path: str
    tensors: tuple[Difference, ...]
    equal: int

    @property
    def changed(self) -> bool:
        """Whether something lies beyond the budget."""
        return any(tensor.verdict != "drifted" for tensor in self.tensors)


def stale_stages(tree: Tree, known: dict[str, pipeline.Stage]) -> dict[str, list[str]]:
    """Why each stale stage is stale, by name."""
    reasons = {name: pipeline.why_stale(tree, stage) for name, stage in known.items()}
    return {name: told for name, told in reasons.items() if told}


def chosen_stages(tree: Tree, wanted: Sequence[str], *, everything: bool = False) -> list[pipeline.Stage]:
    """The stages to run: those that `wanted` names, or all, or the stale ones with all that read their outputs."""
    known = pipeline.stages(tree)
    if wanted:
        names = pipeline.select(known, wanted)
    elif everything:
        names = list(known)
    else:
        names = pipeline.affected(known, stale_stages(tree, known))
    return [known[name] for name in names]


def compare_trees(before: Tree, after: Tree, chosen: Sequence[pipeline.Stage]) -> list[FileDiff]:
    """Compare what the stages wrote in two trees. A file that `before` lacks has all its tensors added."""
    found = []
    for path in (path for stage in chosen for path in stage.outputs):
        old = read_tensors(before.root / path) if (before.root / path).is_file() else {}
        tensors = compare_files(old, read_tensors(after.root / path))
        differing = tuple(tensor for tensor in tensors if tensor.verdict != "equal")
        found.append(FileDiff(path, differing, len(tensors) - len(differing)))
    return found


def table(files: Sequence[FileDiff]) -> list[str]:
    """One line per tensor that differs, under the name of its file."""
    lines = []
    for file in files:
        if file.tensors:
            lines.append(f"{file.path}: {len(file.tensors)} of {len(file.tensors) + file.equal} tensors differ")
            lines += [f"  {line}" for tensor in file.tensors for line in _lines(tensor)]
    return lines


def summary(files: Sequence[FileDiff]) -> str:
    """One line: how many tensors are equal, drifted and changed."""
    counts = {"equal": sum(file.equal for file in files)}
    for tensor in (tensor for file in files for tensor in file.tensors):
        counts[tensor.verdict] = counts.get(tensor.verdict, 0) + 1
    words = {"drifted": "drifted within budget"}
    return ", ".join(f"{count} {words.get(verdict, verdict)}" for verdict, count in counts.items())


def conclusion(
    known: dict[str, pipeline.Stage],
    chosen: Sequence[pipeline.Stage],
    stale: Collection[str],
    files: Sequence[FileDiff],
    wanted: Sequence[str] = (),
) -> list[str]:
    """What follows from a comparison of the chosen stages: what to run, and what is stale and was not looked at.

    `wanted` are the words that selected them, or --all: an update with the same words writes what was shown and nothing
    else.
    """
    looked_at = [stage.name for stage in chosen]
    others = [name for name in stale if name not in looked_at]
    command = " ".join(["kvverify golden update", *wanted, '--reason "why"'])
    lines = []
    if any(file.changed for file in files):
        lines.append(f"to accept: run `{command}`")
    elif stale and not any(file.tensors for file in files):
        told = f"no tensor of {pipeline.named(known.values(), looked_at)} changes"
        recorded = f": `{command}` records that this code was run"
        lines.append(told + (recorded if len(others) < len(stale) else ""))
    if others:
        lines.append(f"stale and not looked at: {pipeline.named(known.values(), others)}")
    return lines


def _lines(tensor: Difference) -> list[str]:
    ulp = "" if tensor.ulp is None else f", {tensor.ulp:,} ULP at most"
    head = f"{tensor.verdict:<8} {tensor.name}  {tensor.shape}"
    if tensor.before is None or tensor.after is None:
        return [head]
    moved = f"  {tensor.changed:.2%} of values{ulp}, largest difference {tensor.relative:.2e} of the largest value"
    sides = [f"mean {side['mean']:.6g} rms {side['rms']:.6g}" for side in (tensor.before, tensor.after)]
    hashes = [value[:12] for value in tensor.sha256]
    return [head, f"       {moved}", f"         {sides[0]} → {sides[1]}   sha256 {hashes[0]} → {hashes[1]}"]
