"""What the manifest keeps of a tensor and of a file.

mean, rms and largest are over the finite values, summed exactly (`math.fsum`) and told to nine digits, so that they are
the same on every machine; `nonfinite` counts the others. `first` are the first values in row-major order, as text where
not finite.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvverify.golden.files import parse, wide
from kvverify.golden.tree import digest

if TYPE_CHECKING:
    from kvverify.golden.files import Stored

__all__ = ["FIRST", "file_record", "statistics", "tensor_record"]

FIRST = 4
DIGITS = 9
Record = dict[str, Any]


def statistics(stored: Stored) -> Record:
    """Mean, root mean square and largest absolute value of the finite values, 0 for none; how many are not finite."""
    values = wide(stored).reshape(-1)
    finite = values[np.isfinite(values)]
    count = max(1, len(finite))
    return {
        "mean": _rounded(math.fsum(finite.tolist()) / count),
        "rms": _rounded(math.sqrt(math.fsum(np.square(finite).tolist()) / count)),
        "largest": _rounded(float(np.abs(finite).max(initial=0.0))),
        "nonfinite": len(values) - len(finite),
    }


def tensor_record(stored: Stored) -> Record:
    """Shape, dtype, hash, statistics and first values of a tensor."""
    first = wide(stored).reshape(-1)[:FIRST].tolist()
    return {
        "shape": list(stored.shape),
        "dtype": stored.dtype,
        "sha256": hashlib.sha256(stored.data).hexdigest(),
        "first": [_rounded(value) if math.isfinite(value) else repr(value) for value in first],
        **statistics(stored),
    }


def file_record(content: bytes) -> Record:
    """Size, hashes and tensors of a file. GoldenError for one that is not a safetensors file."""
    found = digest(content)
    tensors = parse(content)
    return {
        "bytes": found.bytes,
        "sha256": found.sha256,
        "md5": found.md5,
        "tensors": {name: tensor_record(stored) for name, stored in tensors.items()},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
