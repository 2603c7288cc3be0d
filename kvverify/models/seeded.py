"""Tiny transformers models of eight families, every weight drawn here from a seed.

Theory of operation. A family is a configuration of its transformers class, small enough to run anywhere and complete
in what matters to a cache: grouped heads, qk-norm, sliding windows, partial or scaled rotary embeddings, latents,
recurrent layers. No weight comes from an initialiser of transformers or torch: every tensor of the state dict is drawn
from one generator, in the order of the sorted names, as

    w = centre + spread sqrt(3) (2 u - 1),  u uniform on [0, 1) with 53 bits

in float64, then rounded to float32. These are exact IEEE operations, so a seed gives the same bits on every machine; a
normal distribution would not, as its logarithm and cosine are approximated by each vector unit in its own way.

Spreads are set per kind of weight so that the models behave like models: attention scores have a standard deviation of
1 to 2, which is neither uniform nor one-hot, and greedy decoding depends on more than the last token.
"""

from __future__ import annotations

import copy
import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from kvverify.models import require

__all__ = ["SEEDED", "seeded_model", "state_sha256"]

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = _SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_KIMI_LAYERS = ["linear_attention", "full_attention"] * 2

# family: (class of its configuration in transformers, its settings beyond the defaults)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "qwen2_yarn": ("Qwen2Config", _SIZES | {"rope_parameters": _YARN, "max_position_embeddings": 256}),
    "qwen3": ("Qwen3Config", _SIZES | {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        _SIZES
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 16,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4Config", _SIZES | {"head_dim": 16}),
    "deepseek_v2": (
        "DeepseekV2Config",
        _LATENT | {"q_lora_rank": 24, "n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _LATENT | {"n_routed_experts": 4, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        _LATENT
        | {
            "num_hidden_layers": 4,
            "layer_types": _KIMI_LAYERS,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "num_local_experts": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
            "linear_conv_kernel_dim": 4,
        },
    ),
}

SEEDED: tuple[str, ...] = tuple(_FAMILIES)
"""The families that `seeded_model` builds."""


def seeded_model(name: str, *, seed: int = 0) -> Any:
    """Return the transformers causal language model of a family, float32, in eval mode, its weights drawn from `seed`.

    97 tokens, hidden size 64, 2 or 4 layers, 4 query heads; positions to 256 with YaRN and to 1024 otherwise. The
    global generator is left as it was. ValueError for a name that is not in `SEEDED`; ImportError names the extra.
    """
    if name not in _FAMILIES:
        raise ValueError(f"name is {name!r}: expected one of {', '.join(SEEDED)}")
    transformers = require("transformers")
    configuration, settings = _FAMILIES[name]
    config = getattr(transformers, configuration)(**copy.deepcopy(settings))  # it writes into what it is given
    with torch.random.fork_rng(devices=[]):  # the initialisers draw from the global generator, in vain
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model, torch.Generator().manual_seed(seed))
    return model.eval()


def state_sha256(model: Any) -> str:
    """Hash of the state dict: name, dtype, shape and bytes of every tensor, in the order of the sorted names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def _draw(model: Any, generator: torch.Generator) -> None:
    tied = set(model.all_tied_weights_keys)  # these are other tensors of the state dict under a second name
    for name, tensor in sorted(model.state_dict().items()):
        if name in tied:
            continue
        centre, spread = _distribution(name, tensor, model.config)
        uniform = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
        tensor.copy_((2 * uniform - 1) * (math.sqrt(3) * spread) + centre)


def _distribution(name: str, tensor: Tensor, config: Any) -> tuple[float, float]:
    """Mean and standard deviation of one weight.

    A projection of normed rows with spread g / sqrt(inputs) has outputs of standard deviation g, so that scores have
    g_query g_key.
    """
    parts = name.split(".")
    owner, kind = parts[-2], parts[-1]
    if kind == "A_log":
        return 0.0, 0.3  # with dt_bias: a recurrent state forgets about a twentieth of itself a token
    if kind == "dt_bias":
        return -3.0, 0.5
    if kind in ("bias", "e_score_correction_bias"):
        return 0.0, 0.1
    gemma = config.model_type == "gemma3_text"
    if "norm" in owner:
        centre = 1.2 if owner in ("q_norm", "k_norm") else 1.0
        if gemma and owner.startswith("post_"):
            centre = 6.0  # what a layer adds; less of it, and the tied output layer repeats the input token for ever
        return centre - gemma, 0.1  # Gemma adds a one itself
    inputs = tensor.shape[-1]
    gain = {"embed_tokens": math.sqrt(inputs) / 4, "lm_head": 2.0, "o_proj": 2.0}.get(owner, 1.2)
    if gemma and owner == "embed_tokens":
        gain = 1.5  # it is the output layer as well, and its rows are scaled up by sqrt(inputs) on the way in
    return 0.0, gain / math.sqrt(inputs)
