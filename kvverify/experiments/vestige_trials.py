"""Trials of the VestigeKV experiments: a haystack is read, its cache is compressed, and only then a question exists.

A *tier 1* judges the rows of one layer and names those that stay at a given budget, exactly that many. A *tier 2*
fetches archived rows for one query. The mask holds for what comes after the prefix, never for queries of the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvverify.models.latents import Attend, Latents, Prefix, read, step
from kvverify.models.needles import haystacks, question_token, value_token
from kvverify.selectors import Selection, attention_mass, attention_rows, h2o, random, snapkv, streaming_llm
from kvverify.vestige.attend import attend, prologue
from kvverify.vestige.calibration import fetch_threshold
from kvverify.vestige.index import index
from kvverify.vestige.salience import salience
from kvverify.vestige.scan import scan
from kvverify.vestige.selection import select
from kvverify.vestige.step import Retrieval

__all__ = [
    "BLOCK",
    "TIER_ONE",
    "Archive",
    "Choice",
    "Fetch",
    "TierOne",
    "Trial",
    "answer_loss",
    "archive",
    "asked",
    "attend_all",
    "attend_kept",
    "by_salience",
    "question_trials",
    "stay",
]

BLOCK = 256
SNAPKV_WINDOW = 32

Choice = Callable[[int], Tensor]
"""keep -> bool mask[rows] with exactly `keep` rows."""

TierOne = Callable[[Prefix, int, int], Choice]
"""(prefix, layer, seed) -> a choice, so that one judgement serves several budgets."""


@dataclass(frozen=True)
class Trial:
    """One haystack that the model has read: key[needles], value[needles] and position[needles] of what is in it.

    following[continuation] are the tokens that come next in the haystack, unread.
    """

    prefix: Prefix
    key: Tensor
    value: Tensor
    position: Tensor
    following: Tensor
    seed: int


@dataclass(frozen=True)
class Archive:
    """Tier 2 of one layer: the archived rows, their index entries in that order, and the settings of the scan."""

    rows: Tensor
    sketch: Tensor
    residual: Tensor
    retrieval: Retrieval


@dataclass(frozen=True)
class Fetch:
    """What one query of one layer fetched: number of rows, and the share of its full attention that it then saw."""

    layer: int
    rows: int
    coverage: float


def question_trials(
    model: Any,
    *,
    trials: int,
    tokens: int,
    needles: int = 1,
    continuation: int = 0,
    chunk: int | None = None,
) -> Iterator[Trial]:
    """Read haystacks 0..trials-1 of `tokens` tokens, each with `needles` needles in [.1, .8) of its length.

    The number of a trial is the seed of its haystack, so all policies and experiments see the same ones.
    """
    total = tokens + continuation
    span = (0.1 * tokens / total, 0.8 * tokens / total)
    for number in range(trials):
        generator = torch.Generator().manual_seed(number)
        stack = haystacks(1, total, needles, generator, span=span)
        text = stack.tokens[0]
        prefix = read(model, text[:tokens], chunk=chunk)
        yield Trial(prefix, stack.key[0], stack.value[0], stack.position[0], text[tokens:], number)


def by_salience(side: Callable[[Latents], Tensor], *, bandwidth: int, block: int | None = BLOCK) -> TierOne:
    """Tier 1 of VestigeKV on `side` of the rows, without sinks, as the paper measured it."""

    def judge(prefix: Prefix, layer: int, _seed: int) -> Choice:
        sigma = salience(side(prefix.latents[layer]), bandwidth=bandwidth, block=block)
        return lambda keep: select(sigma, keep=keep, sinks=0)

    return judge


def _branch(layer: Latents) -> Tensor:
    return layer.branch


def _kept(selection: Selection, length: int) -> Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[selection.positions[0, 0]] = True
    return mask


def _head_first(prefix: Prefix, layer: int) -> tuple[Tensor, Tensor]:
    """Queries[heads, length, dim] and keys[1, length, dim], as the selectors take them: one KV head for all."""
    return prefix.queries[layer].transpose(0, 1), prefix.latents[layer].all_rows()[None]


@lru_cache(maxsize=4)
def _mass(prefix: Prefix, layer: int) -> Tensor:
    """Attention that each row collected from all heads and rows, [heads, 1, length]: quadratic, so made once."""
    return attention_mass(*_head_first(prefix, layer), scale=prefix.scale)[:, None]


def _h2o(*, recent: int | None) -> TierOne:
    def judge(prefix: Prefix, layer: int, _seed: int) -> Choice:
        mass = _mass(prefix, layer)
        return lambda keep: _kept(h2o(mass, budget=keep, kv_heads=1, recent=recent), prefix.length)

    return judge


def _snapkv(prefix: Prefix, layer: int, _seed: int) -> Choice:
    queries, keys = _head_first(prefix, layer)
    rows = attention_rows(queries[:, -SNAPKV_WINDOW:], keys, scale=prefix.scale)

    def choose(keep: int) -> Tensor:
        # The usual window of 32 is the whole budget of 4096 tokens at 128x: at most half of the rows are window.
        return _kept(snapkv(rows, budget=keep, kv_heads=1, window=min(SNAPKV_WINDOW, keep // 2)), prefix.length)

    return choose


def _streaming(prefix: Prefix, _layer: int, _seed: int) -> Choice:
    unread = torch.empty(1, 0, prefix.length)
    return lambda keep: _kept(streaming_llm(unread, budget=keep, kv_heads=1), prefix.length)


def _random(prefix: Prefix, layer: int, seed: int) -> Choice:
    unread = torch.empty(1, 0, prefix.length)
    return lambda keep: _kept(random(unread, budget=keep, kv_heads=1, seed=seed * 64 + layer), prefix.length)


TIER_ONE: dict[str, TierOne] = {
    "branch, 4 bins": by_salience(_branch, bandwidth=4),
    "branch, 16 bins": by_salience(_branch, bandwidth=16),
    "branch, prefix form, 16 bins": by_salience(_branch, bandwidth=16, block=None),
    "full row, 4 bins": by_salience(Latents.all_rows, bandwidth=4),
    "H2O": _h2o(recent=0),
    "H2O + recent": _h2o(recent=None),
    "SnapKV": _snapkv,
    "StreamingLLM": _streaming,
    "random": _random,
}


def stay(tier: TierOne, trial: Trial, compressions: Sequence[int]) -> dict[int, list[Tensor]]:
    """Bool mask[rows] of every layer at budget length / compression, for each compression."""
    choices = [tier(trial.prefix, layer, trial.seed) for layer in range(len(trial.prefix.latents))]
    return {by: [choose(trial.prefix.length // by) for choose in choices] for by in compressions}


def archive(layer: Latents, kept: Tensor, retrieval: Retrieval) -> Archive:
    """Index the rows of one layer that did not stay."""
    rows = (~kept).nonzero().flatten()
    # All rows are indexed where they lie: gathering the archived ones first would copy most of the cache.
    sketch, residual = index(layer.content, retrieval.basis)
    return Archive(rows, sketch[rows], residual[rows], retrieval)


def attend_kept(
    prefix: Prefix, kept: Sequence[Tensor], archives: Sequence[Archive] = (), *, fetched: list[Fetch] | None = None
) -> Attend:
    """Attention over kept rows, what tier 2 fetches, and every row written since the prefix, each once.

    The callback remembers the rows it is given, so it serves one continuation. `fetched` collects what each query
    fetched; its mass coverage is over the heads' mean.
    """
    listed = [mask.nonzero().flatten() for mask in kept]
    stored = [layer.rows(ids) for layer, ids in zip(prefix.latents, listed, strict=True)]
    spoken: list[list[Tensor]] = [[] for _ in kept]

    def over_rows(layer: int, query: Tensor, row: Tensor) -> Tensor:
        spoken[layer].append(row)
        source, content = prefix.latents[layer], prefix.latents[layer].content.shape[1]
        rows = torch.cat([stored[layer], torch.stack(spoken[layer])])
        if archives:
            held = archives[layer]
            retrieval = held.retrieval
            start = prologue(query, rows, retrieval.basis, scale=prefix.scale, value_dim=content)
            fired = scan(
                query,
                source.branch[held.rows],
                held.sketch,
                held.residual,
                retrieval.basis,
                fetch_threshold(start.best, start.entropy, theta=retrieval.theta),
                scale=prefix.scale,
                inflation=retrieval.inflation,
            )
            rows = torch.cat([rows, source.rows(held.rows[fired])])
        out, lse = attend(query, rows, torch.arange(rows.shape[0]), scale=prefix.scale, value_dim=content)
        if fetched is not None:
            whole = torch.cat([source.all_rows(), torch.stack(spoken[layer])])
            total = torch.logsumexp(prefix.scale * (query @ whole.T), dim=1)
            count = rows.shape[0] - listed[layer].shape[0] - len(spoken[layer])
            fetched.append(Fetch(layer, count, float((lse - total).exp().mean())))
        return out

    return over_rows


def attend_all(prefix: Prefix) -> Attend:
    """Attention over the whole prefix: the uncompressed cache."""
    return attend_kept(prefix, [torch.ones(prefix.length, dtype=torch.bool) for _ in prefix.latents])


def asked(model: Any, trial: Trial, needle: int) -> list[Tensor]:
    """Absorbed query[heads, dim] of one question in each layer, under the whole cache."""
    queries: list[Tensor] = []
    whole = attend_all(trial.prefix)

    def listen(layer: int, query: Tensor, row: Tensor) -> Tensor:
        queries.append(query)
        return whole(layer, query, row)

    step(model, int(question_token(trial.key[needle])), trial.prefix.length, listen)
    return queries


def answer_loss(model: Any, trial: Trial, needle: int, attention: Attend) -> tuple[float, bool]:
    """Negative log-likelihood in nats of the answer to one question asked after the prefix, and whether it wins."""
    answer = value_token(trial.value[needle])
    logits = step(model, int(question_token(trial.key[needle])), trial.prefix.length, attention)
    loss = float(cross_entropy(logits.double()[None], answer[None]))
    if not math.isfinite(loss):
        raise ValueError(f"the loss of needle {needle} is {loss}: expected a finite number of nats")
    return loss, int(logits.argmax()) == int(answer)
