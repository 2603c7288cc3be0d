"""The contract of VestigeKV: signatures, oracles, honest peers, conditions of the budget, bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvverify.attention.operators import decode_condition, peer_decode
from kvverify.cases import DTYPES, Inputs
from kvverify.operator import Operator, Output
from kvverify.vestige import policy
from kvverify.vestige.attend import Prologue
from kvverify.vestige.cases import (
    AttendCase,
    IndexCase,
    PrologueCase,
    SalienceCase,
    ScanCase,
    SelectCase,
)
from kvverify.vestige.index import query_parts
from kvverify.vestige.stream import stream
from kvverify.vestige.stream_case import StreamCase

__all__ = [
    "ATTEND",
    "INDEX",
    "OPERATORS",
    "PROLOGUE",
    "SALIENCE",
    "SCAN",
    "SELECT",
    "STREAM",
    "attend_condition",
    "peer_attend",
    "peer_prologue",
    "prologue_condition",
]


def attend_condition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The condition of `attention.decode`, per head, for (out, lse)."""
    values = inputs.rows[:, : inputs.value_dim]
    tensors = {"query": inputs.query, "keys": inputs.rows, "values": values, "ids": inputs.ids}
    return decode_condition(Inputs(tensors, {"scale": inputs.scale}))


def prologue_condition(inputs: Inputs) -> tuple[Tensor, ...]:
    """Per output. A weight off by a share moves the entropy by that share of itself: it is lse less the mean score.

    A query part passes through the norm of its content, four times.
    """
    listed = torch.arange(len(inputs.rows))
    out, lse = attend_condition(Inputs({**inputs.tensors, "ids": listed}, inputs.static))
    entropy = lse * (2 + math.log(max(len(listed), 1)))
    asked = 4 * inputs.query[:, : inputs.basis.shape[1]].double().norm(dim=1)
    return lse, entropy, out, lse, asked, asked


def peer_attend(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> tuple[Tensor, Tensor]:
    """An honest fused kernel: fp32 scores, probabilities rounded to the storage dtype before they meet the values."""
    return peer_decode(query, rows, rows[:, :value_dim], ids, scale=scale)


def peer_prologue(query: Tensor, rows: Tensor, basis: Tensor, *, scale: float, value_dim: int) -> Prologue:
    """An honest fused kernel: one pass, and the entropy as lse less the mean score, which is how it can be streamed."""
    out, lse = peer_attend(query, rows, torch.arange(len(rows)), scale=scale, value_dim=value_dim)
    scores = scale * (query.float() @ rows.float().T)
    best = scores.amax(dim=1) if len(rows) else torch.full_like(lse, -torch.inf)
    mean = (torch.exp(scores - lse[:, None]) * scores).sum(dim=1)
    entropy = lse - mean if len(rows) else torch.zeros_like(lse)
    return Prologue(best, entropy, out, lse, *query_parts(query.float(), basis))


def salience_bytes(case: SalienceCase) -> int:
    """The branch once."""
    return case.rows * case.columns * DTYPES[case.dtype].itemsize


def select_bytes(case: SelectCase) -> int:
    """Every salience once."""
    return case.rows * DTYPES[case.dtype].itemsize


def index_bytes(case: IndexCase) -> int:
    """The content once, and the basis once in fp32."""
    return case.rows * case.content * DTYPES[case.dtype].itemsize + 4 * case.rank * case.content


def prologue_bytes(case: PrologueCase) -> int:
    """Every attended row once for s*, softmax and entropy together, the query, and the basis in fp32."""
    inputs = case.build()
    item = DTYPES[case.dtype].itemsize
    return item * (int(inputs.rows.numel()) + int(inputs.query.numel())) + 4 * case.rank * case.content


def scan_bytes(case: ScanCase) -> int:
    """Each entry once, branch, fp16 sketch and fp32 residual (260 B at 64 + 64), then query, basis and thresholds."""
    item = DTYPES[case.dtype].itemsize
    entry = case.branch * item + 2 * case.rank + 4
    query = case.heads * ((case.content + case.branch) * item + 4)
    return case.archived * entry + query + 4 * case.rank * case.content


def attend_bytes(case: AttendCase) -> int:
    """Each listed row once (it is key and value), the query, and the list itself."""
    inputs = case.build()
    listed = int((inputs.ids >= 0).sum())
    item = DTYPES[case.dtype].itemsize
    return item * (listed * int(inputs.rows.shape[1]) + int(inputs.query.numel())) + 8 * int(inputs.ids.numel())


def stream_bytes(case: StreamCase) -> int:
    """Every row that arrives once, and the query."""
    inputs = case.build()
    return DTYPES[case.dtype].itemsize * (int(inputs.rows.numel()) + int(inputs.query.numel()))


SALIENCE = Operator(
    "vestige.salience",
    "salience(branch[rows,branch], *, bandwidth, block: int|None) -> salience[rows]",
    case=SalienceCase,
    oracle=policy.salience,
    peer=policy.salience,
    outputs=(Output("salience", dtype="float32", reduce=0),),
    read_bytes=salience_bytes,
)

SELECT = Operator(
    "vestige.select",
    "select(salience[rows], *, keep, sinks) -> mask[rows]",
    case=SelectCase,
    oracle=policy.select,
    peer=policy.select,
    outputs=(Output("mask", dtype="bool", reduce=0),),
    read_bytes=select_bytes,
)

INDEX = Operator(
    "vestige.index",
    "index(content[rows,content], basis[rank,content]) -> sketch[rows,rank], residual[rows]",
    case=IndexCase,
    oracle=policy.index,
    peer=policy.index,
    outputs=(Output("sketch", dtype="float16"), Output("residual", dtype="float32", reduce=0)),
    read_bytes=index_bytes,
)

PROLOGUE = Operator(
    "vestige.prologue",
    "prologue(query[heads,dim], rows[kept,dim], basis[rank,content], *, scale, value_dim)"
    " -> best[heads], entropy[heads], out[heads,value_dim], lse[heads],"
    " query_sketch[heads,rank], query_residual[heads]",
    case=PrologueCase,
    oracle=policy.prologue,
    peer=peer_prologue,
    outputs=(
        Output("best", dtype="float32", reduce=0),
        Output("entropy", dtype="float32", reduce=0),
        Output("out"),
        Output("lse", dtype="float32", reduce=0),
        Output("query_sketch", dtype="float32"),
        Output("query_residual", dtype="float32", reduce=0),
    ),
    read_bytes=prologue_bytes,
)

SCAN = Operator(
    "vestige.scan",
    "scan(query[heads,content+branch], side[rows,branch], sketch[rows,rank], residual[rows], basis[rank,content],"
    " threshold[heads], *, scale, inflation) -> fired[n] (positions in the archive, order free, no repeats)",
    case=ScanCase,
    oracle=policy.scan,
    peer=policy.scan,
    outputs=(Output("fired", dtype="int64", reduce=0),),
    read_bytes=scan_bytes,
)

ATTEND = Operator(
    "vestige.attend",
    "attend(query[heads,dim], rows[pool,dim], ids[n] (-1 = pad), *, scale, value_dim)"
    " -> out[heads,value_dim], lse[heads]",
    case=AttendCase,
    oracle=policy.attend,
    peer=peer_attend,
    outputs=(Output("out"), Output("lse", dtype="float32", reduce=0)),
    read_bytes=attend_bytes,
)

STREAM = Operator(
    "vestige.stream",
    "stream(rows[rows,dim], query[heads,dim], basis[rank,content], *, script, slots, block, bandwidth, fraction,"
    " sinks, dense_below, scale, inflation, theta)"
    " -> attended[events,rows], archived[events,rows], out[slots,heads,content], lse[slots,heads]",
    case=StreamCase,
    oracle=stream,
    peer=stream,
    outputs=(
        Output("attended", dtype="int64", reduce=0),
        Output("archived", dtype="int64", reduce=0),
        Output("out"),
        Output("lse", dtype="float32", reduce=0),
    ),
    read_bytes=stream_bytes,
)

OPERATORS = (SALIENCE, SELECT, INDEX, PROLOGUE, SCAN, ATTEND, STREAM)
