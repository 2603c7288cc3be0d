"""Known-bad and equivalent kernels: attention over the packed store."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvverify.geodesia.attend import attend
from kvverify.geodesia.ladder import EXACT, MEAN
from kvverify.geodesia.operators import (
    ATTEND,
)
from kvverify.geodesia.store import PackedStore
from kvverify.geodesia.store_case import StoreCase, peer_attend

__all__: list[str] = []


@ATTEND.mutant("multiplicity", case=StoreCase(levels="1"))
def a_mean_counts_as_one_token(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    blocks = len(store.valid)
    if not blocks or not bool((store.level == MEAN).all()):
        return attend(query, store, scale=scale)
    _, lse = attend(query, store, scale=scale)
    return attend(query, store, scale=scale)[0], lse - torch.tensor(float(store.geometry.block)).log()


@ATTEND.mutant("multiplicity", "output", case=StoreCase(levels="1", cropped=3, tokens=48))
def a_cropped_block_counts_as_whole(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    return attend(query, replace(store, valid=torch.full_like(store.valid, store.geometry.block)), scale=scale)


@ATTEND.mutant("output", "no_compression_is_dense", "split_merge")
def forgets_the_open_block(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    closed = replace(store, open_keys=store.open_keys[:, :0], open_values=store.open_values[:, :0])
    return attend(query, closed, scale=scale)


@ATTEND.mutant("output", case=StoreCase(levels="by head"))
def one_level_map_for_all_heads(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    # Codes are decoded as those of the first head: what its rung means for the scales and the width.
    first = store.level[:1].expand_as(store.level).clone()
    try:
        return attend(query, replace(store, level=first), scale=scale)
    except (RuntimeError, IndexError, ValueError):
        return torch.full_like(query, torch.nan), query.new_full(query.shape[:2], torch.nan).float()


@ATTEND.mutant("output", case=StoreCase(levels="4"))
def decodes_every_rung_with_the_8_bit_step(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    return attend(query, replace(store, k_step=store.k_step / 17, v_step=store.v_step / 17), scale=scale)


@ATTEND.mutant("output", case=StoreCase(levels="8", regime="ramp"))
def shared_memory_alias_of_channel_0(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    first = store.k_lo[..., :1].expand_as(store.k_lo).clone()
    return attend(query, replace(store, k_lo=first), scale=scale)


@ATTEND.mutant("output", case=StoreCase(levels="8"))
def value_scales_of_the_first_token(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    lo, step = (plane[:, :1].expand_as(plane).clone() for plane in (store.v_lo, store.v_step))
    return attend(query, replace(store, v_lo=lo, v_step=step), scale=scale)


@ATTEND.mutant("output", "multiplicity", case=StoreCase(kept=9, levels="1"))
def residual_tokens_counted_twice(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = attend(query, without_residual(store), scale=scale)
    extra = residual_part(query, store, scale)
    both = torch.stack([lse, extra[1]])
    joint = both.logsumexp(0)
    share = (both - joint).exp().nan_to_num()[..., None]
    return share[0] * out + share[1] * extra[0], joint


def without_residual(store: PackedStore) -> PackedStore:
    """The store as if no token had been kept."""
    none = torch.zeros_like(store.residual_count)
    ids, keys, values = (side[:0] for side in (store.residual_ids, store.residual_keys, store.residual_values))
    return replace(store, residual_count=none, residual_ids=ids, residual_keys=keys, residual_values=values)


def residual_part(query: Tensor, store: PackedStore, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over the residual tokens alone."""
    outs, lses = [], []
    for head, keys, values in zip(
        query,
        store.residual_keys.split(store.residual_count.tolist()),
        store.residual_values.split(store.residual_count.tolist()),
        strict=True,
    ):
        scores = scale * head.double() @ keys.double().T
        outs.append(scores.softmax(-1) @ values.double())
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses)


@ATTEND.mutant("residual_is_exact", "output", case=StoreCase(kept=9, levels="1"))
def forgets_the_residual(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    return attend(query, without_residual(store), scale=scale)


@ATTEND.mutant("output", case=StoreCase(levels="8", regime="ramp"))
def running_maximum_is_not_applied(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    """An online softmax that forgets to fade what it gathered before a higher score came."""
    out, lse = attend(query, store, scale=scale)
    blocks = len(store.valid)
    if not blocks:
        return out, lse
    half = replace(store, valid=torch.where(torch.arange(blocks) < blocks // 2, store.valid, 0))
    early, _ = attend(
        query,
        without_residual(replace(half, open_keys=store.open_keys[:, :0], open_values=store.open_values[:, :0])),
        scale=scale,
    )
    return (out + early) / 2, lse


@ATTEND.mutant("output", case=StoreCase(levels="exact"))
def pages_in_the_order_of_the_payload(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    """Takes the payload for contiguous: the gaps and the order of pages are ignored."""
    size = 2 * store.geometry.block * store.geometry.dim * 2
    if not bool((store.level == EXACT).all()):
        return attend(query, store, scale=scale)
    offset = torch.arange(store.offset.numel()).reshape(store.offset.shape) * size
    return attend(query, replace(store, offset=offset.clamp(max=max(0, len(store.payload) - size))), scale=scale)


@ATTEND.mutant("empty", case=StoreCase(tokens=0))
def nothing_over_nothing(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = attend(query, store, scale=scale)
    return (out, lse) if store.length else (torch.full_like(out, torch.nan), lse)


@ATTEND.mutant("output", case=StoreCase(group=7))
def queries_interleaved_over_kv_heads(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    kv, group, dim = query.shape
    turned = query.transpose(0, 1).reshape(kv, group, dim)
    return attend(turned, store, scale=scale)


@ATTEND.control
def a_flash_kernel_that_rounds_p(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    """fp32 inside, probabilities in the dtype of the query."""
    return peer_attend(query, store, scale=scale)


@ATTEND.control
def in_five_splits(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    """Splits of blocks, some of them empty, merged in fp32."""
    out, lse = attend(query, store, scale=scale, splits=5, accumulate=torch.float32)
    return out.to(query.dtype), lse
