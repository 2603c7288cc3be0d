"""A transformers model that reads a prompt with dense attention and then decodes on caches of ours, several at once.

The model is asked for nothing but its projections: an attention function registered with transformers receives each
layer's queries, keys and values after rotation, and hands them to one `LayerCache` per row and attention layer. Row r
of the batch is one sequence under one policy; the weights of the model are read once for all rows, and rows that read
the same tokens have paired scores. Layers and heads may hold different numbers of states: no mask of the model's is
used, every cache knows what it holds.

    prefill    tokens 0 .. n-1, in one forward or in chunks: exact causal attention in the model's dtype; then each
               cache takes the keys, values and last queries of the prompt
    call       further tokens: their keys and values are appended by the cache, then their queries are served
    generate   the most likely tokens, one by one

Positions are always given to the model, never left to it: after an eviction it would count rows. Attention layers are
numbered in the model's order, and linear-attention layers not counted: they keep their state in `Served.states`.
"""

from __future__ import annotations

import collections.abc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvverify.models import require
from kvverify.models.attention_layers import absorb, attention_layers, is_latent, value_of
from kvverify.models.exact import Exact
from kvverify.models.layer_caches import Consecutive, LayerCache, Row, serve_tokens
from kvverify.models.passing import passing_cache, repeat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

__all__ = ["LayerCache", "Served", "attending", "serving"]

_NAME = "kvverify"


class Served:
    """Sequences under several policies. Made by `serving`, or with the prompt behind them by `conversation`.

    `states` is the transformers cache that passes keys and values through, and holds what linear-attention layers keep.
    """

    def __init__(self, model: Any, rows: Sequence[Row], *, observed: int, begun: bool, states: Any) -> None:
        self.rows = rows
        self.states = states
        self._model = model
        self._layers = attention_layers(model)
        self._number = {layer.index: number for number, layer in enumerate(self._layers)}
        self._observed = observed
        self._begun = begun
        self._prompt: list[_Prompt] | None = None
        self._next: Tensor | None = None  # the most likely next token of each row
        self._over = ""  # why the caches can serve no more
        self._closed = False

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, *, chunk: int | None = None) -> Tensor:
        """Read the prompt, `chunk` tokens a forward (None: all at once); return the logits [1, 1, vocab] after it.

        Chunks change the order of floating-point sums and nothing else: policies see the whole prompt, at its end.
        Shapes: tokens[n].
        """
        self.require_open()
        if self._begun:
            raise ValueError("a prompt was already read, expected it to come first")
        self._check_tokens(tokens, rows=None)
        if chunk is not None:
            _check_count("chunk", chunk, "token a forward")
        with self._whole():
            return self._prefill(tokens, chunk or len(tokens))

    def _prefill(self, tokens: Tensor, chunk: int) -> Tensor:
        for row in self.rows:
            row.open(len(tokens), generated=False)
        self._prompt = [_Prompt(Exact(scale=layer.scale, window=layer.window)) for layer in self._layers]
        start = 0
        for part in tokens.split(chunk):
            positions = torch.arange(start, start + len(part), device=tokens.device)
            logits = self._forward(part[None], positions[None], last_only=True)
            start += len(part)
        for number, prompt in enumerate(self._prompt):
            for row in self.rows:
                row.layers[number].prefill(prompt.last_queries, *prompt.exact.rows)
        for row in self.rows:
            row.close()
        self._prompt, self._begun = None, True
        repeat(self.states, len(self.rows))
        self._next = logits[:, -1].argmax(-1).expand(len(self.rows))
        return logits

    def __call__(self, tokens: Tensor) -> Tensor:
        """Serve the next tokens in every row; return the logits [rows, n, vocab] after each.

        Shapes: tokens[n], the same for all rows, or tokens[rows, n].
        """
        return self._serve(tokens, generated=False)

    ask = __call__

    def generate(self, limit: int, *, stop: Collection[int] = ()) -> list[list[int]]:
        """Continue every row greedily until a token of `stop`, which ends its answer, or `limit` tokens.

        The last token of an answer has been said and not read: begin the next tokens with it where it should be
        remembered. A row that has stopped is fed on, unheard, until all have: if answers differ in length, nothing more
        is served, because the caches hold what was not said.
        """
        if self._next is None:
            raise ValueError("nothing was read, expected a prompt or a question before the first generated token")
        self.require_open()
        _check_count("limit", limit, "token")
        answers: list[list[int]] = [[] for _ in self.rows]
        going = [True] * len(self.rows)
        for turn in range(limit):
            if turn:
                self._serve(self._next[:, None], generated=True)
            for row, token in enumerate(self._next.tolist()):
                if going[row]:
                    answers[row].append(token)
                    going[row] = token not in stop
            if not any(going):
                break
        if len({len(answer) for answer in answers}) > 1:
            self._over = (
                "answers ended after different numbers of tokens, so the first to end hold some that were not said"
            )
        return answers

    def close(self) -> None:
        """Serve no more: the model attends by itself again."""
        self._closed = True

    def require_open(self, *, reading: bool = False) -> None:
        """Raise ValueError where the caches are not what was read and said; unless `reading`, also after the block."""
        over = self._over or ("" if reading or not self._closed else "the block that served the model has ended")
        if over:
            raise ValueError(f"{over}: expected a new one, from the prompt or the sessions as they were")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A forward that fails leaves some layers one step behind others."""
        try:
            yield
        except BaseException:
            self._over = "a forward failed, so that layers and positions no longer agree"
            raise

    @torch.inference_mode()
    def _serve(self, tokens: Tensor, *, generated: bool) -> Tensor:
        if not self._begun:
            raise ValueError("no prompt was read, expected prefill() before the first token")
        self.require_open()
        self._check_tokens(tokens, rows=len(self.rows))
        tokens = tokens.expand(len(self.rows), -1) if tokens.ndim == 1 else tokens
        with self._whole():
            places = [list(row.open(tokens.shape[1], generated=generated)) for row in self.rows]
            logits = self._forward(tokens, torch.tensor(places, device=tokens.device), last_only=False)
            for row in self.rows:
                row.close()
        self._next = logits[:, -1].argmax(-1)
        return logits

    def _forward(self, tokens: Tensor, positions: Tensor, *, last_only: bool) -> Tensor:
        logits: Tensor = self._model(
            input_ids=tokens,
            position_ids=positions,
            cache=self.states,
            use_cache=True,
            logits_to_keep=int(last_only),  # of 0 transformers makes "all"
            served=self,
        ).logits
        return logits

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one layer, as transformers asks for it.

        Shapes: query[rows, heads, n, dim], key[rows, kv, n, dim], value[rows, kv, n, value_dim]
        -> [rows, n, heads, value_dim].
        """
        number, latent = self._number[module.layer_idx], is_latent(module)
        if latent:
            query, key, value = absorb(module, query, *self.states.passed)
        grouped = query.unflatten(1, (key.shape[1], -1))
        if self._prompt is not None:
            out = self._prompt[number].read(grouped[0], key[0], value[0], observed=self._observed)[None]
        else:
            each = zip(self.rows, grouped, key, value, strict=True)
            out = torch.stack([serve_tokens(row.layers[number], *tensors).to(query.dtype) for row, *tensors in each])
        out = out.flatten(1, 2)
        return (value_of(module, out) if latent else out).transpose(1, 2)

    def _check_tokens(self, tokens: object, *, rows: int | None) -> None:
        """Refuse what is not tokens[n], or tokens[rows, n], of the model's vocabulary."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            found = str(tokens.dtype) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ValueError(f"tokens is of {found}, expected a tensor of int64 token ids")
        right = tokens.ndim == 1 or (rows is not None and tokens.ndim == 2 and len(tokens) == rows)
        if not right or not tokens.shape[-1]:
            wanted = "[n]" if rows is None else f"[n] or [{rows}, n]"
            raise ValueError(f"tokens has shape {list(tokens.shape)}, expected {wanted} with at least one token")
        size, largest = self._model.get_input_embeddings().num_embeddings, int(tokens.max())
        if largest >= size or int(tokens.min()) < 0:
            raise ValueError(f"tokens holds {largest}, expected ids of a vocabulary of {size}")

    def check(self, module: Any, mask: object, options: dict[str, Any]) -> None:
        """Refuse what the caches do not do: padding, and attention that is more than a softmax of scaled products."""
        if mask is not None:
            raise ValueError("attention_mask is given, expected none: a row is one sequence without padding")
        window = self._layers[self._number[module.layer_idx]].window
        if options.get("sliding_window") != window:
            found = options.get("sliding_window")
            raise ValueError(
                f"model: layer {module.layer_idx} has a window of {found}, expected {window}, as its module"
            )
        for name in ("softcap", "s_aux"):
            if options.get(name) is not None:
                raise ValueError(f"model: layer {module.layer_idx} attends with {name}, expected a plain softmax")


class _Prompt:
    """A layer while the prompt is read: exact rows, and the last queries."""

    def __init__(self, exact: Exact) -> None:
        self.exact = exact
        self.last_queries: Tensor = torch.empty(0)

    def read(self, queries: Tensor, keys: Tensor, values: Tensor, *, observed: int) -> Tensor:
        seen = torch.cat([self.last_queries, queries], 2) if self.last_queries.numel() else queries
        self.last_queries = seen[:, :, max(0, seen.shape[2] - observed) :]
        return self.exact.serve(queries, keys, values)


@contextmanager
def serving(model: Any, caches: Sequence[Sequence[LayerCache]], *, observed: int = 64) -> Iterator[Served]:
    """Let `caches[row][attention layer]` serve the model's attention inside the block; then it is as it was.

    Works for decoder models of transformers (5.24 or later) that attend through its attention interface and cache keys
    after rotation, or latents. `observed`: how many last prompt queries the caches are shown.
    """
    for row in caches:
        if not isinstance(row, collections.abc.Sequence):
            raise ValueError(f"caches holds a {type(row).__name__}, expected a list of layer caches for each row")
    with attending(model, [Consecutive(row) for row in caches], observed=observed) as served:
        yield served


@contextmanager
def attending(
    model: Any,
    rows: Sequence[Row],
    *,
    observed: int = 0,
    begun: bool = False,
    states: Any = None,
) -> Iterator[Served]:
    """Serve `rows`, as `serving` does; `begun`: their caches hold a prompt, after which `states` stand."""
    layers = len(attention_layers(model))
    if not rows:
        raise ValueError("rows is empty, expected at least one sequence to serve")
    lengths = {len(row.layers) for row in rows}
    if lengths != {layers}:
        raise ValueError(f"caches have {sorted(lengths)} layers in a row, expected {layers} in each of at least one")
    transformers = require("transformers")
    transformers.AttentionInterface.register(_NAME, _attend)
    transformers.AttentionMaskInterface.register(_NAME, _no_mask)
    states = passing_cache(model) if states is None else states
    if begun:
        repeat(states, len(rows))
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    served = Served(model, rows, observed=observed, begun=begun, states=states)
    try:
        yield served
    finally:
        served.close()
        model.set_attn_implementation(before)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, *, served: Served, **options: Any
) -> tuple[Tensor, None]:
    served.check(module, mask, options)
    return served.attend(module, query, key, value), None


def _no_mask(*_: object, attention_mask: Tensor | None = None, **__: object) -> Tensor | None:
    return attention_mask  # the user's own, for `Served.check` to refuse


def _check_count(name: str, value: object, what: str) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, expected at least one {what}")
