"""Geodesia-KV on a model: one packed store per attention layer, and no dense copy of what it holds.

    caches = geodesia_caches(model, budget=4.6)
    with serving(model, [caches], observed=32) as served:
        served.prefill(tokens)
        answers = served.generate(32)
    resident_bits(caches)

Every query is served from the packed store by the loop of `kvverify.geodesia.decoding`, token by token, so however the
tokens of a question are fed, the result is the same. `kvverify.geodesia.reconstructed.GradedCache` is the same policy
with the decoded rows kept beside the store: faster, and no compression of memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.decoding import Decoder, Policy
from kvverify.geodesia.pool import PagePool
from kvverify.models.attention_layers import attention_layers
from kvverify.models.exact import Exact
from kvverify.models.layer_caches import LayerCache

__all__ = ["GeodesiaCache", "geodesia_caches", "resident_bits"]


class GeodesiaCache:
    """The packed cache of one layer. Keys and values are rounded to the pool's 16-bit dtype as they arrive.

    decoder: the policy and its state: levels, masses, `store`, the pages that the last query read.
    """

    def __init__(self, policy: Policy, pool: PagePool) -> None:
        self.decoder = Decoder(policy, pool)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in the prompt and its last queries.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        observed, dtype = self.decoder.policy.observed, self.decoder.cache.pool.dtype
        self.decoder.prefill(queries[:, :, -observed:], keys.to(dtype), values.to(dtype))

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append one token and serve its query, in float64.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, dim] -> [kv, group, dim].
        """
        dtype = self.decoder.cache.pool.dtype
        out, _ = self.decoder.step(query, key.to(dtype), value.to(dtype))
        return out


def geodesia_caches(
    model: Any,
    *,
    budget: float,
    block: int = 64,
    group: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> list[LayerCache]:
    """Make the caches of one row, for every attention layer of `model`: packed, or exact where a window slides.

    budget: bits per value. block: tokens of a block. group: scalars of a quantizer group. dtype: the 16-bit storage.
    options: further fields of `kvverify.geodesia.decoding.Policy` (decay, sinks, window, observed, allocator,
    residual_fraction, residual_form, page_fraction). ValueError for latent attention, whose rows are keys and values at
    once, and for a model that is not on the CPU, where the packed store of this reference lives.
    """
    if model.device.type != "cpu":
        raise ValueError(f"model is on {model.device}, expected the CPU: the packed store of the reference is there")
    config = model.config.get_text_config()
    kv_heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = Geometry(dim=dim, block=block, group=group, kv_heads=kv_heads)
    policy = Policy(budget=budget, scale=1.0, **options)
    caches: list[LayerCache] = []
    for layer in attention_layers(model):
        if layer.latent:
            raise ValueError(f"model: layer {layer.index} caches latents, expected keys and values of their own")
        if layer.window is not None:
            caches.append(Exact(scale=layer.scale, window=layer.window))
        else:
            caches.append(GeodesiaCache(replace(policy, scale=layer.scale), PagePool(geometry, dtype=dtype)))
    return caches


def resident_bits(caches: list[LayerCache]) -> int:
    """Count the bits of all packed buffers that hold keys, values, residual tokens and boxes; index bytes excluded."""
    stores = [cache.decoder.cache.packed() for cache in caches if isinstance(cache, GeodesiaCache)]
    return sum(8 * store.data_bytes for store in stores)
