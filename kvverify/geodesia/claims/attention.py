"""Attention over the packed store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.attention.policy import merge
from kvverify.geodesia.operators import (
    ATTEND,
)
from kvverify.geodesia.store import PackedStore
from kvverify.geodesia.store_case import StoreCase, attend_condition
from kvverify.run import Run

__all__: list[str] = []

LADDER_SOURCE = "Geodesia-KV, ladder of precisions"


@ATTEND.claim(evidence="exact", source="convention: neutral element of the merge")
def empty(run: Run, case: StoreCase) -> None:
    """A store without a token gives out 0 and lse -inf, exactly."""
    inputs = replace(case, tokens=0).build()
    kv, group, dim = inputs.query.shape
    run.equal(inputs.call, (torch.zeros(kv, group, dim), torch.full((kv, group), -torch.inf)))


@ATTEND.claim(evidence="budget", source=LADDER_SOURCE)
def no_compression_is_dense(run: Run, case: StoreCase) -> None:
    """While every block is exact, the output is attention over the rows as they arrived."""
    case = replace(case, levels="exact", kept=0)
    inputs = case.build()
    keys, values = (side[:, : inputs.store.length].double() for side in case.sides())

    def dense(_: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        scores = inputs.scale * inputs.query.double() @ keys.mT
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    run.close(inputs.call, truth=dense, condition=attend_condition(inputs))


@ATTEND.claim(evidence="budget", source="Geodesia-KV, attention over the packed store")
def output(run: Run, case: StoreCase) -> None:
    """The output is softmax attention over every row that the store stands for: codes, means, residual, open block."""
    inputs = case.build()
    run.close(inputs.call, condition=attend_condition(inputs), only=["out"])


@ATTEND.claim(evidence="budget", source="Geodesia-KV: one mean, repeated logically P times")
def multiplicity(run: Run, case: StoreCase) -> None:
    """In the lse a mean block counts once for each of its valid tokens that is not kept exactly elsewhere."""
    inputs = case.build()
    run.close(inputs.call, condition=attend_condition(inputs), only=["lse"])


@ATTEND.claim(evidence="budget", source="online softmax: splits merge to the unsplit result")
def split_merge(run: Run, case: StoreCase) -> None:
    """Closed blocks and open block attended apart and merged are the whole store."""
    case = replace(case, kept=0, cropped=0)
    inputs = case.build()
    store: PackedStore = inputs.store
    closed = replace(store, open_keys=store.open_keys[:, :0], open_values=store.open_values[:, :0])
    still_open = replace(store, level=store.level[:, :0], offset=store.offset[:, :0], valid=store.valid[:0])
    still_open = replace(
        still_open,
        payload=store.payload[:0],
        centroids=store.centroids[:0],
        **{name: getattr(store, name)[:0] for name in ("k_lo", "k_step", "v_lo", "v_step")},
    )

    def joined(op: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        parts = [inputs.replace(store=part).call(op) for part in (closed, still_open)]
        outs, lses = (torch.stack([part.double() for part in side]).flatten(1, 2) for side in zip(*parts, strict=True))
        out, lse = merge(outs, lses)
        return out.reshape(inputs.query.shape), lse.reshape(inputs.query.shape[:2])

    run.close(joined, truth=inputs.call, roundings=2, condition=attend_condition(inputs))


@ATTEND.claim(evidence="budget", source="Geodesia-KV, exact residual")
def residual_is_exact(run: Run, case: StoreCase) -> None:
    """A residual token is served as it arrived, whatever its block became, and its block counts one token less."""
    case = replace(case, kept=9, levels="1" if case.levels == "exact" else case.levels)
    inputs = case.build()
    # Aimed at the query of their head, the kept tokens outweigh the others.
    heads = inputs.query.double().mean(1).repeat_interleave(inputs.store.residual_count, 0)
    moved = (2 * heads).to(inputs.store.residual_keys.dtype)
    store = replace(inputs.store, residual_keys=moved)
    louder = inputs.replace(store=store)
    run.close(louder.call, condition=attend_condition(louder))
