"""A small real model that needs no tensor library of its own: glassllm 0.1.0, trained on two books of Lewis Carroll.

The package holds float16 weights, a tokenizer and a NumPy implementation (MIT). Its files are read here and it is never
imported, so the two implementations share nothing but the weights:

    pip install --no-deps glassllm==0.1.0

Its model is of the Llama architecture except for two orders: a weight is stored [inputs, outputs], and the rotation is
interleaved, so that rows 2i and 2i + 1 of a head are a pair. Both are undone: the model that `load_glassllm` returns
rotates half-split, as transformers does. Scores do not change, as queries and keys are permuted alike.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvverify.models import require
from kvverify.models.loading import half_split, llama_of, package_folder

__all__ = ["GLASSLLM_SHA256", "load_glassllm"]

GLASSLLM_SHA256 = {
    "en.npz": "261ae219ab98caa1f3641e23deb3d9d91b7b7a276f991cbd494f67cfa5abce4d",
    "en.tokenizer.json": "4cf0830157c45cf7f8c70a8fdcb8378c33330b9ba0c9a312e772d7d6485ca4df",
}

# The package's names within a block, and transformers' names within a layer.
_BLOCK_NAMES = {
    "norm1.gamma": "input_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "norm2.gamma": "post_attention_layernorm",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}
_MODEL_NAMES = {"E": "model.embed_tokens.weight", "norm_f.gamma": "model.norm.weight"}
_SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")
_SPACE = "▁"


def load_glassllm() -> tuple[Any, Any]:
    """Return (LlamaForCausalLM in eval mode, PreTrainedTokenizerFast) of the English glassllm, in float32.

    4 layers, 4 query and 2 KV heads of 32 dims, 1024 tokens, context 128, theta 1e4; 852,608 parameters. Needs
    `kvverify[models]` and the package glassllm (ImportError names them); ValueError if one of its files is not the
    pinned one (`GLASSLLM_SHA256`).
    """
    transformers = require("transformers")
    folder = package_folder("glassllm", "glassllm==0.1.0") / "weights"
    for name, pinned in GLASSLLM_SHA256.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != pinned:
            raise ValueError(f"{name}: expected sha256 {pinned}, got {found}")
    with np.load(folder / "en.npz") as arrays:
        sizes = json.loads(str(arrays["__config__"]))
        stored = {name: torch.from_numpy(arrays[name]).float() for name in arrays if name != "__config__"}
    weights = {_weight_name(name): _oriented(name, weight, sizes) for name, weight in stored.items()}
    model = llama_of(transformers, _config(transformers, sizes, weights), weights)
    return model, _tokenizer(transformers, folder / "en.tokenizer.json", sizes["max_len"])


def _config(transformers: Any, sizes: dict[str, Any], weights: dict[str, Tensor]) -> Any:
    return transformers.LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=len(weights["model.layers.0.mlp.gate_proj.weight"]),
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        max_position_embeddings=sizes["max_len"],
        rms_norm_eps=sizes["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope_base"]},
        pad_token_id=_SPECIAL_TOKENS.index("<pad>"),
        bos_token_id=_SPECIAL_TOKENS.index("<bos>"),
        eos_token_id=_SPECIAL_TOKENS.index("<eos>"),
        tie_word_embeddings=True,
    )


def _weight_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight"


def _oriented(name: str, weight: Tensor, sizes: dict[str, Any]) -> Tensor:
    """Turn a stored weight into [outputs, inputs], the rows of a head from (pair, member) to (member, pair)."""
    if ".W" not in name:
        return weight
    weight = weight.T.contiguous()
    heads = {"W_Q": sizes["n_heads"], "W_K": sizes["n_kv_heads"]}.get(name.rpartition(".")[2])
    return weight if heads is None else half_split(weight, heads)


def _tokenizer(transformers: Any, path: Path, length: int) -> Any:
    tokenizers = require("tokenizers")
    stored = json.loads(path.read_text(encoding="utf-8"))
    merges = [tuple(pair) for pair in stored["merges"]]
    tokens = [*_SPECIAL_TOKENS, *stored["alphabet"], *("".join(pair) for pair in merges)]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFC(), tokenizers.normalizers.Replace(" ", _SPACE)]
    )
    # Merges cross neither a line break nor the beginning of a word, which its space belongs to.
    chunk = tokenizers.Regex(rf"\n|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(chunk, behavior="isolated")
    tokenizer.decoder = tokenizers.decoders.Replace(_SPACE, " ")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        split_special_tokens=True,  # "<eos>" in a text is five characters, as in the package
        clean_up_tokenization_spaces=False,
        model_max_length=length,
    )
