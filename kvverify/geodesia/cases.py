"""The cases of the single operators of Geodesia-KV; `store_case` and `decode_operator` hold the two larger ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Case, Inputs, among, generator, magnitudes
from kvverify.geodesia import policy
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.ladder import LADDER
from kvverify.geodesia.rows import rows

__all__ = [
    "AllocateCase",
    "BoxCase",
    "CapturedBoxCase",
    "CapturedQuantizeCase",
    "DequantizeCase",
    "PackCase",
    "QuantizeCase",
    "RankPagesCase",
    "ResidualCase",
    "ToleranceCase",
]

REGIMES = ("normal", "constant", "offset", "tiny", "large", "loud", "mixed", "ties", "edge")


@dataclass(frozen=True, repr=False)
class QuantizeCase(Case):
    """Values in groups. groups: along the grouped axis. members: of a group. other: length of the axis not grouped."""

    groups: int = among(2, 1, 3)
    members: int = among(8, 1, 2, 63, 64, 65)
    other: int = among(5, 0, 1, 64, 65)
    bits: int = among(8, 4, 2)
    axis: str = among("token", "channel")
    regime: str = among(*REGIMES)

    def values(self) -> Tensor:
        """The values, grouped axis first, float64[groups * members, other]."""
        return rows(self.groups * self.members, self.other, regime=self.regime, seed=self.seed)

    def build(self) -> Inputs:
        """Build x in the storage dtype."""
        values = self.values() if self.axis == "token" else self.values().T.contiguous()
        return Inputs({"x": values.to(self.torch_dtype)}, self.numbers())

    def numbers(self) -> dict[str, Any]:
        """Keyword arguments of quantize and dequantize."""
        return {"bits": self.bits, "axis": self.axis, "group": self.members}


@dataclass(frozen=True, repr=False)
class CapturedQuantizeCase(QuantizeCase):
    """Keys (by token) or values (by channel) of a head of a real cache; its key channels have unequal ranges."""

    layer: int = among(0, 1, 2)
    dtype: str = among("bf16")
    members: int = among(32)

    def values(self) -> Tensor:
        """512 keys, tokens first, or 512 values, channels first, in 64 dims."""
        from kvverify.data import captured_cache

        cache = captured_cache()
        found = cache.keys[self.layer, 0] if self.axis == "token" else cache.values[self.layer, 0].T
        return found.double()


@dataclass(frozen=True, repr=False)
class DequantizeCase(QuantizeCase):
    """Any codes with any scales: lows of the regime, steps between 0 and as large as they."""

    def build(self) -> Inputs:
        """Build codes in uint8, lo and step in fp16."""
        shape = (self.groups * self.members, self.other)
        codes = torch.randint(0, 2**self.bits, shape, generator=generator(self.seed, stream=1), dtype=torch.uint8)
        low = rows(self.groups, self.other, regime=self.regime, seed=self.seed).half()
        # One group in three is constant: its step is 0.
        share = torch.randint(0, 3, low.shape, generator=generator(self.seed, stream=2)).double() / 510
        step = (low.double().abs() * share).half()
        codes = codes if self.axis == "token" else codes.T.contiguous()
        return Inputs({"codes": codes, "lo": low, "step": step}, self.numbers())


@dataclass(frozen=True, repr=False)
class PackCase(Case):
    """Codes of any number, which need not fill the last byte."""

    tokens: int = among(3, 0, 1, 63, 64, 65)
    dim: int = among(8, 1, 3, 5)
    bits: int = among(4, 2, 8)
    pattern: str = among("random", "largest", "ramp")

    def build(self) -> Inputs:
        """Build codes uint8[tokens, dim] below 2^bits."""
        shape = (self.tokens, self.dim)
        codes = torch.randint(0, 2**self.bits, shape, generator=generator(self.seed), dtype=torch.uint8)
        match self.pattern:
            case "largest":
                codes = torch.full_like(codes, 2**self.bits - 1)
            case "ramp":
                codes = (torch.arange(codes.numel()) % 2**self.bits).to(torch.uint8).reshape(shape)
        return Inputs({"codes": codes}, {"bits": self.bits})


@dataclass(frozen=True, repr=False)
class AllocateCase(Case):
    """Blocks at their current rungs, and a budget.

    lowest: the largest rung index that a block may be on. hot: which blocks may not move. rate: the budget in bits per
    value. mass, error: equal ones make ties; the numbers are rounded to the storage dtype, which makes near ties real.
    "rising" errors are those of quantizers, "any" ones are neither convex nor monotone.
    """

    blocks: int = among(6, 0, 1, 2, 12, 40)
    lowest: int = among(0, 1, 2, 3, 4)
    hot: str = among("some", "none", "ends", "all")
    rate: float = among(4.5, 16.0, 12.0, 8.5, 6.0, 2.5, 1.0, 0.25, 0.1)
    mass: str = among("random", "equal", "some zero", "one holds all", "mixed")
    error: str = among("rising", "any", "equal", "some constant")

    def build(self) -> Inputs:
        """Build mass and error in fp32, levels, hot mask, bits of a block, and the budget."""
        random = generator(self.seed)
        mass = torch.rand(self.blocks, generator=random, dtype=torch.float64) + 0.01
        match self.mass:
            case "equal":
                mass = torch.ones_like(mass)
            case "some zero":
                mass[::2] = 0
            case "one holds all":
                mass[1:] = 1e-9
            case "mixed":
                mass = magnitudes(self.blocks, self.seed)
        mass = mass / mass.sum().clamp(min=1e-30)
        level = torch.randint(0, self.lowest + 1, (self.blocks,), generator=random)
        hot = torch.rand(self.blocks, generator=random, dtype=torch.float64) < 0.3
        match self.hot:
            case "none" | "all":
                hot = torch.full_like(hot, self.hot == "all")
            case "ends":
                hot = (torch.arange(self.blocks) < 1) | (torch.arange(self.blocks) >= self.blocks - 2)
        cost = torch.tensor(Geometry(dim=128).costs, dtype=torch.float32)
        return Inputs(
            {
                "mass": mass.to(self.torch_dtype).float(),
                "error": self.curves(random).to(self.torch_dtype).float(),
                "level": level,
                "hot": hot,
                "cost": cost,
            },
            {"budget_bits": math.floor(self.rate * self.blocks * int(cost[0]) / 16)},
        )

    def curves(self, random: torch.Generator) -> Tensor:
        """Errors of each block at each rung, float64[blocks, levels]; the exact rung has none."""
        extent = 10 * torch.rand(self.blocks, 1, generator=random, dtype=torch.float64) + 0.1
        spread = 0.3 + torch.rand(self.blocks, 1, generator=random, dtype=torch.float64)
        shape = torch.tensor([0, *(1 / (2 * (2**bits - 1)) for bits in LADDER[1:4])], dtype=torch.float64)
        found = torch.cat([shape * extent, spread * extent], 1)
        match self.error:
            case "any":
                found = torch.rand(found.shape, generator=random, dtype=torch.float64)
                found[:, 0] = 0
            case "equal":
                found = found[:1].expand_as(found).clone()
            case "some constant":
                found[1::2] = 0
        return found


@dataclass(frozen=True, repr=False)
class ToleranceCase(Case):
    """Blocks with a mass and the range of their keys, and a tolerance for the score error.

    extent: "boundary" ones ask for a whole number of bits, up to rounding.
    """

    blocks: int = among(5, 1, 2, 20)
    tau: float = among(0.5, 0.001, 0.1, 10.0)
    mass: str = among("random", "equal", "some zero")
    extent: str = among("random", "boundary", "mixed", "some zero")

    def build(self) -> Inputs:
        """Build mass and extent in fp32."""
        random = generator(self.seed)
        mass = torch.rand(self.blocks, generator=random, dtype=torch.float64) + 0.01
        extent = 20 * torch.rand(self.blocks, generator=random, dtype=torch.float64)
        match self.mass:
            case "equal":
                mass = torch.ones_like(mass)
            case "some zero":
                mass[1::2] = 0
        mass = mass / mass.sum()
        scale, norm = 0.125, 7.0
        match self.extent:
            case "boundary":
                steps = torch.tensor([2 ** LADDER[1 + block % 3] - 1 for block in range(self.blocks)]).double()
                extent = steps * 2 * self.tau / (self.blocks * mass.clamp(min=1e-3) * scale * norm)
            case "mixed":
                extent = 100 * magnitudes(self.blocks, self.seed)
            case "some zero":
                extent[::2] = 0
        return Inputs(
            {"mass": mass.float(), "extent": extent.float()}, {"tau": self.tau, "scale": scale, "query_norm": norm}
        )


@dataclass(frozen=True, repr=False)
class ResidualCase(Case):
    """Token masses and values, the last block partial. count: cut to the tokens there are."""

    tokens: int = among(20, 0, 1, 63, 64, 65, 130)
    dim: int = among(4, 1, 16)
    block: int = among(8, 1, 64)
    count: int = among(5, 0, 1, 1000)
    mass: str = among("random", "equal", "one holds all", "peaked")
    regime: str = among(*REGIMES)

    def build(self) -> Inputs:
        """Build mass in fp32 and values in the storage dtype."""
        mass = torch.rand(self.tokens, generator=generator(self.seed, stream=1), dtype=torch.float64)
        match self.mass:
            case "equal":
                mass = torch.ones_like(mass)
            case "one holds all":
                mass[1:] = 0
            case "peaked":
                mass = mass**8
        values = rows(self.tokens, self.dim, regime=self.regime, seed=self.seed).to(self.torch_dtype)
        return Inputs(
            {"mass": mass.float(), "values": values}, {"block": self.block, "count": min(self.count, self.tokens)}
        )


@dataclass(frozen=True, repr=False)
class BoxCase(Case):
    """Keys in blocks, the last of which may be partial."""

    tokens: int = among(20, 0, 1, 63, 64, 65, 128)
    dim: int = among(5, 1, 64)
    block: int = among(8, 1, 64)
    regime: str = among(*REGIMES)

    def build(self) -> Inputs:
        """Build keys in the storage dtype."""
        keys = rows(self.tokens, self.dim, regime=self.regime, seed=self.seed)
        return Inputs({"keys": keys.to(self.torch_dtype)}, {"block": self.block})


@dataclass(frozen=True, repr=False)
class CapturedBoxCase(BoxCase):
    """Keys of a head of a real cache."""

    layer: int = among(0, 1, 2)
    dtype: str = among("bf16")

    def build(self) -> Inputs:
        """Build 500 keys of 64 dims in blocks of 64."""
        from kvverify.data import captured_cache

        return Inputs({"keys": captured_cache().keys[self.layer, 0, :500].contiguous()}, {"block": 64})


@dataclass(frozen=True, repr=False)
class RankPagesCase(Case):
    """Boxes of pages of keys, and the queries that rank them. keep: cut to the pages there are."""

    pages: int = among(7, 0, 1, 2, 65)
    heads: int = among(2, 1, 7, 8)
    dim: int = among(5, 1, 64)
    keep: int = among(2, 0, 1, 1000)
    regime: str = among("normal", "negative", "equal", "offset", "tiny", "large", "loud", "spread")

    def keys(self) -> Tensor:
        """The keys in the boxes, float64[pages, 8, dim]."""
        known = self.regime if self.regime in REGIMES else "normal"
        found = rows(self.pages * 8, self.dim, regime=known, seed=self.seed).reshape(self.pages, 8, self.dim)
        match self.regime:
            case "negative":
                found = -found.abs()
            case "equal":
                found = found[:1].expand_as(found).clone()
            case "spread":
                # Every second page is wide around zero, the others narrow: a centre says nothing.
                found[::2] *= 10
        return found

    def build(self) -> Inputs:
        """Build queries in the storage dtype, boxes in fp16."""
        query = torch.randn(self.heads, self.dim, generator=generator(self.seed, stream=1), dtype=torch.float64)
        if self.regime == "negative":
            query = query.abs()
        low, high = policy.box(self.keys().flatten(0, 1), block=8)
        return Inputs(
            {"query": query.to(self.torch_dtype), "low": low, "high": high},
            {"keep": min(self.keep, self.pages), "scale": self.dim**-0.5},
        )
