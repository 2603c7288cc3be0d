"""The transformers cache that keeps no row: keys and values pass through it to the attention function.

Linear-attention layers keep their state in it as they do in any cache, one per sequence of the batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvverify.models import require

__all__ = ["passing_cache", "repeat"]


def passing_cache(model: Any) -> Any:
    """Make the cache for `model`; `passed` is what the last attention layer handed in, (keys, values)."""
    return _kind()(config=model.config)


def repeat(states: Any, rows: int) -> None:
    """Let each of `rows` sequences have what linear-attention layers kept of the one prompt."""
    states.reorder_cache(torch.zeros(rows, dtype=torch.int64))


@cache
def _kind() -> Any:
    class PassingCache(require("transformers").DynamicCache):  # type: ignore[misc]
        passed: tuple[Tensor, Tensor]

        def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
            self.passed = key, value
            return key, value

    return PassingCache
