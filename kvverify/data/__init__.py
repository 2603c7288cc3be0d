"""One small real KV cache, shipped with the package: random tensors have neither sinks nor outlier channels.

`captured_cache` loads what SmolLM2-135M-Instruct cached for the first 512 tokens of a presidential address. README.md
beside this file states where it comes from and its licences; golden/capture.py of the source tree computes it again.
Loading needs no model library.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import safe_open
from torch import Tensor

__all__ = ["CAPTURE_FILE", "CapturedCache", "captured_cache"]

CAPTURE_FILE = Path(__file__).with_name("smollm2_sotu.safetensors")


@dataclass(frozen=True)
class CapturedCache:
    """Some KV heads of a real cache, all of the same tokens. Shared between callers: clone before writing.

    keys:    bfloat16 [layers, heads, rows, dim], after rotation, in half-split layout over all dims.
    values:  bfloat16 [layers, heads, rows, dim].
    queries: bfloat16 [layers, heads, group, window, dim], after rotation, of the last `window` rows; query w sees the
             rows up to rows - window + w. Scores are query . key / sqrt(dim).
    source:  int64 [rows], the position each row was written at.
    cos, sin: float32 [rows, pairs], the model's own rotary tables at `source`.
    layers, heads: the model's layers and KV heads that the first two axes stand for.
    provenance: model, text, licences, sha256 pins and versions.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    source: Tensor
    cos: Tensor
    sin: Tensor
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    provenance: Mapping[str, Any]


@functools.cache
def captured_cache() -> CapturedCache:
    """Load the capture that ships with the package, once per process."""
    with safe_open(CAPTURE_FILE, framework="pt") as file:
        provenance = json.loads(file.metadata()["provenance"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a dict
    layers, heads = tuple(provenance["layers"]), tuple(provenance["heads"])
    return CapturedCache(**tensors, layers=layers, heads=heads, provenance=MappingProxyType(provenance))
