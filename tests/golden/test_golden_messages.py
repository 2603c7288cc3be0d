"""What the command prints is one line, names a command that can be pasted, and goes with the right exit code."""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
from pathlib import Path

import pytest
from golden_cases import run

from kvverify.golden import pipeline, remote
from kvverify.golden.commands import main
from kvverify.golden.diff import chosen_stages
from kvverify.golden.faults import Fault, grouped, handful
from kvverify.golden.regenerate import regenerated
from kvverify.golden.tree import GoldenError, Tree, canonical
from kvverify.golden.verify import verify

DATA = "golden/data/decide/ant.safetensors"
UPDATE = ["update", "--reason", "why"]


def called(capsys: pytest.CaptureFixture[str], root: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main([*words, "--root", str(root)])
    output, errors = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, output, errors


def keep(tree: Tree, count: int) -> None:
    tree.parameters.write_text(tree.parameters.read_text().replace("keep: 2", f"keep: {count}"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["update"], "--reason is empty"),
        ([*UPDATE, "cow"], "'cow' is no stage and no model"),
        (["diff", "cow"], "'cow' is no stage and no model"),
        (["update", "--undo"], "nothing to undo"),
    ],
)
def test_a_request_that_cannot_be_carried_out_exits_four(
    tree: Tree, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    code, _, errors = called(capsys, tree.root, *words)
    assert (code, errors.count("\n")) == (4, 1), f"{words} exits {code} and says {errors!r}, expected 4 and one line"
    assert told in errors


@pytest.mark.parametrize("words", [["verify"], ["diff"], UPDATE])
def test_without_pyyaml_every_command_exits_four_and_names_the_extra(
    tree: Tree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, output, errors = called(capsys, tree.root, *words)
    expected = "kvverify golden: PyYAML is not installed, expected it: `pip install 'kvverify[golden]'`\n"
    assert (code, output, errors) == (4, "", expected)


def test_an_update_without_dvc_exits_four(
    tree: Tree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "dvc_installed", lambda: False)
    code, _, errors = called(capsys, tree.root, *UPDATE)
    assert (code, "`pip install 'kvverify[golden]'`" in errors) == (4, True), errors


def test_a_page_without_jinja2_is_refused_before_any_stage_is_run(
    tree: Tree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tree, 3)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, errors = called(capsys, tree.root, "diff", "--html", str(tree.root / "page.html"))
    expected = "kvverify golden: jinja2 is not installed, expected it for --html: `pip install 'kvverify[golden]'`\n"
    assert (code, errors) == (4, expected), "a stage that is run is named in the errors"


def test_a_root_that_does_not_exist_exits_four(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tree.root / "absent"  # its parent is a tree, and must not be taken for it
    code, output, errors = called(capsys, absent, "verify")
    expected = f"kvverify golden: --root {absent} is no folder, expected a folder of the repository\n"
    assert (code, output, errors) == (4, "", expected)


def test_faults_still_exit_ten(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    tree.lock.write_text("stages: [\n")
    assert called(capsys, tree.root, "verify")[0] == 10
    code, _, errors = called(capsys, tree.root, "diff")
    assert (code, "run `git checkout dvc.lock`" in errors) == (10, True), errors


def test_stages_that_wait_for_each_other_are_a_fault_with_a_command(tree: Tree) -> None:
    stages = tree.root / "dvc.yaml"
    made = '"golden/data/decide/${item.model}.safetensors"'
    stages.write_text(stages.read_text().replace("deps: [golden/capture.py]", f"deps: [golden/capture.py, {made}]"))
    found = [fault for fault in verify(tree, dvc=False) if fault.place == "dvc.yaml"]
    assert [(fault.problem[:36], fault.command) for fault in found] == [
        ("has stages that wait for each other ", "git checkout dvc.yaml")
    ]


def spoil_manifest(tree: Tree) -> None:
    """Record another file than is there, in all fields."""
    value = json.loads(tree.manifest.read_bytes())
    record = value["files"]["decide/ant.safetensors"]
    record.update(sha256="0" * 64, md5="0" * 32, bytes=1)
    record["tensors"]["kept"]["sha256"] = "0" * 64
    tree.manifest.write_bytes(canonical(value))


def test_a_manifest_at_fault_blames_neither_whole_data_nor_the_lock(tree: Tree) -> None:
    spoil_manifest(tree)
    found = verify(tree, dvc=False)
    assert [fault.place for fault in found] == ["golden/manifest.json"], "\n".join(map(str, found))


@pytest.mark.parametrize("edited", [True, False])
def test_beside_a_manifest_at_fault_data_is_held_against_the_lock(tree: Tree, edited: bool) -> None:
    spoil_manifest(tree)
    if not edited:
        tree.manifest.write_bytes(b"{")
    content = (tree.root / DATA).read_bytes()
    (tree.root / DATA).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (tree.data / "decide" / "bee.safetensors").unlink()
    keep(tree, 3)
    found = verify(tree, dvc=False)
    told = [(fault.place, fault.command) for fault in found]
    bee = "golden/data/decide/bee.safetensors"
    assert told[1:3] == [(DATA, f"dvc checkout --force {DATA}"), (bee, "dvc pull")], told
    assert told[0][0] == "golden/manifest.json", "the fault of the manifest is told first"
    assert told[3:] == [("decide (2 models)", "kvverify golden diff")], "what is stale is told last"
    assert all("as in dvc.lock" in fault.problem for fault in found[1:3])


def test_tensors_of_one_file_are_told_in_one_line(tree: Tree) -> None:
    (tree.root / DATA).write_bytes((tree.data / "decide" / "bee.safetensors").read_bytes())
    told = [str(fault) for fault in verify(tree, dvc=False)]
    assert len(told) == 1, told
    assert told[0].startswith(f"{DATA}: tensors kept, score: are not as recorded: kept is i64[2], sha256 "), told[0]


def test_outputs_that_the_lock_has_wrong_are_told_in_one_line(tree: Tree) -> None:
    content = tree.lock.read_text()
    for path, md5 in ((p, m) for stage in pipeline.stages(tree).values() for p, m in stage.made.items()):
        if "/decide/" in path:
            content = content.replace(md5, md5[::-1])
    tree.lock.write_text(content)
    told = [fault for fault in verify(tree, dvc=False) if fault.place == "dvc.lock"]
    assert len(told) == 1, told
    assert "decide/ant" in told[0].problem, told
    assert "decide/bee" in told[0].problem, told


def test_only_a_handful_is_told_and_the_rest_counted() -> None:
    assert handful(list("abcd")) == "a, b, c, d"
    assert handful(list("abcdefg")) == "a, b, c, d and 3 more"
    faults = [Fault("x", problem, "mend") for problem in "abcdef"]
    assert grouped([*faults, Fault("x", "g", "push"), Fault("y", "h", "mend")]) == [
        Fault("x", "a; b; c; d and 2 more", "mend"),
        Fault("x", "g", "push"),
        Fault("y", "h", "mend"),
    ]


def test_a_stage_that_fails_is_told_by_its_exception_alone(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    script = "import typer\ndef main(models: list[str]):\n    raise ValueError('out of hay')\ntyper.run(main)\n"
    (tree.golden / "decide.py").write_text(script)
    with pytest.raises(GoldenError) as caught, regenerated(tree, chosen_stages(tree, ["decide"])):
        pass
    command = "`python golden/decide.py ant bee`"
    assert str(caught.value) == f"{command} failed (exit 1), nothing was changed: ValueError: out of hay"


def test_a_diff_of_a_selection_says_what_it_looked_at_and_what_else_is_stale(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tree.golden / "decide.py"
    script.write_text(script.read_text() + "# a comment\n")
    code, output, _ = called(capsys, tree.root, "diff", "decide@ant")
    assert (code, output.splitlines()[-2:]) == (
        0,
        [
            'no tensor of decide@ant changes: `kvverify golden update decide@ant --reason "why"` records that this '
            "code was run",
            "stale and not looked at: decide@bee",
        ],
    )
    code, output, _ = called(capsys, tree.root, "diff", "capture@ant")
    assert (code, output.splitlines()[-2:]) == (
        0,
        ["no tensor of capture@ant changes", "stale and not looked at: decide (2 models)"],
    ), "a fresh selection leaves an update nothing to record"
    code, output, _ = called(capsys, tree.root, "diff", "--all")
    assert "decide (2 models) changes: `kvverify golden update --all --reason" in output, output
    keep(tree, 3)
    code, output, _ = called(capsys, tree.root, "diff", "ant")
    accept = 'to accept: run `kvverify golden update ant --reason "why"`'
    assert (code, output.splitlines()[-2:]) == (10, [accept, "stale and not looked at: decide@bee"])


def test_the_shadow_of_a_read_only_clone_can_be_written_to(tree: Tree) -> None:
    for path in [*tree.data.rglob("*"), tree.data]:
        path.chmod(path.stat().st_mode & ~0o222)
    with regenerated(tree, chosen_stages(tree, ["decide@ant"])) as shadow:
        closed = [path for path in [shadow.data, *shadow.data.rglob("*")] if not path.stat().st_mode & stat.S_IWUSR]
    assert closed == [], "a shadow copies contents, not modes"


@pytest.mark.slow
def test_an_update_says_how_to_accept_and_how_to_reject_it_and_both_work(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tree, 3)
    code, output, _ = called(capsys, tree.root, *UPDATE)
    assert code == 10
    accept, reject = output.splitlines()[-2:]
    assert accept == "to accept: commit dvc.lock, golden/ and what caused the change (params.yaml, code) together"
    _, output, _ = called(capsys, tree.root, "verify")
    assert "2 objects in golden/store that no output names: run `dvc gc" in output, (
        "the objects of an update that is not committed are not tracked either: git clean would remove them"
    )
    commands = re.findall("`([^`]*)`", reject)
    assert commands == ["git checkout dvc.lock golden params.yaml", "dvc checkout --force"]
    for command in commands:
        words = shlex.split(command)
        run([sys.executable, "-m", *words] if words[0] == "dvc" else words, tree.root)
    code, output, _ = called(capsys, tree.root, "verify")
    assert code == 0, output
    assert "2 objects in golden/store that no output names: run `git clean -f golden/store`\n" in output
    run(["git", "clean", "-f", "--quiet", "golden/store"], tree.root)
    assert run(["git", "status", "--porcelain"], tree.root).stdout == "", "a rejected update leaves nothing behind"
    code, output, _ = called(capsys, tree.root, "verify")
    assert (code, "no output names" in output) == (0, False), "what is left is what outputs name"
