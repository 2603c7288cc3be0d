"""The commands of the RoPERelay experiments, on a tiny model."""

import json

import pytest
from relay_cases import stored_history, tiny_reader
from typer.testing import CliRunner

from kvverify.experiments import relay, relay_evidence
from kvverify.experiments.relay_evidence import MEASURES

LIMIT = 1300


@pytest.fixture(scope="module")
def reader():
    return tiny_reader()


def test_the_table_command_rebuilds_tables_and_plots_from_stored_answers_alone(tmp_path):
    kinds = ("fact", "update", "temporal", "cross")
    for number in range(2):
        history = stored_history(number, {"original": ["milk", 2.0], "relay": ["cocoa", 1.0]}, kinds=kinds)
        (tmp_path / f"history_{number:03}.json").write_text(json.dumps(history))
    there = set(tmp_path.iterdir())
    printed = CliRunner().invoke(relay.app, ["table", str(tmp_path)])
    assert set(tmp_path.iterdir()) == there, "printing a table has written files"
    done = CliRunner().invoke(relay.app, ["table", "--write", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.stdout == printed.stdout
    assert done.stdout.startswith("SmolLM2-135M-Instruct, 2 histories of at most 2048 tokens, 8 questions per cell")
    written = {path.name for path in set(tmp_path.iterdir()) - there}
    assert written == {
        "table.md",
        *(f"answers_{name}.{kind}" for name in ("relay", "plans") for kind in ("json", "svg")),
    }
    with pytest.raises(ValueError, match=r"holds no results, expected history_\*\.json"):
        relay.stored_tables(tmp_path / "nowhere")


def test_commands_store_what_the_table_command_reads_back(reader, monkeypatch, tmp_path):
    monkeypatch.setattr(relay, "smollm2_reader", lambda: reader)
    for name, options in (
        ("evidence", ["--tokens", str(LIMIT)]),
        ("overhead", ["--tokens", str(LIMIT), "--kept", "100", "--generate", "2", "--repetitions", "1"]),
    ):
        done = CliRunner().invoke(relay.app, [name, *options, "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
        again = CliRunner().invoke(relay.app, ["table", str(tmp_path / name)])
        assert done.output.endswith(again.output)
        stored = json.loads((tmp_path / name / f"{name}.json").read_text())
        assert stored["settings"]["tokens"] == LIMIT
    names = {path.stem for path in (tmp_path / "evidence").glob("*.svg")}
    assert names == {f"evidence_{measure}" for measure in MEASURES}
    assert relay_evidence.PUBLISHED_SHARE == {"early": 0.0252, "middle": 0.0084, "late": 0.0071}


@pytest.mark.parametrize(
    ("command", "value", "expected"),
    [
        (["answers", "--selector", "best"], "'best'", "bm25"),
        (["answers", "--retention", "1.5"], "1.5", "between 0 and 1"),
        (["evidence", "--selector", "best"], "'best'", "bm25"),
        (["evidence", "--retention", "0"], "0.0", "between 0 and 1"),
        (["overhead", "--selector", "best"], "'best'", "bm25"),
        (["overhead", "--kept", "2560"], "2560", "less than the 2560 tokens"),
        (["table"], "nowhere", "history_*.json"),
    ],
)
def test_options_that_mean_nothing_are_refused_in_one_message_before_a_model_is_loaded(
    monkeypatch, tmp_path, command, value, expected
):
    monkeypatch.setattr(relay, "smollm2_reader", lambda: pytest.fail("the model was loaded before options were read"))
    where = [str(tmp_path / "nowhere")] if command == ["table"] else ["--out", str(tmp_path / "nowhere")]
    done = CliRunner().invoke(relay.app, [*command, *where])
    assert done.exit_code == 2, f"{command} ended with {done.exit_code} and {done.exception!r}, expected a usage error"
    said = " ".join(done.output.replace("│", " ").split())
    for words in (value, expected):  # a box breaks long lines anywhere
        assert words.replace(" ", "") in said.replace(" ", ""), f"{words!r} is not in {said!r}"
    assert not (tmp_path / "nowhere").exists()
