"""A real OCI registry (the distribution's, which Debian has as docker-registry), open, by password, or by token."""

import base64
import contextlib
import datetime
import http.server
import json
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from ship_samples import served

REGISTRY = shutil.which("docker-registry") or shutil.which("registry")
NEEDS_REGISTRY = pytest.mark.skipif(not REGISTRY, reason="needs an OCI registry (Debian: docker-registry)")
USER, PASSWORD = "tuner", "a password of this test"
# bcrypt of the password, the only form that the registry reads.
_HASH = "$2b$05$tilekerntilekerntilekOtCT4eoA73igjqGAc5pRvP3tX1N37tq6"


@dataclass(frozen=True)
class Registry:
    """A running registry: its host and port, and its folder."""

    host: str
    folder: Path

    def manifest(self, repository, reference):
        """Return a manifest as any client sees it."""
        accept = {"Accept": "application/vnd.oci.image.manifest.v1+json"}
        found = requests.get(f"http://{self.host}/v2/{repository}/manifests/{reference}", headers=accept, timeout=10)
        return found.json()

    def blob(self, sha256):
        """Return the file that the registry keeps a blob in."""
        return self.folder / "docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"


@contextlib.contextmanager
def running(folder, auth=""):
    """Run a registry on a free port of this machine; ``auth`` is the access control part of its configuration."""
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
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(requests.ConnectionError):
                requests.get(f"http://{host}/v2/", timeout=5)
                break
            assert time.monotonic() < end, (folder / "log").read_text()
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        yield Registry(host, folder)
    finally:
        process.terminate()
        process.wait()


def by_password(folder):
    """Return access control by a file of passwords."""
    folder.mkdir()
    (folder / "htpasswd").write_text(f"{USER}:{_HASH}\n")
    return f"auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}\n"


@contextlib.contextmanager
def by_token(folder):
    """Run a service of short-lived tokens, as large registries have one; yield access control by its tokens."""
    folder.mkdir()
    key, certificate = _signer()
    (folder / "root.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    with served(_handler(key, certificate)) as address:
        of_token = f"realm: {address}/token, service: tests, issuer: tests, rootcertbundle: {folder}/root.pem"
        yield f"auth: {{token: {{{of_token}}}}}\n"


def _handler(key, certificate):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            if self.headers.get("Authorization") != f"Basic {login}":
                self.send_response(401)
                self.end_headers()
                return
            asked = parse_qs(urlsplit(self.path).query)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"token": _token(key, certificate, asked.get("scope", []))}).encode())

        def log_message(self, *_):
            pass

    return Handler


def _signer():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
    return key, builder.sign(key, hashes.SHA256())


def _token(key, certificate, scopes):
    """Return a JSON web token that grants the scopes."""
    kinds = [scope.split(":") for scope in scopes]
    access = [{"type": kind, "name": name, "actions": actions.split(",")} for kind, name, actions in kinds]
    now = int(time.time())
    header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(certificate.public_bytes(Encoding.DER)).decode()]}
    claims = {"iss": "tests", "aud": "tests", "sub": USER, "iat": now, "nbf": now - 60, "exp": now + 300, "jti": "1"}
    text = f"{_part(header)}.{_part(claims | {'access': access})}"
    return f"{text}.{_base64(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


def _part(document):
    return _base64(json.dumps(document).encode())


def _base64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
