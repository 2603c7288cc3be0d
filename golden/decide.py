"""Stage `decide`: every policy's decisions on the captured tensors, in float64.

    python -m golden.decide llama smollm2        from the root of the repository, after the stage `capture`

No model runs here: what is stored depends on the captured bits and on the policies. Rotated and latent rows alike are
given to the selectors and to the plans of RoPERelay (`golden.decide_relay`); keys and values of their own to
Geodesia-KV, latents to VestigeKV (`golden.decide_tiers`).
"""

from __future__ import annotations

from typing import Annotated

import typer
from torch import Tensor

from golden import decide_relay, decide_tiers, stages


def main(models: Annotated[list[str], typer.Argument(metavar="MODEL...")]) -> None:
    """Decide for each model in turn."""
    stages.run("decide", models, decide)


def decide(name: str) -> dict[str, Tensor]:
    """Collect the decisions on what was captured of a model, in float64."""
    captured = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in stages.read("capture", name).items()
    }
    tensors = decide_relay.decisions(captured)
    tiers = decide_tiers.vestige if int(captured["branch"]) else decide_tiers.geodesia
    return tensors | tiers(captured)


if __name__ == "__main__":
    typer.run(main)
