"""The golden data of this repository is what its models and policies compute, and its pipeline says what they need."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from golden_cases import ROOT
from imported_modules import imported_files
from safetensors.torch import save

from kvverify.golden import manifest, pipeline, remote
from kvverify.golden.compare import compare_files
from kvverify.golden.files import Stored, parse
from kvverify.golden.rebuild import mismatches
from kvverify.golden.tree import Tree
from kvverify.golden.verify import verify

pytest.importorskip("transformers", reason="the golden models are those of transformers")
pytest.importorskip("yaml", reason="the pipeline is described in YAML")

SEEDED = ("llama", "qwen2_yarn", "qwen3", "gemma3", "glm4", "deepseek_v2", "deepseek_v3", "kimi_linear")
TRAINED = ("needles_nope", "needles_rope")
REAL = ("glassllm", "smollm2")
LIMIT = 24 << 20


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """This repository with its data taken from the embedded store: no pull is needed to run these tests."""
    tree = Tree(tmp_path_factory.mktemp("repository"))
    for path in ROOT.iterdir():
        if path.name not in ("golden", ".git", ".dvc"):
            (tree.root / path.name).symlink_to(path)
    shutil.copytree(ROOT / ".dvc", tree.root / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    tree.golden.mkdir()
    for path in (ROOT / "golden").iterdir():
        if path.name != "data":
            (tree.golden / path.name).symlink_to(path)
    for stage in pipeline.stages(tree).values():
        for path, md5 in stage.made.items():
            (tree.root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(remote.object_path(tree, md5), tree.root / path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tree.root)  # stages read and write below the current folder
        patch.setattr(sys, "path", [str(tree.root), *sys.path])
        yield tree


@pytest.fixture(scope="module")
def scripts(repository: Tree) -> Iterator[dict[str, ModuleType]]:
    names = {"capture": "golden.capture_models", "decide": "golden.decide", "generate": "golden.generate"}
    yield {stage: importlib.import_module(name) for stage, name in names.items()}
    for name in [name for name in sys.modules if name == "golden" or name.startswith("golden.")]:
        del sys.modules[name]


def stored(tree: Tree, stage: str, model: str) -> dict[str, Stored]:
    return parse((tree.data / stage / f"{model}.safetensors").read_bytes())


def check_models(tree: Tree, script: Any, stage: str, models: tuple[str, ...]) -> None:
    """Hold what a stage computes here, in this process, against what is stored."""
    make = getattr(script, stage)
    beyond, drifted = [], 0
    for model in models:
        now = parse(save({name: tensor.contiguous().clone() for name, tensor in make(model).items()}))
        for found in compare_files(stored(tree, stage, model), now):
            drifted += found.verdict == "drifted"
            if found.verdict not in ("equal", "drifted"):
                beyond.append(f"{model}: {found.verdict} {found.name} {found.shape} by {found.relative:.2e}")
    platform = mismatches(manifest.load(tree)["files"])
    same = "this platform is the recorded one" if not platform else f"not the recorded platform: {platform}"
    assert not beyond, (
        f"stage {stage} computes other tensors than are stored ({same}). If that is intended: "
        '`kvverify golden diff`, then `kvverify golden update --reason "why"`. '
        f"{len(beyond)} tensors, the first: {beyond[:5]}"
    )
    if platform:
        print(f"{stage}: {drifted} tensors drifted within budget; {same}")
    else:
        assert not drifted, f"{drifted} tensors of stage {stage} drifted on the recorded platform: the code changed"


@pytest.mark.parametrize("stage", ["capture", "decide", "generate"])
def test_seeded_models_compute_what_is_stored(repository: Tree, scripts: dict[str, ModuleType], stage: str) -> None:
    check_models(repository, scripts[stage], stage, SEEDED)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["capture", "decide", "generate"])
def test_trained_models_compute_what_is_stored(repository: Tree, scripts: dict[str, ModuleType], stage: str) -> None:
    check_models(repository, scripts[stage], stage, TRAINED)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["capture", "decide", "generate"])
def test_real_models_compute_what_is_stored(repository: Tree, scripts: dict[str, ModuleType], stage: str) -> None:
    check_models(repository, scripts[stage], stage, REAL)


def test_the_repository_has_no_fault(repository: Tree) -> None:
    found = verify(repository, dvc=False)
    assert found == [], "\n".join(map(str, found[:10]))


def test_a_stage_depends_on_the_modules_that_its_script_imports(repository: Tree) -> None:
    scripts = {"capture": "capture_models", "decide": "decide", "generate": "generate"}
    known = pipeline.stages(repository)
    for stage in (known[f"{kind}@llama"] for kind in scripts):  # the models of a stage share its list
        told = {path for path in stage.dependencies if path.endswith(".py")}
        used = set(imported_files(ROOT, f"golden/{scripts[stage.kind]}.py"))
        lacking, needless = sorted(used - told), sorted(told - used)
        assert told == used, f"{stage.name}: dvc.yaml lacks {lacking}, and needlessly has {needless}"
        wrong = {path for path in told if {"claims", "mutants", "operators"} & {*Path(path).with_suffix("").parts}}
        assert not wrong, f"{stage.name} depends on {sorted(wrong)}: a golden must not move with a test of the policy"


def test_every_model_is_in_every_stage() -> None:
    known = pipeline.stages(Tree(ROOT))
    for kind in ("capture", "decide", "generate"):
        models = [stage.model for stage in known.values() if stage.kind == kind]
        assert sorted(models) == sorted((*SEEDED, *TRAINED, *REAL)), f"stage {kind} is run for {models}"


def test_the_store_stays_small() -> None:
    size = sum(path.stat().st_size for path in (ROOT / "golden" / "store").rglob("*") if path.is_file())
    assert 0 < size <= LIMIT, f"golden/store holds {size:,} bytes, expected at most {LIMIT:,}"


def test_a_store_object_is_no_text_to_git() -> None:
    assert "/golden/store/** binary" in (ROOT / ".gitattributes").read_text(encoding="utf-8")


def test_a_fetch_checks_what_is_pinned(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "golden" / "fetch.py")
    assert spec is not None
    assert spec.loader is not None
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    path = tmp_path / "weights"
    assert "is missing, expected sha256" in fetch.differing(path, "0" * 64, "mend")[0]
    path.write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert fetch.differing(path, empty, "mend") == []
    assert f"has sha256 {empty}" in fetch.differing(path, "0" * 64, "mend")[0]
