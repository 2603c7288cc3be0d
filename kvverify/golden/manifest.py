"""The manifest: a record of every file of the data, and what it was computed with.

A file keeps its provenance for as long as its bytes stay: what was not recomputed is not rewritten.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvverify.golden.pipeline import current
from kvverify.golden.records import file_record
from kvverify.golden.tree import FORMAT, GoldenError, canonical, read_json, write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvverify.golden.pipeline import Stage
    from kvverify.golden.tree import Tree

__all__ = ["THREADS", "build", "data_files", "environment", "load", "save"]

THREADS = 1
"""Threads of every stage: the order of a sum may depend on their number."""

_RECORD = ("bytes", "sha256", "md5", "tensors", "parameters", "provenance")
_VERSIONS = ("torch", "transformers", "numpy", "safetensors")


def environment() -> dict[str, Any]:
    """Describe what the bits of a float depend on beside the code: versions, processor, vector unit, threads."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "threads": THREADS,
    }
    for name in _VERSIONS:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "not installed"
    if found["torch"] != "not installed":
        import torch

        found["vector_unit"] = torch.backends.cpu.get_cpu_capability()
    return found


def data_files(tree: Tree) -> dict[str, bytes]:
    """Content of every file of the data, by its name below golden/data."""
    return {
        path.relative_to(tree.data).as_posix(): path.read_bytes()
        for path in sorted(tree.data.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def build(tree: Tree, before: dict[str, Any] | None, chosen: Iterable[Stage]) -> dict[str, Any]:
    """Make the manifest of the data as it lies there, after the stages `chosen` were run.

    A file that none of them wrote keeps its entry, and one that they wrote with the same bytes its provenance. Records
    are always made anew, so that nothing typed into a manifest survives.
    """
    kept = {} if before is None else before["files"]
    here = environment()
    run = {path: stage for stage in chosen for path in stage.outputs}
    files = {}
    for name, content in data_files(tree).items():
        stage, known = run.get(f"{tree.name(tree.data)}/{name}"), kept.get(name, {})
        record = file_record(content)
        same = known.get("sha256") == record["sha256"]
        record["provenance"] = known["provenance"] if same else here
        record["parameters"] = known.get("parameters", {}) if stage is None else current(tree, stage)
        files[name] = record
    return {"format": FORMAT, "files": files}


def load(tree: Tree) -> dict[str, Any]:
    """Read the manifest. GoldenError for one that is missing, edited, incomplete, or of another format."""
    found, name = read_json(tree, tree.manifest), tree.name(tree.manifest)
    if not isinstance(found.get("files"), dict):
        raise GoldenError(f"{name} has no files, expected the records of all data")
    for file, record in found["files"].items():
        lacking = [key for key in _RECORD if not isinstance(record, dict) or key not in record]
        if lacking:
            raise GoldenError(f"{name} has no {', '.join(lacking)} of {file}, expected {', '.join(_RECORD)}")
    return found


def save(tree: Tree, manifest: dict[str, Any]) -> None:
    """Write the manifest in one step."""
    write(tree.manifest, canonical(manifest))


def _processor() -> str:
    """Name of the processor model, where the system tells it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
