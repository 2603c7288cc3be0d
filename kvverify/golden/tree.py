"""Where the golden store lies in a repository, the one error of this package, and writing in one step."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "FORMAT",
    "Digest",
    "GoldenError",
    "GoldenUsageError",
    "Tree",
    "canonical",
    "digest",
    "find_tree",
    "read_json",
    "write",
]

FORMAT = 1
"""Version of the manifest and of the log. A file of another version is refused, not guessed at."""


_SPREAD = 4


class GoldenError(ValueError):
    """The store cannot do what was asked: one line that names what was found, what was expected, and what to run."""


class GoldenUsageError(GoldenError):
    """Nothing is wrong with the store: an option, a name or an installed package is not what the command needs."""


@dataclass(frozen=True)
class Tree:
    """A repository with a golden store; every path below is within `root`."""

    root: Path

    @property
    def golden(self) -> Path:
        """The folder of scripts, manifest, log, data and store."""
        return self.root / "golden"

    @property
    def data(self) -> Path:
        """The tensors, <stage>/<model>.safetensors."""
        return self.golden / "data"

    @property
    def manifest(self) -> Path:
        """Records of all files and tensors."""
        return self.golden / "manifest.json"

    @property
    def updates(self) -> Path:
        """The chain of recorded reasons."""
        return self.golden / "updates.json"

    @property
    def store(self) -> Path:
        """The embedded remote."""
        return self.golden / "store"

    @property
    def undo(self) -> Path:
        """What an update under way would have to put back."""
        return self.golden / ".undo"

    @property
    def lock(self) -> Path:
        """DVC's record of what every stage was run with."""
        return self.root / "dvc.lock"

    @property
    def parameters(self) -> Path:
        """The parameters of the stages."""
        return self.root / "params.yaml"

    def name(self, path: Path) -> str:
        """Name a path as a reader of the repository does: relative to the root, with slashes."""
        return path.relative_to(self.root).as_posix()


def find_tree(start: Path) -> Tree:
    """Find the tree that holds `start`: the nearest folder with golden/manifest.json or dvc.yaml.

    GoldenUsageError where `start` is no folder, or none is found.
    """
    if not start.is_dir():
        raise GoldenUsageError(f"--root {start} is no folder, expected a folder of the repository")
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / "golden" / "manifest.json").is_file() or (folder / "dvc.yaml").is_file():
            return Tree(folder)
    raise GoldenUsageError(f"{start} is in no repository with a golden store, expected dvc.yaml: pass --root")


@dataclass(frozen=True)
class Digest:
    """Size and hashes of a file: SHA-256 is ours, MD5 is how DVC names content."""

    bytes: int
    sha256: str
    md5: str


def digest(content: bytes) -> Digest:
    """Hash a file's content."""
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return Digest(len(content), hashlib.sha256(content).hexdigest(), md5)


def canonical(value: Any) -> bytes:
    """Serialize to the one JSON text that this package writes and accepts: a tensor is one line of it.

    ValueError for what JSON cannot hold, NaN for one.
    """
    return (_text(value, 0) + "\n").encode()


def read_json(tree: Tree, path: Path) -> dict[str, Any]:
    """Read one of our JSON files. GoldenError for one that is not exactly as we write it, or of another format."""
    name = tree.name(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GoldenError(f"{name} cannot be read ({error.strerror}), expected a JSON file") from error
    try:
        value = json.loads(content)
    except ValueError as error:
        raise GoldenError(f"{name} is not JSON ({error}), expected it as an update wrote it") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise GoldenError(f"{name} has format {found!r}, expected format {FORMAT}")
    try:
        same = canonical(value) == content
    except ValueError as error:
        raise GoldenError(f"{name} holds what is not JSON ({error}), expected it as an update wrote it") from error
    if not same:
        raise GoldenError(f"{name} was edited: its text differs from what an update writes for the same content")
    return value


def _text(value: Any, depth: int) -> str:
    """Spread dicts and lists of dicts over lines, down to a depth; keys sorted."""
    spread = depth < _SPREAD and value
    if spread and isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {_text(value[key], depth + 1)}" for key in sorted(value)]
    elif spread and isinstance(value, list):
        lines = [_text(item, depth + 1) for item in value]
    else:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    inner = ",\n".join(" " * (depth + 1) + line for line in lines)
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{first}\n{inner}\n{' ' * depth}{last}"


def write(path: Path, content: bytes) -> None:
    """Write a temporary file beside the target, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
