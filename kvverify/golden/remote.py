"""The embedded remote, read without DVC, and the few commands of DVC that this package runs.

The remote is a folder of objects, files/md5/<first two digits>/<the rest>, each named by the MD5 of its content.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from kvverify.golden.tree import GoldenError, GoldenUsageError, digest

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from kvverify.golden.tree import Tree

__all__ = [
    "dvc",
    "dvc_installed",
    "embedded",
    "is_object",
    "not_in_remote",
    "object_path",
    "objects",
    "require_dvc",
    "unreferenced",
]

OBJECTS = ("files", "md5")


def object_path(tree: Tree, md5: str) -> Path:
    """Where the embedded store keeps the content with this MD5."""
    return tree.store.joinpath(*OBJECTS, md5[:2], md5[2:])


def objects(tree: Tree) -> dict[Path, tuple[str, str]]:
    """Of every file in the embedded store: the MD5 that its name states, and that of its content."""
    return {
        path: (path.parent.name + path.name, digest(path.read_bytes()).md5)
        for path in sorted(tree.store.rglob("*"))
        if path.is_file()
    }


def is_object(name: str) -> bool:
    """Say whether a file in the store is named like an object; a push that was killed can leave others."""
    return re.fullmatch("[0-9a-f]{32}", name) is not None


def embedded(tree: Tree) -> bool:
    """Say whether the tree's default remote is the embedded store: no other is looked into without DVC."""
    import configparser

    merged: dict[str, dict[str, str]] = {}
    for name in ("config", "config.local"):
        parser = configparser.RawConfigParser()
        parser.read(tree.root / ".dvc" / name, encoding="utf-8")
        for section in parser.sections():
            merged.setdefault(section.strip("'"), {}).update(parser[section])
    default = merged.get("core", {}).get("remote")
    url = merged.get(f'remote "{default}"', {}).get("url", "")
    return (tree.root / ".dvc" / url).resolve() == tree.store.resolve()


def unreferenced(tree: Tree, named: Collection[str]) -> tuple[int, str]:
    """Count the objects of the embedded store whose MD5 is not in `named`, and give the command that removes them.

    A rejected update leaves objects that git does not know: `git clean` removes them. It would also remove the objects
    of an update that is not committed yet, and leave those of earlier data, which git tracks; DVC tells these apart.
    """
    if not embedded(tree):
        return 0, ""
    spare = {tree.name(path) for path, (stated, _) in objects(tree).items() if is_object(stated)}
    spare -= {tree.name(object_path(tree, md5)) for md5 in named}
    if not spare:
        return 0, ""
    clean = _untracked(tree, tree.store) == spare
    return len(spare), f"git clean -f {tree.name(tree.store)}" if clean else "dvc gc --workspace --cloud"


def _untracked(tree: Tree, folder: Path) -> set[str]:
    """Files of a folder that git does not track, relative to the root; none where there is no git."""
    command = ["git", "ls-files", "--others", "-z", "--", tree.name(folder)]
    try:
        listed = subprocess.run(command, cwd=tree.root, capture_output=True, text=True, check=False).stdout
    except OSError:
        return set()
    return {name for name in listed.split("\0") if name}


def dvc_installed() -> bool:
    """Say whether DVC can be run."""
    return importlib.util.find_spec("dvc") is not None


def require_dvc(tree: Tree) -> None:
    """Raise GoldenUsageError where DVC is not installed, or the tree has none."""
    if not dvc_installed():
        raise GoldenUsageError(
            "dvc is not installed, expected it to write golden data: `pip install 'kvverify[golden]'`"
        )
    if not (tree.root / ".dvc").is_dir():
        raise GoldenUsageError(f"{tree.root} has no .dvc folder, expected the repository of kvverify: pass --root")


def dvc(tree: Tree, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run DVC at the root; output is captured, a failure is not raised."""
    command = [sys.executable, "-m", "dvc", *arguments]
    quiet = {**os.environ, "DVC_NO_ANALYTICS": "1"}
    return subprocess.run(command, cwd=tree.root, env=quiet, capture_output=True, text=True, check=False)


def not_in_remote(tree: Tree) -> list[str]:
    """Outputs of dvc.lock whose content the default remote lacks, as DVC sees it. GoldenError where DVC fails."""
    asked = dvc(tree, "data", "status", "--not-in-remote", "--json")
    if asked.returncode:
        raise GoldenError(f"dvc data status failed: {' '.join((asked.stderr or asked.stdout).split())}")
    found: dict[str, Any] = json.loads(asked.stdout or "{}")
    return sorted(str(path) for path in found.get("not_in_remote", []))
