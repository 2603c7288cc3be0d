"""The report of a quality run: one table, one plot, paired intervals. A pure function of the results file.

Differences are nll(policy) - nll(full) on the same tokens, the cluster is the window. A policy below the full cache is
flagged: forgetting can lower perplexity, so such a row is to be read with its needle and its next-token KL.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

from kvverify.experiments.windows import DIGITS
from kvverify.geodesia.rates import Rate, common_chunk
from kvverify.stats import Comparison, compare

__all__ = ["Row", "paired_windows", "plot", "rows", "table", "write_report"]

# The pairs that the paper compares; every policy is compared with the full cache as well.
PAIRS = (("Quest", "compressed-Quest"), ("KIVI-4", "graded+RD"), ("sinks+recent", "graded+RD"))


@dataclass(frozen=True)
class Row:
    """One policy over all windows. NLL and KL in nats; `against_full` needs at least two windows."""

    policy: str
    rate: Rate
    read_union: float
    nll: float
    difference: float
    against_full: Comparison | None
    next_token_kl: float
    attention_kl: float
    needle_digits: int
    needle_keys: int
    windows: int
    certificate: tuple[int, int, float, float] | None  # outputs checked, violations, median and smallest bound / error

    @property
    def below_full(self) -> bool:
        """Whether the policy scored better than the full cache."""
        return self.difference < 0


def rows(results: Mapping[str, Any]) -> list[Row]:
    """Read the rows of a results file, in the order of its policies."""
    windows = [window["policies"] for window in results["windows"]]
    if not windows:
        raise ValueError("results hold 0 windows, expected at least one")
    return [_row(name, windows, results["queries_per_call"]) for name in windows[0]]


def paired_windows(results: Mapping[str, Any], first: str, second: str) -> list[list[float]]:
    """Return nll(first) - nll(second) per token, window by window."""
    known = list(results["windows"][0]["policies"]) if results["windows"] else []
    for name in (first, second):
        if name not in known:
            raise ValueError(f"policy {name!r} is not in the results, expected one of {known}")
    pairs = ((w["policies"][first]["nll"], w["policies"][second]["nll"]) for w in results["windows"])
    return [[a - b for a, b in zip(x, y, strict=True)] for x, y in pairs]


def table(rows: Sequence[Row]) -> str:
    """Lay the rows out as Markdown; rates at different Q are not comparable and are refused (ValueError)."""
    chunk = common_chunk([row.rate for row in rows])
    lines = [
        f"SmolLM2-135M, {rows[0].windows} windows, Q = {chunk} query a call. Bits per value; NLL and KL in nats.",
        "",
        "| policy | resident | read, query head | read, union | NLL | - full | 95 % t interval | next-token KL "
        "| attention KL | bound / error (smallest) | needle digits | whole keys |",
        "|---|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    lines += [_line(row) for row in rows]
    flagged = [row.policy for row in rows if row.below_full]
    if flagged:
        lines += ["", f"Below the full cache, not a gain by itself: {', '.join(flagged)}."]
    checked = sum(row.certificate[0] for row in rows if row.certificate)
    violations = sum(row.certificate[1] for row in rows if row.certificate)
    lines += ["", f"Certificate: {violations} violations in {checked:,} outputs checked."]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw resident rate against NLL difference, with 95 % t intervals where there are two windows, as an SVG."""
    common_chunk([row.rate for row in rows])
    matplotlib = _require("matplotlib")
    figure = _require("matplotlib.figure").Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        x, y = float(row.rate.resident), row.difference
        if row.against_full is not None:
            interval = row.against_full.t
            axes.plot([x, x], [interval.low, interval.high], color="0.6", linewidth=1.5, zorder=1)
        axes.scatter([x], [y], s=24, color="black", zorder=2)
        axes.annotate(row.policy, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="0.8", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1.6, 24)
    axes.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
    axes.set_xlabel("resident bits per value")
    axes.set_ylabel("NLL - NLL of the full cache (nats per token)")
    # Without a salt and a date the same rows give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "kvverify", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def write_report(results: Mapping[str, Any], folder: Path) -> str:
    """Write table.md and rate.svg, and return the table with the paired reports below it."""
    found = rows(results)
    text = table(found)
    if found[0].windows > 1:
        for first, second in PAIRS:
            text += f"\n{first} / {second}: {compare(paired_windows(results, first, second))}\n"
    (folder / "table.md").write_text(text, encoding="utf-8")
    plot(found, folder / "rate.svg")
    return text


def _row(name: str, windows: Sequence[Mapping[str, Any]], chunk: int) -> Row:
    own = [window[name] for window in windows]

    def mean(value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.fmean(value(window) for window in own)

    differences = [
        [a - b for a, b in zip(window[name]["nll"], window["full"]["nll"], strict=True)] for window in windows
    ]
    certificates = [window["certificate"] for window in own if "certificate" in window]
    return Row(
        policy=name,
        rate=Rate(Fraction(mean(lambda w: w["resident"])), Fraction(mean(lambda w: w["read_per_query_head"])), chunk),
        read_union=mean(lambda w: w["read_union"]),
        nll=mean(lambda w: statistics.fmean(w["nll"])),
        difference=statistics.fmean(value for window in differences for value in window),
        against_full=compare(differences) if len(windows) > 1 and name != "full" else None,
        next_token_kl=mean(lambda w: w["next_token_kl"]),
        attention_kl=mean(lambda w: w["attention_kl"]),
        needle_digits=sum(w["needle"]["digits"] for w in own),
        needle_keys=sum(w["needle"]["digits"] == DIGITS for w in own),
        windows=len(own),
        certificate=_together(certificates) if certificates else None,
    )


def _together(windows: Sequence[Mapping[str, Any]]) -> tuple[int, int, float, float]:
    return (
        sum(w["checked"] for w in windows),
        sum(w["violations"] for w in windows),
        statistics.median(w["median"] for w in windows),
        min(w["smallest"] for w in windows),
    )


def _line(row: Row) -> str:
    interval = "" if row.against_full is None else f"[{row.against_full.t.low:+.4f}, {row.against_full.t.high:+.4f}]"
    bound = "" if row.certificate is None else f"{row.certificate[2]:.0f} ({row.certificate[3]:.1f})"
    cells = [
        row.policy + (" (below full)" if row.below_full else ""),
        f"{float(row.rate.resident):.3f}",
        f"{float(row.rate.read):.3f}",
        f"{row.read_union:.3f}",
        f"{row.nll:.4f}",
        f"{row.difference:+.4f}",
        interval,
        f"{row.next_token_kl:.4f}",
        f"{row.attention_kl:.4f}",
        bound,
        f"{row.needle_digits} / {DIGITS * row.windows}",
        f"{row.needle_keys} / {row.windows}",
    ]
    return f"| {' | '.join(cells)} |"


def _require(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'kvverify[report]'", name=module) from error
