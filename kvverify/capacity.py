"""How much context, and how many sequences, a memory budget holds at a given rate.

    values per token   layers * 2 * kv_heads * head_dim
    bytes per token    values per token * bits per value / 8
    max context        floor(budget / bytes per token)
    concurrency        floor(budget / (bytes per token * context))

A policy of constant memory (SnapKV, StreamingLLM keep n tokens whatever T) has no bytes per token: its cache is
n * values per token * 2 bytes, its concurrency does not depend on the context, and it has no largest context here.
The usable fraction of a card is measured bytes / nominal bytes and never exceeds 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GIB", "CacheShape", "Retained", "projected_budget", "usable_fraction"]

GIB = 2**30


@dataclass(frozen=True)
class CacheShape:
    """What a model caches for each token."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Key and value scalars of one token, all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def bytes_per_token(self, bits_per_value: float) -> float:
        """Bytes of one token at a rate."""
        if not bits_per_value > 0:
            raise ValueError(f"bits_per_value is {bits_per_value}, expected a positive rate")
        return self.values_per_token * bits_per_value / 8

    def max_context(self, budget_bytes: float, bits_per_value: float) -> int:
        """Tokens of one sequence that fit the budget."""
        return math.floor(budget_bytes / self.bytes_per_token(bits_per_value))

    def concurrency(self, budget_bytes: float, bits_per_value: float, context: int) -> int:
        """Sequences of `context` tokens that fit the budget together."""
        if context < 1:
            raise ValueError(f"context is {context}, expected a positive number of tokens")
        return math.floor(budget_bytes / (self.bytes_per_token(bits_per_value) * context))

    def total_gib(self, weights_bytes: float, bits_per_value: float, context: int) -> float:
        """Weights and cache of one sequence, GiB."""
        return (weights_bytes + context * self.bytes_per_token(bits_per_value)) / GIB


@dataclass(frozen=True)
class Retained:
    """A policy that keeps a fixed number of exact 16-bit tokens."""

    shape: CacheShape
    tokens: int

    @property
    def constant_bytes(self) -> int:
        """Bytes of the cache, at any context."""
        return self.tokens * self.shape.values_per_token * 2

    def concurrency(self, budget_bytes: float) -> int:
        """Sequences that fit the budget, at any context."""
        return math.floor(budget_bytes / self.constant_bytes)


def usable_fraction(total_bytes: int, nominal_gib: int) -> float:
    """Return measured / nominal memory of a card; above 1 the nominal size is wrong (ValueError)."""
    fraction = total_bytes / (nominal_gib * GIB)
    if not 0 < fraction <= 1:
        raise ValueError(f"nominal_gib is {nominal_gib}, expected at least the {total_bytes / GIB:.2f} GiB measured")
    return fraction


def projected_budget(nominal_gib: float, fraction: float, weights_bytes: int, activation_bytes: int) -> float:
    """Cache bytes on a card of another size: nominal * fraction - weights - activation peak."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}, expected a usable share of at most 1")
    return nominal_gib * GIB * fraction - weights_bytes - activation_bytes
