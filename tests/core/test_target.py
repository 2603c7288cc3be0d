"""From what a user types to an implementation, or to one line that says why not."""

import itertools
import sys
from importlib import metadata

import pytest

from kvverify.operator import Implementation
from kvverify.target import ENTRY_POINTS, UsageError, resolve

GOOD = """
from kvverify import Implementation, implements

@implements("attention.merge")
def merge(out, lse):
    return out[0], lse[0]

class nested:
    impl = Implementation("inside", [merge])

impl = Implementation("mine", {"attention.merge": merge})
number = 3
"""
NAMES = (f"kv_adapter_{number}" for number in itertools.count())


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module under a name never used before, in a folder that only `resolve` knows of."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = []

    def write(text):
        names.append(next(NAMES))
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_each_way_to_name_an_implementation_leads_to_it(module, tmp_path):
    name = module(GOOD)
    folder = str(tmp_path)
    assert resolve(f"{name}:impl", folder=folder).name == "mine"
    assert resolve(f"{name}:nested.impl", folder=folder).name == "inside"
    assert resolve(name, folder=folder).name == name
    assert list(resolve(f"{name}:merge", folder=folder).bindings) == ["attention.merge"]


def test_the_working_directory_is_searched_by_default(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(f"{module(GOOD)}:impl").name == "mine"


def test_an_entry_point_is_found_by_its_name(monkeypatch):
    point = metadata.EntryPoint("my-kernels", "kvverify.attention:reference", ENTRY_POINTS)
    monkeypatch.setattr("kvverify.target.entry_points", lambda group: metadata.EntryPoints([point]))
    assert resolve("my-kernels").name == "attention reference"
    assert isinstance(resolve("kvverify.relay:reference"), Implementation)


@pytest.mark.parametrize("target", ["", ":", "a:", ":impl", "my-pkg.adapter:impl", "a/b.py:impl", "a..b:c", "a b"])
def test_what_is_no_target_is_refused_with_an_example(target):
    with pytest.raises(UsageError, match=r"is not a target: expected module:attribute, e.g. my_pkg.adapter:impl"):
        resolve(target)


@pytest.mark.parametrize(
    ("text", "attribute", "says"),
    [
        (GOOD, ":nothing", "has no attribute 'nothing'"),
        (GOOD, ":number", "is a int: expected a kvverify.Implementation"),
        ("x = 1", "", "is a module without @implements functions"),
        ("import no_such_library", ":impl", "does not import: ModuleNotFoundError: No module named 'no_such_library'"),
        ("1 / 0", ":impl", "does not import: ZeroDivisionError"),
        ("raise RuntimeError('two\\nlines \\x1b[31m')", ":impl", r"RuntimeError: two lines \?\[31m"),
        ("def broken(:", ":impl", "does not import: SyntaxError"),
        ("import sys; sys.exit(0)", ":impl", "does not import: SystemExit: 0"),
        ("import pytest; pytest.importorskip('no_such')", ":impl", "does not import: Skipped"),
        (GOOD + "\nagain = implements('attention.merge')(lambda out, lse: None)", "", "twice"),
    ],
)
def test_what_leads_nowhere_is_refused_in_one_line(module, tmp_path, text, attribute, says):
    with pytest.raises(UsageError, match=says) as refused:
        resolve(module(text) + attribute, folder=str(tmp_path))
    assert str(refused.value).isprintable()


def test_a_missing_module_is_named():
    with pytest.raises(UsageError, match=r"'no_such_module:impl' does not import: ModuleNotFoundError"):
        resolve("no_such_module:impl")


def test_an_interrupt_during_an_import_is_an_interrupt(module, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        resolve(module("raise KeyboardInterrupt") + ":impl", folder=str(tmp_path))
