"""From what a user types to an Implementation."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from kvverify.harness import one_line
from kvverify.operator import Implementation

__all__ = ["ENTRY_POINTS", "UsageError", "resolve"]

ENTRY_POINTS = "kvverify.implementations"


class UsageError(Exception):
    """The caller asked for something that is not there: exit code 4, or 5 where that leaves nothing to be tested."""

    def __init__(self, message: str, *, exit_code: int = 4) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def resolve(target: str, *, folder: str | None = None) -> Implementation:
    """The Implementation behind "module:attribute", "module" (its `@implements` functions), or an entry point's name.

    folder: put on the import path first (default: the working directory). A function marked with `@implements` is an
    implementation by itself. Raises UsageError, in one line, for everything that does not lead to one.
    """
    registered = entry_points(group=ENTRY_POINTS)
    if target in registered.names:
        return _as_implementation(_load(registered[target].load, target), target)
    module_name, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")) or (":" in target and not attribute):
        raise UsageError(
            f"implementation {target!r} is not a target: expected module:attribute, e.g. my_pkg.adapter:impl"
        )
    here = folder or os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    found: Any = _load(lambda: importlib.import_module(module_name), target)
    for part in attribute.split(".") if attribute else []:
        if not hasattr(found, part):
            raise UsageError(f"implementation {target!r}: module {module_name!r} has no attribute {attribute!r}")
        found = getattr(found, part)
    return _as_implementation(found, target)


def _load(load: Any, target: str) -> Any:
    try:
        return load()
    except (UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a script that ends in sys.exit() would otherwise end the gate as if all were well
        text = one_line(error)
        raise UsageError(f"implementation {target!r} does not import: {type(error).__name__}: {text}") from error


def _as_implementation(found: Any, target: str) -> Implementation:
    if isinstance(found, Implementation):
        return found
    if isinstance(found, ModuleType):
        marked = [thing for thing in vars(found).values() if hasattr(thing, "__kvverify_operator__")]
        if marked:
            try:
                return Implementation(target, marked)
            except ValueError as error:
                raise UsageError(f"implementation {target!r}: {error}") from None
        raise UsageError(
            f"implementation {target!r} is a module without @implements functions: expected module:attribute"
        )
    if hasattr(found, "__kvverify_operator__"):
        return Implementation(target, [found])
    raise UsageError(
        f"implementation {target!r} is a {type(found).__name__}: expected a kvverify.Implementation "
        "or a function marked with @kvverify.implements"
    )
