"""Memory records: what is planted stands where it is said to stand, and a number fixes everything."""

import random
import re

import pytest
import torch
from relay_cases import TEXTS, encode

from kvverify.experiments.relay_facts import KINDS, MONTHS, draw_facts, draw_names
from kvverify.experiments.relay_records import build_record
from kvverify.experiments.relay_scoring import build_prompt, clean_answer, exact_match, mean_nll, normalise, token_f1

LIMIT = 1600


@pytest.fixture(scope="module")
def records():
    return [build_record(encode, TEXTS, number, limit=LIMIT) for number in range(12)]


def session_of(record, unit):
    """The header of the session that a unit stands in."""
    return [other.text for other in record.units if other.text.startswith("Session") and other.stop <= unit.start][-1]


def test_units_tile_the_tokens_and_are_the_tokens_of_their_texts(records):
    for record in records:
        ends = [0, *(unit.stop for unit in record.units)]
        assert [unit.start for unit in record.units] == ends[:-1]
        assert ends[-1] == len(record.tokens)
        for unit in record.units:
            assert record.tokens[unit.start : unit.stop].tolist() == encode(unit.text + "\n")


def test_a_record_is_full_and_never_over_its_limit(records):
    longest = max(len(text) for text in TEXTS) + 1
    for record in records:
        assert LIMIT - longest < len(record.tokens) <= LIMIT


def test_a_number_fixes_a_record_and_another_number_gives_another(records):
    again = build_record(encode, TEXTS, 3, limit=LIMIT)
    assert torch.equal(again.tokens, records[3].tokens)
    assert again.questions == records[3].questions
    assert len({tuple(record.tokens.tolist()) for record in records}) == len(records)


def test_every_record_asks_one_question_of_each_kind_and_says_its_answer_in_the_evidence(records):
    for record in records:
        assert [question.kind for question in record.questions] == list(KINDS)
        for question in record.questions:
            assert question.evidence
            said = " ".join(unit.text for unit in question.evidence)
            assert question.answer in said, f"{question.answer!r} is in no evidence of {question.text!r}: {said!r}"
            assert all(unit in record.units for unit in question.evidence)


def test_evidence_positions_are_the_tokens_of_its_units_on_the_device_asked_for(records):
    question = records[0].questions[3]
    first, second = question.evidence
    expected = [*range(first.start, first.stop), *range(second.start, second.stop)]
    assert question.evidence_positions(torch.device("cpu")).tolist() == expected
    assert question.evidence_positions(torch.device("meta")).is_meta


def test_the_month_that_is_asked_for_is_december_in_one_of_six_records():
    # Of six months of twelve December is one with probability 1/2, and the later of two is the last with 1/3.
    answers = [build_record(encode, TEXTS, number, limit=LIMIT).questions[2].answer for number in range(0, 240, 2)]
    assert 0.08 < answers.count("December") / len(answers) < 0.27


def test_the_sentence_that_an_update_has_replaced_is_in_the_history_before_the_evidence(records):
    for record in records:
        question = record.questions[1]
        name = re.match(r"(\w+ \w+) has", question.stem).group(1)
        about = [unit for unit in record.units if unit.text.startswith(f"{name} ")]
        assert len(about) == 2
        assert (about[1],) == question.evidence
        assert question.answer not in about[0].text


def test_the_statements_that_must_be_joined_stand_in_different_sessions_and_only_one_has_the_answer(records):
    for record in records:
        link, attribute = record.questions[3].evidence
        assert session_of(record, link) != session_of(record, attribute)
        assert record.questions[3].answer not in link.text
        assert link.text.rstrip(".").endswith(" ".join(attribute.text.split()[:2]))


def test_a_month_that_is_asked_for_is_that_of_the_session_it_was_said_in(records):
    for record in records[::2]:
        (event,) = record.questions[2].evidence
        assert record.questions[2].answer in MONTHS
        assert record.questions[2].answer in session_of(record, event)
        assert record.questions[2].text.removesuffix("?").split()[-1] in event.text


def test_what_came_first_is_the_event_of_the_earlier_statement_and_is_named_first_as_often_as_not():
    named = []
    for number in range(1, 60, 2):
        fact = draw_facts(random.Random(number), number)[4]
        assert fact.answer in fact.statements[0]
        assert fact.answer not in fact.statements[1]
        named.append(re.search(r"to the (\w+) or", fact.question).group(1) == fact.answer)
    assert 0.25 < sum(named) / len(named) < 0.75


def test_no_two_people_share_a_name():
    names = [part for name in draw_names(random.Random(0), 24) for part in name.split()]
    assert len(set(names)) == 48
    with pytest.raises(ValueError, match=r"^count is 25, expected 0 to 24"):
        draw_names(random.Random(0), 25)


def test_values_of_one_kind_differ_within_a_record():
    for number in range(30):
        facts = draw_facts(random.Random(number), number)
        for kind in ("fact", "update", "cross"):
            answers = [fact.answer for fact in facts if fact.kind == kind]
            assert len(answers) == len(set(answers)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": 300}, r"^limit is 300 tokens, expected at least \d+, the tokens of headers and statements$"),
        ({"texts": TEXTS[:3]}, r"^texts holds 3 paragraphs, expected enough to fill 1600 tokens$"),
        ({"sessions": 1}, r"^sessions is 1, expected at least 2"),
        ({"sessions": 13}, r"^sessions is 13, expected at most 12"),
    ],
)
def test_a_record_that_cannot_be_built_is_refused_in_one_line(change, message):
    arguments = {"texts": TEXTS, "limit": LIMIT, "sessions": 6} | change
    texts = arguments.pop("texts")
    with pytest.raises(ValueError, match=message):
        build_record(encode, texts, 0, **arguments)


def test_the_prompt_ends_with_the_stem_and_the_answer_begins_with_a_blank(records):
    question = records[0].questions[0]
    prompt = build_prompt(encode, question)
    assert prompt.question.tolist()[-len(question.stem) :] == encode(question.stem)
    assert prompt.answer.tolist() == encode(" " + question.answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" punch.\n\nWhat", "punch"), ("\n cocoa\nmilk", "cocoa"), ("<|im_end|>", ""), (" the race, in May", "the race")],
)
def test_an_answer_ends_at_the_first_mark_or_line(text, expected):
    assert clean_answer(text) == expected


def test_words_are_compared_without_case_marks_and_articles():
    assert normalise("The Race!") == ["race"]
    assert exact_match("A duck.", "duck")
    assert not exact_match("duck pond", "duck")
    assert not exact_match("pond duck", "duck pond")
    assert not exact_match("", "duck")


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("grey horse", "horse", 2 / 3),
        ("horse horse", "horse", 2 / 3),
        ("the horse", "horse", 1.0),
        ("duck", "horse", 0.0),
        ("", "horse", 0.0),
        ("", "", 1.0),
    ],
)
def test_token_f1_counts_a_word_as_often_as_both_have_it(answer, reference, expected):
    assert token_f1(answer, reference) == pytest.approx(expected, abs=1e-15)


def test_mean_nll_reads_one_step_for_each_answer_token():
    probabilities = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]])
    logits = probabilities.log()
    expected = [
        -(p * q).log().item() / 2 for p, q in ((torch.tensor(0.5), torch.tensor(0.125)), (torch.tensor(0.25),) * 2)
    ]
    found = mean_nll([logits[:, :1], logits[:, 1:]], torch.tensor([0, 1]))
    assert found == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"^logits are of 2 steps, expected 1"):
        mean_nll([logits], torch.tensor([0]))
