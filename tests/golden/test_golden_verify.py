"""Every fault of a golden tree is found, is named, and is mended by the command that it names."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from golden_cases import golden, run

from kvverify.golden import pipeline
from kvverify.golden.faults import Fault
from kvverify.golden.remote import object_path
from kvverify.golden.tree import Tree, canonical
from kvverify.golden.verify import verify

DATA = "golden/data/decide/ant.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
FLIPS = 40
PASTEABLE = r"""(git|dvc|kvverify|rm) [-\w./ ]+( "why")?"""


def faults(tree: Tree) -> list[Fault]:
    return verify(tree, dvc=False)


def kept_object(tree: Tree) -> Path:
    """The object of `DATA` in the embedded store."""
    return object_path(tree, pipeline.stages(tree)["decide@ant"].made[DATA])


def test_a_tree_that_was_just_updated_has_no_fault(tree: Tree) -> None:
    done = golden(tree.root, "verify")
    assert done.returncode == 0, f"verify reports {done.stdout}{done.stderr}"
    assert "8 tensors in 4 files" in done.stdout
    assert "DVC agrees" in done.stdout


@pytest.mark.parametrize("what", ["data", "store", "manifest", "log"])
def test_one_flipped_bit_is_caught_and_its_file_named(tree: Tree, what: str) -> None:
    places = {
        "data": sorted(tree.data.rglob("*.safetensors")),
        "store": sorted(path for path in tree.store.rglob("*") if path.is_file()),
        "manifest": [tree.manifest],
        "log": [tree.updates],
    }[what]
    draw = random.Random(what)
    for _ in range(FLIPS):
        path = draw.choice(places)
        content = path.read_bytes()
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        path.chmod(0o644)  # DVC keeps its objects read-only
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        found = faults(tree)
        named = [fault for fault in found if fault.place.startswith(tree.name(path))]
        assert named, f"bit {bit} of byte {at} of {tree.name(path)}: verify names {[fault.place for fault in found]}"
        header = 8 + int.from_bytes(content[:8], "little")
        if what == "data" and at >= header:
            assert ": tensor " in named[0].place, f"byte {at} lies in a tensor, and {named[0].place} does not name it"
        path.write_bytes(content)
    assert faults(tree) == [], "after the bits were put back"


def test_a_flipped_bit_of_the_lock_never_makes_verify_fail_itself(tree: Tree) -> None:
    content, draw, told = tree.lock.read_bytes(), random.Random(0), 0
    for _ in range(FLIPS):
        at = draw.randrange(len(content))
        tree.lock.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
        told += bool(faults(tree))
    assert told > FLIPS / 2, f"{told} of {FLIPS} flips of dvc.lock were seen: hashes make up most of the file"


def spoil_missing(tree: Tree) -> None:
    (tree.root / DATA).unlink()


def spoil_truncated(tree: Tree) -> None:
    path = tree.root / DATA
    path.write_bytes(path.read_bytes()[:-5])


def spoil_pointer(tree: Tree) -> None:
    (tree.root / DATA).write_bytes(POINTER)


def spoil_unpushed(tree: Tree) -> None:
    kept_object(tree).unlink()


def spoil_empty(tree: Tree) -> None:
    for path in tree.data.rglob("*.safetensors"):
        path.unlink()


def spoil_object(tree: Tree) -> None:
    path = kept_object(tree)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])


def spoil_left_over(tree: Tree) -> None:
    kept_object(tree).with_name("o4kZvYyK.tmp").write_bytes(b"half of an")


def spoil_object_pointer(tree: Tree) -> None:
    path = kept_object(tree)
    path.chmod(0o644)
    path.write_bytes(POINTER)


def spoil_format(tree: Tree) -> None:
    value = json.loads(tree.manifest.read_bytes())
    tree.manifest.write_bytes(canonical({**value, "format": 2}))


def spoil_record(tree: Tree) -> None:
    value = json.loads(tree.manifest.read_bytes())
    del value["files"]["decide/ant.safetensors"]["md5"]
    tree.manifest.write_bytes(canonical(value))


def spoil_by_hand(tree: Tree) -> None:
    value = json.loads(tree.manifest.read_bytes())
    value["files"]["decide/ant.safetensors"]["tensors"]["kept"]["sha256"] = "0" * 64
    tree.manifest.write_bytes(canonical(value))


def spoil_log(tree: Tree) -> None:
    value = json.loads(tree.updates.read_bytes())
    value["updates"][0]["reason"] = "another reason"
    tree.updates.write_bytes(canonical(value))


def spoil_lock(tree: Tree) -> None:
    made = pipeline.stages(tree)["decide@ant"].made[DATA]
    tree.lock.write_text(tree.lock.read_text().replace(made, "0" * 32))


def spoil_lock_text(tree: Tree) -> None:
    tree.lock.write_text("stages: [\n")


SPOILT: dict[Callable[[Tree], None], tuple[str, str, str]] = {
    spoil_missing: (DATA, "is missing, expected", "dvc pull"),
    spoil_truncated: (DATA, "is truncated", f"dvc checkout --force {DATA}"),
    spoil_pointer: (DATA, "Git LFS pointer", "dvc pull"),
    spoil_empty: ("golden/data", "is empty, expected 4 files", "dvc pull"),
    spoil_unpushed: (DATA, "is not pushed", "dvc push"),
    spoil_object: ("golden/store/files/md5/", "is corrupt", "git checkout golden/store/files/md5/"),
    spoil_left_over: ("golden/store/files/md5/", "is no object", "rm golden/store/files/md5/"),
    spoil_object_pointer: ("golden/store/files/md5/", "Git LFS pointer", "git checkout golden/store/files/md5/"),
    spoil_format: ("golden/manifest.json", "format 2, expected format 1", "git checkout golden/manifest.json"),
    spoil_record: ("golden/manifest.json", "has no md5 of decide/ant.safetensors", "git checkout golden/manifest.json"),
    spoil_by_hand: ("golden/manifest.json", "without a recorded reason", "git checkout golden/manifest.json"),
    spoil_log: ("golden/updates.json", "has entry 0", "git checkout golden/manifest.json golden/updates.json"),
    spoil_lock: ("dvc.lock", "as in the manifest", "git checkout dvc.lock"),
    spoil_lock_text: ("dvc.lock", "is not YAML", "git checkout dvc.lock"),
}


def _marks(spoil: Callable[[Tree], None]) -> list[pytest.MarkDecorator]:
    """Commands of DVC take half a second each: one of them is enough for the fast tests."""
    return [pytest.mark.slow] if SPOILT[spoil][2].startswith("dvc") and spoil is not spoil_missing else []


@pytest.mark.parametrize("spoil", [pytest.param(s, marks=_marks(s), id=s.__name__) for s in SPOILT])
def test_a_fault_is_named_and_its_command_mends_it(tree: Tree, spoil: Callable[[Tree], None]) -> None:
    place, words, command = SPOILT[spoil]
    spoil(tree)
    found = faults(tree)
    fitting = [f for f in found if f.place.startswith(place) and words in f.problem and f.command.startswith(command)]
    assert fitting, f"expected {place}: {words}; {command}: verify says {[str(fault) for fault in found]}"
    for fault in found:
        quoted = re.split("`", str(fault))
        outside, inside = " ".join(quoted[::2]), quoted[1::2]
        assert all(re.fullmatch(PASTEABLE, command) for command in inside), f"not one command each: {inside}"
        assert not re.search(r"\b(git|dvc|kvverify) \w", outside), f"a command outside of backticks: {fault}"
    words_to_run = shlex.split(fitting[0].command)
    if words_to_run[:2] == ["dvc", "pull"]:
        words_to_run.append("--force")  # it asks before it replaces a file that is there
    done = run([sys.executable, "-m", *words_to_run] if words_to_run[0] == "dvc" else words_to_run, tree.root)
    assert faults(tree) == [], f"after `{fitting[0].command}`: {done.stdout}{done.stderr}"


def test_a_file_that_no_stage_made_is_a_fault(tree: Tree) -> None:
    (tree.data / "decide" / "cow.safetensors").write_bytes((tree.root / DATA).read_bytes())
    assert [fault.place for fault in faults(tree)] == ["golden/data/decide/cow.safetensors"]


def test_a_fault_makes_the_exit_code_ten_and_one_line(tree: Tree) -> None:
    spoil_truncated(tree)
    done = golden(tree.root, "verify")
    lines = [line for line in done.stdout.splitlines() if line.startswith("✘")]
    assert done.returncode == 10
    assert len(lines) == 1, f"one fault is told in {lines}"


@pytest.mark.slow
def test_what_is_stale_is_what_dvc_says_is_stale(tree: Tree) -> None:
    changes = {
        "params.yaml": ("keep: 2", "keep: 3"),
        "golden/capture.py": ("import sys", "import sys "),
    }
    for name, (old, new) in changes.items():
        path = tree.root / name
        before = path.read_text()
        path.write_text(before.replace(old, new))
        told = json.loads(run([sys.executable, "-m", "dvc", "status", "--json"], tree.root).stdout)
        ours = {name for name, stage in pipeline.stages(tree).items() if pipeline.why_stale(tree, stage)}
        assert ours, f"a change of {name} leaves nothing stale"
        assert ours == set(told), f"after a change of {name} we say {ours}, DVC says {set(told)}"
        path.write_text(before)


def test_a_changed_parameter_is_told_with_both_values(tree: Tree) -> None:
    tree.parameters.write_text(tree.parameters.read_text().replace("keep: 2", "keep: 3"))
    told = [str(fault) for fault in faults(tree)]
    assert all("parameter decide.keep was 2 and is 3" in line for line in told), told
    assert [line.partition(":")[0] for line in told] == ["decide (2 models)"], "once for all models of a stage"


def test_verifying_imports_no_torch(tree: Tree) -> None:
    code = (
        "import sys; from pathlib import Path; from kvverify.golden.tree import Tree; import kvverify.golden.commands;"
        "from kvverify.golden.verify import verify; assert verify(Tree(Path(sys.argv[1])), dvc=False) == [];"
        "loaded = {'torch', 'transformers', 'dvc', 'jinja2'} & sys.modules.keys(); assert not loaded, loaded"
    )
    done = run([sys.executable, "-c", code, str(tree.root)], tree.root, check=False)
    assert done.returncode == 0, done.stderr
