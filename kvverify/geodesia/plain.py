"""The policy as a plain model: rows in tensors, no pages, no codes, no packing. Slow, and easy to believe.

It shares with the packed implementation the arithmetic of single steps (`mass`, `ladder`, `allocate`, `certificate`)
and none of its storage: a mean block is P equal rows, a quantized block is quantized again from the original rows (the
ladder is nested, so that is the same), a residual token is a row put back.

Where several answers are right (a tie in mass or page score), a kernel's answer decides how the sequence goes on. So
`decode` can be told the levels, pages and residual tokens that a kernel reports, and says what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvverify.geodesia import allocate
from kvverify.geodesia.accounting import Geometry, budget_bits, token_bits
from kvverify.geodesia.certificate import output_bound
from kvverify.geodesia.ladder import EXACT, LADDER, MEAN, block_errors, dequantize, quantize
from kvverify.geodesia.mass import block_sums, hot_set, observe, update
from kvverify.geodesia.pages import box, page_count, rank_pages, read_pages
from kvverify.geodesia.residual import residual, residual_count

__all__ = ["PlainHead", "Setting", "Trace", "decode"]


class Trace(NamedTuple):
    """What was served and what was decided on the way: see `kvverify.geodesia.serving.decode`."""

    out: Tensor
    lse: Tensor
    level: Tensor
    mass: Tensor
    met: Tensor
    resident: Tensor
    pages: Tensor
    read: Tensor
    bound: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Setting:
    """The numbers of a run, as `kvverify.geodesia.serving.decode` takes them."""

    scale: float
    chunk: int
    block: int
    group: int
    decay: float
    sinks: int
    window: int
    residual: float
    page_fraction: float | None


class PlainHead:
    """One KV head of one sequence. `page[2, tokens, dim]` is what is stored, `original` what once arrived."""

    def __init__(self, setting: Setting, dim: int, *, arithmetic: torch.dtype, weights: torch.dtype) -> None:
        self.setting = setting
        self.geometry = Geometry(dim=dim, block=setting.block, group=setting.group)
        self.cost = torch.tensor(self.geometry.costs)
        self.arithmetic, self.weights = arithmetic, weights
        self.original: Tensor = torch.empty(2, 0, dim, dtype=torch.float64)
        self.page: Tensor = self.original
        self.level: Tensor = torch.empty(0, dtype=torch.int64)
        self.error: Tensor = torch.empty(0, len(LADDER), dtype=torch.float64)
        self.drift: Tensor = torch.empty(2, 0, dtype=torch.float64)
        self.mass: Tensor = torch.empty(0, dtype=torch.float64)
        self.kept: Tensor = torch.empty(0, dtype=torch.int64)
        self.prompt = 0

    @property
    def length(self) -> int:
        """Tokens that have arrived."""
        return self.page.shape[1]

    def prefill(self, observed: Tensor, rows: Tensor, kept: Tensor | None) -> None:
        """Take in the prompt: block mass, residual tokens.

        Shapes: observed[group, n, dim], rows[2, tokens, dim], kept[count].
        """
        self.append(rows)
        self.prompt = self.length
        self.mass, token_mass = observe(observed, rows[0], scale=self.setting.scale, block=self.setting.block)
        count = residual_count(self.setting.residual, self.length)
        self.kept = residual(token_mass, rows[1], block=self.setting.block, count=count) if kept is None else kept

    def append(self, rows: Tensor) -> None:
        """Add tokens at the end; blocks close as they fill.

        Shapes: rows[2, tokens, dim].
        """
        self.original = torch.cat([self.original, rows.double()], 1)
        self.page = torch.cat([self.page, rows.double()], 1)
        new = self.length // self.setting.block - len(self.level)
        self.level = torch.cat([self.level, torch.zeros(new, dtype=torch.int64)])
        self.drift = torch.cat([self.drift, self.drift.new_zeros(2, new)], 1)
        first, last = len(self.error) * self.setting.block, len(self.level) * self.setting.block
        keys = self.original[0, first:last]
        self.error = torch.cat([self.error, block_errors(keys, block=self.setting.block, group=self.setting.group)])

    def held(self) -> Tensor:
        """Rows as attention sees them: residual tokens of demoted blocks are exact. Shapes: [2, tokens, dim]."""
        rows, ids = self.page.clone(), self.kept[self.demoted(self.kept)]
        rows[:, ids] = self.original[:, ids]
        return rows

    def demoted(self, ids: Tensor) -> Tensor:
        """Whether tokens lie in demoted blocks."""
        home = ids // self.setting.block
        padded = torch.nn.functional.pad(self.level, (0, 1))
        return padded[home.clamp(max=len(self.level))] != EXACT

    def attend(self, query: Tensor, rows: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, output and LSE over the rows that are seen.

        Shapes: query[group, dim], rows[2, tokens, dim], seen[group, tokens] -> [group, tokens], [group, dim], [group].
        """
        keys, values = rows.to(self.arithmetic)
        scores = (self.setting.scale * query.to(self.arithmetic) @ keys.T).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        weight = (scores - lse[:, None]).exp()
        return weight, weight.to(self.weights).to(self.arithmetic) @ values, lse

    def new_mass(self, query: Tensor) -> Tensor:
        """Return the weight of each block under the current query: from what is stored, mean over the group."""
        seen = torch.ones(len(query), self.length, dtype=torch.bool)
        weight = self.attend(query, self.held(), seen)[0].mean(0)
        return block_sums(weight, block=self.setting.block)

    def update_mass(self, query: Tensor) -> None:
        """One step of the moving average."""
        self.mass = update(self.mass.to(self.arithmetic), self.new_mass(query), decay=self.setting.decay)

    def hot(self) -> Tensor:
        """Blocks that may not move now. Shapes: bool[closed]."""
        setting = self.setting
        found = hot_set(self.length, self.length - 1, block=setting.block, sinks=setting.sinks, window=setting.window)
        return found[: len(self.level)]

    def allowed(self, rate: float) -> int:
        """Bits that the budget leaves to the closed blocks."""
        open_tokens = self.length - len(self.level) * self.setting.block
        return budget_bits(rate, self.geometry.dim, self.length) - token_bits(self.geometry.dim, open_tokens)

    def allocate(self, rate: float) -> Tensor:
        """Return the new rungs: the published prefix form."""
        mass = self.mass[: len(self.level)]
        return allocate.budget(
            mass, self.error, self.level, self.hot(), self.cost, budget_bits=self.allowed(rate)
        ).level

    def demote(self, level: Tensor) -> None:
        """Rewrite blocks on their new rungs, and add up how far their rows moved."""
        for block in (level != self.level).nonzero()[:, 0].tolist():
            rows = slice(block * self.setting.block, (block + 1) * self.setting.block)
            before = self.page[:, rows].clone()
            self.page[:, rows] = self.rewritten(before, self.original[:, rows], int(level[block]))
            self.drift[:, block] += (before - self.page[:, rows]).norm(dim=-1).amax(1)
        self.level = level.clone()

    def rewritten(self, held: Tensor, original: Tensor, level: int) -> Tensor:
        """One block on a rung. Shapes: held[2, block, dim], original[2, block, dim] -> [2, block, dim]."""
        if level == MEAN:
            return held.mean(1, keepdim=True).to(torch.float16).double().expand_as(held)
        if level == EXACT:
            return original
        bits, group = LADDER[level], self.setting.group
        sides = [(original[0], "token", min(group, self.setting.block)), (original[1], "channel", group)]
        stored = [(quantize(rows, bits=bits, axis=axis, group=g), axis, g) for rows, axis, g in sides]  # type: ignore[arg-type]
        return torch.stack([dequantize(*codes, bits=bits, axis=axis, group=g) for codes, axis, g in stored])  # type: ignore[arg-type]

    def choose_pages(self, query: Tensor) -> Tensor:
        """Pages that each query head reads: the best by their boxes, the current one. Shapes: bool[group, pages]."""
        setting = self.setting
        total = -(-self.length // setting.block)
        if setting.page_fraction is None:
            return torch.ones(len(query), total, dtype=torch.bool)
        current = (self.length - 1) // setting.block
        low, high = box(self.original[0, : current * setting.block], block=setting.block)
        keep = page_count(current, setting.page_fraction)
        return read_pages(rank_pages(query, low, high, keep=keep, scale=setting.scale), total=total, current=current)

    def tokens_of(self, pages: Tensor) -> Tensor:
        """Spread a mask of pages over their tokens. Shapes: bool[group, pages] -> bool[group, tokens]."""
        return pages.repeat_interleave(self.setting.block, 1)[:, : self.length]

    def page_bits(self) -> Tensor:
        """Bits of each page with its residual tokens. Shapes: [pages]."""
        token, block = token_bits(self.geometry.dim, 1), self.setting.block
        bits = torch.zeros(-(-self.length // block), dtype=torch.int64)
        bits[: len(self.level)] = self.cost[self.level]
        bits[len(self.level) :] = (self.length - len(self.level) * block) * token
        ids = self.kept[self.demoted(self.kept)]
        return bits.index_add_(0, ids // block, torch.full_like(ids, token))

    def summary_bits(self) -> int:
        """Bits of the boxes of all pages, the open one included."""
        pages = 0 if self.setting.page_fraction is None else -(-self.length // self.setting.block)
        return pages * token_bits(self.geometry.dim, 1)

    def radius(self) -> float:
        """Return the largest distance of a value so far from the mean value of the prompt."""
        center = self.original[1, : self.prompt].mean(0)
        return float((self.original[1] - center).norm(dim=-1).max())

    def bound(self, query: Tensor, weight: Tensor, pages: Tensor) -> Tensor:
        """Return the certificate of each query head. Shapes: [group]."""
        radius = self.radius()
        drift = torch.nn.functional.pad(self.drift, (0, pages.shape[1] - len(self.level)))
        found = []
        for head, read in enumerate(pages):
            key_error = drift[0].masked_fill(~read, torch.inf)
            mass = block_sums(weight[head].double(), block=self.setting.block)
            norm = float(query[head].double().norm())
            scale = self.setting.scale
            found.append(output_bound(mass, key_error, drift[1], query_norm=norm, scale=scale, radius=radius))
        return torch.tensor(found, dtype=torch.float64)

    def step(self, query: Tensor, row: Tensor, rate: float, level: Tensor | None, pages: Tensor | None) -> list[Tensor]:
        """Serve one query, whose own token is appended first.

        Shapes: query[group, dim], row[2, dim], level[blocks], pages[group, pages].
        """
        self.append(row[:, None])
        self.update_mass(query)
        self.demote(self.allocate(rate) if level is None else level[: len(self.level)])
        count = -(-self.length // self.setting.block)
        read = self.choose_pages(query) if pages is None else pages[:, :count]
        weight, out, lse = self.attend(query, self.held(), self.tokens_of(read))
        bits = self.page_bits()
        met = torch.tensor(int(self.cost[self.level].sum()) <= self.allowed(rate))
        resident = bits.sum() + self.summary_bits()
        reads = (read * bits).sum(1) + self.summary_bits()
        return [out, lse, self.level, self.mass, met, resident, read, reads, self.bound(query, weight, read)]


def decode(
    observed: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    rates: tuple[float, ...],
    level: Tensor | None = None,
    pages: Tensor | None = None,
    kept: Tensor | None = None,
    head_type: type[PlainHead] = PlainHead,
    honest: bool = False,
    **numbers: float,
) -> Trace:
    """Run the model on every KV head; arguments and results as in `kvverify.geodesia.serving.decode`.

    level, pages, kept: what a kernel reported, to be followed. honest: fp32 arithmetic, weights and output rounded to
    the dtype of the queries, as a fused kernel would have it.
    """
    setting = Setting(**numbers)  # type: ignore[arg-type]
    precision = (torch.float32, queries.dtype) if honest else (torch.float64, torch.float64)
    heads = []
    for kv in range(len(queries)):
        head = head_type(setting, keys.shape[-1], arithmetic=precision[0], weights=precision[1])
        head.prefill(
            observed[kv], torch.stack([prompt_keys[kv], prompt_values[kv]]), None if kept is None else kept[kv]
        )
        served = []
        for i, rate in enumerate(rates):
            told = None if level is None else level[kv, i], None if pages is None else pages[kv, :, i]
            served.append(head.step(queries[kv, :, i], torch.stack([keys[kv, i], values[kv, i]]), rate, *told))
        out, lse, levels, mass, met, resident, read, bits, bound = zip(*served, strict=True)
        by_query = [torch.stack(out, 1).to(precision[1]), torch.stack(lse, 1), padded(levels, -1), padded(mass, 0)]
        by_query += [torch.stack(met), torch.stack(resident), padded(read, False), torch.stack(bits, 1)]
        heads.append([*by_query, torch.stack(bound, 1), head.kept])
    trace = [torch.stack(side) for side in zip(*heads, strict=True)]
    found = Trace(*trace)
    return found._replace(resident=found.resident.sum(0))


def padded(rows: tuple[Tensor, ...], value: float) -> Tensor:
    """Stack states of growing width behind one another: [n, last] or, of [group, width], [group, n, last]."""
    width = rows[-1].shape[-1]
    return torch.stack([torch.nn.functional.pad(row, (0, width - row.shape[-1]), value=value) for row in rows], -2)
