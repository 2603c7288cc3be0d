"""A safetensors file as tensors of bytes: numpy and safetensors alone, bfloat16 included.

NumPy has no bfloat16. Its 16 bits are the upper half of a float32, so a bfloat16 tensor is held as uint16 and widened
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvverify.golden.tree import GoldenError

__all__ = ["FLOATS", "Stored", "parse", "read_tensors", "wide"]

Array = NDArray[Any]

FLOATS = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}
"""Floating dtypes, as safetensors names them, and the bits of their significands."""

_STORED = {"BF16": "uint16", "F64": "float64", "F32": "float32", "F16": "float16", "BOOL": "bool"}
_STORED |= {
    f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}

POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in a file; `dtype` is safetensors' name of it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def array(self) -> Array:
        """The values in their own type, bfloat16 as uint16."""
        return np.frombuffer(self.data, dtype=_STORED[self.dtype]).reshape(self.shape)


def parse(content: bytes) -> dict[str, Stored]:
    """Tensors of a safetensors file, in the order of their names. GoldenError says in words what they are instead."""
    import safetensors

    if content.startswith(POINTER):
        raise GoldenError("is a Git LFS pointer, expected the safetensors file itself")
    try:
        found = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise GoldenError(f"is not a whole safetensors file ({error})") from error
    unknown = sorted({item["dtype"] for _, item in found} - _STORED.keys())
    if unknown:
        raise GoldenError(f"holds tensors of dtype {', '.join(unknown)}, expected one of {', '.join(sorted(_STORED))}")
    return {
        name: Stored(item["dtype"], tuple(item["shape"]), bytes(item["data"]))
        for name, item in sorted(found, key=lambda entry: entry[0])
    }


def read_tensors(path: Path) -> dict[str, Stored]:
    """Tensors of a file by name. GoldenError names the file and why it cannot be read."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise GoldenError(f"{path} cannot be read ({error.strerror})") from error
    except GoldenError as error:
        raise GoldenError(f"{path} {error}") from error


def wide(stored: Stored) -> Array:
    """Return the values as float64, exact for every dtype but integers beyond 2^53."""
    array = stored.array
    if stored.dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN is no surprise here
        return array.astype(np.float64)
