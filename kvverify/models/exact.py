"""Exact attention over rows that are held as they came: the full cache of a layer, and what ragged heads need.

transformers builds one mask for all layers, from the length of the first. Heads that keep different numbers of states
need a mask per layer and head; `causal_attention` makes it from the slots that are valid. Slots are in the order in
which tokens came: what a query may see is decided by slots, never by rotary positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Exact", "Growing", "causal_attention"]


def causal_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    valid: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Softmax attention of the last n tokens of a cache, in the dtype of the cache.

    Query i of n stands in slot slots - n + i. It sees that slot and those before it, of which `valid` bool[kv, held]
    tells for the first `held` whether they hold a state (later ones do), and with a window w no slot that lies w or
    more behind its own.

    Shapes: queries[kv, group, n, dim], keys[kv, slots, dim], values[kv, slots, value_dim]
    -> [kv, group, n, value_dim].
    """
    count, slots = queries.shape[2], keys.shape[1]
    ragged = valid is not None and not bool(valid.all())
    short = window is not None and window < slots
    mask = None
    if ragged or short or 1 < count < slots:
        own = torch.arange(slots - count, slots, device=keys.device)[:, None]
        slot = torch.arange(slots, device=keys.device)
        mask = slot <= own
        if window is not None:
            mask = mask & (slot > own - window)
        if ragged and valid is not None:
            padded = torch.nn.functional.pad(valid, (0, slots - valid.shape[1]), value=True)
            mask = mask & padded[:, None, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = mask is None and count > 1
    return attend(
        queries, keys[:, None], values[:, None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True
    )


class Growing:
    """A tensor [..., tokens, dim] that grows at its end, with room to spare, so that appending copies what is new.

    `view` is what is held. A view taken earlier keeps its content: only slots after it are written.
    """

    def __init__(self, start: Tensor, *, spare: int = 256) -> None:
        self._spare = spare
        self._buffer = start
        self.length = start.shape[-2]

    def append(self, more: Tensor) -> None:
        """Add tokens, of the shape of the start but for their number."""
        self.extend(more.shape[-2])
        self.view[..., self.length - more.shape[-2] :, :] = more

    def extend(self, count: int) -> None:
        """Add `count` tokens that are written later."""
        end = self.length + count
        if end > self._buffer.shape[-2]:
            grown = self._buffer.new_empty(*self._buffer.shape[:-2], end + self._spare, self._buffer.shape[-1])
            grown[..., : self.length, :] = self.view
            self._buffer = grown
        self.length = end

    @property
    def view(self) -> Tensor:
        """What is held; writable."""
        return self._buffer[..., : self.length, :]


class Exact:
    """The full cache of a layer: every token, in the model's dtype. `window`: what a query sees, as in the model."""

    def __init__(self, *, scale: float, window: int | None = None) -> None:
        self._scale = scale
        self._window = window
        self._keys: Growing | None = None
        self._values: Growing | None = None

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:  # noqa: ARG002 - others choose by them
        """Take in the prompt.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, value_dim].
        """
        self._append(keys, values)

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append one token and serve its query.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, value_dim] -> [kv, group, value_dim].
        """
        return self.serve(query[:, :, None], key[:, None], value[:, None])[:, :, 0]

    def serve(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append n tokens and serve their queries, each of which sees its own token and those before it.

        Shapes: queries[kv, group, n, dim], keys[kv, n, dim], values[kv, n, value_dim] -> [kv, group, n, value_dim].
        """
        self._append(keys, values)
        return causal_attention(queries, *self.rows, scale=self._scale, window=self._window)

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys [kv, tokens, dim] and values [kv, tokens, value_dim] held; ValueError before the first token."""
        if self._keys is None or self._values is None:
            raise ValueError("the cache is empty, expected a prompt or a token first")
        return self._keys.view, self._values.view

    def _append(self, keys: Tensor, values: Tensor) -> None:
        if self._keys is None or self._values is None:
            self._keys, self._values = Growing(keys), Growing(values)
        else:
            self._keys.append(keys)
            self._values.append(values)
