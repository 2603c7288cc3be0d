"""The one accounting of a graded cache: bits of a block, of the open block, of residual tokens and of page summaries.

Policy, store and tables all call these functions; the store's tests compare them with the bytes of real buffers.
All bits are for keys and values together, for one KV head of one layer. Index bytes (level map, offsets, residual ids)
are reported beside them, never inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from kvverify.geodesia.ladder import EXACT, LADDER, MEAN

__all__ = ["Geometry", "bits_per_value", "budget_bits", "summary_bits", "token_bits"]


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer's cache: tokens a block, head dimension, quantizer group, KV heads."""

    dim: int
    block: int = 64
    group: int = 64
    kv_heads: int = 1

    def __post_init__(self) -> None:
        for name in ("dim", "block", "group", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive integer")
        for name, length in (("block", self.block), ("dim", self.dim)):
            if length % min(self.group, length):
                raise ValueError(f"group is {self.group}, expected a divisor of {name} = {length} or at least {length}")
        if self.block * self.dim % 4:
            raise ValueError(
                f"block * dim is {self.block * self.dim}, expected a multiple of 4 (whole bytes at 2 bits)"
            )
        if any(low >= high for high, low in pairwise(self.costs)):
            raise ValueError(f"group is {self.group}, expected scales that let every rung save bits: {self.costs}")

    @property
    def key_groups(self) -> int:
        """Token groups of a block, max(1, P / g)."""
        return max(1, self.block // self.group)

    @property
    def value_groups(self) -> int:
        """Channel groups of a token, max(1, D / g)."""
        return max(1, self.dim // self.group)

    def block_bits(self, level: int) -> int:
        """Bits of one closed block at a rung (an index into the ladder).

        16 bits: 2 P D 16. L in {8, 4, 2}: 2 L P D + 32 key_groups D + 32 P value_groups. One mean: 2 D 16.
        """
        if not 0 <= level < len(LADDER):
            raise ValueError(f"level is {level}, expected an index into the ladder {LADDER}")
        if level == EXACT:
            return token_bits(self.dim, self.block)
        if level == MEAN:
            return token_bits(self.dim, 1)
        scales = 32 * (self.key_groups * self.dim + self.block * self.value_groups)
        return 2 * LADDER[level] * self.block * self.dim + scales

    @property
    def costs(self) -> tuple[int, ...]:
        """Bits of a block at every rung."""
        return tuple(self.block_bits(level) for level in range(len(LADDER)))


def token_bits(dim: int, tokens: int) -> int:
    """Bits of exact 16-bit tokens, 2 n D 16: the open block, and each residual token."""
    return 2 * tokens * dim * 16


def summary_bits(dim: int, length: int, *, block: int) -> int:
    """Bits of the page summaries (fp16 low and high of the keys), nb 2 D 16 with nb = ceil(T / P)."""
    return -(-length // block) * 2 * dim * 16


def budget_bits(rate: float, dim: int, length: int) -> int:
    """Bits that a rate of B bits per value allows for T real (not padded) tokens, floor(B 2 T D)."""
    if not rate > 0:
        raise ValueError(f"rate is {rate}, expected a positive number of bits per value")
    return math.floor(Fraction(str(rate)) * 2 * length * dim)


def bits_per_value(bits: int, dim: int, length: int) -> Fraction:
    """Return bits / (2 T D), exactly."""
    return Fraction(bits, 2 * length * dim)
