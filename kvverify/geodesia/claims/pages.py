"""The exact residual and page summaries."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvverify.geodesia.cases import (
    BoxCase,
    RankPagesCase,
    ResidualCase,
)
from kvverify.geodesia.claims.quantizer import first
from kvverify.geodesia.operators import (
    BOX,
    RANK_PAGES,
    RESIDUAL,
)
from kvverify.geodesia.pages import page_scores
from kvverify.geodesia.residual import salience
from kvverify.geodesia.validity import FP32_EPSILON, top_fault
from kvverify.run import Run

__all__: list[str] = []

PAGES = "Geodesia-KV, compressed Quest"


@RESIDUAL.claim(evidence="exact", source="Geodesia-KV, exact residual")
def residual_topk(run: Run, case: ResidualCase) -> None:
    """The tokens kept have the largest a_j ||v_j - mean of their block||^2; the last block's mean is of real tokens."""
    inputs = case.build()
    score = salience(inputs.mass, inputs.values, block=case.block)
    largest = inputs.values.double().abs().amax() if inputs.values.numel() else torch.tensor(0.0).double()
    # fp32 sums up to `block` values of this size; each of dim differences is off by e.
    e = FP32_EPSILON * (2 + min(case.block, 64) / 16) * largest
    mass = inputs.mass.double()
    norm = (score / mass.clamp(min=1e-300)).sqrt()
    slack = mass * (2 * norm * e * case.dim**0.5 + case.dim * e * e) + score * FP32_EPSILON * (case.dim + 4)
    run.valid(inputs.call, lambda ids: top_fault(ids, score, slack, count=inputs.count))


@BOX.claim(evidence="exact", source=PAGES)
def box_contains(run: Run, case: BoxCase) -> None:
    """No key lies outside the box of its block: fp16 is rounded outward."""
    inputs = case.build()
    home = torch.arange(len(inputs.keys)) // inputs.block

    def fault(low: Tensor, high: Tensor) -> str | None:
        keys, blocks = inputs.keys.double(), -(-len(inputs.keys) // inputs.block)
        if len(low) != blocks or len(high) != blocks:
            return f"low and high have {len(low)} and {len(high)} blocks: expected {blocks}"
        outside = ~((low.double()[home] <= keys) & (keys <= high.double()[home]))
        return first(outside, lambda token, channel: f"key {token} lies outside its box in channel {channel}")

    run.valid(inputs.call, fault)


@BOX.claim(evidence="exact", source=PAGES)
def box_outward(run: Run, case: BoxCase) -> None:
    """low and high are the nearest fp16 numbers outward from the least and the largest key, over real rows only."""
    inputs = case.build()
    run.equal(inputs.call, inputs.call)


@RANK_PAGES.claim(evidence="exact", source=PAGES)
def best_pages(run: Run, case: RankPagesCase) -> None:
    """Each head keeps pages of the largest c sum_d max(q_d low_d, q_d high_d), without repeats; ties are free."""
    inputs = case.build()
    score = page_scores(inputs.query, inputs.low, inputs.high, scale=inputs.scale)
    reach = inputs.query.double().abs() @ torch.maximum(inputs.low.abs(), inputs.high.abs()).double().T * inputs.scale
    slack = reach * FP32_EPSILON * (case.dim + 2)

    def fault(pages: Tensor) -> str | None:
        rows = zip(pages, score, slack, strict=True)
        told = (top_fault(*row, count=inputs.keep) for row in rows)
        return next((f"head {head} {fault}" for head, fault in enumerate(told) if fault), None)

    run.valid(inputs.call, fault)


@RANK_PAGES.claim(evidence="exact", source=PAGES)
def box_bound(run: Run, case: RankPagesCase) -> None:
    """A page with a key that scores above every other page's bound is the best page: bounds hide no key."""
    case = replace(case, keep=1)
    inputs = case.build()
    held = torch.einsum("hd,pkd->hpk", inputs.query.double(), case.keys()).amax(-1) * inputs.scale
    bound = page_scores(inputs.query, inputs.low, inputs.high, scale=inputs.scale)
    size = bound.abs().amax() if bound.numel() else torch.tensor(0.0).double()
    slack = FP32_EPSILON * (case.dim + 2) * size
    above = (bound[:, None, :] + 2 * slack >= held[:, :, None]).sum(-1)
    sure = above <= inputs.keep  # itself included

    def fault(pages: Tensor) -> str | None:
        kept = torch.zeros_like(sure)
        if pages.numel():
            kept.scatter_(1, pages.clamp(0, case.pages - 1), True)
        return first(sure & ~kept, lambda head, page: f"head {head} left out page {page}, which holds the best key")

    run.valid(inputs.call, fault)
