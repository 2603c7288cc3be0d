"""Regenerate everything with the recorded versions, and say whether a difference is the code's or the platform's.

The answer is one of four:

    bitwise equal    every tensor is as stored
    code change      versions and processor are those recorded, and a tensor is not as stored
    platform drift   another processor or version, and every difference is within budget
    unexplained      another processor or version, and a difference beyond the budget

Every stage is run on what is stored, so that each is judged by itself. Where a policy has a threshold (a quantizer's
code, a kept state, a row that fires), the last bit of another processor can flip it: that is a difference beyond the
budget, and is to be looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvverify.golden.manifest import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvverify.golden.diff import FileDiff

__all__ = ["VERSIONS", "Explanation", "explain", "mismatches"]

Explanation = Literal["bitwise equal", "code change", "platform drift", "unexplained"]

VERSIONS = ("python", "torch", "transformers", "numpy", "safetensors")
"""What has to be installed at the recorded version; a processor can only be named."""


def mismatches(files: Mapping[str, Any], here: Mapping[str, Any] | None = None) -> dict[str, tuple[set[str], str]]:
    """Of everything recorded that is otherwise here: (recorded values, value here), by name."""
    now = environment() if here is None else here
    found = {}
    for name, value in now.items():
        recorded = {str(record["provenance"].get(name)) for record in files.values()}
        if recorded != {str(value)}:
            found[name] = (recorded, str(value))
    return found


def explain(files: Sequence[FileDiff], *, same_platform: bool) -> Explanation:
    """Say what the differences of a rebuild mean."""
    if not any(file.tensors for file in files):
        return "bitwise equal"
    if same_platform:
        return "code change"
    return "unexplained" if any(file.changed for file in files) else "platform drift"
