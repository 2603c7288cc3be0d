"""The stages as dvc.yaml describes them, and what dvc.lock says each was last run with: which are stale, and why.

dvc.lock holds, for every stage, its command, the MD5 of its dependencies and outputs, and the values of its parameters.
Reading it needs no DVC, and tells why a stage is stale in words. `dvc status` must agree (a test compares them).

A stage is named `decide@llama`: the stage, and the model that it is run for (`matrix: {model: ...}` in dvc.yaml). Its
command ends with the model, and takes several, so that one process can serve many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvverify.golden.tree import GoldenError, GoldenUsageError, digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from kvverify.golden.tree import Tree

__all__ = ["Run", "Stage", "affected", "current", "named", "parameters", "read_yaml", "select", "stages", "why_stale"]


@dataclass(frozen=True)
class Run:
    """What a stage was last run with: MD5 of files by path, values of parameters by dotted name."""

    command: str
    dependencies: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One stage as dvc.yaml has it, paths relative to the root; `ran` is None for one that was never run."""

    name: str
    command: str
    dependencies: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    ran: Run | None

    @property
    def kind(self) -> str:
        """Name of the stage without the model."""
        return self.name.partition("@")[0]

    @property
    def model(self) -> str:
        """The model that it is run for."""
        return self.name.partition("@")[2]

    @property
    def made(self) -> dict[str, str]:
        """MD5 of the outputs of the last run, by path."""
        return {} if self.ran is None else self.ran.outputs


def stages(tree: Tree) -> dict[str, Stage]:
    """Stages that write golden data, by name, each after those that it depends on."""
    try:
        runs = {name: _run(tree, entry) for name, entry in read_yaml(tree, tree.lock).get("stages", {}).items()}
    except (AttributeError, KeyError, TypeError) as error:
        name = tree.name(tree.lock)
        raise GoldenError(f"{name} is not as DVC writes it ({error!r}): run `git checkout {name}`") from error
    found = {}
    for name, entry in _expanded(tree):
        outputs = tuple(_path(item) for item in entry.get("outs", []))
        if any(path.startswith(_prefix(tree)) for path in outputs):
            dependencies = tuple(_path(item) for item in entry.get("deps", []))
            asked = tuple(str(item) for item in entry.get("params", []))
            found[name] = Stage(name, entry["cmd"], dependencies, outputs, asked, runs.get(name))
    return _ordered(found)


def read_yaml(tree: Tree, path: Path) -> Any:
    """Parse a YAML file of the tree. GoldenError for what is no YAML, GoldenUsageError without PyYAML."""
    try:
        import yaml
    except ImportError as error:
        raise GoldenUsageError("PyYAML is not installed, expected it: `pip install 'kvverify[golden]'`") from error
    name = tree.name(path)
    try:
        # dvc.lock is large, and the loader in C ten times as fast; not every build of PyYAML has it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return yaml.load(path.read_text(encoding="utf-8"), Loader=loader) or {}
    except OSError as error:
        raise GoldenError(f"{name} cannot be read ({error.strerror}): run `git checkout {name}`") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GoldenError(f"{name} is not YAML ({' '.join(str(error).split())}): run `git checkout {name}`") from error


def parameters(tree: Tree) -> Any:
    """The parameters as they stand now."""
    return read_yaml(tree, tree.parameters)


def current(tree: Tree, stage: Stage) -> dict[str, Any]:
    """The values that a stage would be run with now."""
    now = parameters(tree)
    return {name: _lookup(now, name) for name in stage.parameters}


def why_stale(tree: Tree, stage: Stage) -> list[str]:
    """What changed since the stage was run, in words; nothing for a fresh one. Data is not looked at."""
    if stage.ran is None:
        return ["it was never run"]
    found = []
    if stage.ran.command != stage.command:
        found.append(f"its command was {stage.ran.command!r} and is {stage.command!r}")
    now = current(tree, stage)
    for name in dict.fromkeys([*stage.ran.parameters, *now]):
        found += _differences(name, stage.ran.parameters.get(name), now.get(name))
    for path in dict.fromkeys([*stage.ran.dependencies, *stage.dependencies]):
        if path.startswith(_prefix(tree)):
            continue
        file = tree.root / path
        if path not in stage.dependencies:
            found.append(f"it no longer depends on {path}")
        elif not file.is_file():
            found.append(f"{path} is missing")
        elif digest(file.read_bytes()).md5 != stage.ran.dependencies.get(path):
            found.append(f"{path} changed")
    return found


def select(known: dict[str, Stage], wanted: Iterable[str]) -> list[str]:
    """Names of the stages that STAGE, MODEL or STAGE@MODEL mean. GoldenUsageError for a word that means none."""
    chosen: set[str] = set()
    for word in wanted:
        matched = {name for name, stage in known.items() if word in (name, stage.kind, stage.model)}
        if not matched:
            names = dict.fromkeys([stage.kind for stage in known.values()] + [stage.model for stage in known.values()])
            raise GoldenUsageError(f"{word!r} is no stage and no model: expected some of {', '.join(names)}")
        chosen |= matched
    return [name for name in known if name in chosen]


def affected(known: dict[str, Stage], stale: Collection[str]) -> list[str]:
    """The stale stages and all that read what they write, in order."""
    touched: set[str] = set()
    found = []
    for name, stage in known.items():
        if name in stale or touched.intersection(stage.dependencies):
            touched.update(stage.outputs)
            found.append(name)
    return found


def named(known: Iterable[Stage], names: Collection[str]) -> str:
    """Name stages shortly: the whole of one as `decide (12 models)`, single ones as `decide@llama`."""
    told = []
    for kind, group in groupby(known, key=lambda stage: stage.kind):
        stages = list(group)
        chosen = [stage.name for stage in stages if stage.name in names]
        if len(chosen) == len(stages) > 1:
            told.append(f"{kind} ({len(stages)} models)")
        else:
            told += chosen
    return ", ".join(told)


def _prefix(tree: Tree) -> str:
    return f"{tree.name(tree.data)}/"


def _expanded(tree: Tree) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every stage of dvc.yaml, one for each item of a matrix. The part of DVC's templates that this project uses."""
    values = parameters(tree)
    for name, entry in read_yaml(tree, tree.root / "dvc.yaml").get("stages", {}).items():
        if "matrix" not in entry:
            yield name, entry
            continue
        ((axis, items),) = entry["matrix"].items()
        for item in _lookup(values, items.strip("${}")) if isinstance(items, str) else items:
            yield f"{name}@{item}", _filled(entry, f"${{item.{axis}}}", item)


def _filled(value: Any, blank: str, text: str) -> Any:
    if isinstance(value, dict):
        return {key.replace(blank, text): _filled(item, blank, text) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, blank, text) for item in value]
    return value.replace(blank, text) if isinstance(value, str) else value


def _path(item: Any) -> str:
    return next(iter(item)) if isinstance(item, dict) else str(item)


def _run(tree: Tree, entry: dict[str, Any]) -> Run:
    dependencies, outputs = (
        {str(item["path"]): str(item.get("md5", "")) for item in entry.get(key, [])} for key in ("deps", "outs")
    )
    return Run(str(entry["cmd"]), dependencies, outputs, entry.get("params", {}).get(tree.name(tree.parameters), {}))


def _ordered(found: dict[str, Stage]) -> dict[str, Stage]:
    """Stages before those that depend on their outputs; of equals, in the order of dvc.yaml."""
    left, ordered = dict(found), dict[str, Stage]()
    while left:
        pending = {path for stage in left.values() for path in stage.outputs}
        ready = [name for name, stage in left.items() if not pending.intersection(stage.dependencies)]
        if not ready:
            told = f"dvc.yaml has stages that wait for each other ({', '.join(left)})"
            raise GoldenError(f"{told}: run `git checkout dvc.yaml`")
        for name in ready:
            ordered[name] = left.pop(name)
    return ordered


def _lookup(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _differences(name: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [line for key in keys for line in _differences(f"{name}.{key}", before.get(key), now.get(key))]
    return [] if before == now else [f"parameter {name} was {before!r} and is {now!r}"]
