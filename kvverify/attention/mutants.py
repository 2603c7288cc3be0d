"""Attention kernels that are known to be wrong, and a few that are differently right."""

from __future__ import annotations

import torch
from torch import Tensor

import kvverify.attention.claims  # noqa: F401 -- a mutant names claims, so they come first
from kvverify.attention.operators import DECODE, MERGE, DecodeCase, MergeCase, peer_decode
from kvverify.attention.policy import decode, merge

__all__: list[str] = []

Pair = tuple[Tensor, Tensor]


@DECODE.mutant("output", "log_sum_exp", "order_free")
def forgets_scale(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return decode(query, keys, values, ids, scale=1.0)


@DECODE.mutant("log_sum_exp", "canaries", case=DecodeCase(listed=65, dtype="bf16", seed=8))
def drops_last_row(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return decode(query, keys, values, ids[:-1], scale=scale)


@DECODE.mutant("log_sum_exp", case=DecodeCase(listed=130))
def drops_partial_block(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    whole = ids[: len(ids) // 64 * 64] if len(ids) > 64 else ids
    return decode(query, keys, values, whole, scale=scale)


@DECODE.mutant("pads_are_silent", "output", case=DecodeCase(pads=5))
def clamps_pads_to_row_zero(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return decode(query, keys, values, ids.clamp(min=0), scale=scale)


@DECODE.mutant("pads_are_silent", "log_sum_exp", case=DecodeCase(pads=5))
def pads_score_zero(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    pool_keys = torch.cat([keys, torch.zeros_like(keys[:1])])
    pool_values = torch.cat([values, torch.zeros_like(values[:1])])
    return decode(query, pool_keys, pool_values, torch.where(ids < 0, len(keys), ids), scale=scale)


@DECODE.mutant("pads_are_silent", case=DecodeCase())
def stops_at_first_pad(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    pad = (ids < 0).nonzero()
    return decode(query, keys, values, ids[: int(pad[0])] if len(pad) else ids, scale=scale)


@DECODE.mutant("output", case=DecodeCase())
def attends_the_whole_pool(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return decode(query, keys, values, torch.arange(len(keys)), scale=scale)


@DECODE.mutant("output", "pool_order_free", case=DecodeCase(listed=65))
def takes_ids_for_a_prefix(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    listed = torch.where(ids < 0, -1, (ids >= 0).cumsum(0))
    return decode(query, keys, values, listed, scale=scale)


@DECODE.mutant("repeats_count", "log_sum_exp", case=DecodeCase(regime="repeated"))
def lists_each_row_once(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return decode(query, keys, values, ids.unique(), scale=scale)


@DECODE.mutant("output", "log_sum_exp", case=DecodeCase(regime="large", dim=64))
def exponentiates_without_maximum(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    listed = ids[ids >= 0]
    weights = torch.exp(scale * (query.float() @ keys[listed].float().T))
    mass = weights.sum(-1, keepdim=True)
    return (weights @ values[listed].float() / mass).to(values.dtype), mass.squeeze(-1).log()


@DECODE.mutant("empty")
def empty_list_is_nan(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    out, lse = decode(query, keys, values, ids, scale=scale)
    return (out, lse) if (ids >= 0).any() else (out * torch.nan, lse)


@DECODE.mutant("empty")
def empty_list_has_lse_zero(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    out, lse = decode(query, keys, values, ids, scale=scale)
    return out, torch.where(lse == -torch.inf, 0.0, lse)


@DECODE.mutant("log_sum_exp")
def lse_to_the_base_two(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    out, lse = decode(query, keys, values, ids, scale=scale)
    return out, lse / torch.tensor(2.0).log()


@DECODE.mutant("log_sum_exp")
def lse_without_the_maximum(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    out, lse = decode(query, keys, values, ids, scale=scale)
    listed = ids[ids >= 0]
    peak = scale * (query.float() @ keys[listed].float().T)
    return out, lse - (peak.amax(-1) if len(listed) else 0.0)


def _online(
    query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, scale: float, block: int, fade_output: bool
) -> Pair:
    """A flash kernel that rounds its weights to storage; without `fade_output` sums keep their old maximum."""
    heads = len(query)
    peak = torch.full((heads,), -torch.inf)
    mass = torch.zeros(heads)
    total = torch.zeros(heads, values.shape[1])
    for part in ids[ids >= 0].split(block):
        if not len(part):
            continue
        scores = scale * (query.float() @ keys[part].float().T)
        higher = torch.maximum(peak, scores.amax(-1))
        weights = torch.exp(scores - higher[:, None])
        fade = torch.exp(peak - higher)
        mass = mass * fade + weights.sum(-1)
        total = total * (fade[:, None] if fade_output or not mass.any() else 1.0)
        total = total + weights.to(values.dtype).float() @ values[part].float()
        peak = higher
    return (total / torch.where(mass > 0, mass, 1.0)[:, None]).to(values.dtype), peak + mass.log()


@DECODE.mutant("output", case=DecodeCase(listed=130, regime="ramp"))
def keeps_the_first_maximum(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return _online(query, keys, values, ids, scale, 64, fade_output=False)


@DECODE.mutant("output", case=DecodeCase(listed=65, dtype="bf16", regime="ramp"))
def accumulates_in_storage_dtype(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    half = values.dtype
    listed = ids[ids >= 0]
    scores = (scale * (query.to(half) @ keys[listed].to(half).T)).float()
    weights = torch.softmax(scores, -1)
    total = torch.zeros(len(query), values.shape[1], dtype=half)
    for column, row in enumerate(listed.tolist()):
        total = total + weights[:, column : column + 1].to(half) * values[row].to(half)
    return total.to(values.dtype), torch.logsumexp(scores, -1)


@DECODE.mutant("output")
def reads_values_of_the_neighbour(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    listed = ids[ids >= 0]
    return decode(query, keys[listed], values[listed].roll(1, 0), torch.arange(len(listed)), scale=scale)


@DECODE.mutant("output", case=DecodeCase(heads=7))
def shares_the_first_head(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    return decode(query[:1].expand_as(query), keys, values, ids, scale=scale)


@DECODE.control
def flash_in_blocks(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    """Blocks of 64, online maximum, probabilities rounded to storage."""
    return _online(query, keys, values, ids, scale, 64, fade_output=True)


@DECODE.control
def two_pass(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    """Normalised probabilities, rounded to storage before they meet the values."""
    listed = ids[ids >= 0]
    if not len(listed):
        return peer_decode(query, keys, values, ids, scale=scale)
    scores = scale * (query.float() @ keys[listed].float().T)
    weights = torch.softmax(scores, -1).to(values.dtype).float()
    return (weights @ values[listed].float()).to(values.dtype), torch.logsumexp(scores, -1)


@DECODE.control
def splits_then_merges(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> Pair:
    """Three splits in fp32, merged."""
    parts = [
        decode(query.float(), keys.float(), values.float(), ids[start::3].contiguous(), scale=scale)
        for start in range(3)
    ]
    out, lse = merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    return out.to(values.dtype), lse


@MERGE.mutant("weighted_mean", "splits_join", "split_order_free")
def averages_the_splits(out: Tensor, lse: Tensor) -> Pair:
    return merge(out, torch.zeros_like(lse))[0], merge(out, lse)[1]


@MERGE.mutant("weighted_mean", "split_order_free", case=MergeCase(level=1000.0))
def weighs_without_maximum(out: Tensor, lse: Tensor) -> Pair:
    weights = torch.exp(lse)
    mass = weights.sum(0)
    parts = torch.where(weights[..., None] > 0, out.float(), 0.0)
    return ((weights[..., None] * parts).sum(0) / mass[:, None]).to(out.dtype), mass.log()


@MERGE.mutant("all_empty")
def empty_minus_empty_is_nan(out: Tensor, lse: Tensor) -> Pair:
    joint = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - joint)
    return (weights[..., None] * torch.where((lse == -torch.inf)[..., None], 0.0, out.float())).sum(0).to(
        out.dtype
    ), joint


@MERGE.mutant("empty_split_is_neutral", case=MergeCase())
def multiplies_empty_outputs(out: Tensor, lse: Tensor) -> Pair:
    _, joint = merge(out, lse)
    weights = torch.exp(lse - torch.where(joint == -torch.inf, 0.0, joint))
    return (weights[..., None] * out.float()).sum(0).to(out.dtype), joint


@MERGE.mutant("empty_split_is_neutral", case=MergeCase())
def empty_split_weighs_one(out: Tensor, lse: Tensor) -> Pair:
    return merge(out.nan_to_num(), lse.masked_fill(lse == -torch.inf, 0.0))


@MERGE.mutant("weighted_mean", case=MergeCase(spread=0.0))
def joint_lse_is_the_maximum(out: Tensor, lse: Tensor) -> Pair:
    return merge(out, lse)[0], lse.float().amax(0) if len(lse) else merge(out, lse)[1]


@MERGE.mutant("weighted_mean", "split_order_free", "splits_join")
def forgets_the_last_split(out: Tensor, lse: Tensor) -> Pair:
    return merge(out[:-1], lse[:-1])


@MERGE.control
def merges_in_pairs(out: Tensor, lse: Tensor) -> Pair:
    """A running merge, split by split, in fp32."""
    if len(lse) < 2:
        return merge(out, lse)
    running, level = out[:1].float(), lse[:1]
    for split in range(1, len(lse)):
        joined, raised = merge(
            torch.cat([running, out[split : split + 1].float()]), torch.cat([level, lse[split : split + 1]])
        )
        running, level = joined[None], raised[None]
    return running[0].to(out.dtype), level[0]
