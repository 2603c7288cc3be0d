"""The commands `kvverify stats` and `kvverify capacity`: paired reports of scored policies, and what a budget holds.

`register` puts them on the command line's app. They are text in, text out: the numbers are made by `kvverify.stats`,
`kvverify.capacity` and `kvverify.geodesia.rates`, which are imported when a command runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvverify.target import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvverify.capacity import CacheShape

__all__ = ["PUBLISHED", "PUBLISHED_RATES", "capacity", "register", "stats"]

GIB = 2**30

# Layers, KV heads, head dimension, and the cache budget in bytes (free after load less activation peak) of the two
# published measurements: geodesia-ai/geodesia-kv at 39bb98d, results/qwen{8b,3b}_context_capacity_nf4.json.
PUBLISHED: dict[str, tuple[tuple[int, int, int], int]] = {
    "Qwen3-8B": ((36, 8, 128), 41_765_250_560),
    "Qwen2.5-3B": ((36, 2, 128), 48_321_077_760),
}

# Bits per value as published there, measured at T = 16,321 .. 16,383 on Qwen3-8B and rounded to six digits. The figure
# of compressed-Quest came from an allocator that could not stand still; a correct one ends near 10.26.
PUBLISHED_RATES = {
    "full": 16.0,
    "Quest": 16.250489,
    "compressed-Quest B=10": 9.836099,
    "KIVI-4": 5.031156,
    "graded+RD": 4.989738,
    "KIVI-2": 3.050781,
    "RD-V2": 2.061,
}
RETAINED = {"SnapKV": 2048, "StreamingLLM": 2048}


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command()(stats)
    app.command()(capacity)


def stats(
    file: Annotated[Path, typer.Argument(help="JSON of paired per-token scores, or results.json of a quality run")],
) -> None:
    """Judge paired differences: cluster bootstrap, and beside it every small-sample view, with a verdict."""
    from kvverify.stats import compare

    for title, windows in _pairs(_read_json(file)):
        try:
            found = compare(windows)
        except ValueError as error:
            raise UsageError(f"{file}: {title}: {error}") from error
        typer.echo(f"{title}\n{found}\n")


def capacity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a transformers config.json, or a published model")],
    context: Annotated[int, typer.Option(min=1, help="tokens of one sequence, for the concurrency")] = 131_072,
    memory: Annotated[
        float | None, typer.Option(help="GiB for the cache; default: as published, or 24 for a config.json")
    ] = None,
) -> None:
    """Print bytes per token, maximum context and concurrency of every policy, at the published rates."""
    from kvverify.capacity import Retained

    shape, published = _shape(model)
    if memory is not None and not memory > 0:
        raise UsageError(f"--memory is {memory}, expected a positive number of GiB")
    budget = memory * GIB if memory is not None else (published or 24 * GIB)
    typer.echo(
        f"{model}: {shape.layers} layers, {shape.kv_heads} KV heads of {shape.head_dim}; "
        f"{budget / GIB:.2f} GiB for the cache"
    )
    typer.echo(
        f"{'policy':<22} {'bits/value':>10} {'KiB/token':>10} {'max context':>12} {'x ' + str(context) + ' tokens':>18}"
    )
    for policy, bits in PUBLISHED_RATES.items():
        typer.echo(
            f"{policy:<22} {bits:>10.6g} {shape.bytes_per_token(bits) / 1024:>10.3f} "
            f"{shape.max_context(budget, bits):>12,} {shape.concurrency(budget, bits, context):>18,}"
        )
    for policy, tokens in RETAINED.items():
        kept = Retained(shape, tokens)
        held = f"{kept.constant_bytes / GIB:.3f} GiB"
        typer.echo(f"{policy:<22} {'constant':>10} {held:>10} {'any':>12} {kept.concurrency(budget):>18,}")
    typer.echo(
        "Rates as published, measured at 16,321 to 16,383 tokens on Qwen3-8B; they are not those of other lengths."
    )


def _shape(model: str) -> tuple[CacheShape, int | None]:
    from kvverify.capacity import CacheShape

    if model in PUBLISHED:
        (layers, kv_heads, head_dim), budget = PUBLISHED[model]
        return CacheShape(layers, kv_heads, head_dim), budget
    path = Path(model)
    if not path.is_file():
        raise UsageError(f"model {model!r} is neither a file nor published: expected a config.json or {[*PUBLISHED]}")
    config = _read_json(path)
    config = config.get("text_config", config)
    if "kv_lora_rank" in config:
        raise UsageError(f"{path} caches a latent (kv_lora_rank): expected a model that caches keys and values")
    layers, heads = _integer(config, "num_hidden_layers", path), _integer(config, "num_attention_heads", path)
    kv_heads = _integer(config, "num_key_value_heads", path, default=heads)
    if config.get("head_dim") is not None:
        return CacheShape(layers, kv_heads, _integer(config, "head_dim", path)), None
    return CacheShape(layers, kv_heads, _integer(config, "hidden_size", path) // heads), None


def _integer(config: Mapping[str, Any], name: str, path: Path, *, default: int | None = None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} of {path} is {value!r}, expected a positive integer")
    return value


def _pairs(data: Mapping[str, Any]) -> list[tuple[str, list[list[float]]]]:
    """Titles and per-window differences nll_A - nll_B of a file of pairs, or of the results of a quality run."""
    if "pairs" in data:
        return [
            (f"{pair['policy_A']} / {pair['policy_B']}", [_minus(w["nll_A"], w["nll_B"]) for w in pair["windows"]])
            for pair in data["pairs"].values()
        ]
    if "windows" not in data:
        raise UsageError("the file has neither 'pairs' nor 'windows', expected paired scores or results of a run")
    windows = [window["policies"] for window in data["windows"]]
    return [
        (f"{name} / full", [_minus(w[name]["nll"], w["full"]["nll"]) for w in windows])
        for name in (windows[0] if windows else ())
        if name != "full"
    ]


def _minus(first: Sequence[float], second: Sequence[float]) -> list[float]:
    if len(first) != len(second):
        raise UsageError(f"a window has {len(first)} and {len(second)} scores, expected as many of both policies")
    return [a - b for a, b in zip(first, second, strict=True)]


def _read_json(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}, expected a JSON object")
    return found
