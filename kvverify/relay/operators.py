"""The contract of `relay.compact`, `relay.relocate` and `relay.session`: signatures, oracles, peers, bytes."""

from __future__ import annotations

from kvverify.cases import DTYPES
from kvverify.operator import Operator, Output
from kvverify.relay import policy
from kvverify.relay.cases import CapturedRelocateCase, CompactCase, RelocateCase, SessionCase
from kvverify.relay.session import session

__all__ = ["COMPACT", "OPERATORS", "RELOCATE", "SESSION"]


def compact_bytes(case: CompactCase) -> int:
    """One byte a slot: the mask."""
    return case.layers * case.heads * case.slots


def relocate_bytes(case: RelocateCase) -> int:
    """Each rotary key dim once, and four factors a pair."""
    inputs = case.build()
    rows, pairs = inputs.cos_source.shape
    return int(rows * (2 * pairs * DTYPES[case.dtype].itemsize + 4 * pairs * 4))


def session_bytes(case: SessionCase) -> int:
    """Each kept rotary key dim, its source position, and four factors a pair; values and the rest need not be read."""
    kept = int((case.source() >= 0).sum())
    new = case.layers * case.heads * sum(case.steps)
    key = 2 * case.pairs * DTYPES[case.dtype].itemsize
    return kept * (key + 8 + 4 * case.pairs * 4) + new * (key + 2 * case.pairs * 4)


COMPACT = Operator(
    "relay.compact",
    "compact(valid[layers,heads,slots]) -> positions[layers,heads,slots] (-1 = none), anchor",
    case=CompactCase,
    oracle=policy.compact,
    peer=policy.compact,
    outputs=(Output("positions", dtype="int64", reduce=0), Output("anchor", dtype="int64", reduce=0)),
    read_bytes=compact_bytes,
)

RELOCATE = Operator(
    "relay.relocate",
    "relocate(keys[rows,dim], cos_source[rows,pairs], sin_source[rows,pairs], cos_target[rows,pairs],"
    " sin_target[rows,pairs], *, layout, rotary_dims) -> keys[rows,dim]",
    case=RelocateCase,
    oracle=policy.relocate,
    peer=policy.relocate,
    outputs=(Output("keys", axes=("row", "pair", "side")),),
    read_bytes=relocate_bytes,
    captured=tuple(CapturedRelocateCase(layer=layer) for layer in range(3)),
)

SESSION = Operator(
    "relay.session",
    "session(keys[layers,heads,slots,dim], values[layers,heads,slots,value_dim], source[layers,heads,slots]"
    " (-1 = none), fresh_keys[layers,heads,new,dim], fresh_values[layers,heads,new,value_dim],"
    " cos_written[layers,positions,pairs], sin_written[layers,positions,pairs],"
    " cos[layers,positions,pairs], sin[layers,positions,pairs], *, length, steps, layout, rotary_dims)"
    " -> keys[layers,heads,slots+new,dim], values[layers,heads,slots+new,value_dim],"
    " positions[layers,heads,slots+new]",
    case=SessionCase,
    oracle=session,
    peer=session,
    outputs=(
        Output("keys", axes=("layer", "head", "slot", "pair", "side")),
        Output("values"),
        Output("positions", dtype="int64", reduce=0),
    ),
    read_bytes=session_bytes,
    weight=2,
)

OPERATORS = (COMPACT, RELOCATE, SESSION)
