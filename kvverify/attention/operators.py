"""The contract of `attention.decode` and `attention.merge`: signatures, oracles, honest peers, cases, bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.attention import policy
from kvverify.cases import DTYPES, Case, Inputs, among, generator
from kvverify.operator import Operator, Output

__all__ = ["DECODE", "MERGE", "OPERATORS", "DecodeCase", "MergeCase", "decode_condition"]

HUGE = 3e4
"""A finite value that no honest result contains: it stands in rows that are not listed, beside the NaN rows."""


@dataclass(frozen=True, repr=False)
class DecodeCase(Case):
    """A pool, a list of some of its rows, and a query per head.

    listed: how many rows are listed. spare: how many more the pool holds; half of them NaN, half huge. pads: how many
    -1 are mixed into the list. regime: what the scores look like. canary: a listed row with a key aligned to the
    query of every head and a value found nowhere else (-1: none; beyond the list: its last row).
    """

    listed: int = among(5, 0, 1, 2, 63, 64, 65, 130)
    heads: int = among(2, 1, 7, 8)
    dim: int = among(16, 8, 64)
    value_dim: int = among(16, 8, 24)
    spare: int = among(3, 40)
    pads: int = among(0, 1, 5, 64)
    regime: str = among("normal", "equal", "negative", "sink", "offset", "tiny", "large", "repeated", "ramp")
    canary: int = among(-1, 0, 1, 63, 64, 65, 1_000_000)

    def build(self) -> Inputs:
        """Build the pool: row 0 is NaN and never listed, the listed rows lie scattered."""
        random = generator(self.seed)
        rows = 1 + self.listed + self.spare
        query = torch.randn(self.heads, self.dim, generator=random, dtype=torch.float64)
        listed_keys = torch.randn(self.listed, self.dim, generator=random, dtype=torch.float64)
        listed_values = torch.randn(self.listed, self.value_dim, generator=random, dtype=torch.float64)
        query, listed_keys, listed_values = self._shape_scores(query, listed_keys, listed_values)
        if self.canary >= 0 and self.listed:
            at = min(self.canary, self.listed - 1)
            mean = query.mean(0)
            listed_keys[at] = mean * (6 * self.dim**0.5 / mean.square().sum())
            listed_values[at] = torch.linspace(-3, 3, self.value_dim, dtype=torch.float64)
        keys = torch.full((rows, self.dim), torch.nan, dtype=torch.float64)
        values = torch.full((rows, self.value_dim), torch.nan, dtype=torch.float64)
        keys[rows // 2 :] = HUGE
        values[rows // 2 :] = HUGE
        keys[0], values[0] = torch.nan, torch.nan
        ids = 1 + torch.randperm(rows - 1, generator=random)[: self.listed]
        keys[ids], values[ids] = listed_keys, listed_values
        if self.regime == "repeated":
            ids = torch.cat([ids, ids[: (self.listed + 1) // 2]])
        slots = torch.randperm(len(ids) + self.pads, generator=random)
        ids = torch.cat([ids, torch.full((self.pads,), -1)])[slots] if self.pads else ids
        store = self.torch_dtype
        return Inputs(
            {"query": query.to(store), "keys": keys.to(store), "values": values.to(store), "ids": ids},
            {"scale": self.dim**-0.5},
        )

    def _shape_scores(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        match self.regime:
            case "equal":
                keys = keys[:1].expand_as(keys).clone()
            case "negative":
                query, keys = query.abs(), -keys.abs() - 1
            case "sink":
                keys[:1] = 12 * query[:1] / query[:1].norm()
            case "offset":
                keys[:, 0] += 1000
                values = values + 1000
            case "tiny":
                query, values = query * 1e-3, values * 1e-3
            case "large":
                query, keys = query * 4, keys * 16
            case "ramp":
                # Scores rise along the list: a running maximum changes in every block.
                keys = query[:1] * torch.linspace(-2, 6, len(keys), dtype=torch.float64)[:, None]
        return query, keys, values


@dataclass(frozen=True, repr=False)
class CapturedCase(DecodeCase):
    """A layer of a real cache: keys, values and a window query of a language model reading prose."""

    layer: int = among(0, 1, 2)
    dtype: str = among("bf16")
    listed: int = among(512)

    def build(self) -> Inputs:
        """The rows of one captured head, listed in reverse, behind a NaN row."""
        from kvverify.data import captured_cache

        cache = captured_cache()
        keys, values = cache.keys[self.layer, 0], cache.values[self.layer, 0]
        guard = torch.full_like(keys[:1], torch.nan)
        return Inputs(
            {
                "query": cache.queries[self.layer, 0, :, -1].contiguous(),
                "keys": torch.cat([guard, keys]),
                "values": torch.cat([guard, values]),
                "ids": torch.arange(len(keys), 0, -1)[: self.listed],
            },
            {"scale": keys.shape[1] ** -0.5},
        )


@dataclass(frozen=True, repr=False)
class MergeCase(Case):
    """Partial results of several splits. empty: which are empty; their out holds NaN. level: how large the lse are."""

    splits: int = among(3, 0, 1, 2, 8)
    heads: int = among(2, 1, 7)
    dim: int = among(16, 8)
    empty: str = among("none", "first", "last", "one head", "all")
    level: float = among(0.0, 1000.0, -1000.0)
    spread: float = among(2.0, 0.0, 40.0)

    def build(self) -> Inputs:
        """Build out in the storage dtype and lse in fp32."""
        random = generator(self.seed)
        out = torch.randn(self.splits, self.heads, self.dim, generator=random, dtype=torch.float64)
        lse = self.level + self.spread * torch.randn(self.splits, self.heads, generator=random, dtype=torch.float64)
        hole = torch.zeros(self.splits, self.heads, dtype=torch.bool)
        match self.empty:
            case "first":
                hole[:1] = True
            case "last":
                hole[-1:] = True
            case "one head":
                hole[:, 0] = True
            case "all":
                hole[:] = True
        return Inputs(
            {
                "out": out.masked_fill(hole[..., None], torch.nan).to(self.torch_dtype),
                "lse": lse.masked_fill(hole, -torch.inf).float(),
            }
        )


def decode_condition(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The condition of decode, per head: 4 (2 + max|q||k| scale) + n/16 for lse; with n/8, times max|v|, for out.

    A rounding of a score moves its weight by that much relatively. Adding n equal weights one by one in fp32 rounds in
    one direction: the sum is off by up to .234 n u (measured, n to 20,000), and out has two such sums.
    """
    listed = inputs.ids[inputs.ids >= 0]
    query = inputs.query.double()
    if not listed.numel():
        return torch.zeros(len(query)), torch.zeros(len(query))
    reach = query.norm(dim=-1) * inputs.keys[listed].double().norm(dim=-1).max() * inputs.scale
    scores = 4 * (2 + reach)
    largest = float(inputs.values[listed].double().abs().max())
    return (scores + len(listed) / 8) * largest, scores + len(listed) / 16


def peer_decode(query: Tensor, keys: Tensor, values: Tensor, ids: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """An honest fused kernel: fp32 scores, probabilities rounded to the storage dtype before they meet the values."""
    listed = ids[ids >= 0]
    if not listed.numel():
        return values.new_zeros(len(query), values.shape[1]), query.new_full((len(query),), -torch.inf).float()
    scores = scale * (query.float() @ keys[listed].float().T)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = (weights.to(values.dtype).float() @ values[listed].float()) / weights.sum(-1, keepdim=True)
    return out.to(values.dtype), torch.logsumexp(scores, -1)


def decode_bytes(case: DecodeCase) -> int:
    """Each listed row's key and value once, the query, and the list itself."""
    inputs = case.build()
    listed = int((inputs.ids >= 0).sum())
    item = DTYPES[case.dtype].itemsize
    row = int(inputs.keys.shape[1] + inputs.values.shape[1])
    return item * (listed * row + int(inputs.query.numel())) + 8 * int(inputs.ids.numel())


def merge_bytes(case: MergeCase) -> int:
    """Every partial result and every lse once."""
    cells = case.splits * case.heads
    return cells * (case.dim * DTYPES[case.dtype].itemsize + 4)


DECODE = Operator(
    "attention.decode",
    "decode(query[heads,dim], keys[rows,dim], values[rows,value_dim], ids[n] (-1 = pad), *, scale)"
    " -> out[heads,value_dim], lse[heads]",
    case=DecodeCase,
    oracle=policy.decode,
    peer=peer_decode,
    outputs=(Output("out"), Output("lse", dtype="float32", reduce=0)),
    read_bytes=decode_bytes,
    captured=tuple(CapturedCase(layer=layer) for layer in range(3)),
)

MERGE = Operator(
    "attention.merge",
    "merge(out[splits,heads,dim], lse[splits,heads]) -> out[heads,dim], lse[heads]",
    case=MergeCase,
    oracle=policy.merge,
    peer=policy.merge,
    outputs=(Output("out"), Output("lse", dtype="float32", reduce=0)),
    read_bytes=merge_bytes,
)

OPERATORS = (DECODE, MERGE)
