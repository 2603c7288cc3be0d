"""Every fault of a golden tree, each with the command that mends it.

    log       the manifest is the one that the last recorded reason accepted
    data      every file of the manifest is there, byte for byte; a difference is named by tensor
    lock      dvc.lock names the same content, and nothing that a stage was run with has changed since
    store     every object is what its name says, and every output is in the remote
    dvc       `dvc status` and `dvc data status --not-in-remote` agree, where DVC is installed

Faults are collected, not raised: one run tells them all, and those of one file with one command in one line.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvverify.golden import history, manifest, pipeline, remote
from kvverify.golden.faults import Fault, from_error, grouped, handful
from kvverify.golden.files import POINTER, parse
from kvverify.golden.records import tensor_record
from kvverify.golden.tree import GoldenError, GoldenUsageError, digest

if TYPE_CHECKING:
    from kvverify.golden.tree import Tree

__all__ = ["verify"]

PULL = "dvc pull"
PUSH = "dvc push"
UPDATE = 'kvverify golden update --reason "why"'
UNDO = "kvverify golden update --undo"
OR_UPDATE = f"or `{UPDATE}`"


def verify(tree: Tree, *, dvc: bool = True) -> list[Fault]:
    """Find every fault of a tree. `dvc=False` leaves out what only DVC can tell.

    Where the manifest is at fault itself, the data is held against dvc.lock, so that whole data is not blamed for it.
    GoldenUsageError where PyYAML is not installed.
    """
    if tree.undo.exists():
        return [Fault(tree.name(tree.undo), "an update was interrupted while it exchanged files", UNDO)]
    faults = _log(tree)
    whole = all(fault.place != tree.name(tree.manifest) for fault in faults)
    known = manifest.load(tree)["files"] if whole else None
    try:
        stages = pipeline.stages(tree)
        told = _lock(tree, known, stages) + _store(tree, stages)
    except GoldenUsageError:
        raise
    except GoldenError as error:
        stages, told = {}, [from_error(error)]
    if known is not None:
        faults += _data(tree, known)
    elif stages:
        faults += _data_of_lock(tree, stages)
    faults = grouped(faults + told)
    if dvc and remote.dvc_installed() and (tree.root / ".dvc").is_dir():
        faults += _dvc(tree, faults)
    return faults


def _log(tree: Tree) -> list[Fault]:
    """Hold the manifest against the log."""
    restore = f"git checkout {tree.name(tree.manifest)} {tree.name(tree.updates)}"
    for path, load in ((tree.manifest, manifest.load), (tree.updates, history.accepted)):
        try:
            load(tree)
        except GoldenError as error:
            return [Fault(tree.name(path), str(error).removeprefix(f"{tree.name(path)} "), restore)]
    found = hashlib.sha256(tree.manifest.read_bytes()).hexdigest()
    wanted = history.accepted(tree)
    if found == wanted:
        return []
    problem = (
        f"its sha256 is {found[:16]}…, expected {wanted[:16]}…, the one accepted last in {tree.name(tree.updates)}: it "
        "was edited by hand, or regenerated without a recorded reason"
    )
    return [Fault(tree.name(tree.manifest), problem, restore, OR_UPDATE)]


def _data(tree: Tree, known: dict[str, Any]) -> list[Fault]:
    """Hold every file of the data against its record."""
    present = manifest.data_files(tree)
    if known and not present:
        return [Fault(tree.name(tree.data), f"is empty, expected {len(known)} files", PULL)]
    faults = [
        Fault(f"{tree.name(tree.data)}/{name}", "is not in the manifest, expected no other file", UPDATE)
        for name in present.keys() - known.keys()
    ]
    for name, record in known.items():
        if name in present:
            faults += _file(f"{tree.name(tree.data)}/{name}", present[name], record)
        else:
            faults.append(
                Fault(f"{tree.name(tree.data)}/{name}", f"is missing, expected {record['bytes']} bytes", PULL)
            )
    return sorted(faults, key=str)


def _data_of_lock(tree: Tree, stages: dict[str, pipeline.Stage]) -> list[Fault]:
    """Hold every file of the data against the MD5 that dvc.lock names."""
    faults, lock = [], tree.name(tree.lock)
    named = sorted((path, md5) for stage in stages.values() for path, md5 in stage.made.items())
    if named and not manifest.data_files(tree):
        return [Fault(tree.name(tree.data), f"is empty, expected {len(named)} files", PULL)]
    for path, md5 in named:
        file = tree.root / path
        if not file.is_file():
            faults.append(Fault(path, f"is missing, expected md5 {md5} as in {lock}", PULL))
        elif (found := digest(file.read_bytes()).md5) != md5:
            told = f"has md5 {found}, expected {md5} as in {lock}"
            faults.append(Fault(path, told, f"dvc checkout --force {path}"))
    return faults


def _file(place: str, content: bytes, record: dict[str, Any]) -> list[Fault]:
    """Say how one file differs from its record, tensor by tensor where it can be read."""
    mend = f"dvc checkout --force {place}"
    found = digest(content)
    if (found.bytes, found.sha256) == (record["bytes"], record["sha256"]):
        return []
    if content.startswith(POINTER):
        return [Fault(place, f"is a Git LFS pointer, expected the file itself of {record['bytes']} bytes", PULL)]
    if found.bytes < record["bytes"]:
        return [Fault(place, f"is truncated: {found.bytes} bytes, expected {record['bytes']}", mend)]
    hashes = f"sha256 {found.sha256[:16]}…, expected {record['sha256'][:16]}…"
    try:
        tensors = {name: tensor_record(stored) for name, stored in parse(content).items()}
    except (GoldenError, ValueError) as error:
        return [Fault(place, f"{error}; {hashes}", mend)]
    return [_tensors(place, tensors, record["tensors"], mend) or Fault(place, f"its header is another: {hashes}", mend)]


def _tensors(place: str, found: dict[str, Any], recorded: dict[str, Any], mend: str) -> Fault | None:
    """Name the tensors of a file that are not as recorded, and tell how the first differs."""
    names = [name for name in sorted({*found, *recorded}) if found.get(name) != recorded.get(name)]
    if not names:
        return None
    told = _told(found.get(names[0]), recorded.get(names[0]))
    if len(names) == 1:
        return Fault(f"{place}: tensor {names[0]}", told, mend)
    return Fault(f"{place}: tensors {handful(names)}", f"are not as recorded: {names[0]} {told}", mend)


def _told(now: dict[str, Any] | None, before: dict[str, Any] | None) -> str:
    if now is None or before is None:
        return "is missing, expected as recorded" if now is None else "is not in the manifest, expected no other"
    sides = [f"{side['dtype'].lower()}{side['shape']}, sha256 {side['sha256'][:16]}…" for side in (now, before)]
    moved = f"rms {now['rms']:.6g}, recorded {before['rms']:.6g}"
    return f"is {sides[0]}, expected {sides[1]} ({moved})"


def _lock(tree: Tree, known: dict[str, Any] | None, stages: dict[str, pipeline.Stage]) -> list[Fault]:
    """Hold dvc.lock against the manifest, if that is known, and against what the stages depend on."""
    place = tree.name(tree.lock)
    named = {path: md5 for stage in stages.values() for path, md5 in stage.made.items()}
    wanted, source = named, place
    if known is not None:
        wanted = {f"{tree.name(tree.data)}/{name}": record["md5"] for name, record in known.items()}
        source = "the manifest"
    faults = []
    stale: dict[str, list[str]] = {}
    for path in sorted({*named, *wanted}):
        if named.get(path) != wanted.get(path):
            told = f"names {path} with md5 {named.get(path)}, expected {wanted.get(path)} as in {source}"
            faults.append(Fault(place, told, f"git checkout {place}", OR_UPDATE))
    for name, stage in stages.items():
        for path, md5 in (stage.ran.dependencies if stage.ran else {}).items():
            if path in wanted and md5 != wanted[path]:
                told = f"{name} was run with another {path} than {source} records (md5 {md5})"
                faults.append(Fault(place, told, f"git checkout {place}", OR_UPDATE))
        stale.setdefault("; ".join(pipeline.why_stale(tree, stage)), []).append(name)
    return faults + [
        Fault(pipeline.named(stages.values(), names), f"is stale: {why}", "kvverify golden diff", f"then `{UPDATE}`")
        for why, names in stale.items()
        if why
    ]


def _store(tree: Tree, stages: dict[str, pipeline.Stage]) -> list[Fault]:
    """Check the objects of the embedded store, and that every output is among them."""
    if not remote.embedded(tree):
        return []
    faults = []
    for file, (stated, found) in remote.objects(tree).items():
        place = tree.name(file)
        if not remote.is_object(stated):
            faults.append(Fault(place, "is no object, expected the MD5 of its content as name", f"rm {place}"))
        elif stated != found:
            content = file.read_bytes()
            what = "is a Git LFS pointer" if content.startswith(POINTER) else f"is corrupt: md5 {found}"
            made = next((out for stage in stages.values() for out, md5 in stage.made.items() if md5 == stated), None)
            of = f", the content of {made}" if made else ""
            faults.append(
                Fault(place, f"{what}, expected {stated}{of}", f"git checkout {place}", f"or `rm {place}` and `{PUSH}`")
            )
    for stage in stages.values():
        for path, md5 in stage.made.items():
            expected = remote.object_path(tree, md5)
            if not expected.is_file():
                faults.append(Fault(path, f"is not pushed: {tree.name(expected)} is missing", PUSH))
    return faults


def _dvc(tree: Tree, known: list[Fault]) -> list[Fault]:
    """Ask DVC; what was found without it is not told twice."""
    faults = []
    if not known and (status := remote.dvc(tree, "status", "-q")).returncode:
        told = " ".join((status.stderr or remote.dvc(tree, "status").stdout).split())
        faults.append(Fault("dvc status", f"is not clean: {told}", "dvc status", f"then `{UPDATE}`"))
    try:
        missing = remote.not_in_remote(tree)
    except GoldenError as error:
        return [*faults, Fault("dvc", str(error), "dvc data status --not-in-remote")]
    told_already = {fault.place for fault in known}
    return faults + [
        Fault(path, "is not pushed: the remote lacks it", PUSH) for path in missing if path not in told_already
    ]
