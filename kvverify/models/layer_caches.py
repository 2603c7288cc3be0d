"""What a cache of ours looks like to a model: one `LayerCache` per attention layer, gathered in a `Row` per sequence.

The group is the query heads that share a KV head. A cache serves one token at a time (`step`) or, if it has a `serve`,
all tokens of a forward at once; `serve_tokens` asks in the way that the cache knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["BlockCache", "Consecutive", "LayerCache", "Row", "serve_tokens"]


class LayerCache(Protocol):
    """What one layer's cache does under one policy."""

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in the prompt and its last queries.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, value_dim].
        """

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append one token and serve its query.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, value_dim] -> [kv, group, value_dim].
        """


@runtime_checkable
class BlockCache(Protocol):
    """A layer cache that takes all tokens of a forward at once."""

    def serve(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append n tokens and serve their queries, each of which sees its own token and those before it.

        Shapes: queries[kv, group, n, dim], keys[kv, n, dim], values[kv, n, value_dim] -> [kv, group, n, value_dim].
        """


class Row(Protocol):
    """One sequence: its layer caches, and the positions that its tokens take."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """Its caches, one per attention layer."""

    def open(self, count: int, *, generated: bool) -> range:
        """Begin a forward of `count` tokens and return their positions; `generated`: it is the model's last token."""

    def close(self) -> None:
        """End the forward: every layer has served it."""


class Consecutive:
    """A row whose tokens take positions 0, 1, 2, ...: the way a model reads."""

    def __init__(self, layers: Sequence[LayerCache]) -> None:
        self.layers = layers
        self._next = 0

    def open(self, count: int, *, generated: bool) -> range:  # noqa: ARG002 - the next position, whoever wrote the token
        """Give the tokens the next positions."""
        self._next += count
        return range(self._next - count, self._next)

    def close(self) -> None:
        """End the forward; nothing is left to do."""


def serve_tokens(cache: LayerCache | BlockCache, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Append n tokens to `cache` and serve their queries, at once if the cache can.

    Shapes: queries[kv, group, n, dim], keys[kv, n, dim], values[kv, n, value_dim] -> [kv, group, n, value_dim].
    """
    if isinstance(cache, BlockCache):
        return cache.serve(queries, keys, values)
    each = range(keys.shape[1])
    return torch.stack([cache.step(queries[:, :, i], keys[:, i], values[:, i]) for i in each], 2)
