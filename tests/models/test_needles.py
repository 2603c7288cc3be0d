"""The needle task, its two models, and their training."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from kvverify.models.needles import (
    FILLER_IDS,
    FILLER_WINDOW,
    VALUES,
    VOCABULARY,
    WEIGHTS,
    Recipe,
    accuracy,
    build,
    filler,
    haystacks,
    load,
    needle_token,
    question_token,
    serialize,
    train,
    value_token,
)

PINS = Path(__file__).parents[2] / "golden" / "pins.json"
SHORT = Recipe(steps=3, batch=2, patience=1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_needle_token_encodes_its_key_and_value_at_its_position():
    stack = haystacks(5, 40, 8, generator())
    code = stack.tokens.gather(1, stack.position) - FILLER_IDS
    assert torch.equal(code // VALUES, stack.key)
    assert torch.equal(code % VALUES, stack.value)
    assert (stack.tokens >= FILLER_IDS).sum(dim=1).tolist() == [8] * 5


def test_keys_and_positions_of_a_haystack_are_distinct_and_lie_in_the_span():
    stack = haystacks(50, 100, 32, generator(), span=(0.1, 0.8))
    for key, position in zip(stack.key, stack.position, strict=True):
        assert len(set(key.tolist())) == len(set(position.tolist())) == 32
    assert int(stack.position.min()) == 10
    assert int(stack.position.max()) == 79


def test_every_kind_of_token_has_its_own_ids():
    key, value = torch.arange(32).repeat_interleave(32), torch.arange(32).repeat(32)
    ids = torch.cat([torch.arange(FILLER_IDS), needle_token(key, value), question_token(key[::32]), value_token(value)])
    assert torch.equal(ids.unique(), torch.arange(VOCABULARY))


def test_neighbouring_filler_tokens_are_within_one_window_and_the_window_drifts():
    tokens = filler(4, 8000, generator())
    step = (tokens[:, 1:] - tokens[:, :-1]) % FILLER_IDS
    assert int(torch.minimum(step, FILLER_IDS - step).max()) <= FILLER_WINDOW
    for row in tokens:
        assert row[:16].unique().shape[0] <= FILLER_WINDOW < 2 * FILLER_WINDOW < row.unique().shape[0]


@pytest.mark.parametrize("needles", [0, 33])
def test_a_number_of_needles_that_does_not_fit_is_refused_in_one_line(needles):
    with pytest.raises(ValueError, match=rf"^needles is {needles}: expected 1 to 32$"):
        haystacks(1, 100, needles, generator())


def test_the_models_differ_in_position_alone():
    nope, rope = build("nope"), build("rope")
    assert sum(weight.numel() for weight in nope.parameters()) == 412_224
    shapes = [{name: weight.shape for name, weight in model.named_parameters()} for model in (nope, rope)]
    assert shapes[0] == shapes[1]
    assert set(nope.config.layer_types) == {"full_attention"}
    assert not hasattr(nope.model, "rotary_emb")
    assert hasattr(rope.model, "rotary_emb")


def test_building_leaves_the_global_generator_as_it_was():
    before = torch.random.get_rng_state()
    build("nope")
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_position_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^position is 'alibi': expected 'nope' or 'rope'$"):
        build("alibi")


@pytest.mark.parametrize("position", ["nope", "rope"])
def test_training_twice_gives_the_same_file_and_another_seed_does_not(position):
    first, second = (serialize(train(position, SHORT), position, SHORT) for _ in range(2))
    assert first == second
    other = Recipe(steps=3, batch=2, patience=1, seed=1)
    assert serialize(train(position, other), position, SHORT) != first


def test_training_changes_every_weight():
    before, after = build("nope", SHORT), train("nope", SHORT)
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(old, new), name


def test_the_length_doubles_up_to_the_longest_once_a_length_is_mastered():
    lengths = []
    recipe = Recipe(steps=4, batch=1, patience=1, mastered=-1.0, longest=128)
    train("nope", recipe, report=lambda step, length, loss, hits: lengths.append(length))
    assert lengths == [32, 64, 128, 128]


def test_the_loaded_model_is_the_saved_one_in_half_precision(tmp_path):
    model = build("rope", SHORT)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(serialize(model, "rope", SHORT))
    loaded = load("rope", path)
    for (name, old), new in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(old.half().float(), new), name
    with pytest.raises(ValueError, match=r"^position is 'nope': expected 'rope', as the file says$"):
        load("nope", path)


def test_the_shipped_weights_are_pinned_small_and_of_the_recipe_in_the_code():
    pins = json.loads(PINS.read_text())
    for position, path in WEIGHTS.items():
        pin = pins[f"needles_{position}"]
        assert pin["file"] == f"kvverify/data/{path.name}"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == pin["sha256"]
        with safe_open(path, framework="pt") as file:
            provenance = json.loads(file.metadata()["provenance"])
        assert provenance["position"] == position
        assert Recipe(**provenance["recipe"]) == Recipe()
    assert sum(path.stat().st_size for path in WEIGHTS.values()) <= 2_000_000


@pytest.mark.parametrize("position", ["nope", "rope"])
def test_the_shipped_models_retrieve_far_above_chance(position):
    # Chance is 1/32; both answer more than 9 of 10 questions at the length they were trained at.
    assert accuracy(load(position), length=256, needles=8, sequences=8) > 0.9
