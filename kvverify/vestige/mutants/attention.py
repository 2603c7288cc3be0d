"""Attention over cache rows that is known to be wrong, and two kernels that are differently right."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.attention import merge
from kvverify.vestige.cases import AttendCase
from kvverify.vestige.operators import ATTEND, peer_attend
from kvverify.vestige.policy import attend

__all__: list[str] = []

Pair = tuple[Tensor, Tensor]
BLOCK = 64


def rotated(vectors: Tensor, positions: Tensor) -> Tensor:
    """A rotary embedding of vectors[n, 2 pairs] at positions[n], in fp32."""
    pairs = vectors.shape[1] // 2
    angle = positions[:, None] * 100.0 ** (-torch.arange(pairs) / pairs)
    left, right = vectors.float().chunk(2, dim=1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=1)


@ATTEND.mutant("stationary", "position_free")
def rotates_the_branch(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    """Position as a rotary cache has it: a row's is its place in the pool, the query stands behind the last one."""
    here, now = torch.arange(len(rows)), torch.full((len(query),), len(rows))
    keys = torch.cat([rows[:, :value_dim].float(), rotated(rows[:, value_dim:], here)], dim=1)
    asked = torch.cat([query[:, :value_dim].float(), rotated(query[:, value_dim:], now)], dim=1)
    out, lse = attend(asked, keys, ids, scale=scale, value_dim=value_dim)
    return out.to(rows.dtype), lse


@ATTEND.mutant("log_sum_exp", "leakage_output")
def forgets_scale(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query, rows, ids, scale=1.0, value_dim=value_dim)


@ATTEND.mutant("row_certificate", "log_sum_exp")
def scales_twice_too_much(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query, rows, ids, scale=2 * scale, value_dim=value_dim)


@ATTEND.mutant("exchangeable", "output")
def favours_the_first_listed_row(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query, rows, torch.cat([ids[:1], ids]), scale=scale, value_dim=value_dim)


@ATTEND.mutant("pads_are_silent", "output", case=AttendCase(pads=5))
def clamps_pads_to_row_zero(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query, rows, ids.clamp(min=0), scale=scale, value_dim=value_dim)


@ATTEND.mutant("pads_are_silent", "log_sum_exp", case=AttendCase(pads=5))
def pads_score_zero(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    pool = torch.cat([rows, torch.zeros_like(rows[:1])])
    return attend(query, pool, torch.where(ids < 0, len(rows), ids), scale=scale, value_dim=value_dim)


@ATTEND.mutant("merge_of_equal_rows", "log_sum_exp", case=AttendCase(regime="repeated"))
def attends_each_row_once(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query, rows, ids.unique(), scale=scale, value_dim=value_dim)


@ATTEND.mutant("output")
def takes_the_branch_for_the_value(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    _, lse = attend(query, rows, ids, scale=scale, value_dim=value_dim)
    turned = rows.roll(-value_dim, 1)
    return attend(query.roll(-value_dim, 1), turned, ids, scale=scale, value_dim=value_dim)[0], lse


@ATTEND.mutant("log_sum_exp", "merge_needs_the_lse")
def scores_by_content_only(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query[:, :value_dim], rows[:, :value_dim], ids, scale=scale, value_dim=value_dim)


@ATTEND.mutant("log_sum_exp", "leakage", case=AttendCase(regime="equal"))
def lse_to_the_base_two(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    out, lse = attend(query, rows, ids, scale=scale, value_dim=value_dim)
    return out, lse / torch.tensor(2.0).log()


@ATTEND.mutant("empty")
def empty_list_is_nan(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    out, lse = attend(query, rows, ids, scale=scale, value_dim=value_dim)
    return (out, lse) if (ids >= 0).any() else (out * torch.nan, lse - lse)


@ATTEND.mutant("output", "log_sum_exp", case=AttendCase(listed=65))
def merges_a_stale_split(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    parts = [attend(query, rows, part, scale=scale, value_dim=value_dim) for part in ids.split(BLOCK) if len(part)]
    parts += parts[:1]  # the workspace of a longer list still holds a split
    if not parts:
        return attend(query, rows, ids, scale=scale, value_dim=value_dim)
    return merge(*(torch.stack(side) for side in zip(*parts, strict=True)))


@ATTEND.mutant("canaries", "log_sum_exp", case=AttendCase(listed=65, seed=8))
def drops_the_last_row(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    return attend(query, rows, ids[:-1], scale=scale, value_dim=value_dim)


@ATTEND.control
def attends_in_splits(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    """Three splits in fp32, merged; an empty one is neutral."""
    parts = [attend(query.float(), rows.float(), ids[start::3], scale=scale, value_dim=value_dim) for start in range(3)]
    out, lse = merge(*(torch.stack(side) for side in zip(*parts, strict=True)))
    return out.to(rows.dtype), lse


@ATTEND.control
def attends_backwards(query: Tensor, rows: Tensor, ids: Tensor, *, scale: float, value_dim: int) -> Pair:
    """The list from its end, with weights rounded to storage as a flash kernel does."""
    return peer_attend(query, rows, ids.flip(0), scale=scale, value_dim=value_dim)
