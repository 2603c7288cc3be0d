"""What a decode step reads, item by item: the closed forms behind "4x fewer reads", and what the paper leaves out.

Counts are rows of one step (ints), or rows per context token (Fractions: kept rho, archived 1 - rho, fetched f). Both
are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvverify.vestige.inputs import require_count

__all__ = ["Reading", "read_bytes", "read_dims", "read_ledger"]


@dataclass(frozen=True)
class Reading:
    """One thing that a step reads, in values and bytes, and whether the published dims and bytes count it."""

    name: str
    dims: Fraction
    bytes: Fraction
    published_dims: bool
    published_bytes: bool


def read_ledger(
    *,
    kept: int | Fraction,
    archived: int | Fraction,
    fetched: int | Fraction,
    tail: int | Fraction = 0,
    rank: int = 64,
    content: int = 512,
    branch: int = 64,
    id_bytes: int = 8,
) -> tuple[Reading, ...]:
    """List everything that one layer reads in one step; rows are shared by all heads.

    Published: dims = (content + branch) (kept + fetched) + (branch + rank) archived (VestigeKV equation 2), at 2 B a
    value; its byte figure adds the 4 B residual of an entry. Left out: the residual as a dimension, the tail, row
    ids, and the second reading of the attended rows, once for s* and once for the softmax, by an implementation
    without a fused prologue.
    """
    for name, size in (("rank", rank), ("content", content), ("branch", branch), ("id_bytes", id_bytes)):
        require_count(name, size)
    for name, count in (("kept", kept), ("archived", archived), ("fetched", fetched), ("tail", tail)):
        if count < 0:
            raise ValueError(f"{name} is {count}: expected at least 0")
    row, attended = content + branch, kept + tail
    items: tuple[tuple[str, int | Fraction, int, int, bool, bool], ...] = (
        ("kept rows", kept, row, 2 * row, True, True),
        ("index: branch and sketch", archived, branch + rank, 2 * (branch + rank), True, True),
        ("index: residual", archived, 1, 4, False, True),
        ("fetched rows", fetched, row, 2 * row, True, True),
        ("tail rows", tail, row, 2 * row, False, False),
        ("attended rows again, for s*", attended, row, 2 * row, False, False),
        ("row ids", attended + fetched, 0, id_bytes, False, False),
    )
    return tuple(
        Reading(name, Fraction(count * dims), Fraction(count * size), *published)
        for name, count, dims, size, *published in items
    )


def read_dims(ledger: tuple[Reading, ...], *, published: bool) -> Fraction:
    """Dimensions read: what the paper counts, or everything."""
    return sum((item.dims for item in ledger if item.published_dims or not published), Fraction(0))


def read_bytes(ledger: tuple[Reading, ...], *, published: bool) -> Fraction:
    """Bytes read: what the published figure counts, or everything."""
    return sum((item.bytes for item in ledger if item.published_bytes or not published), Fraction(0))
