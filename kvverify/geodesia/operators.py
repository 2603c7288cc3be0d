"""The contract of the operators of Geodesia-KV: signatures, oracles, honest peers, bytes.

`geodesia.decode`, which serves a whole sequence, stands in `decode_operator`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvverify.cases import Case
from kvverify.geodesia import allocate as allocators
from kvverify.geodesia import policy
from kvverify.geodesia.cases import (
    AllocateCase,
    BoxCase,
    CapturedBoxCase,
    CapturedQuantizeCase,
    DequantizeCase,
    PackCase,
    QuantizeCase,
    RankPagesCase,
    ResidualCase,
    ToleranceCase,
)
from kvverify.geodesia.decode_operator import DECODE
from kvverify.geodesia.ladder import STEP_RATIO
from kvverify.geodesia.store_case import ATTEND
from kvverify.operator import Operator, Output

__all__ = [
    "ALLOCATE",
    "ATTEND",
    "BOX",
    "DECODE",
    "DEQUANTIZE",
    "OPERATORS",
    "PACK",
    "QUANTIZE",
    "RANK_PAGES",
    "RESIDUAL",
    "TOLERANCE",
]


def peer_dequantize(codes: Tensor, lo: Tensor, step: Tensor, *, bits: int, axis: Any, group: int) -> Tensor:
    """Multiply and add in fp32."""
    planes = [plane.repeat_interleave(group, 0) for plane in (lo.float(), step.float() * STEP_RATIO[bits])]
    low, delta = planes if axis == "token" else (plane.T for plane in planes)
    return codes.float() * delta + low


def numel_bytes(*names: str) -> Any:
    """Count the bytes of some inputs, each read once."""

    def count(case: Case) -> int:
        inputs = case.build()
        return sum(tensor.numel() * tensor.element_size() for tensor in (getattr(inputs, name) for name in names))

    return count


QUANTIZE = Operator(
    "geodesia.quantize",
    "quantize(x[tokens,dim], *, bits, axis, group) -> codes[tokens,dim], lo[groups,other], step[groups,other]",
    case=QuantizeCase,
    oracle=policy.quantize,
    peer=policy.quantize,
    outputs=(
        Output("codes", dtype="uint8", reduce=0),
        Output("lo", dtype="float16", reduce=0),
        Output("step", dtype="float16", reduce=0),
    ),
    read_bytes=numel_bytes("x"),
    captured=tuple(CapturedQuantizeCase(layer=layer, axis=axis) for layer in range(3) for axis in ("token", "channel")),
)

DEQUANTIZE = Operator(
    "geodesia.dequantize",
    "dequantize(codes[tokens,dim], lo[groups,other], step[groups,other], *, bits, axis, group) -> x[tokens,dim]",
    case=DequantizeCase,
    oracle=policy.dequantize,
    peer=peer_dequantize,
    outputs=(Output("x", dtype="float32", reduce=0),),
    read_bytes=numel_bytes("codes", "lo", "step"),
)

PACK = Operator(
    "geodesia.pack",
    "pack(codes[tokens,dim], *, bits) -> bytes[bytes]",
    case=PackCase,
    oracle=policy.pack,
    peer=policy.pack,
    outputs=(Output("bytes", dtype="uint8", reduce=0),),
    read_bytes=numel_bytes("codes"),
)

ALLOCATE = Operator(
    "geodesia.allocate",
    "allocate(mass[blocks], error[blocks,levels], level[blocks], hot[blocks], cost[levels], *, budget_bits)"
    " -> level[blocks]",
    case=AllocateCase,
    oracle=policy.allocate,
    peer=policy.allocate,
    outputs=(Output("level", dtype="int64", reduce=0),),
    read_bytes=numel_bytes("mass", "error", "level", "hot", "cost"),
)

TOLERANCE = Operator(
    "geodesia.tolerance",
    "tolerance(mass[blocks], extent[blocks], *, tau, scale, query_norm) -> level[blocks]",
    case=ToleranceCase,
    oracle=allocators.tolerance,
    peer=allocators.tolerance,
    outputs=(Output("level", dtype="int64", reduce=0),),
    read_bytes=numel_bytes("mass", "extent"),
)

RESIDUAL = Operator(
    "geodesia.residual",
    "residual(mass[tokens], values[tokens,dim], *, block, count) -> ids[count]",
    case=ResidualCase,
    oracle=policy.residual,
    peer=policy.residual,
    outputs=(Output("ids", dtype="int64", reduce=0),),
    read_bytes=numel_bytes("mass", "values"),
)

BOX = Operator(
    "geodesia.box",
    "box(keys[tokens,dim], *, block) -> low[blocks,dim], high[blocks,dim]",
    case=BoxCase,
    oracle=policy.box,
    peer=policy.box,
    outputs=(Output("low", dtype="float16", reduce=0), Output("high", dtype="float16", reduce=0)),
    read_bytes=numel_bytes("keys"),
    captured=tuple(CapturedBoxCase(layer=layer) for layer in range(3)),
)

RANK_PAGES = Operator(
    "geodesia.rank_pages",
    "rank_pages(query[heads,dim], low[pages,dim], high[pages,dim], *, keep, scale) -> pages[heads,keep]",
    case=RankPagesCase,
    oracle=policy.rank_pages,
    peer=policy.rank_pages,
    outputs=(Output("pages", dtype="int64", reduce=0),),
    read_bytes=numel_bytes("query", "low", "high"),
)

OPERATORS = (
    QUANTIZE,
    DEQUANTIZE,
    PACK,
    ALLOCATE,
    TOLERANCE,
    RESIDUAL,
    BOX,
    RANK_PAGES,
    ATTEND,
    DECODE,
)
