"""Baselines on the attention path of this package: full, StreamingLLM, SnapKV and KIVI, one layer at a time.

Each is a layer's cache with `prefill` and `step`. Keys and values are rounded to the cache's 16-bit dtype as they
arrive (a wider dtype turns rounding off), attention runs in float64 on what is held, and after a step the cache shows

    weight[kv, group, tokens]    the softmax weight of the last query, 0 where a position is not held or not read
    footprint                    bits held, and bits the last query read (per query head, and union over the group)

    full            every token
    streaming_llm   the first 4 tokens and the last n, at their own positions
    snapkv          n prompt tokens chosen per KV head by the last queries (`kvverify.selectors.snapkv`), and every
                    token decoded since
    kivi            tokens older than the last 32 quantized in groups of 32: keys per channel, values per token. The
                    newest group may be short; its scales are then those of its real tokens, which presumes that its
                    rows are at hand in 16 bits until it is full, while `rates.kivi` charges a whole quantized block

Quest is the graded cache (`reconstructed`) with a budget of 16 bits: exact pages, of which each query reads the best.
A row that leaves the cache is overwritten with zeros: nothing can lean on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from kvverify.geodesia import rates
from kvverify.geodesia.accounting import token_bits
from kvverify.geodesia.ladder import Axis, dequantize, quantize
from kvverify.selectors.observed import snapkv
from kvverify.selectors.scores import attention_rows

__all__ = ["Footprint", "Full", "Kivi", "Rows", "SnapKV", "StreamingLLM", "attend_rows"]


@dataclass(frozen=True)
class Footprint:
    """Bits of one layer, all KV heads: held, read by the group's query heads on average, read as their union."""

    resident: Fraction
    read_per_query_head: Fraction
    read_union: Fraction

    def per_value(self, *, kv_heads: int, dim: int, length: int) -> tuple[Fraction, Fraction, Fraction]:
        """Return the three in bits per value, over 2 kv T D values."""
        values = 2 * kv_heads * dim * length
        return self.resident / values, self.read_per_query_head / values, self.read_union / values


class Rows:
    """Keys and values [kv, tokens, dim] in float64, in one buffer that grows at its end."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor = torch.empty(2, 0, 0, 0, dtype=torch.float64)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens.

        Shapes: keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        end = self.length + keys.shape[1]
        if end > self._buffer.shape[2]:
            grown = torch.empty(2, len(keys), end + 256, keys.shape[2], dtype=torch.float64)
            if self.length:
                grown[:, :, : self.length] = self._buffer[:, :, : self.length]
            self._buffer = grown
        self._buffer[0, :, self.length : end] = keys
        self._buffer[1, :, self.length : end] = values
        self.length = end

    @property
    def both(self) -> Tensor:
        """Keys and values as one writable view.

        Shapes: [2, kv, tokens, dim].
        """
        return self._buffer[:, :, : self.length]


def attend_rows(
    query: Tensor,
    rows: Tensor,
    *,
    scale: float,
    readable: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (output, softmax weight) in float64; a position that is not `readable` weighs 0.

    Shapes: query[kv, group, dim], rows[2, kv, tokens, dim], readable bool[kv, group or 1, tokens]
    -> [kv, group, dim], [kv, group, tokens].
    """
    scores = scale * query.double() @ rows[0].mT
    if readable is not None:
        scores = scores.masked_fill(~readable, -torch.inf)
    weight = scores.softmax(-1)
    return weight @ rows[1], weight


class Full:
    """The whole context, exact; also what the other baselines start from."""

    def __init__(self, *, scale: float, dtype: torch.dtype = torch.bfloat16) -> None:
        self.scale = scale
        self.dtype = dtype
        self.rows = Rows()
        self.readable: Tensor | None = None
        self.weight: Tensor = torch.empty(0)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:  # noqa: ARG002 - SnapKV needs them
        """Take in the prompt and its last queries.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        self.rows.append(keys.to(self.dtype), values.to(self.dtype))

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append one token and serve its query.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, dim] -> [kv, group, dim].
        """
        self.rows.append(key[:, None].to(self.dtype), value[:, None].to(self.dtype))
        self._compress()
        out, self.weight = attend_rows(query, self.rows.both, scale=self.scale, readable=self.readable)
        return out

    @property
    def footprint(self) -> Footprint:
        """Bits held and read after the last step: here they are the same."""
        bits = self._resident()
        return Footprint(bits, bits, bits)

    def _resident(self) -> Fraction:
        kept = self.rows.length * len(self.rows.both[0]) if self.readable is None else int(self.readable.sum())
        return Fraction(token_bits(self.rows.both.shape[3], kept))

    def _compress(self) -> None:
        """What the policy does to the rows once a token has been appended."""

    def _keep(self, kept: Tensor) -> None:
        """Hold only these positions.

        Shapes: kept bool[kv, tokens].
        """
        self.rows.both.masked_fill_(~kept[None, :, :, None], 0)
        self.readable = kept[:, None]


class StreamingLLM(Full):
    """The first `sinks` and the last `recent` tokens."""

    def __init__(self, *, scale: float, recent: int, sinks: int = 4, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(scale=scale, dtype=dtype)
        self.sinks = sinks
        self.recent = recent

    def _compress(self) -> None:
        position = torch.arange(self.rows.length)
        kept = (position < self.sinks) | (position >= self.rows.length - self.recent)
        self._keep(kept.expand(len(self.rows.both[0]), -1))


class SnapKV(Full):
    """`budget` prompt tokens per KV head, chosen once by the last `window` queries; every decoded token is kept."""

    def __init__(
        self, *, scale: float, budget: int, window: int = 64, kernel: int = 5, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(scale=scale, dtype=dtype)
        self.budget = budget
        self.window = window
        self.kernel = kernel
        self._kept: Tensor = torch.empty(0)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Choose the prompt tokens and drop the others.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        super().prefill(queries, keys, values)
        weights = attention_rows(queries.flatten(0, 1)[:, -self.window :], keys, scale=self.scale)
        chosen = snapkv(weights, budget=self.budget, kv_heads=len(keys), window=self.window, kernel=self.kernel)
        self._kept = torch.zeros(keys.shape[:2], dtype=torch.bool).scatter_(1, chosen.positions[0], True)
        self._keep(self._kept)

    def _compress(self) -> None:
        decoded = self.rows.length - self._kept.shape[1]
        self._keep(torch.nn.functional.pad(self._kept, (0, decoded), value=True))


class Kivi(Full):
    """Tokens older than the last `recent` in `bits` bits, in groups of `group`."""

    def __init__(
        self, *, scale: float, bits: int, group: int = 32, recent: int = 32, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(scale=scale, dtype=dtype)
        self.bits = bits
        self.group = group
        self.recent = recent
        self._done = 0  # tokens in whole quantized groups
        self._exact: Tensor = torch.empty(0)  # the 16-bit rows from there on

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in the prompt and quantize all but its last `recent` tokens.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        super().prefill(queries, keys, values)
        self._exact = self.rows.both.clone()
        self._quantize()

    def _compress(self) -> None:
        self._exact = torch.cat([self._exact, self.rows.both[:, :, -1:]], 2)
        self._quantize()

    def _quantize(self) -> None:
        end = max(0, self.rows.length - self.recent)
        whole = end // self.group * self.group
        for start, stop in ((self._done, whole), (whole, end)):
            if stop > start:
                rows = self._exact[:, :, start - self._done : stop - self._done]
                self.rows.both[0, :, start:stop] = self._rounded_keys(rows[0])
                self.rows.both[1, :, start:stop] = _rounded(
                    rows[1].flatten(0, 1), self.bits, "channel", self.group
                ).view_as(rows[1])
        self._exact = self._exact[:, :, whole - self._done :]
        self._done = whole

    def _rounded_keys(self, keys: Tensor) -> Tensor:
        heads, tokens, _ = keys.shape
        channels = keys.transpose(0, 1).reshape(tokens, -1)  # the heads side by side: scales are per channel
        return _rounded(channels, self.bits, "token", self.group).reshape(tokens, heads, -1).transpose(0, 1)

    def _resident(self) -> Fraction:
        _, heads, length, dim = self.rows.both.shape
        rate = rates.kivi(
            [length], key_bits=self.bits, value_bits=self.bits, dim=dim, group=self.group, recent=self.recent
        )
        return rate.resident * 2 * heads * length * dim


def _rounded(x: Tensor, bits: int, axis: Axis, group: int) -> Tensor:
    """What x reads back as from the stored format.

    Shapes: x[tokens, dim] -> [tokens, dim].
    """
    codes, low, step = quantize(x, bits=bits, axis=axis, group=group)
    return dequantize(codes, low, step, bits=bits, axis=axis, group=group)
