"""The paper's inequalities, as functions of their own quantities: one formula for claims, tests and tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_real, require_tensor

__all__ = ["leakage_output_bound", "leakage_ratio", "rotated_page_energy", "score_change_bound"]


def score_change_bound(query: Tensor, distance: float, *, scale: float) -> Tensor:
    """|delta s| <= scale ||Q|| distance, [heads], where a row is replaced by one within `distance` of it.

    query[heads, dim]. Source: VestigeKV section 3(c).
    """
    require_tensor("query", query, (None, None))
    require_real("distance", distance, minimum=0.0)
    norm: Tensor = torch.linalg.vector_norm(query, dim=1)
    return scale * distance * norm


def leakage_ratio(excluded: int, margin: float) -> float:
    """Bound x on the excluded over the included softmax mass: excluded e^-margin.

    It needs every excluded score to be at least `margin` below the best included one. Source: VestigeKV Lemma 3.
    """
    require_count("excluded", excluded)
    require_real("margin", margin)
    return excluded * math.exp(-margin)


def leakage_output_bound(ratio: float, value_norm: float) -> float:
    """Bound on the output error at a mass ratio x: 2 x / (1 + x) max ||v||.

    The paper prints x max ||v||, which is false: kept v = +1, excluded v = -1 and x = 0.5 give 2/3. Proof of this
    one: the error is p ||mean of the excluded values - output over the kept||, p the excluded share; p <= x / (1 +
    x), and the two are at most 2 max ||v|| apart. Source: VestigeKV Lemma 3, corrected for this project.
    """
    require_real("ratio", ratio, minimum=0.0)
    require_real("value_norm", value_norm, minimum=0.0)
    return 2 * ratio / (1 + ratio) * value_norm


def rotated_page_energy(pair_norm: Tensor, frequency: Tensor, *, page: int) -> Tensor:
    """Mean squared distance of one key at `page` consecutive positions to its mean: sum_j ||k_j||^2 (1 - D_j^2).

    D_j = |sin(page theta_j / 2)| / (page |sin(theta_j / 2)|), and 1 for theta_j = 0: without rotation a page of one
    content has radius 0. pair_norm[pairs] is ||k_j||, frequency[pairs] is theta_j in radians per token; the result is
    0-d. Source: VestigeKV equation 5.
    """
    require_tensor("pair_norm", pair_norm, (None,))
    require_tensor("frequency", frequency, (pair_norm.shape[0],))
    require_count("page", page, minimum=1)
    step = torch.sin(frequency / 2)
    coherence = torch.sin(page * frequency / 2) / (page * step.where(step != 0, 1.0))
    return (pair_norm**2 * (1 - coherence.where(step != 0, 1.0) ** 2)).sum()
