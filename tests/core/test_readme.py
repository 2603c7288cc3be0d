"""The README says what the code says: every table and figure in it is printed by a command, and compared here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvverify import budget
from kvverify.gate import PROFILES
from kvverify.operator import registry
from kvverify.relay import PLANS, measured
from kvverify.selectors import by_name

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, header and rule left out."""
    table = re.search(r"(?:^\|.*\n)+", README[README.index(heading) :], re.M)
    assert table, f"no table after {heading!r} in the README"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def test_the_table_of_operators_is_the_registry() -> None:
    told = {name.strip("`| "): (int(claims), int(mutants)) for name, claims, mutants, _ in rows("<!-- operators")}
    held = {name: (len(operator.claims), len(operator.mutants)) for name, operator in registry().items()}
    assert told == held, f"README lists {told}, the registry holds {held}"


def test_the_budget_table_is_the_code() -> None:
    told = [(quantity.strip("| "), value.strip("| ")) for quantity, value in rows("<!-- budget")]
    assert told == budget.table()


def test_the_budget_rule_is_quoted_as_the_code_states_it() -> None:
    assert budget.__doc__
    rule = next(line.strip() for line in budget.__doc__.splitlines() if line.strip().startswith("allowed ="))
    assert rule in README


def test_the_profiles_are_those_of_the_gate() -> None:
    told = {row[0].strip("`| "): int(row[1].replace(",", "")) for row in rows("| profile |")}
    assert told == {name: profile.examples for name, profile in PROFILES.items()}


def test_the_commands_exist() -> None:
    from typer.main import get_command

    from kvverify.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    told = set(re.findall(r"`kvverify (\w+)", README))
    assert told <= known, f"the README names {sorted(told - known)}, which the command does not have"


def test_every_plan_and_selector_is_named() -> None:
    for name in (*PLANS, *by_name):
        assert name in README, f"{name} is missing from the README"


def figure(pattern: str) -> float:
    """The one number that a pattern finds in the README."""
    found = re.findall(pattern, README)
    assert len(found) == 1, f"{pattern!r} finds {found} in the README: expected one figure"
    return float(found[0])


# Another processor may round differently: a figure of three digits is held to a twentieth.
@pytest.mark.parametrize(("moves", "told"), [(1, "1, "), (256, "256, "), (1024, "1,024 moves")])
def test_the_drift_is_what_the_command_prints(moves: int, told: str) -> None:
    stated = figure(rf"([\d.]+) % after {told}")
    assert stated == pytest.approx(100 * measured.drift(moves), rel=0.05)


def test_the_other_measured_figures_are_what_the_command_prints() -> None:
    rms, _ = measured.common_shift(2048)
    assert figure(r"scores by (\.\d+) \(rms\)") == pytest.approx(rms, rel=0.05)
    assert figure(r"off by up to ([\d.]+) %") == pytest.approx(100 * measured.bf16_tables(), rel=0.05)
    assert figure(r"grows ([\d.]+)-fold") == pytest.approx(measured.amplitude_left_out(), rel=0.001)


def test_the_golden_data_is_as_large_as_told() -> None:
    manifest = json.loads((Path(__file__).parents[2] / "golden" / "manifest.json").read_text(encoding="utf-8"))
    files = manifest["files"].values()
    assert f"{sum(len(file['tensors']) for file in files):,} tensors" in README
    assert f", {sum(file['bytes'] for file in files) / 1e6:.0f} MB, in `golden/store`" in README


def test_the_ladder_in_the_readme_names_real_claims() -> None:
    ladder = README[README.index("relay reference ·") : README.index("Gate your own kernel")]
    shown = re.findall(r"✔ (\w+) +\d+ cases", ladder)
    assert shown, "the README shows no rung of the ladder"
    known = {claim for operator in registry().values() for claim in operator.claims}
    assert set(shown) <= known, f"the README shows {sorted(set(shown) - known)}, which are no claims"


def test_the_weights_of_heavy_operators_are_told() -> None:
    for name, operator in registry().items():
        if operator.weight > 1:
            assert f"{operator.weight} for `{name}`" in README, f"the README does not tell the weight of {name}"
