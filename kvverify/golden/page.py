"""A diff as one HTML page without scripts or network: a strip per tensor shows where in it the differences lie."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvverify.golden.compare import BUDGET
from kvverify.golden.tree import GoldenUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvverify.golden.diff import FileDiff

__all__ = ["page", "require_jinja2"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvverify golden diff</title><style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code { font-size: 13px } svg { display: block } .changed, .added, .removed { color: #a40000; font-weight: 600 }
.drifted { color: #8a5a00 } .note { color: #555 }
</style></head><body>
<h1>Golden diff</h1>
<p>{{ summary }}</p>
{% for stage, reasons in stale.items() %}<p><b>{{ stage }}</b> is stale: {{ reasons | join("; ") }}</p>{% endfor %}
{% for file in files if file.tensors %}
<h2><code>{{ file.path }}</code></h2>
<table><tr><th>tensor</th><th>verdict</th><th>shape</th><th>changed</th><th>max ULP</th><th>max rel</th>
<th>mean, rms</th><th>sha256</th><th>where (row-major)</th></tr>
{% for t in file.tensors %}
<tr><td><code>{{ t.name }}</code></td><td class="{{ t.verdict }}">{{ t.verdict }}</td><td>{{ t.shape }}</td>
<td class="number">{{ "%.2f %%" | format(100 * t.changed) }}</td>
<td class="number">{{ "–" if t.ulp is none else "{:,}".format(t.ulp) }}</td>
<td class="number">{{ "%.2e" | format(t.relative) }}</td>
<td>{% for side in (t.before, t.after) if side %}{{ "%.6g, %.6g" | format(side.mean, side.rms) }}<br>{% endfor %}</td>
<td>{% for hash in t.sha256 if hash %}<code>{{ hash[:12] }}</code><br>{% endfor %}</td>
<td><svg width="{{ 4 * t.strip | length }}" height="18" role="img" aria-label="largest differences along the tensor">
{% for cell in t.strip %}<rect x="{{ 4 * loop.index0 }}" width="4" height="18" fill="rgb(164,0,0)"
 fill-opacity="{{ cell }}"/>{% endfor %}</svg></td></tr>
{% endfor %}</table>
{% endfor %}
<p class="note">Budgets, over the largest value of the stored tensor:
{% for dtype, budget in budgets.items() %}
{{- dtype }} {{ "%.3g" | format(budget) }}{{ ", " if not loop.last }}{% endfor %}.
Integers, bools and bytes have none. max rel is the largest difference over the largest value.</p>
</body></html>
"""


def require_jinja2() -> None:
    """Raise GoldenUsageError, which names the extra, where jinja2 is not installed."""
    if find_spec("jinja2") is None:
        raise GoldenUsageError("jinja2 is not installed, expected it for --html: `pip install 'kvverify[golden]'`")


def page(files: Sequence[FileDiff], stale: Mapping[str, Sequence[str]], told: str) -> str:
    """Render the page. GoldenUsageError where jinja2 is not installed."""
    require_jinja2()
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    return template.render(files=files, stale=stale, summary=told, budgets=BUDGET) + "\n"
