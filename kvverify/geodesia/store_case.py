"""The contract of `geodesia.attend`: a packed store as an argument.

The store is built by the policy's own cache (rows appended, blocks demoted, the end cropped), then its pages are moved
about in the payload, between stale bytes that are NaN in every 16-bit dtype. The dense rows do not exist any more. The
harness sees the store as its buffers: each lies between guard bands, on its own strides, and may not be changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvverify.attention.policy import decode as dense_decode
from kvverify.cases import Case, Inputs, among, generator
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.ladder import EXACT, LADDER, MEAN
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.rows import rows
from kvverify.geodesia.sequence import Sequence
from kvverify.geodesia.store import PackedStore, reconstruct
from kvverify.operator import Operator, Output

__all__ = ["ATTEND", "StoreCase", "attend_condition", "dense_attend"]

STALE = 0xFF
"""A byte of a page that was freed: NaN in bf16 and fp16, and no code that the store points to."""


@dataclass(frozen=True, repr=False)
class StoreCase(Case):
    """A packed store and a query per head.

    group: query heads of a KV head. sizes: tokens of a block, head dim, quantizer group. levels: the rungs of closed
    blocks. kept: residual tokens of each head. cropped: tokens taken off the end after demotion. regime: of the keys;
    "ramp" makes scores rise along the sequence, so that a running maximum changes in every block.
    """

    kv: int = among(2, 1, 3)
    group: int = among(2, 1, 7, 8)
    tokens: int = among(45, 0, 1, 7, 8, 9, 16, 63, 64, 65, 130)
    sizes: tuple[int, int, int] = among((8, 8, 8), (16, 16, 8), (8, 16, 16))
    levels: str = among("mixed", "exact", "8", "4", "2", "1", "by head", "rising")
    kept: int = among(0, 3, 9)
    cropped: int = among(0, 3, 12)
    regime: str = among("normal", "ramp", "sink", "constant", "offset", "large", "loud", "tiny", "equal")

    @property
    def cache_dtype(self) -> torch.dtype:
        """Rows are cached in 16 bits; the query may be wider."""
        return torch.bfloat16 if self.dtype == "fp32" else self.torch_dtype

    def geometry(self) -> Geometry:
        """Sizes of the cache."""
        block, dim, group = self.sizes
        return Geometry(dim=dim, block=block, group=group, kv_heads=self.kv)

    def sides(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they arrived, in the cache's dtype [kv, tokens, dim]."""
        dim, shape = self.sizes[1], (self.kv, self.tokens, self.sizes[1])
        known = "normal" if self.regime in {"ramp", "equal", "offset"} else self.regime
        keys, values = (
            rows(self.kv * self.tokens, dim, regime=known, seed=self.seed, stream=side).reshape(shape)
            for side in (0, 1)
        )
        match self.regime:
            case "ramp":
                keys = (
                    self.queries()[:, :1]
                    * torch.linspace(-2, 4, max(self.tokens, 1), dtype=torch.float64)[: self.tokens, None]
                )
            case "equal":
                keys = keys[:, :1].expand_as(keys).clone()
            case "offset":
                keys[..., 0] += 1000
                values = values + 1000
        return keys.to(self.cache_dtype), values.to(self.cache_dtype)

    def queries(self) -> Tensor:
        """Queries of all heads, float64[kv, group, dim]."""
        shape = (self.kv, self.group, self.sizes[1])
        return torch.randn(shape, generator=generator(self.seed, stream=3), dtype=torch.float64)

    def rungs(self, blocks: int) -> Tensor:
        """The rung of every closed block [kv, blocks]."""
        match self.levels:
            case "mixed":
                shape = (self.kv, blocks)
                return torch.randint(0, len(LADDER), shape, generator=generator(self.seed, stream=4))
            case "by head":
                return (torch.arange(self.kv)[:, None] + 1).expand(self.kv, blocks) % len(LADDER)
            case "rising":
                return (torch.arange(blocks) % len(LADDER)).flip(0).expand(self.kv, blocks)
        level = EXACT if self.levels == "exact" else LADDER.index(int(self.levels))
        return torch.full((self.kv, blocks), level)

    def store(self) -> PackedStore:
        """Fill, demote and crop a cache, and gather its buffers."""
        sequence = Sequence(PagePool(self.geometry(), dtype=self.cache_dtype))
        keys, values = self.sides()
        sequence.append(keys, values)
        if self.kept and self.tokens:
            random = generator(self.seed, stream=5)
            drawn = torch.rand(self.kv, self.tokens, generator=random, dtype=torch.float64).argsort(-1)
            sequence.keep_exact([ids.sort().values for ids in drawn[:, : self.kept]])
        sequence.demote(self.rungs(len(sequence.valid)))
        sequence.crop(max(0, sequence.length - self.cropped))
        return scattered(sequence.packed(), self.seed)

    def build(self) -> Inputs:
        """Build the query in the storage dtype, the store in the cache's."""
        query = self.queries().to(self.torch_dtype)
        return Inputs({"query": query, "store": self.store()}, {"scale": self.sizes[1] ** -0.5})


@dataclass(frozen=True, repr=False)
class CapturedStoreCase(StoreCase):
    """A layer of a real cache in blocks of 64, on mixed rungs."""

    layer: int = among(0, 1, 2)
    dtype: str = among("bf16")
    group: int = among(3)
    tokens: int = among(500)
    sizes: tuple[int, int, int] = among((64, 64, 64))

    def sides(self) -> tuple[Tensor, Tensor]:
        """The captured keys and values."""
        from kvverify.data import captured_cache

        cache = captured_cache()
        return cache.keys[self.layer, :, : self.tokens], cache.values[self.layer, :, : self.tokens]

    def queries(self) -> Tensor:
        """The captured queries of the last token."""
        from kvverify.data import captured_cache

        return captured_cache().queries[self.layer, :, :, -1].double()


def scattered(store: PackedStore, seed: int) -> PackedStore:
    """Put the pages of a store in another order, with stale bytes before and between them."""
    level = store.level.flatten().tolist()
    page, offset = 2 * store.geometry.block * store.geometry.dim, store.offset.flatten().clone()
    pages = [at for at, rung in enumerate(level) if rung != MEAN]
    gap = torch.full((2 * page,), STALE, dtype=torch.uint8)
    parts, end = [gap], len(gap)
    for place in torch.randperm(len(pages), generator=generator(seed, stream=6)).tolist():
        at = pages[place]
        size = page * LADDER[level[at]] // 8
        parts += [store.payload[offset[at] : offset[at] + size], gap]
        offset[at] = end
        end += size + len(gap)
    return replace(store, payload=torch.cat(parts), offset=offset.reshape(store.offset.shape))


def dense_attend(
    query: Tensor, store: PackedStore, *, scale: float, arithmetic: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the rows that the store stands for, every token a row (the mean of a block, P times).

    Shapes: query[kv, group, dim] -> out[kv, group, dim], lse[kv, group].
    """
    keys, values = (side.to(arithmetic) for side in reconstruct(store))
    ids = torch.arange(keys.shape[1])
    heads = [
        dense_decode(q, k, v, ids, scale=scale) for q, k, v in zip(query.to(arithmetic), keys, values, strict=True)
    ]
    outs, lses = zip(*heads, strict=True)
    return torch.stack(outs), torch.stack(lses)


def peer_attend(query: Tensor, store: PackedStore, *, scale: float) -> tuple[Tensor, Tensor]:
    """An honest fused kernel: fp32 inside, probabilities rounded to the query's dtype before they meet the values."""
    keys, values = (side.float() for side in reconstruct(store))
    if not keys.shape[1]:
        return torch.zeros_like(query), query.new_full(query.shape[:2], -torch.inf).float()
    scores = scale * query.float() @ keys.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = (weights.to(query.dtype).float() @ values) / weights.sum(-1, keepdim=True)
    return out.to(query.dtype), torch.logsumexp(scores, -1)


def attend_condition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The condition of attention, per head: 4 (2 + max|q||k| scale) (1 + n/16) for lse, times max|v| for out."""
    keys, values = reconstruct(inputs.store)
    kv, group, _ = inputs.query.shape
    if not keys.shape[1]:
        return torch.zeros(kv, group), torch.zeros(kv, group)
    reach = inputs.query.double().norm(dim=-1) * keys.norm(dim=-1).amax(-1, keepdim=True) * inputs.scale
    through = 4 * (2 + reach) * (1 + keys.shape[1] / 16)
    return through * values.abs().amax((1, 2))[:, None], through


def attend_bytes(case: StoreCase) -> int:
    """The bits that the store accounts for, its index, and the query; stale bytes need not be read."""
    inputs: Any = case.build()
    store: PackedStore = inputs.store
    query = int(inputs.query.numel() * inputs.query.element_size())
    return store.accounted_bits // 8 + store.index_bytes + query


ATTEND = Operator(
    "geodesia.attend",
    "attend(query[kv,group,dim], store: PackedStore, *, scale) -> out[kv,group,dim], lse[kv,group]",
    case=StoreCase,
    oracle=dense_attend,
    peer=peer_attend,
    outputs=(Output("out"), Output("lse", dtype="float32", reduce=0)),
    read_bytes=attend_bytes,
    captured=tuple(CapturedStoreCase(layer=layer) for layer in range(3)),
    weight=5,
)
