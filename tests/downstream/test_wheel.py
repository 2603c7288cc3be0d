"""What a user installs."""

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from kernel_packages import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy: a build leaves nothing in the source tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "kvverify", source / "kvverify", ignore=shutil.ignore_patterns("__pycache__"))
    told = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", folder=source)
    assert told.returncode == 0, told.stdout + told.stderr
    (built,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module_the_capture_and_the_shipped_tests(wheel):
    names = set(wheel.namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kvverify").rglob("*.py")}
    assert modules <= names
    assert "kvverify/conformance/test_conformance.py" in names
    assert "kvverify/data/smollm2_sotu.safetensors" in names
    assert not any(name.startswith(("tests/", "bench/", "golden/")) for name in names)
    assert sum(info.file_size for info in wheel.infolist()) < 4_000_000


def test_the_wheel_registers_the_command_and_the_plugin(wheel):
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(entry).decode().splitlines()
    assert lines[lines.index("[console_scripts]") + 1] == "kvverify = kvverify.cli:main"
    assert lines[lines.index("[pytest11]") + 1] == "kvverify = kvverify.plugin"
