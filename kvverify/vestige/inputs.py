"""What the reference functions of this package accept: one place for precision, shapes and counts.

Precision rule: if any floating input is float64 the arithmetic is float64, otherwise it is fp32. Storage dtypes
(bf16, fp16) are widened before the first operation, so a result never depends on how a device rounds half-precision
intermediates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["CHUNK_ROWS", "require_count", "require_real", "require_tensor", "row_chunks", "working_dtype"]

CHUNK_ROWS = 32_768
"""Rows widened at a time: 576 columns in float64 are 151 MB, so memory does not grow with the context."""


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def row_chunks(rows: int) -> Iterator[slice]:
    """Consecutive slices of at most `CHUNK_ROWS` that cover range(rows)."""
    for start in range(0, rows, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, rows))


def require_tensor(
    name: str, tensor: object, shape: tuple[int | None, ...], *, dtype: torch.dtype | None = None
) -> None:
    """Raise unless `tensor` is a tensor of `shape` (None = any size) and `dtype` (None = any floating dtype)."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
    fits = tensor.dim() == len(shape)
    if not fits or any(want not in (None, size) for want, size in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}: expected [{wanted}]")
    if dtype is None and not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected a floating dtype")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {dtype}")


def require_count(name: str, value: int, *, minimum: int = 0, maximum: int | None = None) -> None:
    """Raise unless `value` is an int of at least `minimum` and at most `maximum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected an int")
    if value < minimum or (maximum is not None and value > maximum):
        wanted = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ValueError(f"{name} is {value}: expected {wanted}")


def require_real(name: str, value: float, *, minimum: float = -math.inf, maximum: float = math.inf) -> None:
    """Raise unless `value` is a finite number of at least `minimum` and at most `maximum`."""
    if not (math.isfinite(value) and minimum <= value <= maximum):
        raise ValueError(f"{name} is {value}: expected a finite number in [{minimum}, {maximum}]")
