"""Every view of a report says the same, whatever a kernel's messages hold."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvverify.report import failure_block, failure_blocks, ladder_line, render, self_check_line, write_reports
from kvverify.report.files import junit, markdown, reserve, write_atomically
from kvverify.target import UsageError
from kvverify.verdicts import Failure, Report, SelfCheck, Verdict

FAILURE = Failure(
    kind="budget",
    message="keys[row 1] is <2>, should be 1 & \x1b[31mred\x00",
    case="ToyCase(rows=8)",
    expected="1",
    actual="2",
    budget="max error 1, allowed 0",
    python="import kvverify; kvverify.reproduce('m:a', 'toy.double', 'doubled', 'ToyCase(rows=8)')",
    command='kvverify repro m:a toy.double doubled "ToyCase(rows=8)"',
    nearest="triples",
    compared=12,
)
HELD = Verdict(
    "toy.double", "held", "This | holds.", "paper", "holds", "exact", ok=True, examples=50, seconds=0.5, worst=0.0
)
FAILED = replace(HELD, claim="doubled", evidence="budget", ok=False, worst=math.inf, failure=FAILURE)


def reported(*verdicts, missed=()):
    return Report(
        implementation="mine <1>",
        target="m:a",
        device="cpu",
        dtypes=("bf16",),
        evidence="reference",
        profile="quick",
        seed=0,
        versions={"kvverify": "0"},
        self_check=SelfCheck(7, missed, ()),
        verdicts=verdicts,
        seconds=1.0,
    )


def test_json_says_ok_and_is_json_to_a_strict_reader():
    def refuse(constant):
        raise AssertionError(constant)

    told = json.loads(reported(HELD, FAILED).to_json(), parse_constant=refuse)
    assert told["ok"] is False
    assert [verdict["worst"] for verdict in told["verdicts"]] == [0.0, None]
    assert told["verdicts"][1]["failure"]["case"] == "ToyCase(rows=8)"
    assert json.loads(reported(HELD).to_json())["ok"] is True


def test_junit_is_well_formed_and_counts_failures_whatever_the_kernel_said():
    root = ElementTree.fromstring(junit(reported(HELD, FAILED)))
    (suite,) = root.findall("testsuite")
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("2", "1")
    (failure,) = suite.iter("failure")
    assert failure.attrib["type"] == "budget"
    assert "ToyCase(rows=8)" in failure.text
    assert [case.attrib["name"] for case in suite.iter("testcase")] == ["held", "doubled"]


def test_markdown_holds_the_verdict_every_claim_and_every_failure():
    page = markdown(reported(HELD, FAILED))
    assert page.startswith("## ✘ kvverify: mine <1>")
    assert "This \\| holds." in page
    assert page.count("```text") == 1
    assert markdown(reported(HELD)).startswith("## ✔")


def test_a_failure_block_can_be_read_alone():
    block = failure_block(FAILED)
    for part in ("toy.double · doubled · budget", "This | holds.", "ToyCase(rows=8)", FAILURE.python, FAILURE.command):
        assert part in block
    assert "your output equals mutant triples on 12 of 12 failing cases" in block
    assert failure_block(HELD) == ""


def test_a_failure_without_a_nearest_mutant_says_none_and_one_that_was_not_compared_says_nothing():
    none = replace(FAILED, failure=replace(FAILURE, nearest=None))
    assert "none of the known-bad kernels behaves like yours (12 failing cases compared)" in failure_block(none)
    assert "nearest" not in failure_block(replace(FAILED, failure=replace(FAILURE, nearest=None, compared=0)))


def test_claims_with_one_cause_share_a_block_and_others_do_not():
    other = replace(FAILED, claim="other")
    alone = replace(FAILED, claim="alone", failure=replace(FAILURE, nearest=None))
    blocks = failure_blocks(reported(FAILED, other, alone))
    assert len(blocks) == 2
    assert "other: ToyCase(rows=8)" in blocks[0]


def test_the_ladder_names_each_claim_once_with_its_cases():
    assert "✔ held" in ladder_line(HELD)
    assert "50 cases" in ladder_line(HELD)
    assert "✘ doubled" in ladder_line(FAILED)
    assert len(ladder_line(replace(HELD, statement="long " * 100))) <= 120
    assert "6 of 7 known-bad kernels caught" in self_check_line(
        SelfCheck(7, ("a: b passes c on d", "a: b passes e"), ())
    )
    assert render(reported(HELD, FAILED)).splitlines()[-1].startswith("NOT OK: 1 of 2 claims hold")


def test_a_suite_defect_is_told_and_is_not_ok():
    defect = reported(HELD, missed=("toy.double: m passes c on d",))
    assert not defect.ok
    assert "suite defect: toy.double: m passes c on d" in render(defect)


def test_three_files_are_written_and_nothing_else(tmp_path):
    written = write_reports(reported(FAILED), tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["report.json", "junit.xml", "summary.md"]
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["junit.xml", "report.json", "summary.md"]
    ElementTree.parse(tmp_path / "new" / "folder" / "junit.xml")


def test_the_step_summary_is_appended_to(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    write_reports(reported(HELD), tmp_path / "out")
    assert page.read_text() == "before\n" + markdown(reported(HELD))


def test_an_old_file_is_intact_when_writing_fails(tmp_path, monkeypatch):
    target = tmp_path / "report.json"
    write_atomically(target, "old")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, "new")
    assert target.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_folder_that_cannot_be_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be written"):
            reserve(folder)
    reserve(Path(tmp_path / "a" / "b"))
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_verdict_survives_the_way_from_a_worker():
    from dataclasses import asdict

    for verdict in (HELD, FAILED):
        assert Verdict.from_dict(asdict(verdict)) == verdict
