"""The judge's protocol: what it is told, what it may say, and how two judges are compared."""

import json

import pytest
from relay_cases import stored_history
from typer.testing import CliRunner

from kvverify.experiments.judge import (
    TEMPLATE,
    Agreement,
    agreement,
    app,
    judged,
    parse_verdict,
    read_verdicts,
    render,
)

PLANS = {"original": ["milk", 3.0], "relay": ["hot cocoa", 1.0], "random 0": ["cocoa", 2.0]}


def histories():
    return [stored_history(number, PLANS, selector="snapkv") for number in range(2)]


@pytest.mark.parametrize(("text", "expected"), [('{"correct": true}', True), (' {"correct":false}\n', False)])
def test_a_verdict_is_one_boolean(text, expected):
    assert parse_verdict(text) is expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        pytest.param('{"correct": ' * 100_000, id="nested objects"),
        pytest.param('{"correct": ' + "[" * 100_000, id="nested arrays"),
        "true",
        "yes",
        "{}",
        '{"correct": 1}',
        '{"correct": "true"}',
        '{"correct": null}',
        '{"correct": [true]}',
        '{"correct": {"correct": true}}',
        '{"Correct": true}',
        '{"correct": true, "reason": "it matches"}',
        '{"correct": true, "correct": false}',
        '{"correct": true} because it matches',
        '```json\n{"correct": true}\n```',
        '[["correct", true]]',
        '[{"correct": true}]',
        "{'correct': true}",
        '{"correct": True}',
        None,
        {"correct": True},
        True,
    ],
)
def test_anything_else_is_no_verdict(text):
    with pytest.raises(ValueError, match=r'^verdict is .*, expected \{"correct": true\} or \{"correct": false\}$'):
        parse_verdict(text)


def test_a_payload_has_the_five_fields_and_nothing_that_tells_the_method():
    for line in render(histories()):
        assert set(line) == {"id", "system", "user"}
        rubric, _, payload = line["user"].partition("\n\n")
        assert rubric == TEMPLATE["rubric"]
        fields = json.loads(payload)
        assert list(fields) == ["question", "references", "candidate", "question_type", "question_date"]
        assert fields["references"] == ["cocoa"]
        for method in ("snapkv", "original", "relay", "random", "full", "0.1", "history"):
            assert method not in json.dumps(line["id"]) + payload, f"{method!r} shows in {line}"


def test_ids_are_distinct_and_payloads_in_their_order():
    names = [line["id"] for line in render(histories())]
    assert len(set(names)) == len(names) == 2 * 2 * (1 + len(PLANS))
    assert names == sorted(names)
    assert [name for name, _ in judged(histories())] != names


def test_the_template_asks_for_the_one_field_that_is_parsed():
    assert '{"correct": true}' in TEMPLATE["system"]
    assert '{"correct": false}' in TEMPLATE["system"]
    assert TEMPLATE["verdict"] == "correct"


def test_kappa_is_agreement_beyond_chance():
    found = Agreement(both_right=20, first_only=5, second_only=10, both_wrong=15)
    assert found.observed == pytest.approx(0.7)
    assert found.kappa == pytest.approx(0.4)  # chance (25 30 + 25 20) / 50^2 = 0.5
    assert str(found).endswith("50 answers, agreement 70.0 %, Cohen's kappa 0.400")
    assert Agreement(10, 0, 0, 10).kappa == pytest.approx(1)
    assert Agreement(0, 10, 10, 0).kappa == pytest.approx(-1)
    assert Agreement(0, 0, 0, 9).kappa is None
    assert str(Agreement(0, 0, 0, 9)).endswith("kappa undefined: both judges gave one verdict throughout")


def test_agreement_counts_by_id_whatever_the_order():
    first = {"a": True, "b": True, "c": False, "d": False, "e": True}
    second = {"e": False, "d": False, "c": True, "b": True, "a": True}
    assert agreement(first, second) == Agreement(2, 1, 1, 1)
    with pytest.raises(ValueError, match=r"^only one judge has judged f, expected both to judge the same answers$"):
        agreement(first, second | {"f": True})
    with pytest.raises(ValueError, match=r"^first is empty, expected at least one verdict$"):
        agreement({}, {})


def test_a_file_of_verdicts_names_the_line_that_is_none(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    good = json.dumps({"id": "a", "verdict": '{"correct": true}'})
    path.write_text(good + "\n")
    assert read_verdicts(path) == {"a": True}
    for bad, message in (
        ("nothing", r"^verdicts\.jsonl line 2 is 'nothing', expected an object with id and verdict$"),
        ('{"id": "b"}', r"^verdicts\.jsonl line 2 is .*, expected an object with id and verdict$"),
        ("[1]", r"^verdicts\.jsonl line 2 is '\[1\]', expected an object with id and verdict$"),
        ('{"id": [1], "verdict": "x"}', r"^verdicts\.jsonl line 2 has the id \[1\], expected a text$"),
        ('{"id": 7, "verdict": "x"}', r"^verdicts\.jsonl line 2 has the id 7, expected a text$"),
        ("[" * 100_000, r"^verdicts\.jsonl line 2 is '\[+', expected an object with id and verdict$"),
        ('{"id": "b", "verdict": "yes"}', r"^verdicts\.jsonl line 2: verdict is 'yes', expected "),
        (good, r"^verdicts\.jsonl line 2 judges a again, expected one verdict for each id$"),
    ):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=message):
            read_verdicts(path)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x1c", "\x0b"])
def test_verdicts_are_split_at_line_feeds_only(tmp_path, mark):
    path = tmp_path / "verdicts.jsonl"
    lines = [f'{{"id": "{name}{mark}", "verdict": "{{\\"correct\\": true}}"}}' for name in "ab"]
    if mark < " ":  # JSON has these escaped in a text, and nowhere else
        lines = [line.replace(mark, json.dumps(mark)[1:-1]) for line in lines]
    path.write_bytes(("\r\n".join(lines) + "\n").encode())
    assert read_verdicts(path) == {f"a{mark}": True, f"b{mark}": True}


def test_two_rules_judge_stored_answers_and_their_agreement_is_printed(tmp_path):
    for history in histories():
        (tmp_path / f"history_{history['number']:03}.json").write_text(json.dumps(history))
    files = [tmp_path / "exact.jsonl", tmp_path / "f1.jsonl"]
    for rule, path in zip(("exact", "f1"), files, strict=True):
        done = CliRunner().invoke(app, ["rule", str(tmp_path), rule, "--out", str(path)])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["agree", *map(str, files)])
    # Of each four answers "cocoa" is right twice, "hot cocoa" has F1 2/3, "milk" is wrong.
    assert done.output == str(Agreement(8, 0, 4, 4)) + "\n"
    done = CliRunner().invoke(app, ["render", str(tmp_path), "--out", str(tmp_path / "payloads.jsonl")])
    sent = [json.loads(line) for line in (tmp_path / "payloads.jsonl").read_text().splitlines()]
    assert sent == render(histories())
    assert {line["id"] for line in sent} == set(read_verdicts(files[0]))
    assert CliRunner().invoke(app, ["rule", str(tmp_path), "guess"]).exit_code == 2
