"""A transformers model that reads a prompt with dense attention and then decodes on caches of ours, several at once.

The model is asked for nothing but its projections: an attention function registered with transformers receives each
layer's queries, keys and values after rotation, and hands them to one `LayerCache` per policy and layer. Row r of the
batch is policy r; all rows read the same tokens, so their scores are paired, and the weights of the model are read once
for all of them.

    prefill    tokens 0 .. n-1: causal attention in the model's dtype; each cache takes the keys, values, last queries
    decode     each further token: its key and value are appended by the cache, then its query is served

Teacher forcing: with a prefix of n tokens, token n is the first input and token n + 1 the first target (`score`), so
m tokens after the prefix make m - 1 calls at Q = 1 and as many targets.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvverify.models import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["LayerCache", "Scores", "Served", "score", "serving"]

_NAME = "kvverify"


class LayerCache(Protocol):
    """What one layer's cache does under one policy; the group is the query heads that share a KV head."""

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in the prompt and its last queries.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append one token and serve its query.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, dim] -> [kv, group, dim].
        """


@dataclass(frozen=True, eq=False)
class Scores:
    """Per row and target: negative log-likelihood and KL(row 0 || row) of the next token (nats); did argmax hit."""

    nll: Tensor  # [rows, targets]
    next_token_kl: Tensor  # [rows, targets]
    correct: Tensor  # [rows, targets]


class Served:
    """One prompt under several policies, `caches[row][layer]`. Made by `serving`."""

    def __init__(self, model: Any, caches: Sequence[Sequence[LayerCache]], observed: int) -> None:
        self._model = model
        self._caches = caches
        self._observed = observed
        self._length = 0

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Read the prompt; return the logits [1, 1, vocab] after its last token.

        Shapes: tokens[n].
        """
        if self._length:
            raise ValueError(f"{self._length} tokens were already read, expected the prompt to come first")
        return self._forward(tokens[None])

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Serve the next tokens in every row; return the logits [rows, n, vocab] after each.

        Shapes: tokens[n].
        """
        if not self._length:
            raise ValueError("no prompt was read, expected prefill() before the first token")
        return self._forward(tokens.expand(len(self._caches), -1))

    def _forward(self, tokens: Tensor) -> Tensor:
        position = torch.arange(self._length, self._length + tokens.shape[1])[None]
        keep = 1 if not self._length else 0  # of 0 transformers makes "all"
        logits: Tensor = self._model(
            input_ids=tokens, position_ids=position, use_cache=False, logits_to_keep=keep, served=self
        ).logits
        self._length += tokens.shape[1]
        return logits

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of one layer, as transformers asks for it.

        Shapes: query[rows, heads, n, dim], key[rows, kv, n, dim], value[rows, kv, n, dim] -> [rows, n, heads, dim].
        """
        grouped = query.unflatten(1, (key.shape[1], -1))
        if not self._length:
            for row in self._caches:
                row[layer].prefill(grouped[0, :, :, -self._observed :], key[0], value[0])
            dense = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
            return dense.transpose(1, 2)
        out = torch.empty_like(grouped)
        for r, row in enumerate(self._caches):
            for i in range(query.shape[2]):
                out[r, :, :, i] = row[layer].step(grouped[r, :, :, i], key[r, :, i], value[r, :, i])
        return out.flatten(1, 2).transpose(1, 2)


@contextmanager
def serving(model: Any, caches: Sequence[Sequence[LayerCache]], *, observed: int = 64) -> Iterator[Served]:
    """Let `caches[row][layer]` serve the model's attention inside the block; afterwards the model is as it was.

    Works for decoder models of transformers (5.24 or later) that attend through its attention interface over the whole
    context and cache keys after rotation (Llama, Qwen2, Qwen3...). `observed`: how many last prompt queries go along.
    """
    layers = model.config.num_hidden_layers
    lengths = {len(row) for row in caches}
    if lengths != {layers}:
        raise ValueError(f"caches have {sorted(lengths)} layers in a row, expected {layers} in each of at least one")
    transformers = require("transformers")
    transformers.AttentionInterface.register(_NAME, _attend)
    transformers.AttentionMaskInterface.register(_NAME, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield Served(model, caches, observed)
    finally:
        model.set_attn_implementation(before)


def score(forward: Callable[[Tensor], Tensor], tokens: Tensor, *, prefix: int, chunk: int = 1) -> Scores:
    """Score tokens prefix+1 .. of a text by teacher forcing, `chunk` inputs a call, after the prefix was read.

    `forward(tokens[n]) -> logits[rows, n, vocab]`, the logits after each token. nll = -log p(target).

    Shapes: tokens[n] -> Scores of n - prefix - 1 targets.
    """
    targets = len(tokens) - prefix - 1
    if prefix < 1 or targets < 1:
        raise ValueError(f"prefix is {prefix}, expected 1 to {len(tokens) - 2}, to leave an input and a target")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected at least one token a call")
    inputs, wanted = tokens[prefix:-1], tokens[prefix + 1 :]
    parts = []
    for start in range(0, targets, chunk):
        logp = forward(inputs[start : start + chunk]).double().log_softmax(-1)
        now = wanted[start : start + chunk]
        nll = -logp.gather(2, now.expand(len(logp), -1)[..., None])[..., 0]
        kl = (logp[:1].exp() * (logp[:1] - logp)).sum(-1)
        parts.append((nll, kl, logp.argmax(-1) == now))
    return Scores(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, *, scaling: float, served: Served, **_: object
) -> tuple[Tensor, None]:
    if mask is not None:
        raise ValueError("attention_mask is given, expected none: the caches hold one unpadded sequence")
    return served.attend(module.layer_idx, query, key, value, scaling), None


def _no_mask(*_: object, **__: object) -> None:
    return None
