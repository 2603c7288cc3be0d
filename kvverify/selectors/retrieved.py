"""BM25 over units of the history: retrieval by words, before any attention."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvverify.selectors.checks import check_budget, check_count, protected_count
from kvverify.selectors.scores import top_indices
from kvverify.selectors.selection import Selection, from_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["HistoryUnit", "bm25", "bm25_scores", "words"]


@dataclass(frozen=True)
class HistoryUnit:
    """One turn or paragraph of the history: its text, and its tokens start..stop-1."""

    text: str
    start: int
    stop: int


def words(text: str) -> list[str]:
    """Split a text into runs of letters, digits and underscores, case folded; no stop words, no stemming."""
    return re.findall(r"\w+", text.casefold())


def bm25(
    units: Sequence[HistoryUnit],
    *,
    budget: int,
    query: str,
    history: int | None = None,
    layers: int = 1,
    kv_heads: int = 1,
    sinks: int = 0,
    k1: float = 1.5,
    b: float = 0.75,
    tokenize: Callable[[str], list[str]] = words,
) -> Selection:
    """Keep whole units, best BM25 score first, the earlier of equals, and stop where the next one would not fit.

    At most `budget` tokens, the same for every layer and head, in source order. The first `sinks` tokens are kept first
    and count in the budget. Tokens in no unit (a template) are not kept. `history` is the number of tokens, by
    default those up to the end of the last unit. Where nothing matches, an empty query included, all scores are 0 and
    the tie rule alone decides: the earliest units.
    """
    end = 0
    for index, unit in enumerate(units):
        if not end <= unit.start <= unit.stop:
            raise ValueError(
                f"units[{index}] spans {unit.start}..{unit.stop}; expected start >= {end} and stop >= start"
            )
        end = unit.stop
    history = end if history is None else check_count("history", history)
    if history < end:
        raise ValueError(f"history={history} ends before the last unit; expected at least {end}")
    kept = check_budget(budget, history)
    sinks = protected_count("sinks", check_count("sinks", sinks), kept, history)
    scores = bm25_scores([tokenize(unit.text) for unit in units], tokenize(query), k1=k1, b=b)

    mask = torch.arange(history) < sinks
    left = kept - sinks
    for index in top_indices(torch.tensor(scores, dtype=torch.float64), len(units)).tolist():
        start, stop = max(units[index].start, sinks), max(units[index].stop, sinks)
        if stop - start > left:
            break
        mask[start:stop] = True
        left -= stop - start
    return from_mask(
        mask.expand(check_count("layers", layers), check_count("kv_heads", kv_heads, minimum=1), history),
        "bm25",
        budget,
        parameters={"query": query, "sinks": sinks, "k1": k1, "b": b, "tokenize": tokenize.__name__},
    )


def bm25_scores(documents: Sequence[list[str]], query: list[str], *, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """Return the Okapi BM25 score of every document, by the `bm25s` library.

    score = sum over the query's words, repeats included, of idf * tf (k1 + 1) / (tf + k1 (1 - b + b length / mean))
    with idf = ln(1 + (N - df + 1/2) / (df + 1/2)), which is never negative.
    """
    try:
        import bm25s
    except ImportError as error:
        raise ImportError("bm25 needs the bm25s library: pip install 'kvverify[selectors]'") from error
    vocabulary = {word for document in documents for word in document}
    known = [word for word in query if word in vocabulary]
    if not known:
        return [0.0] * len(documents)
    index = bm25s.BM25(k1=k1, b=b, method="atire", idf_method="lucene", dtype="float64")
    index.index(list(documents), show_progress=False)
    return [float(score) for score in index.get_scores(known)]
