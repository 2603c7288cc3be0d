"""The rotary signature and tables of tiny seeded models, judged by what the models themselves cache."""

import math
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from kvverify.models.rotary import (
    RotarySignature,
    probe,
    require_same_table,
    rotary_tables,
    table_changes_with_length,
)

FLOAT32_ROUNDOFF = 2.0**-24
# Both end at the same position, so that a table which depends on the length is the same one in both runs.
SOURCE = torch.tensor([0, 3, 7, 20, 50, 200])
TARGET = torch.tensor([5, 0, 1, 130, 2, 200])
LENGTH = 201

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


def scaled(rope_type: str, **parameters: object) -> dict[str, object]:
    return SIZES | {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4} | parameters}


LONGROPE = scaled("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4) | {"original_max_position_embeddings": 64}
DYNAMIC = scaled("dynamic", factor=4.0) | {"max_position_embeddings": 64}
LLAMA3 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=64)


def plain(rotary_dims: int, layout: str = "half", **fields: object) -> RotarySignature:
    return RotarySignature(**({"layout": layout, "rotary_dims": rotary_dims, "sense": 1, "amplitude": 1.0} | fields))


NO_ROTATION = plain(0)
GEMMA3 = SIZES | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
GPT_OSS = GEMMA3 | {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = SIZES | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": []}
SMALL_HEADS = SIZES | {"hidden_size": 64}
GPTJ = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 8}

GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2}
SHARED = SIZES | {"num_key_value_heads": 1, "head_dim": 16}  # one rotary slice for keys and values

# family: (configuration class, its sizes, the signature of each layer's cached rows)
FAMILIES = {
    "llama": ("LlamaConfig", SIZES, (plain(8), plain(8))),
    "llama linear": ("LlamaConfig", scaled("linear", factor=4.0), (plain(8), plain(8))),
    "llama llama3": ("LlamaConfig", LLAMA3, (plain(8), plain(8))),
    "llama dynamic": ("LlamaConfig", DYNAMIC, (plain(8), plain(8))),
    "qwen2 yarn": ("Qwen2Config", YARN, (plain(8, amplitude=1 + 0.1 * math.log(4)),) * 2),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}, (plain(16), plain(16))),
    "gpt-neox": ("GPTNeoXConfig", SMALL_HEADS, (plain(4), plain(4))),
    "glm-4.5": ("Glm4MoeConfig", SIZES | EXPERTS | {"head_dim": 16}, (plain(8), plain(8))),
    "phi-3": ("Phi3Config", scaled("default", partial_rotary_factor=0.5), (plain(4), plain(4))),
    "phi-3 longrope": ("Phi3Config", LONGROPE, (plain(8, amplitude=math.sqrt(1 + math.log(4) / math.log(64))),) * 2),
    "glm-4": ("Glm4Config", SIZES | {"head_dim": 16}, (plain(8, "interleaved"),) * 2),
    "cohere": ("CohereConfig", SIZES, (plain(8, "interleaved"),) * 2),
    "gpt-j": ("GPTJConfig", GPTJ, (plain(8, "interleaved"),) * 2),
    "deepseek-v2": ("DeepseekV2Config", LATENT | EXPERTS, (plain(8, "interleaved", tensor="values"),) * 2),
    "deepseek-v3": ("DeepseekV3Config", LATENT | EXPERTS, (plain(8, tensor="values"),) * 2),
    "llama-4": ("Llama4TextConfig", LLAMA4 | {"no_rope_layers": [1, 0]}, (plain(8, "interleaved"), NO_ROTATION)),
    "gemma-3": ("Gemma3TextConfig", GEMMA3, (plain(16), plain(16))),
    "gpt-oss": ("GptOssConfig", GPT_OSS, (plain(16, amplitude=1 + 0.1 * math.log(32)),) * 2),  # one table column a pair
    "nanochat": ("NanoChatConfig", SIZES, (plain(8, sense=-1),) * 2),
    "smollm3": ("SmolLM3Config", SIZES | {"no_rope_layers": [1, 0]}, (plain(8), NO_ROTATION)),
    "kimi-linear": (
        "KimiLinearConfig",
        LATENT | {"layer_types": ["full_attention"] * 2, "first_k_dense_replace": 2},
        (NO_ROTATION, NO_ROTATION),
    ),
}


def build(config_class: str, sizes: dict[str, object]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[transformers.PreTrainedModel, tuple[RotarySignature, ...]]:
    config_class, sizes, signatures = FAMILIES[request.param]
    return build(config_class, sizes), signatures


@torch.no_grad()
def cached(model: transformers.PreTrainedModel, positions: Tensor, layer: int, tensor: str) -> Tensor:
    """Return the rows [heads, tokens, dim] of six tokens at `positions` that `layer` caches.

    Layer 0 reads a true sequence. Above it the hidden state depends on the positions of the sequence, so there every
    token is a sequence of its own.
    """
    tokens = torch.arange(10, 10 + len(positions))
    cache = transformers.DynamicCache(config=model.config)
    alone = layer > 0
    inputs, places = (tokens[:, None], positions[:, None]) if alone else (tokens[None], positions[None])
    model(input_ids=inputs, position_ids=places, cache=cache, use_cache=True)
    rows = getattr(cache.layers[layer], tensor)
    return rows[:, :, 0].transpose(0, 1) if alone else rows[0]


def relocate(
    rows: Tensor, signature: RotarySignature, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Undo the rotation of `source` and apply that of `target`, in float64; also return the norm of each pair."""
    pairs = signature.rotary_dims // 2
    cos, sin = (table.double() for table in source)
    rotated, rest = rows.double().split((2 * pairs, rows.shape[-1] - 2 * pairs), dim=-1)
    half = signature.layout == "half"
    pair = rotated.unflatten(-1, (2, pairs)).unbind(-2) if half else rotated.unflatten(-1, (pairs, 2)).unbind(-1)
    unturned = torch.complex(*pair) * torch.complex(cos, -sin) / (cos**2 + sin**2)
    turned = unturned * torch.complex(*(table.double() for table in target))
    parts = torch.stack((turned.real, turned.imag), -2 if half else -1).flatten(-2)
    norms = torch.stack((turned.abs(), turned.abs()), -2 if half else -1).flatten(-2)
    return torch.cat((parts, rest), -1), norms


def excess(model: transformers.PreTrainedModel, layer: int, signature: RotarySignature) -> float:
    """Return the largest error of a relocation from SOURCE to TARGET in units of what float32 explains (at most 1).

    With u = 2^-24, per element and relative to the norm of its pair: each of the model's two rotations rounds two
    products and one sum of terms that are at most sqrt(2) times the norm, 3 sqrt(2) u each; each of the four table
    entries may be a spacing (2u) off where a vectorized cos and a scalar one differ, 4 * 2u * sqrt(2); a norm that
    follows the rotation (nanochat, Llama-4) rounds a sum of `dim` squares and its root, twice. In total below
    (20 + dim) u times the norm.
    """
    before = cached(model, SOURCE, layer, signature.tensor)
    after = cached(model, TARGET, layer, signature.tensor).double()
    tables = [rotary_tables(model, positions, layer=layer, length=LENGTH) for positions in (SOURCE, TARGET)]
    moved, norms = relocate(before, signature, *tables)
    rotary_dims = signature.rotary_dims
    assert torch.equal(moved[..., rotary_dims:], after[..., rotary_dims:])
    if not rotary_dims:
        return 0.0
    error = (moved - after)[..., :rotary_dims].abs()
    return float((error / ((20 + moved.shape[-1]) * FLOAT32_ROUNDOFF * norms)).max())


@pytest.mark.parametrize("layer", [0, 1])
def test_relocated_keys_are_the_keys_the_model_caches_at_the_target(family, layer: int) -> None:
    model, _ = family
    assert excess(model, layer, probe(model, layer=layer)) <= 1


@pytest.mark.parametrize("layer", [0, 1])
def test_signature_is_that_of_the_family(family, layer: int) -> None:
    model, signatures = family
    found, expected = probe(model, layer=layer), signatures[layer]
    assert replace(found, amplitude=1.0) == replace(expected, amplitude=1.0)
    assert found.amplitude == pytest.approx(expected.amplitude, rel=4 * FLOAT32_ROUNDOFF)


def test_a_wrong_layout_or_sense_or_table_is_far_outside_the_bound() -> None:
    model = build("LlamaConfig", SIZES)
    right = probe(model)
    assert excess(model, 0, right) <= 1
    assert excess(model, 0, plain(8, "interleaved")) > 1000
    gemma = build("Gemma3TextConfig", GEMMA3)
    tables = [rotary_tables(gemma, TARGET, layer=layer)[0] for layer in (0, 1)]
    assert (tables[0] - tables[1]).abs().max() > 0.5


def test_tables_carry_the_amplitude_in_float32_whatever_the_type_of_the_model() -> None:
    model = build("Qwen2Config", YARN)
    exact = rotary_tables(model, SOURCE)
    amplitude = probe(model).amplitude
    # cos^2 + sin^2: three roundings, and one relative spacing in each table.
    assert ((exact[0] ** 2 + exact[1] ** 2) / amplitude**2 - 1).abs().max() <= 8 * FLOAT32_ROUNDOFF
    half = build("Qwen2Config", YARN).to(torch.bfloat16)
    assert probe(half) == probe(model)
    tables = rotary_tables(half, SOURCE)
    assert tables[0].dtype == tables[1].dtype == torch.float32
    assert not torch.equal(tables[0], tables[0].bfloat16().float())


def test_a_layer_without_rotation_has_tables_without_pairs() -> None:
    cos, sin = rotary_tables(build(*FAMILIES["smollm3"][:2]), SOURCE, layer=1)
    assert cos.shape == sin.shape == (6, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_dynamic_and_longrope_tables_change_with_length(name: str) -> None:
    model = build(*FAMILIES[name][:2])
    assert table_changes_with_length(model) == (name in {"llama dynamic", "phi-3 longrope"})


@pytest.mark.parametrize("name", ["llama dynamic", "phi-3 longrope"])
def test_a_table_that_changed_since_the_key_was_written_is_refused(name: str) -> None:
    model = build(*FAMILIES[name][:2])
    require_same_table(model, written_at=10, now=64)
    with pytest.raises(ValueError, match="length 40 differs from the one its keys were written with at length 201"):
        require_same_table(model, written_at=201, now=40)
    with pytest.raises(ValueError, match=r"^length: layer 0's table depends on the sequence length"):
        rotary_tables(model, SOURCE)
    with pytest.raises(ValueError, match=r"^positions: expected all below length 200, got 200"):
        rotary_tables(model, SOURCE, length=200)


def test_a_table_that_cannot_change_is_accepted_at_every_length() -> None:
    assert require_same_table(build("LlamaConfig", SIZES), written_at=201, now=4) is None


def test_asking_leaves_a_grown_table_as_it_was() -> None:
    model = build("LlamaConfig", DYNAMIC)
    cached(model, SOURCE, 0, "keys")
    module = model.model.rotary_emb
    grown = module.inv_freq
    kept = grown.clone()
    rotary_tables(model, torch.tensor([1]), length=2)
    probe(model, layer=1)
    assert model.model.rotary_emb is module
    assert module.inv_freq is grown
    assert torch.equal(grown, kept)
    assert not torch.equal(grown, module.original_inv_freq)


def qwen_vl(version: int) -> transformers.PreTrainedModel:
    name = f"Qwen{version}VL"
    section = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = getattr(transformers, f"{name}Config")(text_config=SIZES | section, vision_config=vision)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qwen_vl(2), "three position axes"),
        (lambda: qwen_vl(3), "three position axes"),
        (lambda: build("DeepseekV4Config", SHARED), "moves keys and values"),
        (lambda: build("GPT2Config", GPT2), "moves keys and values"),
    ],
    ids=["qwen2-vl", "qwen3-vl", "deepseek-v4", "gpt-2"],
)
def test_what_is_no_rotation_of_leading_pairs_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^model: .*{message}"):
        probe(make())


def test_a_layer_that_caches_no_rows_is_refused_and_its_neighbour_is_not() -> None:
    model = build("Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention"]})
    assert probe(model, layer=1) == plain(8)
    with pytest.raises(ValueError, match=r"^layer: layer 0 of Lfm2ForCausalLM caches no rows"):
        probe(model, layer=0)


@torch.no_grad()
def test_a_layer_of_zero_keys_is_refused_because_it_shows_nothing() -> None:
    model = build("LlamaConfig", SIZES)
    model.model.layers[0].self_attn.k_proj.weight.zero_()
    with pytest.raises(ValueError, match=r"^model: layer 0 of LlamaForCausalLM caches zeros alone"):
        probe(model)


def test_a_rotation_of_trailing_dims_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("transformers.models.llama.modeling_llama", fromlist=["apply_rotary_pos_emb"])
    original = module.apply_rotary_pos_emb

    def trailing(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        width = keys.shape[-1] // 2
        tables = (cos[..., ::2], sin[..., ::2])
        turned = original(query[..., width:], keys[..., width:], *tables)
        return tuple(torch.cat((rows[..., :width], part), -1) for rows, part in zip((query, keys), turned))

    monkeypatch.setattr(module, "apply_rotary_pos_emb", trailing)
    with pytest.raises(ValueError, match=r"^model: no rotation of leading pairs .* layer 0 of LlamaForCausalLM"):
        probe(build("LlamaConfig", SIZES))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: probe(model.train()), ValueError, "model: LlamaForCausalLM is in training mode"),
        (lambda model: probe(model, layer=2), ValueError, "layer: expected 0 to 1, got 2"),
        (lambda _: probe(torch.nn.Linear(2, 2)), TypeError, "model: expected a transformers PreTrainedModel, got Lin"),
        (lambda _: probe(7), TypeError, "model: expected a transformers PreTrainedModel, got int"),
        (lambda model: require_same_table(model, written_at=0, now=1), ValueError, "written_at: expected .* got 0"),
        (lambda model: rotary_tables(model, [1]), TypeError, "positions: expected an int64 tensor, got list"),
        (lambda model: rotary_tables(model, SOURCE.float()), TypeError, "positions: expected int64 .*float32"),
        (lambda model: rotary_tables(model, SOURCE[None]), TypeError, r"positions: expected int64 .*\[1, 6\]"),
        (lambda model: rotary_tables(model, -SOURCE), ValueError, "positions: expected 0 to 16777215, got -200 to 0"),
    ],
)
def test_bad_input_is_one_clear_error(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(build("LlamaConfig", SIZES))
