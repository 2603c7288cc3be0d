"""The real cache that ships with the package is the pinned one, and is real."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from kvverify.data import CAPTURE_FILE, captured_cache

PINS = json.loads((Path(__file__).parents[2] / "golden" / "pins.json").read_text())
FLOAT32_ROUNDOFF = 2.0**-24


def window_attention(keys: Tensor, queries: Tensor) -> Tensor:
    """Return the causal softmax [layers, heads, group, window, rows] of the captured queries, in float64."""
    rows, window = keys.shape[-2], queries.shape[-2]
    scores = queries.double() @ keys.double().mT[:, :, None] / keys.shape[-1] ** 0.5
    last_seen = rows - window + torch.arange(window)
    return scores.masked_fill(torch.arange(rows) > last_seen[:, None], -torch.inf).softmax(-1)


def rows_attended(attention: Tensor) -> Tensor:
    """Return the exponential of the entropy: n for n equal probabilities."""
    return torch.special.entr(attention).sum(-1).exp()


def test_file_is_the_pinned_one_and_at_most_a_megabyte() -> None:
    content = CAPTURE_FILE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == PINS["capture"]["sha256"]
    assert len(content) <= 1_000_000


def test_provenance_states_licences_and_the_pinned_inputs() -> None:
    provenance = captured_cache().provenance
    assert provenance["model_licence"] == "Apache-2.0"
    assert provenance["text_licence"].startswith("public domain")
    assert provenance["model_sha256"] == PINS["model"]["sha256"]
    assert provenance["text_sha256"] == PINS["text"]["sha256"]


def test_shapes_and_types_are_those_documented() -> None:
    cache = captured_cache()
    assert (cache.layers, cache.heads) == ((2, 14, 26), (0, 2))
    assert cache.keys.shape == cache.values.shape == (3, 2, 512, 64)
    assert cache.queries.shape == (3, 2, 3, 16, 64)
    assert {cache.keys.dtype, cache.values.dtype, cache.queries.dtype} == {torch.bfloat16}
    assert torch.equal(cache.source, torch.arange(512))
    assert cache.cos.shape == cache.sin.shape == (512, 32)
    assert cache.cos.dtype == cache.sin.dtype == torch.float32


def test_tables_are_rotations_by_the_models_frequencies() -> None:
    cache = captured_cache()
    frequencies = 1e5 ** -(torch.arange(32).double() / 32)
    angle = cache.source[:, None].double() * frequencies
    # The float32 frequency (a power and a quotient, 4u together) and the product (u) put the angle off by 5 u relative,
    # which moves cos and sin by as much; their own rounding adds at most one spacing (2u).
    allowed = (5 * angle + 2) * FLOAT32_ROUNDOFF
    assert ((cache.cos - angle.cos()).abs() <= allowed).all()
    assert ((cache.sin - angle.sin()).abs() <= allowed).all()


def test_attention_is_peaked_and_has_the_sink_that_random_keys_lack() -> None:
    cache = captured_cache()
    attention = window_attention(cache.keys, cache.queries)
    assert (rows_attended(attention).mean((2, 3)) < 100).all()
    assert (rows_attended(attention)[1:].mean((2, 3)) < 20).all()
    assert (attention[1:, ..., 0].mean((2, 3)) > 0.4).all()
    # Random directions of the same norms are as peaked, but on any row: it is the sink that tells real keys from them.
    random = torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(0))
    random *= cache.keys.float().norm(dim=-1, keepdim=True) / random.norm(dim=-1, keepdim=True)
    assert (window_attention(random, cache.queries)[..., 0].mean((2, 3)) < 0.01).all()


def test_loading_needs_no_model_library() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['transformers', 'gguf', 'tokenizers', 'bm25s']))"
    program = f"{blocked}; import kvverify.models; from kvverify.data import captured_cache; captured_cache()"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")


def test_the_capture_is_shared_and_loaded_once() -> None:
    assert captured_cache() is captured_cache()
