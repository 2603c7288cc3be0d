"""Temporary packages of users, and how they are gated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

KVVERIFY = Path(sys.executable).with_name("kvverify")

ADAPTER = """
import torch
from kvverify import Implementation
from kvverify.relay import compact, relocate, rotate

def turned(keys, cos, sin, layout, rotary_dims):
    return rotate(keys.float(), cos, sin, layout=layout, rotary_dims=rotary_dims)

def forgetful(keys, cos, sin, cos_target, sin_target, *, layout, rotary_dims):
    bare = turned(keys, cos, -sin, layout, rotary_dims)  # not divided by the squared amplitude
    return turned(bare, cos_target, sin_target, layout, rotary_dims).to(keys.dtype)

def raises(valid): raise RuntimeError("out of\\nshared memory \\x1b[31m")
def nothing(valid): return None
def wrong_shape(valid): return compact(valid)[0][:-1], compact(valid)[1]
def view(valid): return valid.view(torch.uint8).view(valid.shape), 0
def wrong_dtype(valid): return compact(valid)[0].int(), compact(valid)[1]
def leaves(valid): raise SystemExit(0)
def two_arguments(valid, more): return compact(valid)

def only(kernel, **declared): return Implementation(kernel.__name__, {"relay.compact": kernel}, **declared)

good = only(compact)
bad = Implementation("forgetful kernels", {"relay.relocate": forgetful})
raising, none, shape, aliased, dtype, leaving = map(only, (raises, nothing, wrong_shape, view, wrong_dtype, leaves))
unknown = Implementation("unknown", {"relay.compat": compact})
unsupported = only(compact, supports={"slots": {7}})
misspelt = only(compact, supports={"slot": {5}})
misfit = only(two_arguments)
number = 3
"""


def environment() -> dict[str, str]:
    """The environment without what would colour output or move the files of Hypothesis."""
    dropped = ("FORCE_COLOR", "NO_COLOR", "HYPOTHESIS_STORAGE_DIRECTORY", "GITHUB_STEP_SUMMARY")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def run(*command: object, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a user's folder."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
