"""The real OCI registry that packs are pushed to: the distribution's, which Debian has as docker-registry."""

import contextlib
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

REGISTRY = shutil.which("docker-registry") or shutil.which("registry")
NEEDS_REGISTRY = pytest.mark.skipif(not REGISTRY, reason="needs an OCI registry (Debian: docker-registry)")
USER, PASSWORD = "tuner", "a password of this test"
# bcrypt of it, the only form that the registry reads.
_HASH = "$2b$05$tilekerntilekerntilekOtCT4eoA73igjqGAc5pRvP3tX1N37tq6"


@dataclass(frozen=True)
class Registry:
    """A running registry: its host and port, and the folder that it keeps everything in."""

    host: str
    folder: Path

    def manifest(self, repository, reference):
        """A manifest as anybody's client sees it."""
        accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        found = requests.get(f"http://{self.host}/v2/{repository}/manifests/{reference}", headers=accept, timeout=10)
        return found.json()

    def blob(self, sha256):
        """The file that the registry keeps a blob in."""
        return self.folder / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"


@contextlib.contextmanager
def running(folder, auth=""):
    """A registry on a free port of this machine; ``auth`` is the part of its configuration that says who may enter."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\n"
        f'http: {{addr: "{host}"}}\n{auth}'
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([REGISTRY, "serve", folder / "config.yml"], stdout=log, stderr=log)
    try:
        _wait(host, process, folder / "log")
        yield Registry(host, folder)
    finally:
        process.terminate()
        process.wait()


def by_password(folder):
    """Who may enter: those in a file of passwords."""
    folder.mkdir()
    (folder / "htpasswd").write_text(f"{USER}:{_HASH}\n")
    return f"auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}\n"


def _wait(host, process, log, at_most_s=30):
    end = time.monotonic() + at_most_s
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(requests.ConnectionError):
            requests.get(f"http://{host}/v2/", timeout=5)
            return
        time.sleep(0.05)
    raise AssertionError(f"the registry did not start: {log.read_text()}")
