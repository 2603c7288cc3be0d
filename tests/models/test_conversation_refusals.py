"""Conversations with models: what cannot be served is named, and what has ended is not gone on with."""

import pytest
import torch
import transformers
from model_cases import asked, compressed, exact_caches, model, text

from kvverify.models.conversation import conversing, read_history
from kvverify.models.seeded import SEEDED, seeded_model
from kvverify.models.serving import serving
from kvverify.selectors import snapkv

LENGTH, QUESTION, ANSWER = 48, 7, 6
ROTARY = tuple(name for name in SEEDED if name != "kimi_linear")


def test_after_its_block_a_conversation_can_be_read_and_not_continued():
    net, tokens = model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    with conversing(net, [history.session().relocate()]) as talk:
        talk.ask(tokens[LENGTH:])
    assert talk.sessions[0].rows == LENGTH + QUESTION
    for go_on in (lambda: talk.ask(tokens[:2]), lambda: talk.generate(2)):
        with pytest.raises(ValueError, match="the block that served the model has ended: expected a new one"):
            go_on()


def test_a_forward_that_fails_ends_a_conversation(monkeypatch):
    net, tokens = seeded_model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    with conversing(net, [history.session().relocate()]) as talk:
        monkeypatch.setattr(net.lm_head, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            talk.ask(tokens[LENGTH:])
        monkeypatch.undo()
        for go_on in (lambda: talk.ask(tokens[LENGTH:]), lambda: talk.sessions):
            with pytest.raises(ValueError, match="a forward failed, so that layers and positions no longer agree"):
                go_on()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], "tokens is of list, expected a tensor of int64 token ids"),
        (torch.ones(3), r"tokens is of torch\.float32, expected a tensor of int64"),
        (torch.tensor(3), r"tokens has shape \[\], expected \[n\] or \[1, n\] with at least one token"),
        (torch.tensor([], dtype=torch.int64), r"tokens has shape \[0\], expected"),
        (torch.tensor([3, 500]), "tokens holds 500, expected ids of a vocabulary of 97"),
    ],
)
def test_bad_tokens_are_named_and_leave_the_conversation_as_it_was(tokens, message):
    net, right = model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, right[:LENGTH])
    session = history.session().relocate()
    fresh, _ = asked(net, history, [session], right[LENGTH:])
    with conversing(net, [session]) as talk:
        with pytest.raises(ValueError, match=message):
            talk.ask(tokens)
        assert torch.equal(talk.ask(right[LENGTH:]), fresh)


def test_sessions_of_another_model_and_no_sessions_are_named():
    history = read_history(model("llama"), text("llama", LENGTH))
    session = history.session().relocate()
    for net, sessions, message in (
        (model("llama"), session, "sessions: got RelaySession of RelaySession, expected a list of sessions"),
        (model("llama"), [], "rows is empty, expected at least one sequence to serve"),
        (model("gemma3"), [session], "one has 2 layers, expected 4, those of the model"),
        (model("deepseek_v3"), [session], r"one has heads and dims \[2, 16\], expected \[1, 40\], those of the model"),
    ):
        with pytest.raises(ValueError, match=message), conversing(net, sessions) as talk:
            talk.ask(torch.tensor([1]))
    with pytest.raises(ValueError, match="selection is a str, expected a Selection or None"):
        history.session("snapkv")
    with pytest.raises(ValueError, match="layer is 9, expected 0 to 1, an attention layer"):
        history.rows(layer=9)
    flat = exact_caches(model("llama"))
    with pytest.raises(ValueError, match="caches holds a Exact, expected a list"), serving(model("llama"), flat):
        pass


def test_answers_of_different_lengths_end_a_conversation():
    net, tokens = model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    sessions = [compressed(history), history.session().relocate()]
    with conversing(net, sessions) as talk:
        talk.ask(tokens[LENGTH:])
        first, second = talk.generate(ANSWER)
        assert len(first) == len(second) == ANSWER
        assert len(talk.sessions) == 2
    stop = next(token for token in first if token not in second)
    with conversing(net, sessions) as talk:
        talk.ask(tokens[LENGTH:])
        answers = talk.generate(ANSWER, stop=(stop,))
        assert answers == [first[: first.index(stop) + 1], second]
        for go_on in (lambda: talk.ask(tokens[:2]), lambda: talk.generate(1), lambda: talk.sessions):
            with pytest.raises(ValueError, match="answers ended after different numbers of tokens"):
                go_on()


def test_a_state_of_linear_layers_goes_with_its_own_history_only():
    net, tokens = model("kimi_linear"), text("kimi_linear", LENGTH)
    history, other = read_history(net, tokens), read_history(net, tokens[:-1])
    session = history.session().relocate()
    with pytest.raises(ValueError, match="one is of 48 tokens, expected 47 of history"):
        asked(net, other, [session], tokens[:2])


def test_what_cannot_be_conversed_with_is_named():
    net, tokens = model("llama"), text("llama", LENGTH)
    history = read_history(net, tokens)
    session = history.session()
    with pytest.raises(ValueError, match=r"state 'selected', expected it relocated"), conversing(net, [session]):
        pass
    with pytest.raises(ValueError, match="last is 0, expected at least one token"):
        history.rows(0)
    other = read_history(net, tokens[:20])
    selection = snapkv(other.rows(4), budget=8, kv_heads=other.kv_heads, window=4)
    with pytest.raises(ValueError, match=r"selection is of .* over 20 tokens, expected .* over 48"):
        history.session(selection)
    with conversing(net, [session.relocate()] * 2) as talk:
        with pytest.raises(ValueError, match="nothing was read"):
            talk.generate(1)
        with pytest.raises(ValueError, match=r"tokens has shape \[3, 5\], expected \[n\] or \[2, n\]"):
            talk.ask(torch.zeros(3, 5, dtype=torch.int64))
        talk.ask(tokens[:2])
        with pytest.raises(ValueError, match="limit is 0, expected at least one token"):
            talk.generate(0)


def test_linear_layers_need_the_history_their_state_is_in():
    net = model("kimi_linear")
    session = read_history(net, text("kimi_linear", 20)).session().relocate()
    with (
        pytest.raises(ValueError, match="history is None, expected the one of the sessions"),
        conversing(net, [session]),
    ):
        pass


def test_a_table_that_changes_with_the_length_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )
    net = transformers.LlamaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"rotary table at length .* differs"):
        read_history(net, torch.arange(20))


def test_padding_is_refused():
    net, tokens = model("llama"), text("llama", 9)
    with serving(net, [exact_caches(net)]) as served, pytest.raises(ValueError, match="without padding"):
        net(tokens[None], attention_mask=torch.ones(1, 9, dtype=torch.int64), cache=served.states, served=served)
