"""The tables of the answers, a pure function of the stored histories.

A difference is plan minus `original` on the same question and the same cache; `random` is first averaged over its
seeds. A mean over questions weighs every question alike, its 95 % interval is the percentile bootstrap over whole
histories (`stats.paired_mean_difference`). That is narrow with few of them, so a star marks only what the t interval
over history means (`stats.t_interval`) sets apart from 0 as well. EM: exact match. NLL: nats per token of the reference
answer, lower is better.

Two selectors are not pooled with the others: FINCH, whose plan `relay` is FINCH itself, and CaM, which merges all that
it evicts in one step into at most 32 receivers; its NLL is above that of a uniform guess, and would decide the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvverify.experiments.relay_facts import KINDS
from kvverify.experiments.relay_scoring import exact_match, token_f1
from kvverify.experiments.results import Cell, Chart, Result
from kvverify.stats import Interval, paired_mean_difference, t_interval

__all__ = ["Score", "charts", "difference", "history_interval", "markdown", "scores"]

METRICS = ("exact", "f1", "nll")
NAMES = ("EM", "F1", "NLL")
UNIFORM = math.log(49_152)
"""NLL of a uniform guess over the vocabulary of SmolLM2, nats per token."""
NOT_POOLED = ("full", "finch", "cam")
PUBLISHED = {"original": "26.4", "key_only": "8.4", "relay": "36.2", "query_only": "27.2", "common_shift": "27.2"}


@dataclass(frozen=True)
class Score:
    """One question from one cache under one plan. exact: 0 or 1, or between for a mean over seeds."""

    history: int
    question: str
    kind: str
    selector: str
    retention: float
    plan: str
    exact: float
    f1: float
    nll: float
    evidence_kept: float


def scores(histories: Iterable[Mapping[str, Any]]) -> list[Score]:
    """Score all answers, with `random` averaged over its seeds, and the full cache as selector and plan "full"."""
    found = []
    for history in histories:
        for question in history["questions"]:
            cells = [
                *question["cells"],
                {"selector": "full", "retention": 1.0, "evidence_kept": 1.0, "plans": {"full": question["full"]}},
            ]
            for cell in cells:
                merged: dict[str, list[tuple[str, float]]] = {}
                for name, (text, nll) in cell["plans"].items():
                    merged.setdefault(name.split()[0], []).append((text, nll))
                for plan, answers in merged.items():
                    reference = question["reference"]
                    found.append(
                        Score(
                            history["number"],
                            question["name"],
                            question["kind"],
                            cell["selector"],
                            cell["retention"],
                            plan,
                            statistics.fmean(exact_match(text, reference) for text, _ in answers),
                            statistics.fmean(token_f1(text, reference) for text, _ in answers),
                            statistics.fmean(nll for _, nll in answers),
                            cell["evidence_kept"],
                        )
                    )
    return found


def difference(found: Sequence[Score], plan: str, metric: str) -> tuple[float, float | None, float | None]:
    """Mean of plan - original over the scores, and its interval (None with a single history)."""
    values, clusters = _differences(found, plan, metric)
    if len(set(clusters)) < 2:
        return statistics.fmean(values), None, None
    interval = paired_mean_difference(values, clusters).interval
    return statistics.fmean(values), interval.low, interval.high


def history_interval(found: Sequence[Score], plan: str, metric: str) -> Interval:
    """95 % t interval of the mean of plan - original over the means of at least two histories."""
    grouped: dict[int, list[float]] = {}
    for value, history in zip(*_differences(found, plan, metric), strict=True):
        grouped.setdefault(history, []).append(value)
    return t_interval([statistics.fmean(values) for values in grouped.values()])


def markdown(histories: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the relay table, the plans, and the kinds of question, as Markdown."""
    found = scores(histories)
    pooled = [s for s in found if s.selector not in NOT_POOLED]
    questions = len({s.question for s in found})
    settings = histories[0]["settings"]
    full = [s for s in found if s.plan == "full"]
    lines = [
        f"SmolLM2-135M-Instruct, {len(histories)} histories of at most {settings['tokens']} tokens, {questions} "
        f"questions per cell ({questions // len(KINDS)} of each kind). EM (exact match) and F1 in per cent; NLL in "
        "nats per answer token, lower is better. Differences are plan - original on the same cache, with 95 % "
        "percentile bootstrap intervals over histories. Over few histories these are too narrow: a star (*) marks a "
        "difference, not 0 as printed, that the 95 % t interval over history means sets apart from 0 too.",
        "",
        f"Full cache: EM {_percent(full, 'exact')}, F1 {_percent(full, 'f1')}, NLL {_mean(full, 'nll'):.2f}.",
        "",
        "| selector | kept | evidence kept | EM original | relay | difference | F1 original | relay | difference "
        "| NLL original | relay | difference |",
        "|---|--:|--:|--:|--:|---|--:|--:|---|--:|--:|---|",
    ]
    settled: dict[tuple[str, float], list[float]] = {}
    for selector, retention in dict.fromkeys((s.selector, s.retention) for s in found if s.plan == "original"):
        cell = [s for s in found if (s.selector, s.retention) == (selector, retention)]
        lines.append(_relay_line(selector, retention, cell))
        if selector != "finch":
            settled[selector, retention] = [
                statistics.fmean(_differences(cell, "relay", metric)[0]) for metric in METRICS
            ]
    without = [changes for (selector, _), changes in settled.items() if selector not in NOT_POOLED]
    lines += [
        "",
        f"Of {len(settled)} settings without finch relay is {_counts(list(settled.values()))} (published: better in 32 "
        f"of 36). Without cam too, of {len(without)}: {_counts(without)}. finch with plan relay is FINCH itself.",
        "",
        *_apart([s for s in found if s.selector == "cam"]),
        *_plan_table(
            f"The {len(without)} settings without finch and cam together; published: judged accuracy of Qwen2-7B, "
            "BM25-B8192.",
            pooled,
        ),
        *_plan_table(
            "bm25 at 10 %, the setting of the published controls:",
            [s for s in pooled if (s.selector, s.retention) == ("bm25", 0.1)],
        ),
        *_kind_table(pooled, full),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def charts(histories: Sequence[Mapping[str, Any]]) -> dict[str, Result]:
    """Make the plots: what relay changes in the NLL by selector and retention, and what every plan does."""
    found = scores(histories)
    settings = histories[0]["settings"] | {"histories": len(histories)}
    cells: list[tuple[Cell, ...]] = []
    for selector, retention in dict.fromkeys((s.selector, s.retention) for s in found if s.plan == "original"):
        cell = [s for s in found if (s.selector, s.retention) == (selector, retention)]
        cells.append((selector, f"{100 * retention:g} %", *_rounded(difference(cell, "relay", "nll"))))
    pooled = [s for s in found if s.selector not in NOT_POOLED]
    plans: list[tuple[Cell, ...]] = [
        (plan, f"{100 * retention:g} %", *_rounded(difference(kept, plan, "nll")))
        for retention in dict.fromkeys(s.retention for s in pooled)
        for kept in [[s for s in pooled if s.retention == retention]]
        for plan in dict.fromkeys(s.plan for s in kept)
        if plan != "original"
    ]
    title = "NLL of the answer, {} - original (nats per token, below 0 is better)"
    ends = ("NLL difference", "low", "high")
    return {
        f"answers_{name}": Result(
            title.format(moved),
            (first, "kept", *ends),
            tuple(rows),
            Chart(first, ends[0], "kept", "low", "high"),
            settings,
            notes,
        )
        for name, moved, first, rows, notes in (
            ("relay", "relay", "selector", cells, ()),
            ("plans", "plan", "plan", plans, ("All selectors but finch and cam.",)),
        )
        if rows
    }


def _differences(found: Sequence[Score], plan: str, metric: str) -> tuple[list[float], list[int]]:
    """Plan - original of each question and cache, and the history of each."""
    base = {(s.question, s.selector, s.retention): s for s in found if s.plan == "original"}
    own = [s for s in found if s.plan == plan]
    if not own:
        raise ValueError(f"plan is {plan!r}, expected one that was scored")
    values = [getattr(s, metric) - getattr(base[s.question, s.selector, s.retention], metric) for s in own]
    return values, [s.history for s in own]


def _relay_line(selector: str, retention: float, cell: Sequence[Score]) -> str:
    held = statistics.fmean(s.evidence_kept for s in cell if s.plan == "original")
    parts = [selector, f"{100 * retention:g} %", f"{100 * held:.0f} %", *_pair(cell)]
    return f"| {' | '.join(parts)} |"


def _pair(found: Sequence[Score], metrics: Sequence[str] = METRICS) -> list[str]:
    parts = []
    for metric in metrics:
        own, moved = ([s for s in found if s.plan == plan] for plan in ("original", "relay"))
        parts += [_value(own, metric), _value(moved, metric), _change(found, "relay", metric)]
    return parts


def _counts(changes: Sequence[Sequence[float]]) -> str:
    """Tell in how many settings the mean difference of each metric is for the better and for the worse."""
    parts = []
    for place, name in enumerate(NAMES):
        gains = [-one[place] if name == "NLL" else one[place] for one in changes]
        parts.append(f"better in {sum(g > 0 for g in gains)} and worse in {sum(g < 0 for g in gains)} by {name}")
    return ", ".join(parts)


def _plan_table(heading: str, found: Sequence[Score]) -> list[str]:
    """Compare all plans on these scores; nothing where there are none."""
    if not found:
        return []
    return [
        heading,
        "",
        "| plan | EM | - original | F1 | - original | NLL | - original | published |",
        "|---|--:|---|--:|---|--:|---|--:|",
        *(_plan_line(plan, found) for plan in dict.fromkeys(s.plan for s in found)),
        "",
    ]


def _kind_table(pooled: Sequence[Score], full: Sequence[Score]) -> list[str]:
    """Show original and relay for each kind of question; nothing where there are no scores."""
    if not pooled:
        return []
    lines = [
        "| kind | full EM | EM original | relay | difference | NLL original | relay | difference |",
        "|---|--:|--:|--:|---|--:|--:|---|",
    ]
    for kind in KINDS:
        own, whole = ([s for s in scored if s.kind == kind] for scored in (pooled, full))
        lines.append(f"| {' | '.join([kind, _percent(whole, 'exact'), *_pair(own, ('exact', 'nll'))])} |")
    return lines


def _apart(found: Sequence[Score]) -> list[str]:
    """Say why CaM is not pooled, and what relay does in its own settings; nothing where it was not run."""
    if not found:
        return []
    changes = (f"{name} {_change(found, 'relay', metric)}" for name, metric in zip(NAMES, METRICS, strict=True))
    own = [s for s in found if s.plan == "original"]
    return [
        "cam is not in the tables below: merging in one step adds all evicted values to at most 32 receivers, and its "
        f"NLL under original is {_mean(own, 'nll'):.2f}, where a uniform guess has {UNIFORM:.2f}. Its own settings "
        f"together, relay - original: {', '.join(changes)}.",
        "",
    ]


def _plan_line(plan: str, found: Sequence[Score]) -> str:
    own = [s for s in found if s.plan == plan]
    parts = [plan]
    for metric in METRICS:
        parts += [_value(own, metric), "" if plan == "original" else _change(found, plan, metric)]
    return f"| {' | '.join([*parts, PUBLISHED.get(plan, '')])} |"


def _change(found: Sequence[Score], plan: str, metric: str) -> str:
    mean, low, high = difference(found, plan, metric)
    scale, digits = (1, 2) if metric == "nll" else (100, 1)
    shown = f"{scale * mean:+.{digits}f}"
    if low is None or high is None:
        return shown
    # A shift of all positions changes rounding alone, which with many histories is reliably not 0: no star for 0.00.
    starred = float(shown) != 0 and not low <= 0 <= high and not history_interval(found, plan, metric).contains(0)
    return f"{shown} [{scale * low:+.{digits}f}, {scale * high:+.{digits}f}]{'*' if starred else ''}"


def _value(found: Sequence[Score], metric: str) -> str:
    return f"{_mean(found, metric):.2f}" if metric == "nll" else _percent(found, metric)


def _percent(found: Sequence[Score], metric: str) -> str:
    return f"{100 * _mean(found, metric):.1f}"


def _mean(found: Sequence[Score], metric: str) -> float:
    return statistics.fmean(getattr(s, metric) for s in found)


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in values]
