"""A model small enough to train in minutes that retrieves over thousands of tokens, with and without rotary position.

Theory of operation. A haystack is filler with needles; a needle is ONE token that encodes a (key, value) pair, a
question is one token that names a key, and the answer is one token that names a value:

    f f N(k=3,v=17) f f f N(k=9,v=2) f ... f Q(9) Q(3)        at Q(9) the next token is V(2), at Q(3) it is V(17)

Filler drifts: token t is uniform over 16 neighbouring ids (on a ring of 64) whose window moves by one step in eight
tokens, so that the next filler token is predicted from its context, and the hidden rows of a haystack have the slow
trend that a salience has to remove.

`build` makes the NoPE model (Kimi Linear, every layer full attention, dense MLPs) or its RoPE twin (DeepSeek-V3, the
same sizes), `train` trains either from a `Recipe` that holds every number, and `load` returns the trained weights that
ship with the package. Training twice on one machine with one thread gives the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvverify.models import require

__all__ = [
    "FILLER_IDS",
    "KEYS",
    "VALUES",
    "VOCABULARY",
    "WEIGHTS",
    "Haystack",
    "Position",
    "Recipe",
    "accuracy",
    "build",
    "filler",
    "haystacks",
    "load",
    "needle_token",
    "question_token",
    "serialize",
    "train",
    "value_token",
]

Position = Literal["nope", "rope"]

FILLER_IDS = 64
FILLER_WINDOW = 16
DRIFT = 1 / 8
KEYS = VALUES = 32
VOCABULARY = FILLER_IDS + KEYS * VALUES + KEYS + VALUES
WEIGHTS: dict[Position, Path] = {
    position: Path(__file__).parent.parent / "data" / f"needles_{position}.safetensors" for position in ("nope", "rope")
}


@dataclass(frozen=True)
class Recipe:
    """Everything that the weights depend on beside the versions of torch and transformers.

    Lengths count all tokens of a sequence, its questions included; the length doubles, from `shortest` to `longest`,
    whenever the mean accuracy of the last `patience` steps exceeds `mastered`. The learning rate rises for
    `warmup` steps and falls linearly to a tenth over the last third.
    """

    seed: int = 20_260
    steps: int = 700
    batch: int = 64
    needles: int = 8
    shortest: int = 32
    longest: int = 256
    mastered: float = 0.95
    patience: int = 10
    learning_rate: float = 3e-3
    warmup: int = 40
    filler_weight: float = 0.05
    layers: int = 2
    hidden: int = 96
    intermediate: int = 192
    heads: int = 4
    content: int = 48
    branch: int = 16
    nope_head: int = 16
    value_head: int = 32


class Haystack(NamedTuple):
    """tokens[batch, length] of haystacks without questions; key, value and position[batch, needles] of the needles."""

    tokens: Tensor
    key: Tensor
    value: Tensor
    position: Tensor


def needle_token(key: Tensor, value: Tensor) -> Tensor:
    """Id of the token that says: the value of `key` is `value`."""
    return FILLER_IDS + key * VALUES + value


def question_token(key: Tensor) -> Tensor:
    """Id of the token that asks for the value of `key`."""
    return FILLER_IDS + KEYS * VALUES + key


def value_token(value: Tensor) -> Tensor:
    """Id of the answer `value`."""
    return FILLER_IDS + KEYS * VALUES + KEYS + value


def filler(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Drifting filler, int64 [batch, length]: uniform over `FILLER_WINDOW` ids from a start that walks on the ring."""
    start = torch.randint(FILLER_IDS, (batch, 1), generator=generator)
    moves = torch.rand(batch, length, generator=generator) < DRIFT
    steps = torch.randint(2, (batch, length), generator=generator) * 2 - 1
    offset = torch.randint(FILLER_WINDOW, (batch, length), generator=generator)
    return (start + (moves * steps).cumsum(dim=1) + offset) % FILLER_IDS


def haystacks(
    batch: int, length: int, needles: int, generator: torch.Generator, *, span: tuple[float, float] = (0.0, 1.0)
) -> Haystack:
    """Filler with `needles` of distinct keys at distinct random positions in [span[0] length, span[1] length).

    ValueError for more needles than keys or than positions.
    """
    first, stop = math.ceil(span[0] * length), math.ceil(span[1] * length)
    if not 1 <= needles <= min(KEYS, stop - first):
        raise ValueError(f"needles is {needles}: expected 1 to {min(KEYS, stop - first)}")
    tokens = filler(batch, length, generator)
    key = torch.rand(batch, KEYS, generator=generator).argsort(dim=1)[:, :needles]
    value = torch.randint(VALUES, (batch, needles), generator=generator)
    position = first + torch.rand(batch, stop - first, generator=generator).argsort(dim=1)[:, :needles]
    return Haystack(tokens.scatter(1, position, needle_token(key, value)), key, value, position)


def build(position: Position, recipe: Recipe | None = None) -> Any:
    """Return an untrained model of the recipe: KimiLinearForCausalLM for "nope", DeepseekV3ForCausalLM for "rope".

    Weights are drawn from the recipe's seed; the global generator is left as it was.
    """
    recipe = recipe or Recipe()
    transformers = require("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "kv_lora_rank": recipe.content,
        "q_lora_rank": None,
        "qk_rope_head_dim": recipe.branch,
        "qk_nope_head_dim": recipe.nope_head,
        "v_head_dim": recipe.value_head,
        "max_position_embeddings": 1 << 20,
        "initializer_range": 0.05,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if position == "nope":
        kind = transformers.KimiLinearForCausalLM
        layers = {"layer_types": ["full_attention"] * recipe.layers, "mlp_layer_types": ["dense"] * recipe.layers}
        config = transformers.KimiLinearConfig(**sizes, **layers)
    elif position == "rope":
        kind = transformers.DeepseekV3ForCausalLM
        config = transformers.DeepseekV3Config(**sizes, first_k_dense_replace=recipe.layers, num_mtp_layers=0)
    else:
        raise ValueError(f"position is {position!r}: expected 'nope' or 'rope'")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return kind(config)


def train(
    position: Position, recipe: Recipe | None = None, *, report: Callable[[int, int, float, float], None] | None = None
) -> Any:
    """Train a model of the recipe and return it in eval mode; needs one thread for the same bits each time.

    loss = cross-entropy of the answers + filler_weight x cross-entropy of every eighth filler token. `report` is
    called after every step with (step, length, loss, accuracy of the answers).
    """
    recipe = recipe or Recipe()
    model = build(position, recipe).train()
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, recipe))
    length = recipe.shortest
    recent: list[float] = []
    for step in range(recipe.steps):
        stack = haystacks(recipe.batch, length - recipe.needles, recipe.needles, generator)
        order = torch.rand(recipe.batch, recipe.needles, generator=generator).argsort(dim=1)
        question = question_token(stack.key.gather(1, order))
        answer = value_token(stack.value.gather(1, order))
        hidden = model.model(torch.cat([stack.tokens, question], dim=1), use_cache=False).last_hidden_state
        answers = model.lm_head(hidden[:, -recipe.needles :])
        loss = cross_entropy(answers.flatten(0, 1), answer.flatten())
        loss = loss + recipe.filler_weight * _filler_loss(model, hidden, stack.tokens, offset=step % 8)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        hits = float((answers.argmax(dim=2) == answer).double().mean())
        recent = [*recent, hits][-recipe.patience :]
        if report is not None:
            report(step, length, loss.item(), hits)
        if len(recent) == recipe.patience and math.fsum(recent) > recipe.mastered * recipe.patience:
            length, recent = min(2 * length, recipe.longest), []
    return model.eval()


@torch.no_grad()
def accuracy(model: Any, *, length: int, needles: int, sequences: int, seed: int = 0) -> float:
    """Share of right answers over `sequences` fresh haystacks of `length` tokens, one question for each needle."""
    generator = torch.Generator().manual_seed(seed)
    hits = 0
    for _ in range(sequences):
        stack = haystacks(1, length - needles, needles, generator)
        tokens = torch.cat([stack.tokens, question_token(stack.key)], dim=1)
        logits = model(tokens, use_cache=False, logits_to_keep=needles).logits
        hits += int((logits.argmax(dim=2) == value_token(stack.value)).sum())
    return hits / (sequences * needles)


def serialize(model: Any, position: Position, recipe: Recipe) -> bytes:
    """The safetensors file of a trained model: weights as float16, the recipe and the versions in its metadata."""
    transformers, safetensors = require("transformers"), require("safetensors.torch")
    provenance = {
        "position": position,
        "recipe": asdict(recipe),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
    }
    weights = {name: weight.detach().to(torch.float16).contiguous() for name, weight in model.state_dict().items()}
    # One entry, in a fixed order: the order of several entries is not defined by the format.
    content: bytes = safetensors.save(weights, metadata={"provenance": json.dumps(provenance, sort_keys=True)})
    return content


def load(position: Position, path: Path | None = None) -> Any:
    """Return the trained model in eval mode, its float16 weights widened to float32.

    ImportError names the extra when transformers is missing; ValueError for a file of the other model.
    """
    safetensors = require("safetensors")
    with safetensors.safe_open(path or WEIGHTS[position], framework="pt") as file:
        provenance = json.loads(file.metadata()["provenance"])
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 -- not a dict
    if provenance["position"] != position:
        raise ValueError(f"position is {position!r}: expected {provenance['position']!r}, as the file says")
    model = build(position, Recipe(**provenance["recipe"]))
    model.load_state_dict(weights)
    return model.eval()


def _learning_rate_factor(step: int, recipe: Recipe) -> float:
    left = (recipe.steps - step) / (recipe.steps / 3)
    return min(1.0, (step + 1) / recipe.warmup, max(0.1, left))


def _filler_loss(model: Any, hidden: Tensor, tokens: Tensor, *, offset: int) -> Tensor:
    now, following = tokens[:, offset:-1:8], tokens[:, offset + 1 :: 8]
    counted = (now < FILLER_IDS) & (following < FILLER_IDS)
    return cross_entropy(model.lm_head(hidden[:, offset : tokens.shape[1] - 1 : 8][counted]), following[counted])
