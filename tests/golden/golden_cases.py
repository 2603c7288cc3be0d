"""A golden tree small enough to build in seconds: two stages, two models, numpy alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvverify.golden.tree import Tree

__all__ = ["ROOT", "copy_tree", "golden", "run", "toy_tree"]

ROOT = Path(__file__).parents[2]

STAGES = """stages:
  capture:
    matrix: {model: "${models}"}
    cmd: python golden/capture.py ${item.model}
    params: [capture]
    deps: [golden/capture.py]
    outs: ["golden/data/capture/${item.model}.safetensors"]
  decide:
    matrix: {model: "${models}"}
    cmd: python golden/decide.py ${item.model}
    params: [decide.keep]
    deps: [golden/decide.py, "golden/data/capture/${item.model}.safetensors"]
    outs: ["golden/data/decide/${item.model}.safetensors"]
"""
PARAMETERS = "models: [ant, bee]\ncapture: {rows: 6}\ndecide: {keep: 2}\n"
CAPTURE = """import sys, yaml, numpy
from safetensors.numpy import save_file
rows = yaml.safe_load(open("params.yaml"))["capture"]["rows"]
for model in sys.argv[1:]:
    draw = numpy.random.default_rng(len(model) + ord(model[0]))
    tensors = {"keys": draw.standard_normal((rows, 4)), "queries": draw.standard_normal(4).astype("float32")}
    save_file(tensors, f"golden/data/capture/{model}.safetensors")
"""
DECIDE = """import sys, yaml, numpy
from safetensors.numpy import load_file, save_file
keep = yaml.safe_load(open("params.yaml"))["decide"]["keep"]
for model in sys.argv[1:]:
    found = load_file(f"golden/data/capture/{model}.safetensors")
    score = found["keys"] @ found["queries"]
    kept = numpy.sort(numpy.argsort(-score, kind="stable")[:keep])
    save_file({"kept": kept, "score": score}, f"golden/data/decide/{model}.safetensors")
"""
CONFIG = (ROOT / ".dvc" / "config").read_text(encoding="utf-8")
IGNORED = "/golden/data/\n/golden/.undo*/\n"


def toy_tree(root: Path) -> Tree:
    """Build a tree with its first update recorded, pushed and committed."""
    contents = {
        "dvc.yaml": STAGES,
        "params.yaml": PARAMETERS,
        "dvc.lock": "schema: '2.0'\nstages: {}\n",
        "golden/capture.py": CAPTURE,
        "golden/decide.py": DECIDE,
        ".dvc/config": CONFIG,
        ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
        ".gitignore": IGNORED,
    }
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    run(["git", "init", "--quiet", "."], root)
    done = golden(root, "update", "--reason", "first")
    assert done.returncode == 10, f"the first update of the toy tree failed: {done.stdout}{done.stderr}"
    commit(root)
    return Tree(root)


def copy_tree(tree: Tree, to: Path) -> Tree:
    """Copy of a tree that a test may spoil."""
    shutil.copytree(tree.root, to)
    return Tree(to)


def commit(root: Path) -> None:
    """Commit everything that git does not ignore."""
    run(["git", "add", "--all"], root)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    run(["git", *identity, "commit", "--quiet", "-m", "golden"], root)


def golden(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as its users do."""
    return run([sys.executable, "-m", "kvverify.golden", *words, "--root", str(root)], root, check=False)


def run(command: list[str], folder: Path, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; its output is text."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=check)
