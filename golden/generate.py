"""Stage `generate`: each model answers with each policy on.

    python -m golden.generate llama smollm2        from the root of the repository, after the stage `capture`

The model reads the captured history. Then, for every way to keep it, it reads one question and answers greedily:

    full                                   nothing is evicted
    relay.<plan>                           what SnapKV keeps, at the positions of each of the ten plans
    geodesia                               the packed cache; for keys and values of their own
    vestige                                both tiers; for latents (rotated ones as a comparison)

    <way>.logits[question, vocabulary], <way>.logits_lse[question], <way>.answer[tokens]

A large vocabulary is thinned to evenly spaced logits; the log-sum-exp is over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from golden import stages
from golden.capture_models import reader
from kvverify.models.attention_layers import attention_layers
from kvverify.models.conversation import History, conversing, read_history
from kvverify.models.exact import Exact
from kvverify.models.geodesia_cache import geodesia_caches
from kvverify.models.serving import serving
from kvverify.models.vestige_cache import VestigeSettings, vestige_caches
from kvverify.relay.plans import PLANS
from kvverify.relay.session import RelaySession
from kvverify.selectors import budget_from_share, snapkv
from kvverify.vestige.partition import EvictionPolicy

SETTINGS = stages.parameters("generate")
DECIDE = stages.parameters("decide")


def main(models: Annotated[list[str], typer.Argument(metavar="MODEL...")]) -> None:
    """Generate with each model in turn."""
    stages.run("generate", models, generate)


def generate(name: str) -> dict[str, Tensor]:
    """Ask the model one question in every way."""
    model, _ = reader(name)
    tokens = stages.read("capture", name)["tokens"]
    generator = torch.Generator().manual_seed(SETTINGS["seed"])
    question = tokens[torch.randint(len(tokens), (SETTINGS["question"],), generator=generator)]
    history = read_history(model, tokens)
    tensors: dict[str, Tensor] = {}
    plans = sessions(history)
    with conversing(model, list(plans.values()), history=history) as talk:
        logits = talk.ask(question)
        tensors |= told([f"relay.{plan}" for plan in plans], logits, talk.generate(SETTINGS["answer"]))
    latent = all(layer.latent for layer in history.layers)
    exact = [Exact(scale=layer.scale, window=layer.window) for layer in attention_layers(model)]
    caches = vestige(model) if latent else geodesia(model)
    for way, row in (("full", exact), ("vestige" if latent else "geodesia", caches)):
        with serving(model, [row], observed=len(tokens)) as served:
            served.prefill(tokens)
            logits = served(question)
            tensors |= told([way], logits, served.generate(SETTINGS["answer"]))
    return tensors


def sessions(history: History) -> dict[str, RelaySession]:
    """One session per plan, all with what SnapKV keeps."""
    budget = budget_from_share(Fraction(SETTINGS["share"]), history.length)
    rows = history.rows()
    selection = snapkv(rows, budget=budget, kv_heads=history.kv_heads, window=DECIDE["window"])
    mass = rows.double().sum(2).unflatten(1, (history.kv_heads, -1)).sum(2)
    session = history.session(selection, scores=mass.gather(2, selection.positions.clamp(min=0)))
    return {name: session.relocate(plan(session.retained)) for name, plan in PLANS.items()}


def geodesia(model: Any) -> Any:
    """Packed caches with the settings of the stage `decide`."""
    settings = DECIDE["geodesia"]
    return geodesia_caches(
        model,
        budget=SETTINGS["rate"],
        block=settings["block"],
        group=settings["group"],
        sinks=settings["sinks"],
        window=settings["window"],
        decay=settings["decay"],
        residual_fraction=settings["residual"],
        page_fraction=settings["pages"],
    )


def vestige(model: Any) -> Any:
    """Both tiers with the settings of the stage `decide`."""
    settings = DECIDE["vestige"]
    eviction = EvictionPolicy(**{name: settings[name] for name in ("block", "bandwidth", "fraction", "sinks")})
    found = VestigeSettings(eviction, rank=settings["rank"], recall=settings["recall"], window=32)
    return vestige_caches(model, found, allow_rotary=True)


def told(ways: Sequence[str], logits: Tensor, answers: list[list[int]]) -> dict[str, Tensor]:
    """Tensors of each row of a batch, under the name of its way."""
    tensors: dict[str, Tensor] = {}
    for row, way in enumerate(ways):
        found = stages.thinned(logits[row], keep=SETTINGS["logits"]) | {"answer": torch.tensor(answers[row])}
        tensors |= {f"{way}.{name}": tensor for name, tensor in found.items()}
    return tensors


if __name__ == "__main__":
    typer.run(main)
