"""Run stages in a shadow of the tree, so that nothing that is stored is touched.

The shadow is a temporary folder with a link to everything in the root, but for golden/data, which is a copy there.
Stages of one command are run for all their models in one process, on one thread.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from kvverify.golden.manifest import THREADS
from kvverify.golden.tree import GoldenError, Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvverify.golden.pipeline import Stage

__all__ = ["regenerated"]

_APART = {".git", ".dvc", "golden"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "TYPER_USE_RICH": "0", "TYPER_STANDARD_TRACEBACK": "1"}
"""A stage script prints an exception as Python does, without boxes: its last line is the exception."""


@contextmanager
def regenerated(
    tree: Tree,
    chosen: Sequence[Stage],
    report: Callable[[str], None] = lambda _: None,
    *,
    from_stored: bool = False,
) -> Iterator[Tree]:
    """Yield a shadow of `tree` in which the outputs of the chosen stages, which are in order, were made anew.

    A stage reads what the stages before it have just made; with `from_stored` it reads what is stored (the last stage
    runs first), so that what one stage drifts is not the input of the next.
    GoldenError where a command fails or leaves an output out; it carries the last line that the command printed.
    """
    with tempfile.TemporaryDirectory(prefix="kvverify-golden-") as folder:
        shadow = Tree(Path(folder).resolve())
        _link(tree, shadow)
        groups = [(command, list(group)) for command, group in groupby(chosen, key=_command)]
        for command, group in reversed(groups) if from_stored else groups:
            for stage in group:
                for path in stage.outputs:
                    (shadow.root / path).unlink(missing_ok=True)
            _run(shadow, command, group, report)
        yield shadow


def _link(tree: Tree, shadow: Tree) -> None:
    for path in tree.root.iterdir():
        if path.name not in _APART:
            (shadow.root / path.name).symlink_to(path)
    shadow.golden.mkdir()
    for path in tree.golden.iterdir():
        if path not in (tree.data, tree.store, tree.undo):
            (shadow.golden / path.name).symlink_to(path)
    if tree.data.is_dir():
        _copy(tree.data, shadow.data)


def _copy(source: Path, target: Path) -> None:
    """Copy a folder without its modes: what is read-only in the tree is written to in its shadow."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def _command(stage: Stage) -> str:
    return stage.command.removesuffix(f" {stage.model}") if stage.model else stage.command


def _run(shadow: Tree, command: str, group: Sequence[Stage], report: Callable[[str], None]) -> None:
    models = [stage.model for stage in group if stage.model]
    words = [*shlex.split(command), *models]
    report(" ".join(words))
    if words[0] == "python":
        words[0] = sys.executable
    for stage in group:
        for path in stage.outputs:
            (shadow.root / path).parent.mkdir(parents=True, exist_ok=True)
    limits = dict.fromkeys(_THREADS, str(THREADS))
    done = subprocess.run(
        words, cwd=shadow.root, env={**os.environ, **_PLAIN, **limits}, capture_output=True, text=True, check=False
    )
    missing = [path for stage in group for path in stage.outputs if not (shadow.root / path).is_file()]
    if done.returncode or missing:
        why = f"exit {done.returncode}" if done.returncode else f"{missing[0]} was not written"
        printed = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
        last = printed[-1] if printed else "it printed nothing"
        raise GoldenError(f"`{' '.join([command, *models])}` failed ({why}), nothing was changed: {last}")
