"""Answers from a selected cache: the machinery against the plain model, the files, and the tables made of them."""

import json
from dataclasses import replace

import pytest
import torch
from relay_cases import TEXTS, encode, stored_history, tiny_reader
from typer.testing import CliRunner

from kvverify.experiments import relay
from kvverify.experiments.relay_answers import RANDOM_SEEDS, Settings, answer, planned, read_results, run, run_record
from kvverify.experiments.relay_records import build_record
from kvverify.experiments.relay_scoring import build_prompt
from kvverify.experiments.relay_selection import SELECTORS, Observed, evidence_kept, finch_selection, select
from kvverify.models.conversation import read_history
from kvverify.relay.plans import PLANS
from kvverify.selectors import attention_rows
from kvverify.selectors.retrieved import bm25_scores, words

LIMIT = 1300


@pytest.fixture(scope="module")
def reader():
    return tiny_reader()


@pytest.fixture(scope="module")
def observed(reader):
    record = build_record(encode, TEXTS, 0, limit=LIMIT)
    return Observed(record, read_history(reader.model, record.tokens))


@pytest.fixture(scope="module")
def prompt(observed):
    return build_prompt(encode, observed.record.questions[0])


def selected(observed, name, budget):
    return select(name, observed, observed.record.questions[0].text, budget)


@torch.inference_mode()
def test_the_full_cache_answers_and_scores_as_the_plain_model_does(reader, observed, prompt):
    session = observed.history.session().relocate(PLANS["original"](observed.history.session().retained))
    (text,), (nll,) = answer(reader, [session], prompt, limit=4)

    before = torch.cat([observed.record.tokens, prompt.question])
    logits = reader.model(torch.cat([before, prompt.answer])[None]).logits[0].double().log_softmax(-1)
    steps = range(len(before) - 1, len(before) + len(prompt.answer) - 1)
    plain = -sum(logits[step, token] for step, token in zip(steps, prompt.answer.tolist(), strict=True))
    # Other sums of float32: rounding through three layers, far below what one token more or less changes.
    assert nll == pytest.approx(float(plain) / len(prompt.answer), abs=1e-4)

    said = before
    for _ in range(4):
        said = torch.cat([said, reader.model(said[None]).logits[0, -1:].argmax(-1)])
    assert text == reader.decode(said[len(before) :].tolist())


def test_an_answer_ends_at_a_token_that_stops(reader, observed, prompt):
    session = observed.history.session().relocate(PLANS["original"](observed.history.session().retained))
    (whole,), _ = answer(reader, [session], prompt, limit=4)
    first = int(whole.split()[0].removeprefix("t"))
    (text,), _ = answer(replace(reader, stop=(first,)), [session], prompt, limit=4)
    assert text == f"t{first}"


@pytest.mark.parametrize("name", SELECTORS)
def test_every_plan_of_a_selector_has_the_same_states_values_and_bytes(observed, name):
    selection, relevance = selected(observed, name, 60)
    session = observed.history.session(selection)
    sessions = planned(session, relevance, tuple(PLANS))
    assert len(sessions) == len(PLANS) - 1 + RANDOM_SEEDS
    for label, one in sessions.items():
        assert torch.equal(one.source, session.source), f"{label} has other states"
        assert torch.equal(one.values, session.values), f"{label} has other values"
        assert one.keys.nbytes == session.keys.nbytes
    assert torch.equal(sessions["original"].keys, session.keys)
    orders = {tuple(one.positions.flatten().tolist()) for label, one in sessions.items() if label.startswith("random")}
    assert len(orders) == RANDOM_SEEDS


def test_plan_score_puts_the_most_relevant_state_nearest_the_question(observed):
    selection, relevance = selected(observed, "snapkv", 60)
    one = planned(observed.history.session(selection), relevance, ("score",))["score"]
    best = relevance.argmax(-1, keepdim=True)
    assert bool((one.positions.gather(2, best) == one.next_position - 1).all())


@pytest.mark.parametrize("budget", [13, 60, 200])
@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_selectors_meet_the_budget_that_retention_gives_them(observed, name, budget):
    selection, relevance = selected(observed, name, budget)
    kept = selection.counts.double().mean()
    if name == "bm25":
        assert kept <= budget
    else:
        assert float(kept) == pytest.approx(budget, abs=1e-9)
    assert relevance.shape == selection.positions.shape


def test_a_selector_that_is_not_known_is_refused(observed):
    with pytest.raises(ValueError, match=r"^selector is 'best', expected one of bm25, snapkv, "):
        selected(observed, "best", 60)


@pytest.mark.parametrize(("budget", "window"), [(1, 1), (13, 6), (63, 31), (64, 32), (200, 32)])
def test_the_protected_window_takes_at_most_half_of_a_small_budget(observed, budget, window):
    selection, _ = selected(observed, "snapkv", budget)
    assert dict(selection.provenance.parameters)["window"] == window


def test_relevance_is_the_attention_of_the_window_and_for_h2o_that_of_all_tokens(observed):
    history = observed.history
    every = torch.stack(
        [attention_rows(q, k, scale=layer.scale) for q, k, layer in zip(history.queries, history.keys, history.layers)]
    ).double()
    for name, rows in (("snapkv", every[:, :, -32:]), ("h2o", every)):
        selection, relevance = selected(observed, name, 100)
        mass = rows.sum(2).unflatten(1, (history.kv_heads, -1)).sum(2)
        torch.testing.assert_close(relevance, mass.gather(2, selection.positions), rtol=1e-6, atol=1e-6)


def test_relevance_of_bm25_is_the_score_of_the_unit_of_a_state(observed):
    question = observed.record.questions[0].text
    selection, relevance = selected(observed, "bm25", 200)
    by_unit = bm25_scores([words(unit.text) for unit in observed.record.units], words(question))
    expected = [
        score
        for position in selection.positions[0, 0].tolist()
        for unit, score in zip(observed.record.units, by_unit, strict=True)
        if unit.start <= position < unit.stop
    ]
    assert relevance[-1, -1].tolist() == expected
    assert len(set(expected)) > 1


def test_finch_keeps_the_history_states_that_the_question_attends_to_most(reader, observed, prompt):
    history, budget = observed.history, 50
    selection = finch_selection(reader.model, history, prompt.question, budget)
    assert selection.provenance.history == history.length
    rows = history.question_rows(reader.model, prompt.question).double()
    count = len(prompt.question)
    seen = torch.arange(history.length + 1, history.length + count + 1).double()[:, None]
    by_head = (rows[..., : history.length] * seen).sum(2).unflatten(1, (history.kv_heads, -1)).sum(2)
    assert torch.equal(selection.positions, by_head.topk(budget).indices.sort(-1).values)


def test_evidence_kept_is_the_mean_over_layers_heads_and_tokens():
    positions = torch.tensor([[[3, 5, -1], [3, 4, 5]], [[0, 1, 2], [5, -1, -1]]])
    assert evidence_kept(positions, torch.tensor([3, 5])) == (2 + 2 + 0 + 1) / 8
    assert evidence_kept(positions[..., :0], torch.tensor([3, 5])) == 0
    with pytest.raises(ValueError, match=r"^evidence is empty, expected the position of at least one token$"):
        evidence_kept(positions, torch.tensor([], dtype=torch.int64))


@pytest.fixture(scope="module")
def small():
    return Settings(selectors=("bm25",), retentions=(0.01, 0.1), plans=("original", "relay", "random"), tokens=LIMIT)


@pytest.fixture(scope="module")
def folder(reader, small, tmp_path_factory):
    path = tmp_path_factory.mktemp("answers")
    assert list(run(reader, small, range(2), path)) == [(0, False), (1, False)]
    return path


def test_a_run_stores_every_cell_of_every_question_and_leaves_no_partial_file(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["history_000.json", "history_001.json"]
    for history in read_results(folder):
        assert len(history["questions"]) == 4
        for question in history["questions"]:
            cells = [(cell["retention"], cell["selector"], len(cell["plans"])) for cell in question["cells"]]
            two = [("bm25", 2 + RANDOM_SEEDS), ("finch", 2)]
            assert cells == [(share, *one) for share in (0.01, 0.1) for one in two]


def test_a_run_goes_on_where_it_stopped_and_gives_the_same_bytes(reader, small, folder, tmp_path):
    (tmp_path / "history_000.json").write_bytes((folder / "history_000.json").read_bytes())
    assert list(run(reader, small, range(2), tmp_path)) == [(0, True), (1, False)]
    assert (tmp_path / "history_001.json").read_bytes() == (folder / "history_001.json").read_bytes()


def test_a_folder_of_other_settings_or_of_another_history_is_refused(reader, small, folder):
    other = replace(small, answer_limit=3)
    with pytest.raises(ValueError, match=r"^history_000\.json was made with answer_limit = 6, expected 3: "):
        list(run(reader, other, range(1), folder))
    with pytest.raises(ValueError, match=r"^history_000\.json is of another history 0, expected the one built now$"):
        list(run(replace(reader, texts=TEXTS[::-1]), small, range(1), folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found["questions"][2].update(question="Who?"),
            r"has as question 2 and reference \('Who\?', '.*'\), expected \(.*\), the one built now$",
        ),
        (
            lambda found: found["questions"][1].update(reference="nobody"),
            r"has as question 1 and reference \(.*, 'nobody'\), expected \(.*\), the one built now$",
        ),
        (
            lambda found: found["questions"].pop(),
            r"has as question 3 and reference None, expected \(.*\), the one built now$",
        ),
        (
            lambda found: found["questions"][3]["cells"][2]["plans"].pop("random 4"),
            r"has of plan random at bm25 0\.1 the seeds \['random 0', .* 'random 3'\], expected \[.* 'random 4'\]$",
        ),
    ],
    ids=["question", "reference", "count", "seeds"],
)
def test_a_file_with_other_questions_references_or_seeds_is_not_gone_on_from(
    reader, small, folder, tmp_path, change, message
):
    found = json.loads((folder / "history_000.json").read_text())
    change(found)
    (tmp_path / "history_000.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=r"^history_000\.json " + message):
        list(run(reader, small, range(1), tmp_path))


def test_the_prompt_that_is_asked_is_that_of_the_settings(reader, observed):
    read = []

    def remembering(text):
        read.append(text)
        return encode(text)

    settings = Settings(
        selectors=("bm25",),
        retentions=(0.1,),
        plans=("original",),
        finch=False,
        tokens=LIMIT,
        prompt="{question}? {stem}",
    )
    found = run_record(replace(reader, encode=remembering), settings, observed.record)
    assert found["settings"]["prompt"] == "{question}? {stem}"
    asked = [f"{question.text}? {question.stem}" for question in observed.record.questions]
    assert [text for text in read if "?" in text] == asked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "Tell {me}"}, r"^prompt is 'Tell \{me\}', expected no fields but \{question\} and \{stem\}$"),
        ({"prompt": "{question"}, r"^prompt is '\{question', expected no fields but \{question\} and \{stem\}$"),
        ({"prompt": "{}"}, r"^prompt is '\{\}', expected no fields but \{question\} and \{stem\}$"),
        ({"plans": ("relay", "sideways")}, r"^plans holds 'sideways', expected names of original, relay, "),
        ({"selectors": ("best",)}, r"^selectors holds 'best', expected names of bm25, "),
        ({"retentions": (0.1, 1.0)}, r"^retentions holds 1\.0, expected shares of the history between 0 and 1$"),
    ],
)
def test_settings_that_mean_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Settings(**change)


def test_histories_of_different_settings_do_not_share_a_table(tmp_path):
    for number in range(2):
        history = stored_history(number, {"original": ["x", 1.0]}, settings={"tokens": number})
        (tmp_path / f"history_{number:03}.json").write_text(json.dumps(history))
    with pytest.raises(ValueError, match=r"^history 1 has other settings than 0, expected one run$"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match=r"holds no history_\*\.json, expected at least one$"):
        read_results(tmp_path / "nowhere")


@pytest.mark.slow
def test_smollm2_answers_one_history_from_the_command_line(tmp_path):
    done = CliRunner().invoke(
        relay.app, ["answers", "--tokens", "800", "--retention", "0.2", "--selector", "bm25", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(
        "4 questions per cell, 1 of each kind, in 1 histories (the clusters); 1 cells of 10 plans"
    )
    (history,) = read_results(tmp_path)
    for question in history["questions"]:
        plans = question["cells"][0]["plans"]
        # A shift of everything by 2,048 changes float32 rounding and nothing else.
        assert plans["common_shift"][1] == pytest.approx(plans["original"][1], abs=0.01)
