"""The result of an experiment as data, and its three views: a table, JSON and an SVG."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

__all__ = ["Cell", "Chart", "Result", "draw", "quantile", "table", "write"]

Cell = str | int | float | None


@dataclass(frozen=True)
class Chart:
    """Which columns the SVG shows: bars of `y` at each `x`, one colour per `series`; low and high are an interval."""

    x: str
    y: str
    series: str
    low: str | None = None
    high: str | None = None


@dataclass(frozen=True)
class Result:
    """A table with the settings that it was measured under; None stands for a cell that does not apply."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    chart: Chart
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"rows holds {row}: expected {len(self.columns)} cells, {', '.join(self.columns)}")
            if any(isinstance(cell, float) and not math.isfinite(cell) for cell in row):
                raise ValueError(f"rows holds {row}: expected finite numbers")

    def column(self, name: str) -> list[Cell]:
        """All cells of one column."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


def quantile(values: list[int] | list[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    if not values:
        raise ValueError("values is empty: expected at least one")
    return float(sorted(values)[max(0, math.ceil(share * len(values)) - 1)])


def table(result: Result) -> str:
    """Plain text, columns aligned, numbers to the right."""
    texts = [result.columns, *(tuple(_text(cell) for cell in row) for row in result.rows)]
    widths = [max(len(row[place]) for row in texts) for place in range(len(result.columns))]
    numeric = [any(isinstance(cell, int | float) for cell in result.column(name)) for name in result.columns]
    lines = [
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in texts
    ]
    return "\n".join([result.title, "", lines[0], "-" * len(lines[0]), *lines[1:], *("", *result.notes)])


def write(result: Result, folder: Path, name: str) -> tuple[Path, Path]:
    """Write NAME.json and NAME.svg to `folder`, each in one step, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record = asdict(result) | {"torch": torch.__version__.partition("+")[0]}
    paths = folder / f"{name}.json", folder / f"{name}.svg"
    contents = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode(), draw(result)
    for path, content in zip(paths, contents, strict=True):
        partial = path.with_suffix(".partial")
        partial.write_bytes(content)
        os.replace(partial, path)
    return paths


def draw(result: Result) -> bytes:
    """Grouped bars as an SVG, the same bytes for the same result."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib is not installed: pip install 'kvverify[report]'", name="matplotlib") from error
    chart = result.chart
    cells = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    places = list(dict.fromkeys(_text(cell[chart.x]) for cell in cells))
    series = list(dict.fromkeys(_text(cell[chart.series]) for cell in cells))
    figure = Figure(figsize=(max(6.0, 1.0 + 0.22 * len(places) * len(series)), 4.0), layout="constrained")
    axes = figure.subplots()
    for number, label in enumerate(series):
        chosen = [cell for cell in cells if _text(cell[chart.series]) == label and cell[chart.y] is not None]
        at = [places.index(_text(cell[chart.x])) + (number + 0.5) * 0.8 / len(series) - 0.4 for cell in chosen]
        heights = [float(cell[chart.y] or 0) for cell in chosen]
        bars = None
        if chart.low is not None and chart.high is not None:
            ends = [(float(cell[chart.low] or 0), float(cell[chart.high] or 0)) for cell in chosen]
            # Rounding of printed ends may cross the bar by an ulp, which the plot would refuse.
            bars = [
                [max(0.0, end[side] * sign - height * sign) for end, height in zip(ends, heights, strict=True)]
                for side, sign in ((0, -1), (1, 1))
            ]
        axes.bar(at, heights, width=0.8 / len(series), yerr=bars, label=label, error_kw={"elinewidth": 0.8})
    axes.set_xticks(range(len(places)), places)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.set_title(result.title, fontsize=9)
    figure.legend(loc="outside right upper", fontsize=7)
    stream = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kvverify"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
