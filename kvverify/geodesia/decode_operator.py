"""The contract of `geodesia.decode`: a whole sequence, from the prompt through its queries, and all decisions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvverify.cases import Case, Inputs, among, generator
from kvverify.geodesia import plain
from kvverify.geodesia.ladder import MEAN
from kvverify.geodesia.rows import rows
from kvverify.operator import Operator, Output

__all__ = ["DECODE", "DecodeCase", "decode_condition"]

OBSERVED = 4


@dataclass(frozen=True, repr=False)
class DecodeCase(Case):
    """A prompt, the queries that follow it, and the numbers of the policy.

    group: query heads of a KV head. prompt, new: tokens. chunk: how many of the new ones arrive together. sizes:
    tokens of a block, head dim, quantizer group. rate: the budget in bits per value; it is `fall` lower from the middle
    on. pages: fraction of the pages that a query reads (0: all, without boxes). regime: of the keys; "wandering" turns
    the queries from one block to another, "repeated" makes blocks equal, so that their damages are.
    """

    dtype: str = among("bf16", "fp16")
    kv: int = among(2, 1)
    group: int = among(2, 1, 7)
    prompt: int = among(60, 1, 8, 9, 47)
    new: int = among(3, 1, 2, 8)
    chunk: int = among(1, 3, 10)
    sizes: tuple[int, int, int] = among((8, 8, 8), (16, 16, 8))
    rate: float = among(9.0, 16.0, 12.0, 7.5, 6.0, 2.0)
    fall: float = among(0.0, 1.5)
    decay: float = among(0.5, 0.9, 0.0, 1.0)
    residual: float = among(0.0, 0.2)
    pages: float = among(0.0, 0.25, 0.5, 1.0)
    regime: str = among("normal", "wandering", "repeated", "sink", "mixed")

    def rates(self) -> tuple[float, ...]:
        """The budget at each query."""
        return tuple(self.rate - (self.fall if 2 * i >= self.new else 0.0) for i in range(self.new))

    def sides(self) -> tuple[Tensor, Tensor, Tensor]:
        """All queries [kv, group, tokens, dim], keys and values [kv, tokens, dim], float64."""
        total, (block, dim, _) = self.prompt + self.new, self.sizes
        known = "normal" if self.regime in {"wandering", "repeated"} else self.regime
        keys, values = (
            rows(self.kv * total, dim, regime=known, seed=self.seed, stream=side).reshape(self.kv, total, dim)
            for side in (0, 1)
        )
        shape = (self.kv, self.group, total, dim)
        queries = 2 * torch.randn(shape, generator=generator(self.seed, stream=2), dtype=torch.float64)
        match self.regime:
            case "wandering":
                looked_at = (torch.arange(total) * 7) % max(self.prompt, 1)
                queries = 3 * keys[:, None, looked_at] + 0.2 * queries
            case "repeated":
                twice = torch.arange(total) % (2 * block)
                keys = keys[:, twice % total]
        return queries, keys, values

    def build(self) -> Inputs:
        """Build queries, keys and values in the storage dtype."""
        queries, keys, values = (side.to(self.torch_dtype) for side in self.sides())
        block, dim, group = self.sizes
        past, observed = slice(0, self.prompt), slice(max(0, self.prompt - OBSERVED), self.prompt)
        later = slice(self.prompt, self.prompt + self.new)
        return Inputs(
            {
                "observed": queries[:, :, observed].contiguous(),
                "prompt_keys": keys[:, past].contiguous(),
                "prompt_values": values[:, past].contiguous(),
                "queries": queries[:, :, later].contiguous(),
                "keys": keys[:, later].contiguous(),
                "values": values[:, later].contiguous(),
            },
            {
                "rates": self.rates(),
                "chunk": self.chunk,
                "scale": dim**-0.5,
                "block": block,
                "group": group,
                "decay": self.decay,
                "sinks": 4,
                "window": block,
                "residual": self.residual,
                "page_fraction": self.pages or None,
            },
        )


@dataclass(frozen=True, repr=False)
class CapturedDecodeCase(DecodeCase):
    """The last 128 tokens of a layer of a real cache, in blocks of 16, and the queries captured with them."""

    layer: int = among(0, 1, 2)
    prompt: int = among(126)
    new: int = among(2)
    sizes: tuple[int, int, int] = among((16, 64, 32))

    def sides(self) -> tuple[Tensor, Tensor, Tensor]:
        """The captured rows; queries are known for the last ones only, and the others are never asked for."""
        from kvverify.data import captured_cache

        cache, total = captured_cache(), self.prompt + self.new
        keys, values = (side[self.layer, :, -total:].double() for side in (cache.keys, cache.values))
        queries = cache.queries[self.layer].double()
        return torch.nn.functional.pad(queries, (0, 0, total - queries.shape[2], 0)), keys, values


def decode_condition(inputs: Inputs, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The conditions of out [kv, group, new], lse (the same) and mass [kv, new], as for attention.

    A mean row may be rounded to fp16 either way: where there is one, a score may move by that.
    """
    keys = torch.cat([inputs.prompt_keys, inputs.keys], 1).double()
    values = torch.cat([inputs.prompt_values, inputs.values], 1).double()
    reach = inputs.queries.double().norm(dim=-1) * keys.norm(dim=-1).amax(-1)[:, None, None] * inputs.scale
    through = 4 * (2 + reach) * (1 + keys.shape[1] / 16)
    has_mean = (level == MEAN).any(-1)[:, None]
    through = through + has_mean * 2.0**23 * 2.0**-11 * reach / keys.shape[2] ** 0.5
    return through * values.abs().amax((1, 2))[:, None, None], through, through.amax(1)


def decode_bytes(case: DecodeCase) -> int:
    """Every row and query once: a cache may hold them packed from then on."""
    return sum(tensor.numel() * tensor.element_size() for tensor in case.build().tensors.values())


DECODE = Operator(
    "geodesia.decode",
    "decode(observed[kv,group,n,dim], prompt_keys[kv,prompt,dim], prompt_values[kv,prompt,dim],"
    " queries[kv,group,new,dim], keys[kv,new,dim], values[kv,new,dim], *, rates, chunk, scale, block, group, decay,"
    " sinks, window, residual, page_fraction)"
    " -> out[kv,group,new,dim], lse[kv,group,new], level[kv,new,blocks], mass[kv,new,total], met[kv,new],"
    " resident[new], pages[kv,group,new,total], read[kv,group,new], bound[kv,group,new], kept[kv,count]",
    case=DecodeCase,
    oracle=plain.decode,
    peer=partial(plain.decode, honest=True),
    outputs=(
        Output("out"),
        Output("lse", dtype="float32", reduce=0),
        Output("level", dtype="int64", reduce=0),
        Output("mass", dtype="float32"),
        Output("met", dtype="bool", reduce=0),
        Output("resident", dtype="int64", reduce=0),
        Output("pages", dtype="bool", reduce=0),
        Output("read", dtype="int64", reduce=0),
        Output("bound", dtype="float32", reduce=0),
        Output("kept", dtype="int64", reduce=0),
    ),
    read_bytes=decode_bytes,
    captured=(CapturedDecodeCase(layer=1),),
    weight=16,
)
