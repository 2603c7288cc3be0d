"""The tables of the answers, a pure function of the stored histories.

A difference is plan minus `original` on the same question and the same cache; `random` is first averaged over its
seeds. A mean over questions weighs every question alike, its 95 % interval is the percentile bootstrap over whole
histories (`stats.paired_mean_difference`), which is narrow with few of them. EM: exact match. NLL: nats per token of
the reference answer, lower is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvverify.experiments.relay_facts import KINDS
from kvverify.experiments.relay_scoring import exact_match, token_f1
from kvverify.experiments.results import Cell, Chart, Result
from kvverify.stats import paired_mean_difference

__all__ = ["Score", "charts", "difference", "markdown", "scores"]

METRICS = ("exact", "f1", "nll")
NAMES = ("EM", "F1", "NLL")
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


def markdown(histories: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the relay table, the plans, and the kinds of question, as Markdown."""
    found = scores(histories)
    selected = [s for s in found if s.selector not in ("full", "finch")]
    questions = len({s.question for s in found})
    settings = histories[0]["settings"]
    full = [s for s in found if s.plan == "full"]
    lines = [
        f"SmolLM2-135M-Instruct, {len(histories)} histories of at most {settings['tokens']} tokens, {questions} "
        f"questions per cell ({questions // len(KINDS)} of each kind). EM (exact match) and F1 in per cent; NLL in "
        "nats per answer token, lower is better. Differences are plan - original on the same cache, with 95 % "
        "bootstrap intervals over histories.",
        "",
        f"Full cache: EM {_percent(full, 'exact')}, F1 {_percent(full, 'f1')}, NLL {_mean(full, 'nll'):.2f}.",
        "",
        "| selector | kept | evidence kept | EM original | relay | difference | F1 original | relay | difference "
        "| NLL original | relay | difference |",
        "|---|--:|--:|--:|--:|---|--:|--:|---|--:|--:|---|",
    ]
    settled = []
    for selector, retention in dict.fromkeys((s.selector, s.retention) for s in found if s.plan == "original"):
        cell = [s for s in found if (s.selector, s.retention) == (selector, retention)]
        lines.append(_relay_line(selector, retention, cell))
        if selector != "finch":
            settled.append([statistics.fmean(_differences(cell, "relay", metric)[0]) for metric in METRICS])
    better = [sum(one[place] > 0 for one in settled) for place in (0, 1)] + [sum(one[2] < 0 for one in settled)]
    worse = [sum(one[place] < 0 for one in settled) for place in (0, 1)] + [sum(one[2] > 0 for one in settled)]
    lines += [
        "",
        f"Of {len(settled)} settings without finch relay is better in {better[0]} and worse in {worse[0]} by EM, "
        f"better in {better[1]} and worse in {worse[1]} by F1, better in {better[2]} and worse in {worse[2]} by NLL "
        "(published: better in 32 of 36). finch with plan relay is FINCH itself.",
        "",
        f"All {len(settled)} settings together; published: judged accuracy of Qwen2-7B, BM25-B8192.",
        "",
        *_plan_table(selected),
        "",
        *_without("cam", selected),
        "bm25 at 10 %, the setting of the published controls:",
        "",
        *_plan_table([s for s in selected if (s.selector, s.retention) == ("bm25", 0.1)]),
        "",
        "| kind | full EM | EM original | relay | difference | NLL original | relay | difference |",
        "|---|--:|--:|--:|---|--:|--:|---|",
        *(_kind_line(kind, [s for s in found if s.kind == kind]) for kind in KINDS),
    ]
    return "\n".join(lines) + "\n"


def charts(histories: Sequence[Mapping[str, Any]]) -> dict[str, Result]:
    """Make the plots: what relay changes in the NLL by selector and retention, and what every plan does."""
    found = scores(histories)
    settings = histories[0]["settings"] | {"histories": len(histories)}
    cells: list[tuple[Cell, ...]] = []
    for selector, retention in dict.fromkeys((s.selector, s.retention) for s in found if s.plan == "original"):
        cell = [s for s in found if (s.selector, s.retention) == (selector, retention)]
        cells.append((selector, f"{100 * retention:g} %", *_rounded(difference(cell, "relay", "nll"))))
    selected = [s for s in found if s.selector not in ("full", "finch")]
    plans: list[tuple[Cell, ...]] = [
        (plan, f"{100 * retention:g} %", *_rounded(difference(kept, plan, "nll")))
        for retention in dict.fromkeys(s.retention for s in selected)
        for kept in [[s for s in selected if s.retention == retention]]
        for plan in dict.fromkeys(s.plan for s in kept)
        if plan != "original"
    ]
    title = "NLL of the answer, {} - original (nats per token, below 0 is better)"
    ends = ("NLL difference", "low", "high")
    return {
        "answers_relay": Result(
            title.format("relay"),
            ("selector", "kept", *ends),
            tuple(cells),
            Chart("selector", ends[0], "kept", "low", "high"),
            settings,
        ),
        "answers_plans": Result(
            title.format("plan"),
            ("plan", "kept", *ends),
            tuple(plans),
            Chart("plan", ends[0], "kept", "low", "high"),
            settings,
        ),
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


def _plan_table(found: Sequence[Score]) -> list[str]:
    return [
        "| plan | EM | - original | F1 | - original | NLL | - original | published |",
        "|---|--:|---|--:|---|--:|---|--:|",
        *(_plan_line(plan, found) for plan in dict.fromkeys(s.plan for s in found)),
    ]


def _without(selector: str, found: Sequence[Score]) -> list[str]:
    """Tell what relay does in all cells but those of one selector, whose NLL would decide the mean."""
    others = [s for s in found if s.selector != selector]
    if not others or len(others) == len(found):
        return []
    changes = (f"{name} {_change(others, 'relay', metric)}" for name, metric in zip(NAMES, METRICS, strict=True))
    return [f"Without {selector}, relay - original: {', '.join(changes)}.", ""]


def _plan_line(plan: str, found: Sequence[Score]) -> str:
    own = [s for s in found if s.plan == plan]
    parts = [plan]
    for metric in METRICS:
        parts += [_value(own, metric), "" if plan == "original" else _change(found, plan, metric)]
    return f"| {' | '.join([*parts, PUBLISHED.get(plan, '')])} |"


def _kind_line(kind: str, found: Sequence[Score]) -> str:
    selected = [s for s in found if s.selector not in ("full", "finch")]
    full = [s for s in found if s.plan == "full"]
    return f"| {' | '.join([kind, _percent(full, 'exact'), *_pair(selected, ('exact', 'nll'))])} |"


def _change(found: Sequence[Score], plan: str, metric: str) -> str:
    mean, low, high = difference(found, plan, metric)
    scale, digits = (1, 2) if metric == "nll" else (100, 1)
    interval = "" if low is None or high is None else f" [{scale * low:+.{digits}f}, {scale * high:+.{digits}f}]"
    return f"{scale * mean:+.{digits}f}{interval}"


def _value(found: Sequence[Score], metric: str) -> str:
    return f"{_mean(found, metric):.2f}" if metric == "nll" else _percent(found, metric)


def _percent(found: Sequence[Score], metric: str) -> str:
    return f"{100 * _mean(found, metric):.1f}"


def _mean(found: Sequence[Score], metric: str) -> float:
    return statistics.fmean(getattr(s, metric) for s in found)


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 5) for value in values]
