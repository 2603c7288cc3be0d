"""Selectors: which states of a cache stay.

Theory of operation
-------------------
A selector is a pure function. It is given what the model attended to, or the words of the history, and a budget; it
returns a `Selection`, the source positions that every layer and KV head keeps. No selector remembers a call.

    attention_rows(queries, keys) -> rows -> snapkv(rows, budget=2048, kv_heads=8) -> Selection -> gather(keys, values)

- Rows are attention after the softmax, [heads, queries, history] or [layers, heads, queries, history]. No keys, so
  latent caches are served alike. Query heads that share a KV head are consecutive and add up (a mean ranks alike).
- The budget is a number of states per KV head and is met exactly: a mean over layers for `pyramidkv`, over the heads
  of a layer for `ada_kv`, a bound for `bm25` (whole units). `budget_from_share` turns a share of the history into one.
  Budget 0 keeps nothing, a budget of at least the history keeps everything.
- Of equal scores the lower source position wins, everywhere. What is kept is in source order, everywhere.
- A protected window is kept by construction, never by raised scores. It counts in the budget, and one that does not
  fit is refused, except where the budget is 0 or covers the history.
- Scores are float64. NaN is refused.

    module       selectors                                    idea
    positional   streaming_llm, random                        no score
    accumulated  h2o                                          attention summed over all rows given
    observed     snapkv, pyramidkv, ada_kv, chunkkv, finch    attention of the last rows
    merged       cam                                          evicted values are added to kept ones
    retrieved    bm25                                         words

`by_name` lists them. All are called `select(rows, *, budget, kv_heads=None, **parameters)`, save two: `cam` needs
`values` too, and `bm25` takes units of text and a query in the place of rows.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from kvverify.selectors.accumulated import h2o
from kvverify.selectors.budgets import budget_from_share, pyramid_budgets
from kvverify.selectors.merged import cam
from kvverify.selectors.observed import ada_kv, chunkkv, finch, pyramidkv, snapkv
from kvverify.selectors.positional import random, streaming_llm
from kvverify.selectors.retrieved import HistoryUnit, bm25
from kvverify.selectors.scores import attention_mass, attention_rows, top_indices
from kvverify.selectors.selection import Provenance, Selection, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "HistoryUnit",
    "Provenance",
    "Selection",
    "ada_kv",
    "attention_mass",
    "attention_rows",
    "bm25",
    "budget_from_share",
    "by_name",
    "cam",
    "chunkkv",
    "finch",
    "gather",
    "h2o",
    "pyramid_budgets",
    "pyramidkv",
    "random",
    "snapkv",
    "streaming_llm",
    "top_indices",
]

by_name: Mapping[str, Callable[..., Selection]] = MappingProxyType(
    {
        "streaming_llm": streaming_llm,
        "h2o": h2o,
        "snapkv": snapkv,
        "pyramidkv": pyramidkv,
        "chunkkv": chunkkv,
        "ada_kv": ada_kv,
        "cam": cam,
        "finch": finch,
        "bm25": bm25,
        "random": random,
    }
)
