"""The chain of recorded reasons: every manifest that was ever accepted, and why it replaced the one before.

An entry carries the hash of the manifest that it accepted, the hash of the entry before it, and its own:

    sha256 = SHA-256 of the entry's JSON without that field

so an entry cannot be changed, removed or put in without all later ones being made again. That is a guard against
accidents and haste, not against malice: whoever can write the log can write a consistent one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvverify.golden.tree import FORMAT, GoldenError, canonical, read_json

if TYPE_CHECKING:
    from kvverify.golden.tree import Tree

__all__ = ["START", "accepted", "append", "entries"]

START = "0" * 64
Entry = dict[str, Any]


def entries(tree: Tree) -> list[Entry]:
    """Entries of the log, oldest first. GoldenError where the chain is broken."""
    name = tree.name(tree.updates)
    found: list[Entry] = read_json(tree, tree.updates).get("updates", [])
    previous = START
    for number, entry in enumerate(found):
        if entry.get("previous") != previous or entry.get("sha256") != _hash(entry):
            raise GoldenError(
                f"{name} has entry {number} ({entry.get('reason')!r}) edited, or an entry before it removed"
            )
        previous = entry["sha256"]
    return found


def accepted(tree: Tree) -> str:
    """SHA-256 of the manifest that was accepted last. GoldenError where none was."""
    found = entries(tree)
    if not found or "manifest" not in found[-1]:
        raise GoldenError(f"{tree.name(tree.updates)} holds no entry, expected at least the first one")
    return str(found[-1]["manifest"])


def append(tree: Tree, *, reason: str, manifest: bytes, changes: list[str], environment: dict[str, Any]) -> bytes:
    """Return the log with one more entry; it is written by whoever exchanges the files."""
    found = entries(tree) if tree.updates.exists() else []
    entry: Entry = {
        "reason": reason,
        "manifest": hashlib.sha256(manifest).hexdigest(),
        "changes": changes,
        "environment": environment,
        "previous": found[-1]["sha256"] if found else START,
    }
    entry["sha256"] = _hash(entry)
    return canonical({"format": FORMAT, "updates": [*found, entry]})


def _hash(entry: Entry) -> str:
    return hashlib.sha256(canonical({name: entry[name] for name in entry if name != "sha256"})).hexdigest()
