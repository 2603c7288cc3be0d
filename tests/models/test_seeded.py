"""The seeded models: the same bits from a seed, the rotary signature of their family, and attention worth caching."""

import math
from itertools import pairwise

import pytest
import torch
import transformers

from kvverify.models.rotary import RotarySignature, probe, rotary_tables
from kvverify.models.seeded import SEEDED, seeded_model, state_sha256


def half(dims: int, amplitude: float = 1.0, tensor: str = "keys") -> RotarySignature:
    return RotarySignature("half", dims, 1, amplitude, tensor)


def interleaved(dims: int, tensor: str = "keys") -> RotarySignature:
    return RotarySignature("interleaved", dims, 1, 1.0, tensor)


# family: the signature of each layer, None for a layer that keeps a state instead of rows
SIGNATURES = {
    "llama": [half(16)] * 2,
    "qwen2_yarn": [half(16, 1 + 0.1 * math.log(4))] * 2,
    "qwen3": [half(16)] * 2,
    "gemma3": [half(16)] * 4,
    "glm4": [interleaved(8)] * 2,
    "deepseek_v2": [interleaved(8, "values")] * 2,
    "deepseek_v3": [half(8, tensor="values")] * 2,
    "kimi_linear": [None, half(0), None, half(0)],
}
every_family = pytest.mark.parametrize("name", SEEDED)


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(seed))


@every_family
def test_a_seed_gives_the_same_bits_again_and_another_seed_others(name: str) -> None:
    first = state_sha256(seeded_model(name))
    torch.manual_seed(7)  # what the initialisers draw must not matter
    assert state_sha256(seeded_model(name)) == first, f"{name}: seed 0 gave two models"
    assert state_sha256(seeded_model(name, seed=1)) != first, f"{name}: seeds 0 and 1 gave one model"


@every_family
def test_every_weight_is_drawn_and_bounded(name: str) -> None:
    ours, theirs = seeded_model(name), seeded_model(name, seed=1)
    for (weight_name, weight), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert weight.dtype == torch.float32, f"{name}: {weight_name} is {weight.dtype}, not float32"
        assert not bool((weight == other).any()), f"{name}: {weight_name} has values that no seed changes"
        assert float(weight.abs().max()) < 8, f"{name}: {weight_name} has a value beyond every spread"
    assert not ours.training, f"{name}: the model is in training mode"


@pytest.mark.parametrize(
    ("name", "first", "deviation"),
    [("llama", "lm_head.weight", 2 / 8), ("gemma3", "model.embed_tokens.weight", 1.5 / 8)],
)
def test_weights_are_drawn_in_the_order_of_their_names_and_a_tied_one_once(name, first, deviation) -> None:
    uniform = torch.rand(97, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = ((2 * uniform - 1) * (math.sqrt(3) * deviation)).float()
    found = seeded_model(name, seed=3).state_dict()[first]
    assert torch.equal(found, expected), f"{name}: the first numbers of the generator are not in {first}"


def test_a_changed_configuration_does_not_reach_the_next_model() -> None:
    model = seeded_model("qwen2_yarn")
    model.config.rope_parameters["factor"] = 2.0
    assert seeded_model("qwen2_yarn").config.rope_parameters["factor"] == 4.0


def test_the_hash_sees_values_names_shapes_and_types() -> None:
    model = seeded_model("llama")
    before = state_sha256(model)
    hashes = {before}
    weight = model.model.norm.weight
    with torch.no_grad():
        weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
    hashes.add(state_sha256(model))
    model.model.norm.weight = torch.nn.Parameter(weight.detach()[None])
    hashes.add(state_sha256(model))
    model.model.norm.weight = torch.nn.Parameter(weight.detach().view(torch.int32), requires_grad=False)
    hashes.add(state_sha256(model))
    model.model.other, model.model.norm = model.model.norm, None
    hashes.add(state_sha256(model))
    assert len(hashes) == 5, f"5 different state dicts have {len(hashes)} hashes"


def test_building_leaves_the_global_generator_as_it_was() -> None:
    before = torch.random.get_rng_state()
    seeded_model("kimi_linear")
    assert torch.equal(before, torch.random.get_rng_state()), "seeded_model drew from the global generator"


def test_an_unknown_family_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^name is 'gpt2': expected one of llama, qwen2_yarn, .*, kimi_linear$"):
        seeded_model("gpt2")


@every_family
def test_the_cached_rows_are_rotated_as_in_the_family(name: str) -> None:
    model = seeded_model(name)
    assert model.config.num_hidden_layers == len(SIGNATURES[name])
    for layer, expected in enumerate(SIGNATURES[name]):
        if expected is None:
            with pytest.raises(ValueError, match=f"layer {layer} of KimiLinearForCausalLM caches no rows"):
                probe(model, layer=layer)
            continue
        found = probe(model, layer=layer)
        amplitude = pytest.approx(expected.amplitude, rel=1e-6)
        assert (found.layout, found.rotary_dims, found.sense, found.amplitude, found.tensor) == (
            expected.layout,
            expected.rotary_dims,
            expected.sense,
            amplitude,
            expected.tensor,
        ), f"{name}: layer {layer} rotates as {found}"


def test_the_two_layer_types_of_gemma3_rotate_by_different_tables() -> None:
    model = seeded_model("gemma3")
    tables = [rotary_tables(model, torch.tensor([100]), layer=layer)[0] for layer in range(4)]
    assert torch.equal(tables[0], tables[2])
    assert torch.equal(tables[1], tables[3])
    assert not torch.allclose(tables[0], tables[1]), "sliding and full layers of gemma3 have one rotary base"


@every_family
@torch.no_grad()
def test_decoding_from_the_cache_equals_one_forward_over_all_tokens(name: str) -> None:
    # 48 tokens leave the window of 16 (Gemma-3); the cache is read in parts of 40, 7 and 1 tokens.
    model, tokens = seeded_model(name), prompt(48)
    whole = model(tokens, use_cache=False).logits
    cache = transformers.DynamicCache(config=model.config)
    parts = [model(tokens[:, a:b], cache=cache, use_cache=True).logits for a, b in pairwise((0, 40, 47, 48))]
    # Logits have a standard deviation of 1 to 2; float32 sums in another order leave at most 1e-5 (measured: 8e-6).
    error = float((torch.cat(parts, 1) - whole).abs().max())
    assert error < 1e-4, f"{name}: logits from the cache are off by {error:.1e}"


@every_family
@torch.no_grad()
def test_attention_is_neither_uniform_nor_one_hot(name: str) -> None:
    model = seeded_model(name)
    model.set_attn_implementation("eager")
    attentions = model(prompt(96), output_attentions=True, use_cache=False).attentions
    rows = [layer[0, :, -32:] for layer in attentions if layer is not None]
    assert len(rows) == sum(signature is not None for signature in SIGNATURES[name])
    for number, row in enumerate(rows):
        score = row.log().where(row > 0, math.nan)  # up to a constant per row, which no deviation sees
        seen = (row > 0).sum(-1)
        spread = ((score - score.nanmean(-1, keepdim=True)) ** 2).nanmean(-1).sqrt().mean()
        assert 1 < float(spread) < 2, f"{name}: scores of attention layer {number} have deviation {float(spread):.2f}"
        effective = float((torch.special.entr(row).sum(-1).exp() / seen).mean())
        assert 0.1 < effective < 0.6, f"{name}: attention layer {number} reads {effective:.0%} of its tokens"


@every_family
@torch.no_grad()
def test_the_next_token_depends_on_more_than_the_last_one(name: str) -> None:
    model = seeded_model(name)
    tokens = torch.cat([torch.cat([prompt(31, seed), torch.tensor([[50]])], 1) for seed in range(16)])
    logits = model(tokens, use_cache=False).logits[:, -1]
    said = logits.argmax(1).unique().numel()
    assert said >= 6, f"{name}: after 16 texts with one last token the model says {said} different tokens"
    assert 1 < float(logits.std()) < 3, f"{name}: logits have deviation {float(logits.std()):.2f}"
