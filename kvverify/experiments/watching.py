"""Watch a layer's cache from outside: what it holds and reads, and how far its attention is from dense attention.

The watcher keeps an exact copy of the rows that the cache was given, rounded as the cache rounds them. The policy never
sees it. Every step adds to the footprint; every `every`-th step is compared with dense attention of the same query:

    attention KL    KL(policy || dense) of the softmax weights over positions, nats, mean over heads. In this direction
                    it is finite for a policy that holds part of the context
    certificate     the bound that the cache computes about itself, and the true || o - o^ ||_2 (`GradedCache.bounds`)

This is not the KL of next-token distributions, which a published table calls by the same name; that one is in `Scores`.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

import torch
from torch import Tensor

from kvverify.geodesia import certificate
from kvverify.geodesia.baselines import Footprint, attend_rows
from kvverify.geodesia.reconstructed import GradedCache
from kvverify.models.serving import LayerCache

__all__ = ["Watched", "WatchedCache"]


class WatchedCache(LayerCache, Protocol):
    """A layer cache that shows its last step."""

    weight: Tensor  # [kv, group, tokens]

    @property
    def footprint(self) -> Footprint:
        """Bits held and read."""


class Watched:
    """A layer cache under watch: itself a layer cache. Read its totals when the window is done."""

    def __init__(self, cache: WatchedCache, *, scale: float, dtype: torch.dtype, every: int) -> None:
        self.cache = cache
        self.values = 0
        self.resident = self.read_per_query_head = self.read_union = Fraction(0)
        self.attention_kl: list[float] = []
        self.bounds: list[Tensor] = []
        self.printed: list[Tensor] = []
        self.errors: list[Tensor] = []
        self._scale = scale
        self._dtype = dtype
        self._every = every
        self._given: tuple[list[Tensor], list[Tensor]] = ([], [])  # keys and values [kv, tokens, dim], not yet rounded
        self._length = 0
        self._steps = 0

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Pass the prompt on.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        self._give(keys, values)
        self.cache.prefill(queries, keys, values)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Pass one query on and measure what it did.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, dim] -> [kv, group, dim].
        """
        self._give(key[:, None], value[:, None])
        out = self.cache.step(query, key, value)
        footprint = self.cache.footprint
        self.resident += footprint.resident
        self.read_per_query_head += footprint.read_per_query_head
        self.read_union += footprint.read_union
        self.values += 2 * key.numel() * self._length
        if self._steps % self._every == 0:
            self._compare(query, out)
        self._steps += 1
        return out

    def _give(self, keys: Tensor, values: Tensor) -> None:
        """Keep what was given, by reference: the watchers of all policies share one prompt."""
        for side, rows in zip(self._given, (keys, values), strict=True):
            side.append(rows)
        self._length += keys.shape[1]

    def _compare(self, query: Tensor, out: Tensor) -> None:
        rows = torch.stack([torch.cat(side, 1).to(self._dtype).double() for side in self._given])
        dense, weight = attend_rows(query, rows, scale=self._scale)
        served = self.cache.weight
        # Where the policy holds nothing it adds nothing, although dense attention may be 0 there too.
        terms = torch.where(served > 0, served * (served / weight).log(), 0.0)
        self.attention_kl.append(float(terms.sum(-1).mean()))
        if isinstance(self.cache, GradedCache) and self.cache.decoder.read is None:
            self.bounds.append(self.cache.bounds(query).flatten())
            self.printed.append(self.cache.bounds(query, certificate.printed).flatten())
            self.errors.append((out - dense).norm(dim=-1).flatten())
