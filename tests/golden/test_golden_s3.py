"""The golden store on S3: pushed, pulled, corrupted and interrupted over HTTP, against a server of its interface."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from golden_cases import run

from kvverify.golden.exchange import undo
from kvverify.golden.tree import Tree
from kvverify.golden.verify import verify

pytest.importorskip("moto", reason="moto is not installed: S3 is not tested")
pytest.importorskip("dvc_s3", reason="dvc-s3 is not installed: S3 is not tested")
pytestmark = pytest.mark.slow

FOLDER = "kvverify"


@dataclass
class Service:
    """A server of the S3 interface; `kill` is the process to kill when the third object arrives."""

    url: str = ""
    bucket: str = field(default_factory=lambda: f"golden-{uuid4()}")  # the server's memory outlives a test
    kill: int | None = None
    arrived: list[str] = field(default_factory=list)

    def watching(self, app: Callable[..., Any]) -> Callable[..., Any]:
        def answer(environ: dict[str, Any], start: Any) -> Any:
            if environ["REQUEST_METHOD"] == "PUT" and "/files/md5/" in environ["PATH_INFO"]:
                self.arrived.append(environ["PATH_INFO"])
                if self.kill is not None and len(self.arrived) == 3:
                    os.kill(self.kill, signal.SIGKILL)
                    start("503 Service Unavailable", [])
                    return [b""]
            return app(environ, start)

        return answer

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.url)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))  # what DVC remembers of remotes
    service = Service()
    app = service.watching(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True)
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        service.client().create_bucket(Bucket=service.bucket)
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def dvc(tree: Tree, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "dvc", *words], tree.root, check=check)


def keys(service: Service) -> list[str]:
    found = service.client().list_objects_v2(Bucket=service.bucket).get("Contents", [])
    return sorted(item["Key"] for item in found)


@pytest.fixture
def remote(tree: Tree, service: Service) -> Tree:
    """The toy tree, switched to S3 by the two lines of the README (and the address of the server)."""
    dvc(tree, "remote", "add", "--default", "s3", f"s3://{service.bucket}/{FOLDER}")
    dvc(tree, "remote", "modify", "s3", "verify", "true")
    dvc(tree, "remote", "modify", "s3", "endpointurl", service.url)
    return tree


def clone_of(tree: Tree, folder: Path) -> Tree:
    """A clone without the embedded store and without a cache."""
    run(["git", "clone", "--quiet", str(tree.root), str(folder)], tree.root.parent)
    clone = Tree(folder)
    (clone.root / ".dvc" / "config").write_bytes((tree.root / ".dvc" / "config").read_bytes())
    run(["rm", "-rf", str(clone.store)], clone.root)
    return clone


def test_what_is_pushed_to_s3_is_pulled_by_a_fresh_clone(remote: Tree, service: Service, tmp_path: Path) -> None:
    assert {fault.command for fault in verify(remote)} == {"dvc push"}, "nothing is in the bucket yet"
    dvc(remote, "push")
    assert len(keys(service)) == 4
    assert verify(remote) == []
    clone = clone_of(remote, tmp_path / "clone")
    dvc(clone, "pull")
    assert verify(clone) == []


def test_an_object_that_was_corrupted_on_s3_is_caught(remote: Tree, service: Service, tmp_path: Path) -> None:
    dvc(remote, "push")
    spoilt = keys(service)[0]
    client = service.client()
    content = client.get_object(Bucket=service.bucket, Key=spoilt)["Body"].read()
    client.put_object(Bucket=service.bucket, Key=spoilt, Body=content[:-1] + bytes([content[-1] ^ 1]))
    clone = clone_of(remote, tmp_path / "clone")
    done = dvc(clone, "pull", check=False)
    assert done.returncode != 0, "dvc pulled a corrupted object"
    found = verify(clone)
    assert any("is missing, expected" in fault.problem for fault in found), [str(fault) for fault in found]


def test_a_push_to_s3_that_is_killed_is_reported_and_a_second_one_heals_it(remote: Tree, service: Service) -> None:
    words = [sys.executable, "-c", "input(); from dvc.cli import main; main(['push', '--jobs', '1'])"]
    pushing = subprocess.Popen(words, cwd=remote.root, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    service.kill = pushing.pid
    pushing.communicate(b"go\n")
    assert pushing.returncode == -signal.SIGKILL, f"the push ended with {pushing.returncode}, expected it killed"
    service.kill = None
    held = len(keys(service))
    assert 0 < held < 4, f"{held} of 4 objects arrived before the kill"
    found = verify(remote)
    assert len(found) == 4 - held, [str(fault) for fault in found]
    assert {fault.command for fault in found} == {"dvc push"}
    dvc(remote, "push")
    assert verify(remote) == []


def test_an_update_pushes_to_s3(remote: Tree, service: Service) -> None:
    from kvverify.golden.update import update

    dvc(remote, "push")
    remote.parameters.write_text(remote.parameters.read_text().replace("keep: 2", "keep: 3"))
    update(remote, reason="three states")
    assert len(keys(service)) == 6
    assert verify(remote) == []
    with pytest.raises(ValueError, match="nothing to undo"):
        undo(remote)
