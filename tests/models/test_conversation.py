"""RoPERelay on models: nothing changes where nothing is compressed, and a selected cache stands where the plan says."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import transformers
from model_cases import (
    asked,
    compressed,
    exact_caches,
    floor,
    median_difference,
    model,
    plain_answer,
    plain_logits,
    text,
)

from kvverify.models import needles
from kvverify.models.attention_layers import attention_layers
from kvverify.models.conversation import conversing, read_history
from kvverify.models.glassllm import load_glassllm
from kvverify.models.seeded import SEEDED, seeded_model
from kvverify.models.serving import serving
from kvverify.relay.plans import PLANS
from kvverify.relay.policy import relocate_positions
from kvverify.selectors import ada_kv, cam, pyramidkv, snapkv

LENGTH, QUESTION, ANSWER = 48, 7, 6
ROTARY = tuple(name for name in SEEDED if name != "kimi_linear")


@pytest.mark.parametrize("name", SEEDED)
def test_a_session_that_keeps_everything_is_the_plain_model_token_for_token(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    with conversing(net, [history.session().relocate()], history=history) as talk:
        logits = talk.ask(tokens[LENGTH:])[0]
        answer = talk.generate(ANSWER)
    assert answer == [plain_answer(net, tokens, ANSWER)]
    found = torch.cat([history.logits[None], logits])[:-1]
    plain = plain_logits(net, tokens, LENGTH)[:-1]
    assert median_difference(found, plain, tokens[LENGTH:]) <= floor(net, tokens, LENGTH)


@pytest.mark.parametrize(
    "load", [lambda: needles.load("nope"), lambda: needles.load("rope"), lambda: load_glassllm()[0]]
)
def test_a_session_that_keeps_everything_is_the_trained_model_token_for_token(load):
    try:
        net = load()
    except ImportError as error:
        pytest.skip(str(error))
    tokens = torch.randint(4, 60, (LENGTH + QUESTION,), generator=torch.Generator().manual_seed(0))
    history = read_history(net, tokens[:LENGTH])
    with conversing(net, [history.session().relocate()]) as talk:
        logits = talk.ask(tokens[LENGTH:])[0]
        answer = talk.generate(ANSWER)
    assert answer == [plain_answer(net, tokens, ANSWER)]
    found = torch.cat([history.logits[None], logits])[:-1]
    plain = plain_logits(net, tokens, LENGTH)[:-1]
    assert median_difference(found, plain, tokens[LENGTH:]) <= floor(net, tokens, LENGTH)


@pytest.mark.parametrize("name", SEEDED)
def test_a_served_model_with_full_caches_is_the_plain_model_token_for_token(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    with serving(net, [exact_caches(net), exact_caches(net)]) as served:
        first = served.prefill(tokens[:LENGTH], chunk=11)[0]
        logits = served(tokens[LENGTH:])[1]
        answers = served.generate(ANSWER)
    assert answers == 2 * [plain_answer(net, tokens, ANSWER)]
    plain = plain_logits(net, tokens, LENGTH)[:-1]
    assert median_difference(torch.cat([first, logits])[:-1], plain, tokens[LENGTH:]) <= floor(net, tokens, LENGTH)


@pytest.mark.parametrize("name", SEEDED)
def test_a_model_in_bfloat16_keeps_rows_in_bfloat16_and_is_itself_within_its_rounding(name):
    net, tokens = seeded_model(name).bfloat16(), text(name, LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    logits, (session,) = asked(net, history, [history.session().relocate()], tokens[LENGTH:])
    assert session.keys.dtype == session.values.dtype == logits.dtype == torch.bfloat16
    plain = plain_logits(net, tokens, LENGTH)[1:]
    sdpa, eager = plain, plain_logits(net, tokens, LENGTH, attention="eager")[1:]
    allowed = 3 * (sdpa - eager).abs().max() + 2 * 2.0**-8 * plain.abs().max()
    assert float((logits[0] - plain).abs().max()) <= float(allowed)


@pytest.mark.parametrize("name", SEEDED)
def test_reading_in_chunks_and_asking_token_by_token_changes_nothing_under_compression(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    at_once, streamed = read_history(net, tokens[:LENGTH]), read_history(net, tokens[:LENGTH], chunk=13)
    sessions = [compressed(history) for history in (at_once, streamed)]
    assert torch.equal(sessions[0].positions, sessions[1].positions), "a chunked history is selected from differently"
    one, _ = asked(net, at_once, sessions[:1], tokens[LENGTH:])
    other, _ = asked(net, streamed, sessions[1:], tokens[LENGTH:], at_a_time=1)
    moved = median_difference(one[0, :-1], other[0, :-1], tokens[LENGTH + 1 :])
    assert moved <= floor(net, tokens, LENGTH)
    dropped, _ = asked(net, at_once, [at_once.session().relocate()], tokens[LENGTH:])
    assert median_difference(one[0, :-1], dropped[0, :-1], tokens[LENGTH + 1 :]) > moved, "nothing was compressed"


@pytest.mark.parametrize("name", ["llama", "qwen2_yarn", "qwen3"])
def test_a_relocated_cache_equals_transformers_own_cache_of_keys_made_anew_at_the_new_positions(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    session = compressed(history, select=snapkv)
    found, _ = asked(net, history, [session], tokens[LENGTH:])
    kept, anchor = session.source, session.next_position
    past = transformers.DynamicCache(config=net.config)
    places = torch.arange(anchor)[None]
    cos, sin = net.model.rotary_emb(torch.zeros(1), places)
    for number, keys in enumerate(history.keys):
        # Undo each key's own rotation by solving for it, and rotate as the model does, with its own function.
        old_cos, old_sin = net.model.rotary_emb(torch.zeros(1), torch.arange(LENGTH)[None])
        half = keys.shape[2] // 2
        turned = torch.cat([keys[..., half:], -keys[..., :half]], -1)
        bare = (keys * old_cos + turned * old_sin) / (old_cos**2 + old_sin**2)
        index = kept[number][..., None].expand(-1, -1, keys.shape[2])
        bare, values = bare.gather(1, index), history.values[number].gather(1, index)
        new = bare * cos + torch.cat([-bare[..., half:], bare[..., :half]], -1) * sin
        past.update(new[None], values[None], number)
    with torch.inference_mode():
        positions = torch.arange(anchor, anchor + QUESTION)[None]
        plain = net(tokens[None, LENGTH:], position_ids=positions, cache=past, use_cache=True).logits
    assert float((found - plain).abs().max()) <= 256 * 2.0**-23 * float(plain.abs().max())


@pytest.mark.parametrize("name", ROTARY)
def test_new_tokens_stand_at_the_anchor_and_on_with_keys_the_model_rotated_there(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    session = compressed(history)
    _, (after,) = asked(net, history, [session], tokens[LENGTH:])
    anchor = int(session.positions.max()) + 1
    assert after.positions[..., -QUESTION:].unique().tolist() == list(range(anchor, anchor + QUESTION))
    # The first layer's key depends on the token and its position alone.
    alone = read_history(net, tokens[LENGTH:])
    for head in range(history.kv_heads):
        moved = relocate_positions(
            alone.keys[0][head], torch.arange(QUESTION), torch.arange(anchor, anchor + QUESTION), history.tables[0]
        )
        found = after.keys[0, head, -QUESTION:]
        assert float((found - moved).abs().max()) <= 64 * 2.0**-23 * float(moved.abs().max())


def test_plans_of_one_selected_cache_are_rows_that_do_not_see_each_other():
    net, tokens = model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    sessions = [compressed(history, plan) for plan in PLANS]
    together, _ = asked(net, history, sessions, tokens[LENGTH:])
    for plan, session, logits in zip(PLANS, sessions, together, strict=True):
        alone, _ = asked(net, history, [session], tokens[LENGTH:])
        assert float((logits - alone[0]).abs().max()) <= 64 * 2.0**-23 * float(alone.abs().max()), plan
    relay, shifted = (together[list(PLANS).index(plan)] for plan in ("relay", "query_only"))
    assert float((relay - shifted).abs().max()) > 0.1, "the plans make no difference"


@pytest.mark.parametrize("name", ["gemma3", "kimi_linear"])
def test_an_earlier_session_answers_another_question_as_if_the_first_had_not_been_asked(name):
    net, tokens = model(name), text(name, LENGTH + 2 * QUESTION)
    history = read_history(net, tokens[:LENGTH])
    session, second = compressed(history), tokens[-QUESTION:]
    fresh, _ = asked(net, history, [session], second)
    _, (after,) = asked(net, history, [session], tokens[LENGTH:-QUESTION])
    again, _ = asked(net, history, [session], second)
    assert torch.equal(fresh, again)
    if name == "kimi_linear":  # the state of its linear layers after the first question is not in the session
        with pytest.raises(ValueError, match="has gone on since its history"):
            asked(net, history, [after], second)
        return
    followed, (last,) = asked(net, history, [after], second)
    assert not torch.equal(followed, fresh)
    assert last.next_position == session.next_position + 2 * QUESTION


@pytest.mark.parametrize("select", [pyramidkv, ada_kv])
def test_heads_that_keep_different_numbers_of_states_are_ragged_and_end_together(select):
    net, tokens = model("qwen3"), text("qwen3", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    session = compressed(history, select=select)
    counts = (session.positions >= 0).sum(-1)
    assert len(counts.unique()) > 1, "the selection is not ragged"
    assert session.positions.amax(-1).unique().tolist() == [int(counts.max()) - 1]
    logits, _ = asked(net, history, [session], tokens[LENGTH:])
    # What an empty slot holds is never read.
    empty = (session.positions < 0)[..., None]
    keys, values = (tensor.masked_fill(empty, 1e30) for tensor in (session.keys, session.values))
    again, _ = asked(net, history, [replace(session, keys=keys, values=values)], tokens[LENGTH:])
    assert torch.equal(logits, again)


def test_merged_values_are_served_in_the_place_of_the_caches():
    net, tokens = model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    values = torch.stack(history.values)
    merged = cam(history.rows(4), values=values, budget=12, kv_heads=history.kv_heads, window=4)
    session = history.session(merged)
    assert torch.equal(session.values, merged.values.masked_fill(~merged.valid[..., None], 0))
    kept = history.values[0].gather(1, merged.positions[0].clamp(min=0)[..., None].expand(-1, -1, values.shape[3]))
    assert not torch.equal(session.values[0], kept), "nothing was merged"


def test_a_sliding_layer_keeps_its_window_whatever_is_selected():
    net, tokens = model("gemma3"), text("gemma3", LENGTH)
    history = read_history(net, tokens)
    session = compressed(history, budget=6)
    for number, layer in enumerate(attention_layers(net)):
        kept = sorted(set(session.source[number][session.source[number] >= 0].tolist()))
        if layer.window is None:
            assert len(kept) <= 2 * 12
        else:
            assert kept == list(range(LENGTH - layer.window + 1, LENGTH)), f"layer {number}"


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "kimi_linear"])
def test_rows_of_a_question_are_those_of_the_text_that_ends_with_it(name):
    net, tokens = model(name), text(name, LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    rows = history.question_rows(net, tokens[LENGTH:])
    whole = read_history(net, tokens).rows(QUESTION)
    assert rows.shape == whole.shape
    assert float((rows - whole).abs().max()) <= 64 * 2.0**-23
    assert torch.equal(history.question_rows(net, tokens[LENGTH:]), rows), "asking has changed the history"
    assert torch.equal(history.rows(5, layer=1), history.rows(5)[1])


def test_scores_are_those_of_the_selection_and_order_no_sliding_window():
    net, tokens = model("gemma3"), text("gemma3", LENGTH)
    history = read_history(net, tokens)
    selection = snapkv(history.rows(4), budget=8, kv_heads=history.kv_heads, window=4)
    with pytest.raises(ValueError, match=r"scores has shape \[4, 2, 48\], expected \[4, 2, 8\], as the selection"):
        history.session(selection, scores=torch.zeros(4, 2, LENGTH))
    session = history.session(selection, scores=-selection.positions.double())
    plan = PLANS["score"](session.retained).positions
    for number, layer in enumerate(history.layers):
        held = session.source[number] >= 0
        moved, source = plan[number][held].view(2, -1), session.source[number][held].view(2, -1)
        order = moved.argsort(-1) if layer.window is not None else moved.argsort(-1, descending=True)
        assert torch.equal(source.gather(1, order), source.sort(-1).values), f"layer {number}"


def test_a_table_is_asked_once_and_again_where_a_history_is_longer(monkeypatch):
    from kvverify.models import history as module

    net, asked_for = seeded_model("llama"), []
    real = module.rotary_tables
    monkeypatch.setattr(module, "rotary_tables", lambda *a, **k: asked_for.append(k["length"]) or real(*a, **k))
    for length in (20, 30, 2049):
        tables = read_history(net, text("llama", length)).tables
        cos, sin = real(net, torch.arange(length), layer=1)
        assert torch.equal(tables[1].cos[:length], cos)
        assert torch.equal(tables[1].sin[:length], sin)
    assert asked_for == [4096, 4096, 8192, 8192]


def test_a_conversation_that_is_over_leaves_its_caches_to_no_collector():
    net, tokens = model("llama"), text("llama", LENGTH + QUESTION)
    history = read_history(net, tokens[:LENGTH])
    gc.disable()
    try:
        with conversing(net, [compressed(history)]) as talk:
            talk.ask(tokens[LENGTH:])
        held = weakref.ref(talk.rows[0].keys)
        del talk
        assert held() is None, "a cycle keeps the caches of a conversation until they are collected"
    finally:
        gc.enable()
