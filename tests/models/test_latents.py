"""MLA latents as transformers caches them: views, absorbed queries, and a step over chosen rows."""

import pytest
import torch
from transformers import DynamicCache

from kvverify.models.latents import absorbed, latents, read, step
from kvverify.models.needles import VOCABULARY, build
from kvverify.vestige import attend, index, salience

ROWS = 48
UNIT_ROUNDOFF = 2.0**-24  # float32


@pytest.fixture(params=["nope", "rope"])
def model(request):
    return build(request.param).eval()


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (ROWS + 1,), generator=torch.Generator().manual_seed(0))


def over_all_rows(model, prefix):
    def attention(layer, query, row):
        rows = torch.cat([prefix.latents[layer].rows(torch.arange(prefix.length)), row[None]])
        content = prefix.latents[layer].content.shape[1]
        return attend(query, rows, torch.arange(len(rows)), scale=prefix.scale, value_dim=content)[0]

    return attention


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens[None], use_cache=False, logits_to_keep=1).logits[0, -1]


def test_latents_are_views_of_the_cache(model, tokens):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[None], cache=cache, use_cache=True)
    for number, layer in enumerate(cache.layers):
        held = latents(cache, number)
        assert held.content.shape == (ROWS + 1, 48)
        assert held.branch.shape == (ROWS + 1, 16)
        for view, whole in ((held.content, layer.keys), (held.branch, layer.values)):
            assert view.data_ptr() == whole.data_ptr()
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_the_policy_reads_the_cached_views_and_gathers_only_what_it_is_asked_for(model, tokens):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[None], cache=cache, use_cache=True)
    held = latents(cache, 1)
    copied = held.content.clone(), held.branch.clone()
    assert torch.equal(salience(held.branch, bandwidth=2, block=None), salience(copied[1], bandwidth=2, block=None))
    basis = torch.eye(6, 48)
    for found, expected in zip(index(held.content, basis), index(copied[0], basis), strict=True):
        assert torch.equal(found, expected)
    ids = torch.tensor([40, 3])
    assert torch.equal(held.rows(ids), torch.cat(copied, dim=1)[ids])
    assert held.rows(ids).untyped_storage().nbytes() == 2 * 64 * 4


def test_a_cache_of_keys_and_values_is_refused_in_one_line():
    cache = DynamicCache()
    cache.update(torch.zeros(1, 4, 5, 8), torch.zeros(1, 4, 5, 8), 0)
    with pytest.raises(
        ValueError, match=r"^keys has shape \[1, 4, 5, 8\]: expected \[1, 1, rows, width\], one MLA seq"
    ):
        latents(cache, 0)


def test_a_step_over_all_rows_is_the_model(model, tokens):
    found = step(model, int(tokens[-1]), ROWS, over_all_rows(model, read(model, tokens[:-1])))
    peer, truth = logits_of(model, tokens), logits_of(model.double(), tokens)
    # Three times the error of the model's own float32 pass, and two roundings of the largest logit.
    allowed = 3 * (peer.double() - truth).abs().max() + 2 * UNIT_ROUNDOFF * truth.abs().max()
    assert (found.double() - truth).abs().max() <= allowed
    assert allowed < 1e-4 * truth.abs().max()


def test_a_step_that_misses_rows_is_not_the_model(model, tokens):
    prefix = read(model, tokens[:-1])
    found = step(model, int(tokens[-1]), ROWS, over_all_rows(model, read(model, tokens[ROWS // 2 : -1])))
    whole = step(model, int(tokens[-1]), ROWS, over_all_rows(model, prefix))
    assert (found - whole).abs().max() > 1e-3 * whole.abs().max()


def test_absorbed_rows_are_the_cached_rows(model, tokens):
    prefix = read(model, tokens)
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(tokens))
    with torch.no_grad():
        query, rows = absorbed(model, 0, hidden, torch.arange(ROWS + 1))
    cached = prefix.latents[0].rows(torch.arange(ROWS + 1))
    # The same products of 96 terms, maybe added in another order.
    bound = 96 * UNIT_ROUNDOFF * 4 * cached.abs().max()
    assert (rows - cached).abs().max() <= bound
    assert torch.equal(query, prefix.queries[0])


def test_prefill_in_chunks_gives_the_same_latents_up_to_rounding(model, tokens):
    whole, chunked = read(model, tokens), read(model, tokens, chunk=7)
    truth = read(model.double(), tokens)
    for one, other, exact in zip(whole.latents, chunked.latents, truth.latents, strict=True):
        for name in ("content", "branch"):
            a, b, c = (getattr(part, name).double() for part in (one, other, exact))
            allowed = 3 * (a - c).abs().max() + 4 * UNIT_ROUNDOFF * c.abs().max()
            assert (b - c).abs().max() <= allowed, name
