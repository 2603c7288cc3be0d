"""How evidence is read, and what a request costs: the measures by hand, against the plain model, and by shape."""

from dataclasses import replace

import pytest
import torch
from relay_cases import TEXTS, encode, tiny_reader

from kvverify.experiments import relay, relay_evidence
from kvverify.experiments.relay_answers import planned
from kvverify.experiments.relay_evidence import (
    BANDS,
    EVIDENCE_PLANS,
    MEASURES,
    MOMENTS,
    attention_reading,
    bands,
    margins,
    read,
    readable,
    views,
)
from kvverify.experiments.relay_records import build_record
from kvverify.experiments.relay_scoring import build_prompt
from kvverify.experiments.relay_selection import SELECTORS, Observed
from kvverify.models.conversation import read_history
from kvverify.relay.policy import rotate

LIMIT = 1300


@pytest.fixture(scope="module")
def reader():
    return replace(tiny_reader(), texts=TEXTS)


@pytest.fixture(scope="module")
def observed(reader):
    record = build_record(encode, TEXTS, 0, limit=LIMIT)
    return Observed(record, read_history(reader.model, record.tokens))


@pytest.fixture(scope="module")
def prompt(observed):
    return build_prompt(encode, observed.record.questions[3])


@pytest.fixture(scope="module")
def evidence(observed):
    return torch.cat([torch.arange(unit.start, unit.stop) for unit in observed.record.questions[3].evidence])


def one_head():
    """Two query heads on one KV head with four slots, whose weights are 1 : 2 : 4 and an empty slot."""
    query = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])
    keys = torch.tensor([[[0.0, 9.0], [2.0, 9.0], [4.0, 9.0], [100.0, 9.0]]]) * torch.tensor(2.0).log()
    values = torch.tensor([[[3.0, 4.0], [0.0, 2.0], [1.0, 0.0], [9.0, 9.0]]])
    valid = torch.tensor([[True, True, True, False]])
    return query, keys, values, valid


def test_share_and_norm_are_means_over_heads_of_what_the_evidence_gets():
    query, keys, values, valid = one_head()
    evidence = torch.tensor([[True, True, False, False]])
    share, norm = attention_reading(query, keys, values, evidence, valid, 0.5).tolist()
    assert share == pytest.approx((3 / 7 + 2 / 3) / 2)
    assert norm == pytest.approx(((1 * 5 + 2 * 2) / 7 + (5 + 2) / 3) / 2)


def test_margin_is_the_log_odds_of_the_evidence_among_the_states_held():
    query, keys, _, valid = one_head()
    evidence = torch.tensor([[True, True, False, False]])
    expected = (torch.tensor(3 / 4).log() + torch.tensor(2.0).log()) / 2
    assert float(margins(query, keys, evidence, valid, 0.5)) == pytest.approx(float(expected))


@pytest.mark.parametrize("evidence", [[False] * 4, [True, True, True, False], [False, False, False, True]])
def test_a_head_without_evidence_or_with_nothing_else_has_no_margin(evidence):
    query, keys, _, valid = one_head()
    assert margins(query, keys, torch.tensor([evidence]) & valid, valid, 0.5).isnan()


def test_bands_are_thirds_and_leave_out_what_is_not_a_number():
    assert bands(torch.tensor([1.0, 3.0, 5.0, torch.nan, 7.0, 9.0])) == [2.0, 5.0, 8.0]
    assert bands(torch.arange(5.0)) == [0.0, 1.5, 3.5]
    with pytest.raises(ValueError, match=r"^values are of 2 layers, expected at least 3$"):
        bands(torch.zeros(2))


@torch.inference_mode()
def test_the_share_is_that_of_the_plain_model_at_the_last_question_token_and_the_first_of_the_answer(
    reader, observed, prompt, evidence
):
    sessions = planned(observed.history.session(), None, ("original",))
    found = read(reader, observed.history, sessions, prompt, evidence)
    tokens = torch.cat([observed.record.tokens, prompt.question, prompt.answer[:1]])
    before = reader.model.config._attn_implementation
    reader.model.set_attn_implementation("eager")
    attentions = reader.model(tokens[None], output_attentions=True).attentions
    reader.model.set_attn_implementation(before)
    for moment, place in (("question", -2), ("answer", -1)):
        plain = [float(layer[0, :, place, evidence].sum(-1).mean()) for layer in attentions]
        assert found[moment]["original"]["share"] == pytest.approx(plain, abs=1e-5), moment


def test_without_eviction_relay_reads_as_original_does(reader, observed, prompt, evidence):
    sessions = planned(observed.history.session(), None, EVIDENCE_PLANS)
    found = read(reader, observed.history, sessions, prompt, evidence)
    for moment in MOMENTS:
        assert found[moment]["relay"] == found[moment]["original"]
        assert found[moment]["half_gap"] == found[moment]["original"]


@torch.inference_mode()
def test_the_first_layer_is_read_as_if_its_queries_and_keys_were_rotated_at_the_positions_of_the_plan(
    reader, observed, prompt, evidence
):
    history = observed.history
    selection, relevance = SELECTORS["chunkkv"](observed, "", 400)
    sessions = planned(history.session(selection), relevance, EVIDENCE_PLANS)
    found = read(reader, history, sessions, prompt, evidence)["question"]

    # The first layer's projections depend on the tokens alone, so they can be made without any cache.
    layer, table = reader.model.model.layers[0], history.tables[0]
    tokens = torch.cat([observed.record.tokens, prompt.question])
    hidden = layer.input_layernorm(reader.model.model.embed_tokens(tokens))
    queries = layer.self_attn.q_proj(hidden).unflatten(-1, (4, 8))
    keys = layer.self_attn.k_proj(hidden).unflatten(-1, (2, 8))
    for name, session in sessions.items():
        asked = session.next_position + len(prompt.question) - 1
        places = torch.arange(session.next_position, asked + 1)
        odds, shares = [], []
        for head in range(4):
            source = torch.cat([selection.positions[0, head // 2], torch.arange(history.length, len(tokens))])
            at = torch.cat([session.positions[0, head // 2], places])
            key = rotate(keys[source, head // 2], table.cos[at], table.sin[at], layout="half", rotary_dims=8)
            factors = table.cos[[asked]], table.sin[[asked]]
            query = rotate(queries[-1:, head], *factors, layout="half", rotary_dims=8)
            logits = (key @ query[0]).double() * 8**-0.5
            gold = torch.isin(source, evidence)
            assert gold.any()
            odds.append(logits[gold].logsumexp(0) - logits[~gold & (source < history.length)].logsumexp(0))
            shares.append(logits.softmax(0)[gold].sum())
        assert found[name]["margin"][0] == pytest.approx(float(torch.stack(odds).mean()), abs=1e-4), name
        assert found[name]["share"][0] == pytest.approx(float(torch.stack(shares).mean()), abs=1e-5), name
    assert len({round(found[name]["margin"][0], 3) for name in sessions}) == 3
    assert len({round(found[name]["share"][0], 4) for name in sessions}) == 3


def entry(history, relay, *, selector="bm25"):
    values = {"original": [1.0, 1.0, 1.0], "relay": relay, "half_gap": [1.0, 1.0, 1.0]}
    plans = {plan: dict.fromkeys(MEASURES, value) for plan, value in values.items()}
    return {"history": history, "name": "x", "selector": selector, "read": dict.fromkeys(MOMENTS, plans)}


def test_the_view_shows_differences_beside_the_published_ones_and_counts_what_was_left_out():
    entries = [entry(0, [2.0, 1.0, 0.0]), entry(1, [4.0, 1.0, 0.0]), {**entry(1, []), "read": None}]
    found = views(entries, {})
    assert list(found) == ["evidence_margin", "evidence_share", "evidence_norm"]
    share = found["evidence_share"]
    assert share.rows[:3] == (
        ("question, early", "bm25 original", 1.0, None, None, None, None, 2),
        ("question, early", "bm25 relay", 3.0, 2.0, 1.0, 3.0, 0.0252, 2),
        ("question, early", "bm25 half_gap", 1.0, 0.0, 0.0, 0.0, None, 2),
    )
    assert len(share.rows) == len(MOMENTS) * len(BANDS) * len(EVIDENCE_PLANS)
    assert share.notes == ("1 of 3 caches hold no evidence, or nothing else, in some layer and are left out.",)
    assert set(found["evidence_norm"].column("published")) == {None}


def test_the_published_gain_stands_beside_bm25_alone():
    rows = views([entry(0, [2.0, 1.0, 0.0], selector=name) for name in ("bm25", "snapkv")], {})["evidence_share"].rows
    published = [(row[0], row[1]) for row in rows if row[6] is not None]
    assert published == [(f"question, {band}", "bm25 relay") for band in BANDS]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ([[[3, 9], [1, 2]], [[9, -1], [3, 9]]], True),
        ([[[3, 9], [1, 2]], [[1, -1], [2, 9]]], True),
        ([[[3, 9], [1, 2]], [[9, -1], [8, 9]]], False),  # the second layer has no evidence
        ([[[3, 9], [1, 2]], [[3, -1], [1, 2]]], False),  # nothing else: an empty slot is no state
        ([[[3, 9], [1, 2]], [[3, -1], [8, 9]]], False),  # one head has evidence only, the other none
    ],
)
def test_a_cache_is_readable_if_in_every_layer_a_head_has_evidence_and_something_else(source, expected):
    assert readable(torch.tensor(source), torch.tensor([1, 2, 3])) is expected


def test_a_cache_of_bm25_that_holds_nothing_but_evidence_is_left_out(reader, observed):
    question = observed.record.questions[0]
    share = (len(question.evidence_positions(torch.device("cpu"))) + 0.5) / observed.history.length
    entries = relay_evidence.run(reader, [0], selectors=["bm25"], retention=share, tokens=LIMIT)
    selection, _ = SELECTORS["bm25"](observed, question.text, int(share * observed.history.length))
    assert set(selection.positions[0, 0].tolist()) == set(question.evidence_positions(torch.device("cpu")).tolist())
    assert entries[0]["read"] is None


def test_what_is_stored_is_never_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        relay._store(tmp_path / "evidence.json", {"settings": {}, "entries": [{"read": [float("nan")]}]})
    assert list(tmp_path.iterdir()) == []
