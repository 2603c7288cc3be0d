"""A whole sequence at once: prefill, then query by query, with everything the policy decided on the way.

This is the form in which a serving engine's implementation can be held against the policy: `geodesia.decode`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.attend import block_weights
from kvverify.geodesia.certificate import output_bound
from kvverify.geodesia.decoding import Decoder, Policy
from kvverify.geodesia.plain import padded
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.store import PackedStore, read_bits

__all__ = ["decode"]


def decode(
    observed: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rates: tuple[float, ...],
    chunk: int,
    scale: float,
    block: int,
    group: int,
    decay: float,
    sinks: int,
    window: int,
    residual: float,
    page_fraction: float | None,
) -> tuple[Tensor, ...]:
    """Serve `new` queries after a prompt, each with its own token appended first, and tell all that was decided.

    observed: [kv, group, n, dim], the last n queries of the prompt. prompt_keys, prompt_values: [kv, prompt, dim].
    queries: [kv, group, new, dim]. keys, values: [kv, new, dim]; keys and values in bf16 or fp16.
    rates: the budget in bits per value that holds at each query.
    chunk: how many tokens arrive together. It changes nothing: they are served one by one.
    block: tokens P of a block. group: scalars of a quantizer group. decay, sinks, window: as in `Policy`.
    residual: the fraction of the prompt kept exact. page_fraction: of the closed pages, read by a query; None: all.

    Returns, a query at a time, as they stand after it:
    out[kv, group, new, dim], lse[kv, group, new];
    level int64[kv, new, blocks], the rung of every closed block, -1 where it is not closed yet;
    mass[kv, new, pages], 0 where a page does not exist yet;
    met bool[kv, new], whether the graded blocks and the open one are within the budget of real tokens;
    resident int64[new], bits of all buffers that hold keys, values and boxes, index excluded;
    pages bool[kv, group, new, pages], the pages each head read; read int64[kv, group, new], the bits that this took;
    bound[kv, group, new], the certificate: no output is farther from that of the full cache;
    kept int64[kv, count], the residual tokens.
    """
    kv_heads, _, new, dim = queries.shape
    geometry = Geometry(dim=dim, block=block, group=group, kv_heads=kv_heads)
    policy = Policy(
        budget=rates[0],
        scale=scale,
        decay=decay,
        sinks=sinks,
        window=window,
        observed=observed.shape[2],
        residual_fraction=residual,
        page_fraction=page_fraction,
    )
    decoder = Decoder(policy, PagePool(geometry, dtype=keys.dtype))
    decoder.prefill(observed, prompt_keys, prompt_values)
    served = []
    del chunk  # however tokens arrive, each is appended and served before the next
    for i in range(new):
        decoder.policy = replace(policy, budget=rates[i])
        out, lse = decoder.step(queries[:, :, i], keys[:, i], values[:, i])
        store, read = decoder.store, decoder.read
        assert store is not None
        if read is None:
            read = torch.ones(*queries.shape[:2], decoder.mass.shape[1], dtype=torch.bool)
        met = torch.tensor([status != "infeasible" for status in decoder.status])
        resident = torch.tensor(8 * store.data_bytes)
        bound = _bound(decoder, store, queries[:, :, i], read)
        state = (decoder.cache.level.clone(), decoder.mass, met, resident, read, read_bits(store, read)[0], bound)
        served.append((out, lse, *state))
    outs, lses, level, mass, mets, residents, reads, bits, bounds = zip(*served, strict=True)
    return (
        torch.stack(outs, 2),
        torch.stack(lses, 2),
        padded(level, -1),
        padded(mass, 0),
        torch.stack(mets, 1),
        torch.stack(residents),
        padded(reads, False),
        torch.stack(bits, 2),
        torch.stack(bounds, 2),
        torch.stack(decoder.cache.kept),
    )


def _bound(decoder: Decoder, store: PackedStore, query: Tensor, read: Tensor) -> Tensor:
    """Return the certificate of every query head: a page that it did not read may have been anything."""
    cache, policy = decoder.cache, decoder.policy
    weight = block_weights(query, store, scale=policy.scale) * read
    weight /= weight.sum(-1, keepdim=True)
    still_open = (0, read.shape[2] - len(cache.valid))
    errors = [torch.nn.functional.pad(error, still_open) for error in (cache.key_error, cache.value_error)]
    bound = torch.empty(query.shape[:2], dtype=torch.float64)
    for kv, member in torch.cartesian_prod(*map(torch.arange, query.shape[:2])).tolist():
        bound[kv, member] = output_bound(
            weight[kv, member],
            errors[0][kv].masked_fill(~read[kv, member], torch.inf),
            errors[1][kv],
            query_norm=float(query[kv, member].double().norm()),
            scale=policy.scale,
            radius=float(cache.radius[kv]),
        )
    return bound
