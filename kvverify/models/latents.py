"""MLA as the policies see it: the latents that transformers caches, absorbed queries, and one step over chosen rows.

Theory of operation. For MLA transformers keeps, per layer, the content c[1, 1, rows, content] in `layer.keys` and the
branch r[1, 1, rows, branch] in `layer.values` (which is no value). `latents` hands out views of the two; only rows
that are attended are ever gathered into C_u = [c_u ; r_u]. With W_UK and W_UV the two halves of kv_b_proj, head h has

    score = scaling <[W_UK^T q_nope ; q_rot], C_u>,   output = W_UV sum_u softmax(score)_u c_u

so `step` runs a token through the model without expanding a latent, and leaves the attention to a callback: that is
where a policy decides which rows exist. With all rows it is the model, up to the order of additions.

Serves models with the layout of DeepSeek-V3 and of Kimi Linear's full-attention layers, without query compression.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvverify.models import require
from kvverify.models.attention_layers import up_projections

__all__ = ["Attend", "Latents", "Prefix", "absorbed", "latents", "read", "step"]

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, query[heads, dim], own row[dim]) -> softmax-weighted content, [heads, content]."""


@dataclass(frozen=True)
class Latents:
    """content[rows, content] and branch[rows, branch] of one layer of one sequence: views of the cache."""

    content: Tensor
    branch: Tensor

    def rows(self, ids: Tensor) -> Tensor:
        """Gather C_u = [c_u ; r_u] of these rows, [n, content + branch]."""
        return torch.cat([self.content[ids], self.branch[ids]], dim=1)

    def all_rows(self) -> Tensor:
        """C_u of every row: a copy of the whole layer, for those that need one."""
        return torch.cat([self.content, self.branch], dim=1)


@dataclass(frozen=True, eq=False)
class Prefix:
    """What a model made of tokens[length]: latents and absorbed queries[length, heads, dim], one each per layer.

    scale is that of a score, (nope + branch)^-1/2.
    """

    tokens: Tensor
    latents: tuple[Latents, ...]
    queries: tuple[Tensor, ...]
    scale: float

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.tokens.shape[0]


def latents(cache: Any, layer: int) -> Latents:
    """Views of what `cache` holds for `layer`; no byte is copied. ValueError unless it is one sequence of latents."""
    keys, values = cache.layers[layer].keys, cache.layers[layer].values
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dim() != 4 or tensor.shape[:2] != (1, 1):
            raise ValueError(f"{name} has shape {list(tensor.shape)}: expected [1, 1, rows, width], one MLA sequence")
    return Latents(keys[0, 0], values[0, 0])


@torch.no_grad()
def read(model: Any, tokens: Tensor, *, chunk: int | None = None) -> Prefix:
    """Prefill tokens[length], in chunks if asked, and keep the latents and the absorbed queries of every layer."""
    cache = require("transformers").DynamicCache(config=model.config)
    layers = model.model.layers
    heard: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _module, _inputs, output, own=own: own.append(output[0]))
        for layer, own in zip(layers, heard, strict=True)
    ]
    try:
        for start in range(0, tokens.shape[0], chunk or tokens.shape[0]):
            part = tokens[start : start + (chunk or tokens.shape[0])]
            positions = torch.arange(start, start + part.shape[0])[None]
            model(part[None], position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    positions = torch.arange(tokens.shape[0])
    queries = tuple(absorbed(model, number, torch.cat(own), positions)[0] for number, own in enumerate(heard))
    held = tuple(latents(cache, number) for number in range(len(layers)))
    return Prefix(tokens, held, queries, layers[0].self_attn.scaling)


def absorbed(model: Any, layer: int, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Absorbed queries[n, heads, content + branch] and cache rows[n, content + branch] of normed hidden[n, hidden]."""
    attention = model.model.layers[layer].self_attn
    nope, branch = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    query = attention.q_proj(hidden).unflatten(1, (attention.num_heads, nope + branch))
    content, side = attention.kv_a_proj_with_mqa(hidden).split([attention.kv_lora_rank, branch], dim=1)
    turned, side = _rotate(model, query[..., nope:], side, positions)
    up_key, _ = up_projections(attention)
    query = torch.cat([torch.einsum("nhd,hdc->nhc", query[..., :nope], up_key), turned], dim=2)
    return query, torch.cat([attention.kv_a_layernorm(content), side], dim=1)


@torch.no_grad()
def step(model: Any, token: int, position: int, attend: Attend) -> Tensor:
    """Logits[vocabulary] after one token at `position`, where `attend` supplies the attention of each layer."""
    state = model.model.embed_tokens(torch.tensor([token]))
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        query, row = absorbed(model, number, layer.input_layernorm(state), torch.tensor([position]))
        _, up_value = up_projections(attention)
        mixed = torch.einsum("hc,hdc->hd", attend(number, query[0], row[0]), up_value)
        state = state + attention.o_proj(mixed.reshape(1, -1))
        state = state + layer.mlp(layer.post_attention_layernorm(state))
    logits: Tensor = model.lm_head(model.model.norm(state))[0]
    return logits


def _rotate(model: Any, query: Tensor, side: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the rotary parts query[n, heads, branch] and side[n, branch] as the model does; without rotary, do not."""
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return query, side
    apply = require("transformers.models.deepseek_v3.modeling_deepseek_v3").apply_rotary_pos_emb_interleave
    cos, sin = rotary(side, positions[None])
    turned, moved = apply(query[None], side[None, :, None], cos, sin, unsqueeze_dim=2)
    return turned[0], moved[0, :, 0]
