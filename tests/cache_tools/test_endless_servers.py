"""Servers that send too much: no answer is read without bound, whatever it is an answer to."""

import contextlib
import http.server
import os
import tracemalloc

import pytest
from ship_samples import served

from tilekern.cache_tools.remotes import oci
from tilekern.cache_tools.remotes.oci import LARGEST_MANIFEST

MOST = 32 << 20
CHUNK = b"A" * (1 << 16)


@contextlib.contextmanager
def answering(answer):
    """A server whose answers are of ``answer(path)``: status, headers, and a body or None for far too much.

    It gives its address, and the list of how much of each large body was taken.
    """
    taken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.head()

        def do_GET(self):
            body = self.head()
            if body is not None:
                self.wfile.write(body)
                return
            taken.append(0)
            with contextlib.suppress(OSError):
                while taken[-1] < MOST:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
                    taken[-1] += len(CHUNK)
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def head(self):
            status, headers, body = answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                large = {"Transfer-Encoding": "chunked"} if self.command == "GET" else {"Content-Length": 1000}
                for name, value in (large if body is None else {"Content-Length": len(body)}).items():
                    self.send_header(name, str(value))
            self.end_headers()
            return body

    with served(Handler) as address:
        yield address, taken


PING, MANIFEST = "/v2", "/v2/team/kernels/manifests/1"
ENDLESS = {
    "the ping": {PING: (200, {}, None)},
    "the ping's error": {PING: (500, {}, None)},
    "the ping's redirect": {PING: (302, {"Location": "/elsewhere"}, None), "/elsewhere": (200, {}, b"")},
    "the manifest": {MANIFEST: (200, {}, None)},
    "the manifest's error": {MANIFEST: (404, {}, None)},
    "the manifest's redirect": {MANIFEST: (307, {"Location": "/elsewhere"}, None)},
    "an error that is tried again": {MANIFEST: (503, {"Retry-After": "3600"}, None)},
    "what asks for a login": {
        MANIFEST: (401, {"Www-Authenticate": 'Bearer realm="http://HOST/token",service="s"'}, None),
        "/token": (200, {}, b'{"token": "t"}'),
    },
    "a token": {
        MANIFEST: (401, {"Www-Authenticate": 'Bearer realm="http://HOST/token",service="s"'}, b"{}"),
        "/token": (200, {}, None),
    },
    "a token's error": {
        MANIFEST: (401, {"Www-Authenticate": 'Bearer realm="http://HOST/token",service="s"'}, b"{}"),
        "/token": (500, {}, None),
    },
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", sorted(ENDLESS))
def test_no_answer_of_a_registry_is_read_without_bound(cli, tmp_path, monkeypatch, what):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(oci, "_PAUSE_S", 0.01)

    def answer(path):
        plain = {PING: (200, {}, b"")} | ENDLESS[what]
        status, headers, body = plain.get(path.partition("?")[0].rstrip("/"), (404, {}, b"{}"))
        return status, {name: value.replace("HOST", address) for name, value in headers.items()}, body

    with answering(answer) as (url, taken):
        address = url.removeprefix("http://")
        tracemalloc.start()
        try:
            cli.refused("pull", f"oci://{address}/team/kernels:1", "--cache-dir", tmp_path / "cache", says=address)
            assert tracemalloc.get_traced_memory()[1] < 8 * LARGEST_MANIFEST
        finally:
            tracemalloc.stop()
    # What the systems' buffers took counts as well.
    assert taken
    assert max(taken) < MOST


def test_no_more_of_a_registry_s_pack_is_taken_than_its_manifest_says(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    digest = "0" * 64
    manifest = (
        f'{{"artifactType": "{oci.ARTIFACT_TYPE}", "layers": [{{"digest": "sha256:{digest}", "size": 1000}}]}}'.encode()
    )
    answers = {PING: (200, {}, b""), MANIFEST: (200, {}, manifest)}
    answers[f"/v2/team/kernels/blobs/sha256:{digest}"] = (200, {}, None)
    with answering(lambda path: answers[path.rstrip("/")]) as (url, taken):
        cli.refused(
            "pull", f"oci://{url.removeprefix('http://')}/team/kernels:1", "--cache-dir", tmp_path / "cache",
            says="more bytes come than the 1000",
        )  # fmt: skip
    assert max(taken) < MOST


@pytest.mark.parametrize("what", ["pack", "digest"])
def test_no_more_of_a_web_server_s_pack_is_taken_than_it_says(cli, pack, tmp_path, monkeypatch, what):
    """It says 1000 bytes when it is asked, and sends others."""
    sent = pack.read_bytes()

    def answer(path):
        if path.endswith(".sha256"):
            return (404, {}, b"") if what == "pack" else (200, {}, None)
        return (200, {}, None) if what == "pack" else (200, {}, sent)

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with answering(answer) as (url, taken):
        says = "more bytes come than the 1000" if what == "pack" else "kernels.pack"
        cli.refused("pull", f"{url}/kernels.pack", "--cache-dir", tmp_path / "cache", says=says)
    assert max(taken) < MOST
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".pull-")]
