"""Stage `capture`: let every model read a history, and keep what it cached and asked.

    python -m golden.capture_models llama smollm2        from the root of the repository

Written for each model, layers numbered from 0 in their order:

    tokens[n]                     the history
    keys.l[kv, n, dim]            as cached, after rotation; for latent attention the rows [branch ; content]
    values.l[kv, n, value_dim]    not for latent attention, whose rows are their own values
    queries.l[heads, m, dim]      of the last m tokens, after rotation
    cos.l, sin.l[n, pairs]        the rotary table of the layer, amplitude included
    scale[layers], window[layers] of the attention; window 0: all
    interleaved, branch           layout of the rotary pairs; columns of the branch, 0 without latent attention
    logits, logits_lse            after the last token
    state_sha256                  hash of the model's weights
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from golden import stages
from kvverify.models.conversation import History, read_history
from kvverify.models.glassllm import load_glassllm
from kvverify.models.loading import load_smollm2, load_text
from kvverify.models.needles import Position, haystacks, load
from kvverify.models.seeded import SEEDED, seeded_model, state_sha256

SETTINGS = stages.parameters("capture")


def main(models: Annotated[list[str], typer.Argument(metavar="MODEL...")]) -> None:
    """Capture each model in turn."""
    stages.run("capture", models, capture)


def capture(name: str) -> dict[str, Tensor]:
    """Read a history with the model of this name; real models are kept in 16 bits, and a few layers of a deep one."""
    model, tokens = reader(name)
    history = read_history(model, tokens)
    real = name in SETTINGS["real"]
    kept = SETTINGS["real"][name].get("layers") if real else None
    numbers = range(len(history.layers)) if kept is None else kept
    stored = torch.bfloat16 if real else torch.float32
    tensors = {"tokens": tokens, **described(history, numbers)}
    for place, number in enumerate(numbers):
        layer, table = history.layers[number], history.tables[number]
        tensors[f"keys.{place}"] = history.keys[number].to(stored)
        if not layer.latent:
            tensors[f"values.{place}"] = history.values[number].to(stored)
        tensors[f"queries.{place}"] = history.queries[number][:, -SETTINGS["observed"] :].to(stored)
        tensors[f"cos.{place}"], tensors[f"sin.{place}"] = (side[: len(tokens)] for side in (table.cos, table.sin))
    weights = bytes.fromhex(state_sha256(model))
    tensors["state_sha256"] = torch.tensor(list(weights), dtype=torch.uint8)
    return tensors | stages.thinned(history.logits, keep=SETTINGS["logits"])


def reader(name: str) -> tuple[Any, Tensor]:
    """Return the model of this name and the tokens[n] that it reads."""
    generator = torch.Generator().manual_seed(SETTINGS["seed"])
    if name in SEEDED:
        model = seeded_model(name, seed=SETTINGS["seed"])
        return model, torch.randint(3, model.config.vocab_size, (SETTINGS["tokens"],), generator=generator)
    if name in ("needles_nope", "needles_rope"):
        position: Position = "nope" if name == "needles_nope" else "rope"
        sizes = SETTINGS["needles"]
        return load(position), haystacks(1, sizes["tokens"], sizes["needles"], generator).tokens[0]
    model, tokenizer = {"smollm2": load_smollm2, "glassllm": load_glassllm}[name]()
    settings = SETTINGS["real"][name]
    text = load_text("sotu", settings["text"])
    return model, torch.tensor(tokenizer(text[: 8 * settings["tokens"]]).input_ids[: settings["tokens"]])


def described(history: History, numbers: Any) -> dict[str, Tensor]:
    """What a decision needs to know of the layers beside their tensors."""
    layers = [history.layers[number] for number in numbers]
    branch = 2 * history.tables[0].cos.shape[1] if layers[0].latent else 0
    if layers[0].latent and not branch:  # without rotation the branch is what the content leaves of a row
        branch = history.keys[0].shape[2] - history.values[0].shape[2]
    return {
        "scale": torch.tensor([layer.scale for layer in layers], dtype=torch.float64),
        "window": torch.tensor([layer.window or 0 for layer in layers]),
        "interleaved": torch.tensor(history.tables[0].layout == "interleaved"),
        "branch": torch.tensor(branch),
    }


if __name__ == "__main__":
    typer.run(main)
