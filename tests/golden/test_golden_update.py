"""Golden data changes on purpose only: shown first, for a recorded reason, all or nothing, and never green at once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from golden_cases import commit, golden, run

from kvverify.golden import history, manifest, remote
from kvverify.golden.diff import chosen_stages, compare_trees
from kvverify.golden.exchange import undo
from kvverify.golden.regenerate import regenerated
from kvverify.golden.tree import GoldenError, Tree, canonical
from kvverify.golden.update import update
from kvverify.golden.verify import verify

KILLED = 77


def hashes(tree: Tree) -> dict[str, str]:
    """Hash of every file that git or DVC keeps."""
    paths = [tree.manifest, tree.updates, tree.lock, *tree.data.rglob("*.safetensors"), *tree.store.rglob("*")]
    return {tree.name(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def keep(tree: Tree, count: int) -> None:
    tree.parameters.write_text(tree.parameters.read_text().replace("keep: 2", f"keep: {count}"))


def test_a_diff_shows_what_a_parameter_changes_and_touches_nothing(tree: Tree) -> None:
    keep(tree, 3)
    before = hashes(tree)
    page = tree.root / "page.html"
    done = golden(tree.root, "diff", "--html", str(page))
    assert done.returncode == 10, done.stderr
    assert "parameter decide.keep was 2 and is 3" in done.stdout
    assert "changed  kept  i64[2] → i64[3]" in done.stdout
    assert "2 equal, 2 changed" in done.stdout, "the scores do not depend on how many are kept"
    assert hashes(tree) == before, "a diff wrote to the tree"
    html = page.read_text()
    assert html.count("<tr><td>") == 2, "one row for each tensor that differs"
    assert "http" not in html.replace("http-equiv", ""), "the page loads something from elsewhere"


def test_a_diff_follows_a_change_to_the_stages_that_read_it(tree: Tree) -> None:
    tree.parameters.write_text(tree.parameters.read_text().replace("rows: 6", "rows: 7"))
    names = [stage.name for stage in chosen_stages(tree, [])]
    assert names == ["capture@ant", "capture@bee", "decide@ant", "decide@bee"]


def test_nothing_stale_means_nothing_to_do(tree: Tree) -> None:
    before = hashes(tree)
    told = golden(tree.root, "diff")
    assert (told.returncode, told.stdout) == (0, "nothing is stale; --all compares all stages\n")
    told = golden(tree.root, "update", "--reason", "none")
    assert (told.returncode, told.stdout) == (0, "nothing changed, nothing was written\n")
    assert hashes(tree) == before


@pytest.mark.slow
def test_regenerating_everything_gives_the_same_bytes(tree: Tree) -> None:
    done = golden(tree.root, "diff", "--all")
    assert (done.returncode, done.stdout) == (0, "8 equal\n")
    done = golden(tree.root, "rebuild")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("bitwise equal\n")


@pytest.mark.slow
def test_drift_within_the_budget_passes_and_is_said(tree: Tree) -> None:
    script = tree.golden / "capture.py"
    script.write_text(script.read_text().replace("(rows, 4))", "(rows, 4)) * (1 + 3e-16)"))
    done = golden(tree.root, "diff", "capture")
    assert done.returncode == 0, done.stdout
    assert "2 drifted within budget" in done.stdout
    done = golden(tree.root, "rebuild")
    assert done.returncode == 10, "the same platform with other bits is a change of the code"
    assert done.stdout.endswith("code change\n")


def test_an_update_exits_ten_and_verify_is_green_after_it(tree: Tree) -> None:
    keep(tree, 3)
    done = golden(tree.root, "update", "--reason", "three states")
    assert done.returncode == 10, done.stderr
    assert "changed  kept" in done.stdout, "an update shows the diff"
    assert verify(tree) == []
    last = history.entries(tree)[-1]
    assert last["reason"] == "three states"
    assert [line.partition(", ")[0] for line in last["changes"]] == [
        f"golden/data/decide/{model}.safetensors: changed kept i64[2] → i64[3]" for model in ("ant", "bee")
    ]


@pytest.mark.parametrize("reason", ["", "   "])
def test_an_update_without_a_reason_is_refused(tree: Tree, reason: str) -> None:
    keep(tree, 3)
    before = hashes(tree)
    with pytest.raises(GoldenError, match="--reason is empty"):
        update(tree, reason=reason)
    assert hashes(tree) == before


def test_an_update_without_dvc_is_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "dvc_installed", lambda: False)
    with pytest.raises(GoldenError, match=r"dvc is not installed.*kvverify\[golden\]"):
        update(tree, reason="why")


def test_a_selection_rewrites_no_other_entry(tree: Tree) -> None:
    keep(tree, 3)
    before, recorded = hashes(tree), manifest.load(tree)["files"]
    outcome = update(tree, reason="the ant only", wanted=["decide@ant"])
    assert outcome.stages == ("decide@ant",)
    after, now = hashes(tree), manifest.load(tree)["files"]
    assert now.keys() == recorded.keys(), "a selection removed or added entries"
    assert {name for name in now if now[name] != recorded[name]} == {"decide/ant.safetensors"}
    data = {name for name in before if name.startswith("golden/data") and before[name] != after[name]}
    assert data == {"golden/data/decide/ant.safetensors"}
    assert [fault.place for fault in verify(tree)] == ["decide@bee"], "the bee is still stale, and nothing else is"


def test_a_word_that_is_no_stage_is_refused_with_those_that_are(tree: Tree) -> None:
    with pytest.raises(GoldenError, match="'cow' is no stage and no model: expected some of capture, decide, ant, bee"):
        update(tree, reason="why", wanted=["cow"])


@pytest.mark.slow
def test_an_update_of_everything_removes_what_no_stage_makes(tree: Tree) -> None:
    tree.parameters.write_text(tree.parameters.read_text().replace("[ant, bee]", "[ant]"))
    outcome = update(tree, reason="no more bees")
    assert outcome.removed == ("golden/data/capture/bee.safetensors", "golden/data/decide/bee.safetensors")
    assert verify(tree) == []


@pytest.mark.slow
def test_a_new_model_is_added(tree: Tree) -> None:
    tree.parameters.write_text(tree.parameters.read_text().replace("[ant, bee]", "[ant, bee, cow]"))
    outcome = update(tree, reason="a cow")
    assert outcome.stages == ("capture@cow", "decide@cow"), "the others are fresh"
    assert verify(tree) == []


def test_a_stage_that_fails_changes_nothing_and_says_why(tree: Tree) -> None:
    script = tree.golden / "decide.py"
    script.write_text(script.read_text() + "raise SystemExit('out of hay')\n")
    before = hashes(tree)
    with pytest.raises(GoldenError, match=r"(?s)`python golden/decide.py ant bee` failed \(exit 1\).*out of hay"):
        update(tree, reason="why")
    assert hashes(tree) == before


def test_a_stage_that_writes_nothing_is_a_failure(tree: Tree) -> None:
    (tree.golden / "decide.py").write_text("pass\n")
    with (
        pytest.raises(GoldenError, match=r"golden/data/decide/ant.safetensors was not written"),
        regenerated(tree, chosen_stages(tree, ["decide"])),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["commit", "push"])
def test_an_update_that_dvc_refuses_leaves_everything_as_it_was(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    keep(tree, 3)
    before, real = hashes(tree), remote.dvc

    def refusing(tree: Tree, *words: str) -> object:
        return (
            run([sys.executable, "-c", "exit('disk full')"], tree.root, check=False)
            if words[0] == failing
            else real(tree, *words)
        )

    monkeypatch.setattr(remote, "dvc", refusing)
    with pytest.raises(GoldenError, match=f"`dvc {failing}` failed, everything is as it was: disk full"):
        update(tree, reason="why")
    assert {name: hash for name, hash in hashes(tree).items() if name in before} == before
    keep_back = tree.parameters.read_text().replace("keep: 3", "keep: 2")
    tree.parameters.write_text(keep_back)
    assert verify(tree, dvc=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("writes", range(5))
def test_a_killed_update_can_be_undone(tree: Tree, writes: int) -> None:
    before = hashes(tree)
    keep(tree, 3)
    code = f"""
import os, sys; from pathlib import Path
from kvverify.golden import manifest, tree, update
left, real = [{writes}], tree.write
def write(path, content):
    if not left[0]: os._exit({KILLED})
    left[0] -= 1
    real(path, content)
update.write = manifest.write = write
update._commit = lambda *_: os._exit({KILLED})
update.update(tree.Tree(Path(sys.argv[1])), reason="killed")
"""
    assert run([sys.executable, "-c", code, str(tree.root)], tree.root, check=False).returncode == KILLED
    assert [fault.command for fault in verify(tree)] == ["kvverify golden update --undo"]
    with pytest.raises(GoldenError, match="an update was interrupted"):
        update(tree, reason="once more")
    assert golden(tree.root, "update", "--undo").returncode == 10
    assert hashes(tree) == before, f"killed after {writes} writes"
    with pytest.raises(GoldenError, match="nothing to undo"):
        undo(tree)


@pytest.mark.slow
def test_a_fresh_clone_in_another_folder_pulls_offline(tree: Tree, tmp_path: Path) -> None:
    keep(tree, 3)
    update(tree, reason="three states")
    commit(tree.root)
    clone = Tree(tmp_path / "elsewhere" / "clone")
    run(["git", "clone", "--quiet", str(tree.root), str(clone.root)], tmp_path)
    tree.root.rename(tree.root.with_name("moved"))  # what the clone pulls is its own
    run([sys.executable, "-m", "dvc", "pull", "--quiet"], clone.root)
    assert verify(clone) == []
    assert run(["git", "status", "--porcelain"], clone.root).stdout == "", "a pull leaves the clone as git knows it"
    run([sys.executable, "-m", "dvc", "repro", "--quiet"], clone.root)
    assert run(["git", "status", "--porcelain"], clone.root).stdout == "", "nothing is stale, and repro writes nothing"


@pytest.mark.slow
def test_a_push_that_was_killed_is_seen_and_a_second_one_heals_it(tree: Tree) -> None:
    objects = sorted(path for path in tree.store.rglob("*") if path.is_file())
    for path in objects[::2]:
        path.unlink()
    found = verify(tree)
    assert {(fault.command, "is not pushed" in fault.problem) for fault in found} == {("dvc push", True)}
    assert len(found) == len(objects[::2])
    run([sys.executable, "-m", "dvc", "push", "--quiet"], tree.root)
    assert verify(tree) == []


@pytest.mark.slow
def test_a_manifest_that_repro_made_has_no_reason(tree: Tree) -> None:
    keep(tree, 3)
    run([sys.executable, "-m", "dvc", "repro", "--quiet"], tree.root)
    manifest.save(tree, manifest.build(tree, manifest.load(tree), chosen_stages(tree, [], everything=True)))
    run([sys.executable, "-m", "dvc", "push", "--quiet"], tree.root)
    assert ["without a recorded reason" in fault.problem for fault in verify(tree)] == [True]
    done = golden(tree.root, "update", "--reason", "accept what repro made")
    assert done.returncode == 10, done.stdout + done.stderr
    assert verify(tree) == []


def test_an_update_beside_spoilt_data_is_refused(tree: Tree) -> None:
    path = tree.data / "decide" / "bee.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GoldenError, match=r"decide/bee\.safetensors is not as recorded"):
        update(tree, reason="the ant only", wanted=["ant"])


@pytest.mark.slow
def test_the_log_refuses_a_removed_entry(tree: Tree) -> None:
    keep(tree, 3)
    update(tree, reason="second")
    value = json.loads(tree.updates.read_bytes())
    del value["updates"][0]
    tree.updates.write_bytes(canonical(value))
    with pytest.raises(GoldenError, match=r"has entry 0 .* edited, or an entry before it removed"):
        history.entries(tree)


def test_from_stored_judges_a_stage_by_itself_whatever_the_one_before_it_drifts(tree: Tree) -> None:
    script = tree.golden / "capture.py"
    script.write_text(script.read_text().replace("standard_normal((rows, 4))", "standard_normal((rows, 4)) + 1e-9"))
    chosen = chosen_stages(tree, [], everything=True)
    differing = {}
    for from_stored in (False, True):
        with regenerated(tree, chosen, from_stored=from_stored) as shadow:
            files = compare_trees(tree, shadow, chosen)
        differing[from_stored] = {file.path.split("/")[2] for file in files if file.tensors}
    assert differing == {False: {"capture", "decide"}, True: {"capture"}}


def test_a_shadow_is_gone_afterwards(tree: Tree) -> None:
    with regenerated(tree, chosen_stages(tree, ["ant"])) as shadow:
        assert (shadow.root / "golden/data/decide/ant.safetensors").is_file()
        folder = shadow.root
    assert not folder.exists()
    assert os.path.lexists(tree.golden / "decide.py"), "removing the shadow followed its links"
    shutil.rmtree(tree.root)
