"""Which files of the repository a script imports, found without running it."""

from __future__ import annotations

import ast
from pathlib import Path

__all__ = ["imported_files"]


def imported_files(root: Path, start: str) -> list[str]:
    """The script and every module of `golden` and `kvverify` that it reaches by import, relative to `root`, sorted.

    Imports for type checkers are left out. So is the `__init__` of a package of which only modules are named: Python
    runs it, and what it binds (operators, for instance) is not used.
    """
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sorted(_imports(root, ast.parse((root / name).read_text(encoding="utf-8"))))
    return sorted(found)


def _imports(root: Path, tree: ast.Module) -> set[str]:
    found: set[str] = set()
    skipped = {id(node) for check in ast.walk(tree) if _for_type_checkers(check) for node in ast.walk(check)}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] in ("golden", "kvverify"):
            folder = node.module.replace(".", "/")
            for alias in node.names:
                places = (f"{folder}/{alias.name}.py", f"{folder}.py", f"{folder}/__init__.py")
                found |= {next(place for place in places if (root / place).is_file())}
    return found


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
