"""glassllm: the converted model is the package's own, and the order of its rotary pairs is what makes it so."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvverify.models import glassllm
from kvverify.models.glassllm import GLASSLLM_SHA256, load_glassllm
from kvverify.models.rotary import RotarySignature, probe, rotary_tables
from kvverify.relay.plans import Retained
from kvverify.relay.policy import RotaryTable
from kvverify.relay.session import begin

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank,\n\n  and “what is the use”? "
# Logits reach 20 (deviation 2.8). Measured: 9.5e-6 against the package, which computes part of it in float64.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("glassllm", reason="pip install --no-deps glassllm==0.1.0").load_pretrained("en")


@pytest.fixture(scope="module")
def loaded(theirs):
    return load_glassllm()


@pytest.fixture(scope="module")
def tokens(theirs) -> Tensor:
    return torch.tensor((theirs[1].encode(TEXT) * 4)[:128])


@torch.no_grad()
def logits(model, tokens: Tensor, **inputs) -> Tensor:
    return model(tokens[None], **inputs).logits[0]


def test_logits_are_those_of_the_package(loaded, theirs, tokens) -> None:
    expected = torch.from_numpy(np.asarray(theirs[0].forward(tokens.numpy()).data[0]))
    error = float((logits(loaded[0], tokens) - expected).abs().max())
    assert error < TOLERANCE, f"over the whole context of 128 tokens logits are off by {error:.1e}"


def test_logits_are_far_off_without_the_reordering_of_pairs(theirs, tokens, monkeypatch) -> None:
    monkeypatch.setattr(glassllm, "half_split", lambda weight, heads: weight)
    expected = torch.from_numpy(np.asarray(theirs[0].forward(tokens.numpy()).data[0]))
    error = float((logits(load_glassllm()[0], tokens) - expected).abs().max())
    assert error > 1, f"a model that pairs the wrong dims is off by {error:.1e} only: the logits do not see the layout"


def test_the_model_is_half_split_and_complete(loaded) -> None:
    model, _ = loaded
    assert sum(weight.numel() for weight in model.parameters()) == 852_608
    for layer in range(4):
        assert probe(model, layer=layer) == RotarySignature("half", 32, 1, 1.0)
    assert not model.training


@pytest.mark.parametrize(
    "text", [TEXT, "naïve “Ω日” <eos> 3.14", "  two  spaces\n\n\nlines ", "e\u0301 is one letter with NFC, ù too", ""]
)
def test_a_text_is_encoded_as_by_the_package(loaded, theirs, text: str) -> None:
    assert loaded[1](text).input_ids == theirs[1].encode(text)


def test_what_is_encoded_decodes_to_the_text(loaded) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"glassllm is not installed: pip install --no-deps 'glassllm==0\.1\.0'$"):
        load_glassllm()


def test_an_altered_file_is_refused(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "en.npz").write_bytes(b"altered")
    monkeypatch.setattr(glassllm, "package_folder", lambda *_: tmp_path)
    with pytest.raises(
        ValueError, match=rf"^en\.npz: expected sha256 {GLASSLLM_SHA256['en.npz']}, got [0-9a-f]{{64}}$"
    ):
        load_glassllm()


HISTORY, KEPT, QUESTION = 72, 24, 12


@torch.no_grad()
def history(model, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys before and after rotation and values of the history, each [layers, heads, tokens, dim]."""
    plain: list[Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _module, _inputs, output: plain.append(output[0]))
        for layer in model.model.layers
    ]
    cache = model(tokens[None, :HISTORY], use_cache=True).cache
    for hook in hooks:
        hook.remove()
    before = torch.stack(plain).unflatten(2, (2, 32)).transpose(1, 2)
    return before, *(torch.cat([getattr(layer, name) for layer in cache.layers]) for name in ("keys", "values"))


def answer(model, keys: Tensor, values: Tensor, question: Tensor) -> Tensor:
    """Logits of a question that stands right after the KEPT rows of the cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key[None], value[None], layer)
    places = torch.arange(KEPT, KEPT + len(question))[None]
    return logits(model, question, position_ids=places, cache=cache, use_cache=True)


@pytest.mark.parametrize(("layout", "same"), [("half", True), ("interleaved", False)])
def test_relocation_equals_prune_then_rotate_in_the_layout_of_the_model_alone(loaded, tokens, layout, same) -> None:
    # Every head of every layer keeps 24 tokens of its own out of 72. Prune-then-rotate takes their keys before
    # rotation and rotates them, with the model's own function, at 0 .. 23; the session relocates the cached keys there.
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, _ = loaded
    before, keys, values = history(model, tokens)
    generator = torch.Generator().manual_seed(0)
    source = torch.rand(4, 2, HISTORY, generator=generator).argsort(-1)[..., :KEPT].sort(-1).values
    rows = source[..., None].expand(-1, -1, -1, 32)
    pruned, kept, kept_values = before.gather(2, rows), keys.gather(2, rows), values.gather(2, rows)
    cos, sin = model.model.rotary_emb(pruned, torch.arange(KEPT)[None])
    rotated, _ = apply_rotary_pos_emb(pruned, pruned, cos, sin)
    tables = [
        RotaryTable(*rotary_tables(model, torch.arange(HISTORY + QUESTION), layer=layer), layout) for layer in range(4)
    ]
    session = begin(kept, kept_values, Retained(source, HISTORY), tables).relocate()
    question = tokens[HISTORY : HISTORY + QUESTION]
    error = (answer(model, session.keys, kept_values, question) - answer(model, rotated, kept_values, question)).abs()
    # Measured: 4e-6 half-split; 11 interleaved, and at least 1.5 after every token.
    if same:
        assert float(error.max()) < 2 * TOLERANCE, f"relocated half-split, logits are off by {float(error.max()):.1e}"
    else:
        assert float(error.amax(1).min()) > 0.1, "relocating in the wrong layout goes unnoticed after some token"
