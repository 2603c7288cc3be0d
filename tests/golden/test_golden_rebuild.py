"""A rebuild tells a change of the code from another platform, and refuses other versions unless told to."""

from __future__ import annotations

from typing import Any

import pytest
from golden_cases import golden

from kvverify.golden.compare import Difference, Verdict
from kvverify.golden.diff import FileDiff
from kvverify.golden.rebuild import explain, mismatches
from kvverify.golden.tree import Tree, canonical

HERE = {"torch": "2.13.0", "vector_unit": "AVX512", "threads": 1}


def files(*verdicts: Verdict) -> list[FileDiff]:
    return [FileDiff("x", tuple(Difference("t", verdict, "f32[2]") for verdict in verdicts), 3)]


@pytest.mark.parametrize(
    ("verdicts", "same", "told"),
    [
        ([], True, "bitwise equal"),
        ([], False, "bitwise equal"),
        (["drifted"], True, "code change"),
        (["changed"], True, "code change"),
        (["drifted"], False, "platform drift"),
        (["drifted", "changed"], False, "unexplained"),
        (["added"], False, "unexplained"),
    ],
)
def test_a_difference_is_the_codes_where_the_platform_is_the_same(
    verdicts: list[Verdict], same: bool, told: str
) -> None:
    found = explain(files(*verdicts), same_platform=same)
    assert found == told, f"{verdicts} on {'the same' if same else 'another'} platform is {found}, should be {told}"


@pytest.mark.parametrize(("name", "other"), [("torch", "2.14.0"), ("vector_unit", "AVX2"), ("threads", 2)])
def test_whatever_differs_from_the_record_is_named(name: str, other: Any) -> None:
    recorded = {"a": {"provenance": HERE}, "b": {"provenance": {**HERE, name: other}}}
    assert mismatches(recorded, HERE) == {name: ({str(HERE[name]), str(other)}, str(HERE[name]))}
    assert mismatches({"a": {"provenance": HERE}}, HERE) == {}


@pytest.mark.slow
def test_a_rebuild_with_other_versions_is_refused_unless_asked_for(tree: Tree) -> None:
    content = tree.manifest.read_text()
    tree.manifest.write_text(content.replace('"numpy": "', '"numpy": "1.'))
    done = golden(tree.root, "rebuild")
    assert done.returncode == 4, done.stdout
    assert "numpy differ from the recorded versions: run `nox -s golden_rebuild`" in done.stderr
    done = golden(tree.root, "rebuild", "--anyway")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "bitwise equal"), done.stderr


def test_canonical_json_spreads_records_and_keeps_a_tensor_on_one_line() -> None:
    text = canonical({"files": {"a": {"tensors": {"x": {"shape": [2], "dtype": "F32"}}}}}).decode()
    assert '    "x": {"dtype": "F32", "shape": [2]}\n' in text
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"mean": float("nan")})
