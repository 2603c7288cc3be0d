"""What every stage script shares: parameters, one thread, and safetensors files with one text for one content.

Run from the root of the repository, as DVC does: paths are relative to it, and `kvverify` is the one of the tree.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from safetensors.torch import load_file, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

DATA = Path("golden/data")


def parameters(section: str) -> dict[str, Any]:
    """One section of params.yaml."""
    found: dict[str, Any] = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))[section]
    return found


def run(stage: str, models: Sequence[str], make: Callable[[str], dict[str, Tensor]]) -> None:
    """Write what `make` returns for each model to golden/data/<stage>/<model>.safetensors."""
    torch.set_num_threads(1)
    for model in models:
        write(DATA / stage / f"{model}.safetensors", make(model))


def read(stage: str, model: str) -> dict[str, Tensor]:
    """Tensors that an earlier stage wrote for a model."""
    return load_file(DATA / stage / f"{model}.safetensors")


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file in one step. Its bytes depend on the tensors alone: names are sorted, no metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(save({name: tensors[name].contiguous().clone() for name in sorted(tensors)}))
    os.replace(temporary, path)


def numbered(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    """List the tensors name.0, name.1, ..., one for each layer."""
    found: list[Tensor] = []
    while f"{name}.{len(found)}" in tensors:
        found.append(tensors[f"{name}.{len(found)}"])
    return found


def thinned(logits: Tensor, *, keep: int) -> dict[str, Tensor]:
    """At most `keep` evenly spaced logits of a large vocabulary, and the log-sum-exp of all, which sees the others.

    Both in the dtype of the logits: a float64 made of a float32 would be held to a budget that no model meets.
    """
    stride = math.ceil(logits.shape[-1] / keep)
    return {"logits": logits[..., ::stride].clone(), "logits_lse": logits.double().logsumexp(-1).to(logits.dtype)}
