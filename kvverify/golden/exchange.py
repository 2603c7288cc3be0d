"""Replacing several files so that a process that is killed half way can be undone.

Before anything is written, the files as they stand are copied to golden/.undo with a list of them. From then on the old
state is one command away, whatever happens: an error undoes at once, a killed process leaves the folder, which `verify`
reports, and `kvverify golden update --undo` puts everything back. Objects pushed to the store meanwhile stay there;
they are named by their content and hurt nobody.
"""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvverify.golden.tree import GoldenError, GoldenUsageError, write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvverify.golden.tree import Tree

__all__ = ["exchange", "undo"]


@contextmanager
def exchange(tree: Tree, paths: Sequence[Path]) -> Iterator[None]:
    """Let the block replace these files; whatever it raises, they are as before. GoldenError if one is under way."""
    if tree.undo.exists():
        raise GoldenError(
            f"{tree.name(tree.undo)} exists: an update was interrupted, or another one runs: "
            "run `kvverify golden update --undo`"
        )
    prepared = tree.undo.with_suffix(".partial")
    shutil.rmtree(prepared, ignore_errors=True)
    prepared.mkdir(parents=True)
    names = [tree.name(path) for path in paths]
    for number, path in enumerate(paths):
        if path.exists():
            shutil.copyfile(path, prepared / str(number))
    (prepared / "files.json").write_text(json.dumps(names))
    prepared.rename(tree.undo)
    try:
        yield
    except BaseException:
        undo(tree)
        raise
    _forget(tree)


def undo(tree: Tree) -> list[str]:
    """Put back what an interrupted exchange had begun to replace; return the names of the files.

    GoldenUsageError where none was interrupted.
    """
    if not tree.undo.exists():
        raise GoldenUsageError(
            f"{tree.name(tree.undo)} does not exist: no update was interrupted, there is nothing to undo"
        )
    names: list[str] = json.loads((tree.undo / "files.json").read_text())
    for number, name in enumerate(names):
        saved = tree.undo / str(number)
        if saved.exists():
            write(tree.root / name, saved.read_bytes())
        else:
            (tree.root / name).unlink(missing_ok=True)
    _forget(tree)
    return names


def _forget(tree: Tree) -> None:
    done = tree.undo.with_suffix(".done")
    shutil.rmtree(done, ignore_errors=True)
    tree.undo.rename(done)
    shutil.rmtree(done)
