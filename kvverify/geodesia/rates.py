"""Exact rates (bits per value) of the baselines served on the same attention path, as fractions.

Protocol: T runs over the cache lengths of the calls (16321..16383: 63 single-query calls after a 16,320-token prefix)
and a rate is sum(bits) / sum(2 T D). `chunk` is Q, the queries of one call: the KIVI and SnapKV rates depend on it, so
a table compares rates at one Q only (`common_chunk`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["PUBLISHED_LENGTHS", "Rate", "common_chunk", "full", "kivi", "quest", "residual", "retained"]

PUBLISHED_LENGTHS = range(16321, 16384)


@dataclass(frozen=True)
class Rate:
    """Bits per value that stay resident, and that one query reads, at a chunk of Q queries per call."""

    resident: Fraction
    read: Fraction
    chunk: int


def full(*, chunk: int = 1) -> Rate:
    """The uncompressed 16-bit cache."""
    return Rate(Fraction(16), Fraction(16), chunk)


def retained(lengths: Iterable[int], *, tokens: int, chunk: int = 1) -> Rate:
    """A cache of `tokens` exact tokens, whatever T: StreamingLLM 4 + 2048; SnapKV 2048 + every decoded token."""
    lengths = _checked(lengths)
    rate = Fraction(16 * sum(min(tokens, length) for length in lengths), sum(lengths))
    return Rate(rate, rate, chunk)


def quest(lengths: Iterable[int], *, pages: int = 32, page: int = 64, chunk: int = 1) -> Rate:
    """Exact pages, fp16 summaries: resident 16 + 16 nb / T; read (pages + 1 current) whole pages + all summaries."""
    lengths = _checked(lengths)
    summaries = [-(-length // page) * 16 for length in lengths]
    read = [min((pages + 1) * page, -(-length // page) * page) * 16 for length in lengths]
    total = sum(lengths)
    return Rate(16 + Fraction(sum(summaries), total), Fraction(sum(read) + sum(summaries), total), chunk)


def kivi(
    lengths: Iterable[int],
    *,
    key_bits: int,
    value_bits: int,
    dim: int = 128,
    group: int = 32,
    recent: int = 32,
    block: int = 64,
    chunk: int = 1,
) -> Rate:
    """Grouped quantization with an exact recent part of n = max(recent, Q) tokens.

    Bits = ceil((T - n) / P) ((k + v) P D + (P / g) D 32 + P (D / g) 32) + 2 n D 16: partial blocks are charged in full.
    """
    lengths = _checked(lengths)
    exact = max(recent, chunk)
    scales = 32 * (block // group * dim + block * (dim // group))
    per_block = (key_bits + value_bits) * block * dim + scales
    bits = sum(-(-max(0, length - exact) // block) * per_block + 32 * dim * min(exact, length) for length in lengths)
    rate = Fraction(bits, 2 * dim * sum(lengths))
    return Rate(rate, rate, chunk)


def residual(lengths: Iterable[int], *, tokens: int) -> Fraction:
    """Bits per value of an exact residual of a fixed number of tokens, 16 n / T."""
    lengths = _checked(lengths)
    return Fraction(16 * tokens * len(lengths), sum(lengths))


def common_chunk(rates: Sequence[Rate]) -> int:
    """Return the one chunk size of the rates of a table; rates at different Q are not comparable (ValueError)."""
    chunks = sorted({rate.chunk for rate in rates})
    if len(chunks) != 1:
        raise ValueError(f"rates have chunk sizes {chunks}, expected one size for a table")
    return chunks[0]


def _checked(lengths: Iterable[int]) -> list[int]:
    checked = list(lengths)
    if not checked or min(checked) < 1:
        raise ValueError(f"lengths is {checked[:3]}, expected at least one positive cache length")
    return checked
