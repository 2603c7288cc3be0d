"""The attention layers of a model, and latent attention (MLA) as attention with one KV head.

For MLA transformers caches a content c and a rotary branch r per token, and expands them to keys and values in every
forward. With W_UK and W_UV the two halves of kv_b_proj, head h scores a token by

    scale (<q_nope, W_UK c> + <q_rot, r>) = scale <[q_rot ; W_UK^T q_nope], [r ; c]>

and its output is W_UV applied to the weighted sum of c. So a policy sees queries [q_rot ; W_UK^T q_nope], one KV head
whose keys are the rows [r ; c] and whose values are c, and nothing is expanded. The branch comes first: the dims that
rotate lead, as in every layer with partial rotation, and relocation needs no case of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionLayer", "absorb", "attention_layers", "is_latent", "up_projections", "value_of"]


@dataclass(frozen=True)
class AttentionLayer:
    """A layer that keeps a row per token.

    index: its place among all layers of the model. scale: what scores are multiplied by. window: how many tokens a
    query sees, its own included; None: all. latent: whether it is MLA.
    """

    index: int
    scale: float
    window: int | None
    latent: bool


def attention_layers(model: Any) -> tuple[AttentionLayer, ...]:
    """List the attention layers of `model` in order; linear-attention layers are none. ValueError if there is none."""
    found = [
        AttentionLayer(module.layer_idx, float(module.scaling), _window(module), is_latent(module))
        for module in model.modules()
        if hasattr(module, "scaling") and hasattr(module, "layer_idx")
    ]
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no attention layer, expected a decoder of transformers")
    return tuple(sorted(found, key=lambda layer: layer.index))


def is_latent(module: Any) -> bool:
    """Say whether an attention module is MLA."""
    return hasattr(module, "kv_b_proj")


def absorb(module: Any, query: Tensor, content: Tensor, branch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of latent attention in the absorbed form.

    Shapes: query[rows, heads, n, nope + branch] after rotation, content[rows, 1, n, content],
    branch[rows, 1, n, branch] -> [rows, heads, n, branch + content], [rows, 1, n, branch + content],
    [rows, 1, n, content].
    """
    nope, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=3)
    up_key, _ = up_projections(module)
    query = torch.cat([rotated, torch.einsum("rhnd,hdc->rhnc", nope, up_key)], dim=3)
    return query, torch.cat([branch, content], dim=3), content


def value_of(module: Any, mixed: Tensor) -> Tensor:
    """Expand weighted content to the output of each head.

    Shapes: mixed[rows, heads, n, content] -> [rows, heads, n, value].
    """
    return torch.einsum("rhnc,hvc->rhnv", mixed, up_projections(module)[1])


def up_projections(module: Any) -> tuple[Tensor, Tensor]:
    """W_UK[heads, nope, content] and W_UV[heads, value, content]."""
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    weight = module.kv_b_proj.weight.unflatten(0, (module.num_heads, nope + value))
    return weight[:, :nope], weight[:, nope:]


def _window(module: Any) -> int | None:
    window = getattr(module, "sliding_window", None)
    return None if window is None else int(window)
