"""What is in a row: how much the branch decides, whether pages can be ranked, and how many rows are distinct."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvverify.experiments.results import Chart, Result
from kvverify.experiments.vestige_retrieval import sampled_queries
from kvverify.experiments.vestige_trials import Trial, asked, question_trials
from kvverify.models.needles import Position, load

__all__ = ["arkvale_digests", "branch_anatomy", "distinct_rows", "mergeable_rows", "page_recall"]

POSITIONS: tuple[Position, ...] = ("nope", "rope")
PAGE = 32
PAGES_READ = 8
TOLERANCES = (0.0, 1e-6, 1e-4, 1e-2, 1e-1)


def branch_anatomy(*, trials: int, tokens: int = 4096) -> Result:
    """(f) Share of the branch in projection norm, in score variance, and in who is first.

    Top-1 kept: the best row of the full score is also best by that part of the score alone.
    """
    rows = []
    for position in POSITIONS:
        model = load(position)
        found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
        for trial, layer, kind, query in _queries(model, trials=trials, tokens=tokens):
            source = trial.prefix.latents[layer]
            width = source.content.shape[1]
            content, branch = query[:, :width] @ source.content.T, query[:, width:] @ source.branch.T
            best = (content + branch).argmax(dim=1)
            found.setdefault((layer, kind), []).append(
                (
                    float(branch.var(dim=1).sum() / (content + branch).var(dim=1).sum()),
                    float((branch.argmax(dim=1) == best).double().mean()),
                    float((content.argmax(dim=1) == best).double().mean()),
                )
            )
        for (layer, kind), values in sorted(found.items()):
            means = [statistics.fmean(column) for column in zip(*values, strict=True)]
            rows.append((position, layer, f"{position}, {kind}", _norm_ratio(model, layer), *means))
    return Result(
        f"Anatomy of the branch, {tokens} tokens",
        (
            "model",
            "layer",
            "queries",
            "branch/content norm of a projection row",
            "branch share of score variance",
            "top-1 kept by branch only",
            "top-1 kept by content only",
        ),
        tuple(rows),
        Chart("layer", "top-1 kept by branch only", "queries"),
        {"tokens": tokens, "trials": trials},
        ("Prefix queries are scored against the whole prefix here, later rows included: the table is descriptive.",),
    )


def arkvale_digests(*, trials: int, tokens: int = 4096) -> Result:
    """(h) Recall@8 of a 32-row page that holds the true best row, by radius, with and without RoPE."""
    rows = []
    for position in POSITIONS:
        found: dict[tuple[int, str, str], list[float]] = {}
        for trial, layer, kind, query in _queries(load(position), trials=trials, tokens=tokens):
            keys = trial.prefix.latents[layer].all_rows()
            for radius in ("mean", "max"):
                hit = page_recall(query, keys, page=PAGE, read=PAGES_READ, radius=radius)
                found.setdefault((layer, kind, radius), []).append(hit)
        rows += [
            (position, layer, kind, f"{position}, {radius} radius, {kind}", statistics.fmean(hits), len(hits))
            for (layer, kind, radius), hits in sorted(found.items())
        ]
    return Result(
        f"Page digests: recall@{PAGES_READ} of {tokens // PAGE} pages of {PAGE} rows, {tokens} tokens",
        ("model", "layer", "queries", "digest", "recall", "trials"),
        tuple(rows),
        Chart("layer", "recall", "digest"),
        {"tokens": tokens, "trials": trials, "page": PAGE, "read": PAGES_READ},
        (f"A random choice of pages has recall {min(1.0, PAGES_READ * PAGE / tokens):.3f}.",),
    )


def mergeable_rows(*, trials: int, tokens: int = 4096) -> Result:
    """(k) Distinct rows / T at relative tolerances: rows within tolerance x RMS row norm of a representative merge."""
    rows = []
    for position in POSITIONS:
        model = load(position)
        found: dict[tuple[int, float], list[float]] = {}
        for trial in question_trials(model, trials=trials, tokens=tokens):
            for layer, source in enumerate(trial.prefix.latents):
                keys = source.all_rows()
                size = float(keys.square().sum(dim=1).mean().sqrt())
                for tolerance in TOLERANCES:
                    share = distinct_rows(keys, tolerance * size) / tokens
                    found.setdefault((layer, tolerance), []).append(share)
        rows += [
            (position, f"{position}, layer {layer}", f"{tolerance:g}", statistics.fmean(shares), len(shares))
            for (layer, tolerance), shares in sorted(found.items())
        ]
    return Result(
        f"Distinct rows / T, {tokens} tokens",
        ("model", "layer", "tolerance", "distinct", "trials"),
        tuple(rows),
        Chart("tolerance", "distinct", "layer"),
        {"tokens": tokens, "trials": trials},
    )


def page_recall(query: Tensor, keys: Tensor, *, page: int, read: int, radius: str) -> float:
    """Share of queries[n, dim] whose best score over keys[rows, dim] is reached in one of the `read` best pages.

    Score of a page: <q, centre> + radius ||q||; centre is the midpoint of its bounding box, radius the mean or the
    max distance of its rows to it. The rows must be whole pages.
    """
    if keys.shape[0] % page:
        raise ValueError(f"keys has {keys.shape[0]} rows: expected whole pages of {page}")
    pages = keys.unflatten(0, (-1, page))
    centre = (pages.amin(dim=1) + pages.amax(dim=1)) / 2
    distance = torch.linalg.vector_norm(pages - centre[:, None], dim=2)
    reach = distance.mean(dim=1) if radius == "mean" else distance.amax(dim=1)
    score = query @ centre.T + torch.outer(torch.linalg.vector_norm(query, dim=1), reach)
    chosen = score.topk(min(read, score.shape[1]), dim=1).indices
    # Equal rows on several pages are equally good homes: without position, equal tokens have equal rows in layer 0.
    best = (query @ keys.T).unflatten(1, (-1, page)).amax(dim=2)
    return float((best.gather(1, chosen).amax(dim=1) == best.amax(dim=1)).double().mean())


def distinct_rows(rows: Tensor, tolerance: float) -> int:
    """Representatives of a greedy cover of rows[n, dim]: the first uncovered row covers all within `tolerance`."""
    left, count = rows, 0
    while left.shape[0]:
        # The difference, not the expanded square: cancellation would merge rows that are 1e-4 apart.
        left = left[torch.linalg.vector_norm(left - left[0], dim=1) > tolerance]
        count += 1
    return count


def _queries(model: Any, *, trials: int, tokens: int) -> Iterator[tuple[Trial, int, str, Tensor]]:
    """(trial, layer, kind, query[n, dim]): the questions for 8 needles, and a sample of prefix queries."""
    for trial in question_trials(model, trials=trials, tokens=tokens, needles=8):
        questions = [asked(model, trial, needle) for needle in range(8)]
        for layer in range(len(trial.prefix.latents)):
            yield trial, layer, "questions", torch.cat([queries[layer] for queries in questions])
            yield trial, layer, "prefix", sampled_queries(trial.prefix, layer)[0]


def _norm_ratio(model: Any, layer: int) -> float:
    attention = model.model.layers[layer].self_attn
    norms = torch.linalg.vector_norm(attention.kv_a_proj_with_mqa.weight.detach(), dim=1)
    return float(norms[attention.kv_lora_rank :].mean() / norms[: attention.kv_lora_rank].mean())
