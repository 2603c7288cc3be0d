"""The experiments on VestigeKV, on the models trained by golden/train_needles.py.

    python -m kvverify.experiments.vestige NAME --trials 24 --out DIR

prints a table and writes DIR/NAME.json and DIR/NAME.svg; NAME `all` runs every one. An outcome is measured, never
asserted, and is reported where it contradicts the paper too.

Sizes are those of the small models: content 48, branch 16, rank 6 in the place of 512, 64 and 64; blocks of 256 rows
and 4 low bins, by salience and by question. Needs `pip install 'kvverify[models,report]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import torch
import typer

from kvverify.entry import run
from kvverify.experiments.results import Result, table, write
from kvverify.experiments.vestige_anatomy import arkvale_digests, branch_anatomy, mergeable_rows
from kvverify.experiments.vestige_continuation import continuation_loss, streaming_path
from kvverify.experiments.vestige_needles import branch_width, multiple_needles, needle_rates, rope_twin
from kvverify.experiments.vestige_retrieval import rank_knob, tier_two

__all__ = ["EXPERIMENTS", "main"]

EXPERIMENTS: Mapping[str, Callable[..., Result]] = MappingProxyType(
    {
        "needle_rates": needle_rates,
        "tier_two": tier_two,
        "branch_width": branch_width,
        "rope_twin": rope_twin,
        "multiple_needles": multiple_needles,
        "branch_anatomy": branch_anatomy,
        "continuation_loss": continuation_loss,
        "arkvale_digests": arkvale_digests,
        "rank_knob": rank_knob,
        "streaming_path": streaming_path,
        "mergeable_rows": mergeable_rows,
    }
)


def main(
    name: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}, or all.")],
    trials: Annotated[int, typer.Option(min=1, help="Haystacks; pairs of them for rank_knob.")] = 24,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of a haystack, a multiple of 256.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.json and NAME.svg.")] = None,
) -> None:
    """Run one experiment, or all, print its table and write its files."""
    if name != "all" and name not in EXPERIMENTS:
        raise typer.BadParameter(f"NAME is {name!r}: expected one of {', '.join(EXPERIMENTS)}, or all")
    if tokens % 256:
        raise typer.BadParameter(f"--tokens is {tokens}: expected a multiple of 256, so that every block is whole")
    torch.set_num_threads(1)
    for chosen in EXPERIMENTS if name == "all" else (name,):
        result = EXPERIMENTS[chosen](trials=trials, tokens=tokens)
        typer.echo(table(result) + "\n")
        if out is not None:
            for path in write(result, out, chosen):
                typer.echo(f"wrote {path}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run(app, name="python -m kvverify.experiments.vestige", usage=(ValueError, OSError))
