"""The stored tables of RoPERelay are those of the stored answers, and the README quotes them."""

import json
import re
from pathlib import Path

import pytest

from kvverify.experiments.relay_answers import read_results
from kvverify.experiments.relay_report import markdown

ROOT = Path(__file__).parents[2]
STORED = ROOT / "golden" / "experiments"
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("**RoPERelay on SmolLM2-135M**") : README.index("Speed of the references is no goal")]


@pytest.mark.slow
def test_the_stored_table_is_that_of_the_stored_answers():
    assert markdown(read_results(STORED / "relay_answers")) == (STORED / "relay_answers" / "table.md").read_text()


def test_the_readme_quotes_the_table_of_plans():
    stored = (STORED / "relay_answers" / "table.md").read_text()
    rows = [line for line in SECTION.splitlines() if line.startswith("|")]
    assert len(rows) == 12
    assert "\n".join(rows) in stored
    histories, questions = re.findall(r"(\d+) histories .*?, (\d+) questions per cell", stored)[0]
    assert f"{histories} histories" in SECTION
    assert f"{questions} questions per cell" in " ".join(SECTION.split())


def test_the_readme_quotes_the_evidence_and_the_overhead():
    share = json.loads((STORED / "relay_evidence" / "evidence_share.json").read_text())
    columns = share["columns"]
    gains = [
        f".{round(1e4 * row[columns.index('difference')]):04d}"
        for band in ("early", "middle", "late")
        for row in share["rows"]
        if row[0] == f"question, {band}" and row[1] == "bm25 relay"
    ]
    assert ", ".join(gains[:2]) + f"\n  and {gains[2]}" in SECTION
    notes = json.loads((STORED / "relay_overhead" / "overhead_table.json").read_text())["notes"]
    told = re.findall(r"([+-][\d.]+) %", " ".join(notes))
    for figure in re.findall(r"([+-][\d.]+) %", SECTION[SECTION.index("Request time") :]):
        assert figure in told, f"{figure} % is not in {notes}"
