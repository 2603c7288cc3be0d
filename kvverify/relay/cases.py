"""The cases of RoPERelay: which slots hold a state, keys and their tables, sessions over a selected cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvverify.cases import Case, Inputs, among, generator, magnitudes
from kvverify.relay import policy

__all__ = ["CapturedRelocateCase", "CompactCase", "RelocateCase", "SessionCase", "factors", "pairs_of"]

THETA = 10_000.0
HUGE = 3e4


def factors(positions: Tensor, pairs: int, amplitude: float = 1.0, *, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """cos and sin of p theta^(-i / pairs), times the amplitude: exact angles, rounded once to fp32 [..., pairs]."""
    frequencies = theta ** (-torch.arange(pairs, dtype=torch.float64) / max(pairs, 1))
    angles = positions.double()[..., None] * frequencies
    return (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()


def pairs_of(keys: Tensor, layout: policy.Layout, rotary_dims: int) -> Tensor:
    """The rotary pairs of keys [..., dim] as [..., pairs, 2], so that one pair is one unit of the budget."""
    rotary = keys[..., :rotary_dims]
    if layout == "half":
        return torch.stack([rotary[..., : rotary_dims // 2], rotary[..., rotary_dims // 2 :]], -1)
    return torch.stack([rotary[..., 0::2], rotary[..., 1::2]], -1)


@dataclass(frozen=True, repr=False)
class CompactCase(Case):
    """Which slots hold a state. pattern: how they are spread over heads of possibly different length."""

    layers: int = among(2, 1, 3)
    heads: int = among(2, 1, 7)
    slots: int = among(5, 0, 1, 64, 65, 520)
    pattern: str = among("ragged", "full", "scattered", "first head empty", "empty", "last head longest")

    def build(self) -> Inputs:
        """Build valid[layers, heads, slots]."""
        random = generator(self.seed)
        shape = (self.layers, self.heads, self.slots)
        counts = torch.randint(0, self.slots + 1, shape[:2], generator=random)
        valid = torch.arange(self.slots) < counts[..., None]
        match self.pattern:
            case "full":
                valid = torch.ones(shape, dtype=torch.bool)
            case "scattered":
                valid = torch.rand(shape, generator=random, dtype=torch.float32) < 0.6
            case "first head empty":
                valid[0, 0] = False
            case "empty":
                valid = torch.zeros(shape, dtype=torch.bool)
            case "last head longest":
                valid[:, :, self.slots // 2 :] = False
                valid[-1, -1] = True
        return Inputs({"valid": valid})


@dataclass(frozen=True, repr=False)
class RelocateCase(Case):
    """Keys of one head, rotated at a source position each, and the tables of source and target.

    passed: dims behind the rotary ones, which do not rotate. amplitude: that of the source table (1.1386 is YaRN's at
    factor 4). ratio: target amplitude over source amplitude. moves: where the keys come from and go to. scale: the size
    of the keys; "mixed" gives every row its own, "small pair" makes one pair small beside the others.
    """

    rows: int = among(5, 0, 1, 2, 63, 64, 65)
    pairs: int = among(4, 1, 3, 8, 32)
    passed: int = among(3, 0, 16)
    layout: Any = among("half", "interleaved")
    amplitude: float = among(1.0, 1.1386, 0.5)
    ratio: float = among(1.0, 1.25)
    moves: str = among("compact", "far", "near", "none")
    scale: str = among("one", "mixed", "small pair", "large")

    @property
    def rotary_dims(self) -> int:
        """Two for each pair."""
        return 2 * self.pairs

    def positions(self) -> tuple[Tensor, Tensor]:
        """Source and target positions: ascending, without repeats."""
        rows = torch.arange(self.rows)
        gaps = torch.randint(
            1, 2 + 100_000 // max(self.rows, 1), (self.rows,), generator=generator(self.seed, stream=1)
        )
        source = {"near": rows + 1, "none": gaps.cumsum(0)}.get(self.moves, gaps.cumsum(0))
        target = {"near": rows, "none": source, "far": source.flip(0)}.get(self.moves, rows)
        return source, target

    def projection(self) -> Tensor:
        """The keys before any rotation, float64[rows, dim]."""
        dim = self.rotary_dims + self.passed
        keys = torch.randn(self.rows, dim, generator=generator(self.seed), dtype=torch.float64)
        match self.scale:
            case "mixed":
                keys *= magnitudes(self.rows, self.seed)[:, None]
            case "small pair":
                side = [0, self.pairs] if self.layout == "half" else [0, 1]
                keys[:, side] *= 1e-3
            case "large":
                keys *= 64
        return keys

    def rotated(self, positions: Tensor, amplitude: float) -> Tensor:
        """The projection rotated at positions, in float64, with the tables that the case hands out."""
        cos, sin = factors(positions, self.pairs, amplitude)
        return policy.rotate(
            self.projection(), cos.double(), sin.double(), layout=self.layout, rotary_dims=self.rotary_dims
        )

    def build(self) -> Inputs:
        """Build keys in the storage dtype, four tables in fp32, layout and rotary_dims."""
        source, target = self.positions()
        tables = (
            *factors(source, self.pairs, self.amplitude),
            *factors(target, self.pairs, self.amplitude * self.ratio),
        )
        names = ("cos_source", "sin_source", "cos_target", "sin_target")
        keys = self.rotated(source, self.amplitude).to(self.torch_dtype)
        return Inputs(
            {"keys": keys, **dict(zip(names, tables, strict=True))},
            {"layout": self.layout, "rotary_dims": self.rotary_dims},
        )


@dataclass(frozen=True, repr=False)
class CapturedRelocateCase(RelocateCase):
    """Every fourth key of a real cache, moved to compact positions with the model's own tables."""

    layer: int = among(0, 1, 2)
    dtype: str = among("bf16")
    rows: int = among(128)
    pairs: int = among(32)
    passed: int = among(0)

    def positions(self) -> tuple[Tensor, Tensor]:
        """Every fourth source position of the capture, and the first ones."""
        from kvverify.data import captured_cache

        return captured_cache().source[::4][: self.rows], torch.arange(self.rows)

    def projection(self) -> Tensor:
        """The captured keys with their phase taken off in float64."""
        keys, (cos, sin) = self._captured()
        one, zero = torch.ones_like(cos), torch.zeros_like(sin)
        return policy.relocate(keys.double(), cos, sin, one, zero, layout="half", rotary_dims=self.rotary_dims)

    def _captured(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        from kvverify.data import captured_cache

        cache = captured_cache()
        return cache.keys[self.layer, 0, ::4][: self.rows], (cache.cos[::4][: self.rows], cache.sin[::4][: self.rows])

    def build(self) -> Inputs:
        """Build the stored keys as they are, with the model's tables at source and target."""
        from kvverify.data import captured_cache

        keys, (cos, sin) = self._captured()
        target = slice(0, self.rows)
        return Inputs(
            {
                "keys": keys.contiguous(),
                "cos_source": cos.contiguous(),
                "sin_source": sin.contiguous(),
                "cos_target": captured_cache().cos[target].contiguous(),
                "sin_target": captured_cache().sin[target].contiguous(),
            },
            {"layout": "half", "rotary_dims": self.rotary_dims},
        )


@dataclass(frozen=True, repr=False)
class SessionCase(Case):
    """A selected cache of several layers and heads, and the forwards that continue it.

    order: how a head's states lie in its slots ("score": as top-k returned them). pattern: which slots are empty; they
    hold NaN or huge numbers. changed: the table in force is no longer the one that wrote the keys (dynamic scaling).
    steps: tokens of each forward, a question, generated tokens, a second question.
    """

    layers: int = among(2, 1)
    heads: int = among(2, 1, 3)
    slots: int = among(5, 1, 0, 64, 300)
    pairs: int = among(4, 2)
    passed: int = among(3, 0)
    layout: str = among("half", "interleaved")
    amplitude: float = among(1.0, 1.1386)
    order: str = among("source", "score")
    pattern: str = among("ragged", "full", "first head empty", "empty", "full cache")
    changed: bool = among(False, True)
    steps: tuple[int, ...] = among((3, 1, 1, 2), (1,), (4,), (2, 1))

    @property
    def length(self) -> int:
        """Tokens of the history: twice the slots and one, unless the full cache is kept."""
        return max(self.slots, 1) if self.pattern == "full cache" else 2 * self.slots + 1

    def source(self) -> Tensor:
        """Source positions int64[layers, heads, slots], -1 where a slot is empty."""
        random = generator(self.seed, stream=1)
        shape = (self.layers, self.heads, self.slots)
        lots = torch.rand(*shape[:2], self.length, generator=random, dtype=torch.float32)
        chosen = lots.argsort(-1)[..., : self.slots]
        if self.order == "source":
            chosen = chosen.sort(-1).values
        counts = torch.randint(0, self.slots + 1, shape[:2], generator=random)
        match self.pattern:
            case "full" | "full cache":
                counts[:] = self.slots
            case "first head empty":
                counts[0, 0] = 0
            case "empty":
                counts[:] = 0
        held = torch.arange(self.slots) < counts[..., None]
        if self.order == "score":
            held = held.gather(-1, torch.rand(shape, generator=random, dtype=torch.float32).argsort(-1))
        return torch.where(held, chosen, -1)

    def build(self) -> Inputs:
        """Build the cache, the continuing tokens, and per layer the table that wrote the keys and the one in force."""
        random = generator(self.seed)
        source, store = self.source(), self.torch_dtype
        new, dim = sum(self.steps), 2 * self.pairs + self.passed
        sizes = [(self.slots, dim), (self.slots, 6), (new, dim), (new, 6)]
        drawn = [
            torch.randn(self.layers, self.heads, *size, generator=random, dtype=torch.float64).to(store)
            for size in sizes
        ]
        empty = (source < 0)[..., None]
        poison = torch.full((self.slots, 1), HUGE, dtype=store)
        poison[::2] = torch.nan
        for states in drawn[:2]:
            states.copy_(torch.where(empty, poison, states))
        positions = torch.arange(self.length + new + 1)
        per_layer = [
            factors(positions, self.pairs, self.amplitude, theta=THETA * 10**layer) for layer in range(self.layers)
        ]
        cos, sin = (torch.stack(side) for side in zip(*per_layer, strict=True))
        theta = THETA * (4 if self.changed else 1)
        in_force = [
            factors(positions, self.pairs, self.amplitude, theta=theta * 10**layer) for layer in range(self.layers)
        ]
        cos_now, sin_now = (torch.stack(side) for side in zip(*in_force, strict=True))
        return Inputs(
            {
                "keys": drawn[0],
                "values": drawn[1],
                "source": source,
                "fresh_keys": drawn[2],
                "fresh_values": drawn[3],
                "cos_written": cos,
                "sin_written": sin,
                "cos": cos_now,
                "sin": sin_now,
            },
            {
                "length": self.length,
                "steps": self.steps,
                "layout": self.layout,
                "rotary_dims": 2 * self.pairs,
            },
        )
