"""Small models, texts for them, and what the plain model makes of these texts."""

from functools import cache

import torch
import transformers

from kvverify.models.attention_layers import attention_layers
from kvverify.models.conversation import conversing
from kvverify.models.exact import Exact
from kvverify.models.seeded import seeded_model
from kvverify.relay.plans import PLANS
from kvverify.selectors import pyramidkv

FP32_EPSILON = 2.0**-23

model = cache(seeded_model)


def text(name, length, *, seed=0):
    """Random tokens[length] for the model `name`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model(name).config.vocab_size, (length,), generator=generator)


def plain_logits(net, tokens, prefix, *, attention="sdpa"):
    """Logits [n - prefix + 1, vocab] after tokens prefix-1 .. n-1: read the prefix, then one token a forward."""
    before = net.config._attn_implementation
    net.set_attn_implementation(attention)
    past = transformers.DynamicCache(config=net.config)
    found = []
    with torch.inference_mode():
        for start, stop in [(0, prefix), *((i, i + 1) for i in range(prefix, len(tokens)))]:
            positions = torch.arange(start, stop)[None]
            out = net(tokens[None, start:stop], position_ids=positions, cache=past, use_cache=True)
            found.append(out.logits[0, -1])
    net.set_attn_implementation(before)
    return torch.stack(found)


def plain_answer(net, tokens, limit):
    """Greedy tokens of the plain model after tokens[n]."""
    past = transformers.DynamicCache(config=net.config)
    answer, new, start = [], tokens, 0
    with torch.inference_mode():
        for _ in range(limit):
            positions = torch.arange(start, start + len(new))[None]
            out = net(new[None], position_ids=positions, cache=past, use_cache=True)
            start += len(new)
            new = out.logits[0, -1:].argmax(-1)
            answer.append(int(new))
    return answer


def median_difference(logits, other, targets):
    """Median |difference of the negative log-likelihoods| of targets[n] under two logits[n, vocab]."""
    scores = [each.double().log_softmax(-1).gather(1, targets[:, None]) for each in (logits, other)]
    return float((scores[0] - scores[1]).abs().median())


def floor(net, tokens, prefix):
    """How far two right kernels are apart: eager against SDPA, median |dNLL| teacher-forced, and a rounding of it.

    Allowed for a third one: 3 times that, and two roundings of the largest logit, in case the two agree by luck.
    """
    sdpa, eager = (plain_logits(net, tokens, prefix, attention=kernel)[:-1] for kernel in ("sdpa", "eager"))
    return 3 * median_difference(sdpa, eager, tokens[prefix:]) + 2 * FP32_EPSILON * float(sdpa.abs().max())


def exact_caches(net):
    """The full cache of one row."""
    return [Exact(scale=layer.scale, window=layer.window) for layer in attention_layers(net)]


def asked(net, history, sessions, question, *, at_a_time=None):
    """Logits [rows, n, vocab] of a question, read `at_a_time` tokens a forward."""
    with conversing(net, sessions, history=history) as talk:
        return torch.cat([talk.ask(part) for part in question.split(at_a_time or len(question))], 1), talk.sessions


def compressed(history, plan="relay", *, select=pyramidkv, budget=12):
    selection = select(history.rows(4), budget=budget, kv_heads=history.kv_heads, window=4)
    session = history.session(selection, scores=selection.positions.double())
    return session.relocate(PLANS[plan](session.retained))
