"""Train the two small models that the VestigeKV experiments run on: Kimi Linear without position, and its RoPE twin.

    python golden/train_needles.py nope             train, and compare with the shipped weights (exit 1 if they differ)
    python golden/train_needles.py nope --update    train, and replace the shipped weights and their pin
    python golden/train_needles.py nope --accuracy  report the accuracy of the shipped weights at 256 to 4096 tokens

Everything that the weights depend on is in `kvverify.models.needles.Recipe`. One thread: the same machine gives the
same bits. Another processor or version of torch rounds differently, and training amplifies it.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvverify.models.needles import WEIGHTS, Position, Recipe, accuracy, load, serialize, train

PINS = Path(__file__).with_name("pins.json")
LENGTHS = (256, 512, 1024, 2048, 4096)
SEQUENCES = 32


def main(
    position: Annotated[Position, typer.Argument(help="nope or rope.")],
    update: Annotated[bool, typer.Option("--update", help="Replace the shipped weights and their pin.")] = False,
    measure: Annotated[bool, typer.Option("--accuracy", help="Only report the shipped weights' accuracy.")] = False,
) -> None:
    """Train one model from its recipe; compare it with the shipped one, or replace that."""
    torch.set_num_threads(1)
    if not measure:
        check_or_replace(position, serialize(trained(position), position, Recipe()), update=update)
    report_accuracy(position)


def trained(position: Position) -> torch.nn.Module:
    """Train with a progress bar."""
    recipe = Recipe()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(position, total=recipe.steps)

        def report(step: int, length: int, loss: float, hits: float) -> None:
            told = f"{position}: {length} tokens, loss {loss:.3f}, accuracy {hits:.3f}"
            progress.update(task, completed=step + 1, description=told)

        return train(position, recipe, report=report)


def check_or_replace(position: Position, content: bytes, *, update: bool) -> None:
    """Compare the file with its pin, or write both; exit 1 where they differ."""
    path, name = WEIGHTS[position], f"needles_{position}"
    found = hashlib.sha256(content).hexdigest()
    pins = json.loads(PINS.read_text())
    if update:
        replace(path, content)
        pins[name] = {"file": f"kvverify/data/{path.name}", "sha256": found}
        replace(PINS, (json.dumps(pins, indent=2) + "\n").encode())
    elif found != pins[name]["sha256"]:
        typer.echo(f"{name}: expected sha256 {pins[name]['sha256']}, got {found}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{path.name}: {len(content)} bytes, sha256 {found}")


def report_accuracy(position: Position) -> None:
    """Print the accuracy of the shipped weights over fresh haystacks of 8 needles, and of one."""
    model = load(position)
    typer.echo(f"{position}, stored weights, {SEQUENCES} haystacks each\ntokens  8 needles  1 needle")
    for length in LENGTHS:
        shares = (accuracy(model, length=length, needles=needles, sequences=SEQUENCES) for needles in (8, 1))
        typer.echo(f"{length:6}  {next(shares):9.4f}  {next(shares):8.4f}")


def replace(path: Path, content: bytes) -> None:
    """Write `path` in one step: a reader sees the old file or the new one."""
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)


if __name__ == "__main__":
    typer.run(main)
