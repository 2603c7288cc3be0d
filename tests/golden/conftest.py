"""The toy tree is built once, and only where DVC is installed; each test gets a copy of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import copy_tree, toy_tree

from kvverify.golden.remote import dvc_installed
from kvverify.golden.tree import Tree


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    if not dvc_installed():
        pytest.skip("dvc is not installed: the golden store's own commands are not tested")
    return toy_tree(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def tree(pristine: Tree, tmp_path: Path) -> Tree:
    return copy_tree(pristine, tmp_path / "tree")
