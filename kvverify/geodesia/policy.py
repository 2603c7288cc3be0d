"""The reference functions of the Geodesia-KV operators, with the signatures that implementations bind to."""

from __future__ import annotations

from torch import Tensor

from kvverify.geodesia.allocate import budget, tolerance
from kvverify.geodesia.attend import attend
from kvverify.geodesia.ladder import dequantize, pack, quantize
from kvverify.geodesia.pages import box, rank_pages
from kvverify.geodesia.residual import residual
from kvverify.geodesia.serving import decode

__all__ = [
    "allocate",
    "attend",
    "box",
    "decode",
    "dequantize",
    "pack",
    "quantize",
    "rank_pages",
    "residual",
    "tolerance",
]


def allocate(
    mass: Tensor,
    error: Tensor,
    level: Tensor,
    hot: Tensor,
    cost: Tensor,
    *,
    budget_bits: float,
) -> Tensor:
    """Return the new rung of each block: the published prefix form (`kvverify.geodesia.allocate.budget`).

    Shapes: mass[blocks], error[blocks, levels], level[blocks], hot bool[blocks], cost[levels] -> [blocks].
    """
    return budget(mass, error, level, hot, cost, budget_bits=budget_bits).level
