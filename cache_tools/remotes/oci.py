"""A tag of an OCI registry, ``oci://HOST/REPOSITORY:TAG``, through oras.

The pack is the only layer of an artifact of our own type, with annotations that describe it. Credentials are those of
docker's configuration.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import oras.container
import oras.logger
import oras.oci
import oras.provider
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from tilekern.cache import CacheError, Corrupt, Missing
from tilekern.cache.records import parse_object
from tilekern.cache_tools.shared.packs import Contents
from tilekern.cache_tools.shared.printing import progress_bar

ARTIFACT_TYPE = "application/vnd.tilekern.pack.v1"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LARGEST_MANIFEST = 4 * 2**20
_LARGEST_ERROR = 2**16
_CHUNK = 2**20
_CONNECT_S, _READ_S, _PAUSE_S = 10, 60, 0.5
_BUSY = (502, 503, 504)
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"oci://(?P<host>[A-Za-z0-9.-]+(?::[0-9]+)?|\[[0-9a-f:]+\](?::[0-9]+)?)/(?P<repository>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)
_HERE = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")


class _Layer(NamedTuple):
    """The manifest's entry for the pack: sha256 in hexadecimal, size in bytes."""

    sha256: str
    size: int


class OciTag:
    """One tag (for a pull also one digest) of a repository."""

    def __init__(self, url: str, plain_http: bool = False) -> None:
        found = _REFERENCE.fullmatch(url)
        if not found or not re.search(r"[.:]|^localhost$", found["host"]):
            raise CacheError(
                f"{url} is not a place in a registry; one looks like oci://registry.example.com/team/kernels:h200"
            )
        self.url = url
        self._host = found["host"]
        # oras would treat a host without a dot or colon as part of the repository.
        self._container = oras.container.Container(
            url.removeprefix("oci://").removeprefix(f"{self._host}/"), self._host
        )
        self._client = _client(self._container, plain_http or bool(_HERE.fullmatch(self._host)))
        self._layer: _Layer | None = None

    def digest(self) -> str:
        """Return the digest of the pack."""
        self._layer = self._read_manifest()
        return self._layer.sha256

    def download(self, path: Path) -> None:
        """Write the pack to ``path``."""
        layer = self._layer or self._read_manifest()
        response = self._client.get_blob(self._container, f"sha256:{layer.sha256}", stream=True)
        written = 0
        with response, open(path, "xb") as file, progress_bar("pulling", layer.size) as moved:
            self._check(response)
            for chunk in response.iter_content(_CHUNK):
                written += len(chunk)
                if written > layer.size:
                    raise Corrupt(f"{self.url}: more bytes come than the {layer.size} that the manifest says")
                file.write(chunk)
                moved(len(chunk))

    def upload(self, pack: Contents) -> str:
        """Push the pack under the tag; return the URL with the digest of its manifest."""
        if self._container.digest:
            raise CacheError(f"{self.url} names a digest, and a push makes a new one; give a tag")
        layer = {
            "mediaType": ARTIFACT_TYPE,
            "digest": f"sha256:{pack.sha256}",
            "size": pack.size_bytes,
            "annotations": {"org.opencontainers.image.title": pack.path.name},
        }
        self._check(self._client.upload_blob(str(pack.path), self._container, layer))
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": self._upload_empty_config(),
            "layers": [layer],
            "annotations": {
                "tilekern.runtime.records": str(len(pack.records)),
                "tilekern.spec.targets": ",".join(pack.targets),
                "tilekern.toolkits": ",".join(pack.toolkits),
            },
        }
        response = self._check(self._client.upload_manifest(manifest, self._container))
        digest = response.headers.get("Docker-Content-Digest")
        place = f"oci://{self._host}/{self._container.api_prefix}"
        return f"{place}@{digest}" if digest else self.url

    def _upload_empty_config(self) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            path = Path(folder, "config.json")
            path.write_bytes(b"{}")
            config, _ = oras.oci.ManifestConfig(str(path), _EMPTY_TYPE)
            self._check(self._client.upload_blob(str(path), self._container, config))
        return config

    def _read_manifest(self) -> _Layer:
        address = f"{self._client.prefix}://{self._container.manifest_url()}"
        response = self._client.do_request(address, headers={"Accept": _MANIFEST_TYPE}, stream=True)
        with response:
            self._check(response)
            data = response.raw.read(LARGEST_MANIFEST, decode_content=True)
        wanted = self._container.digest
        if wanted and wanted != f"sha256:{hashlib.sha256(data).hexdigest()}":
            raise Corrupt(f"{self.url}: the manifest that the registry sent has another digest")
        return _pack_layer(self.url, data)

    def _check(self, response: requests.Response) -> requests.Response:
        if response.ok:
            return response
        if response.status_code == 404:
            raise Missing(f"there is no {self.url}")
        if response.status_code in (401, 403):
            raise CacheError(f"{self.url}: the registry refuses this; `docker login {self._host}` says who you are")
        answer = f"{response.status_code} {response.reason} {response.text:.200}"
        raise CacheError(f"{self.url}: the registry answered {answer}")


# Without the decorator of oras, which tries for two minutes if the host is missing or the password is wrong.
_request = inspect.unwrap(oras.provider.Registry.do_request)


class _Client(oras.provider.Registry):
    """The client of oras, which also gets a new token if the one that it has is for something else."""

    def do_request(self, *arguments: Any, **options: Any) -> requests.Response:
        """Send a request, with a login if needed; raise CacheError if there is none or it is wrong."""
        try:
            response = _request(self, *arguments, **options)
            if response.status_code == 401 and getattr(self.auth, "token", None):
                # A token to read is not valid to write.
                self.auth.token = None
                response = _request(self, *arguments, **options)
            return response
        except requests.RequestException:
            raise
        except ValueError:
            raise CacheError(_wants_login(self.hostname)) from None


class _Patient(HTTPAdapter):
    """Repeats reads of a busy server, limits the time of every request, and the memory of every answer.

    requests and urllib3 read bodies of errors, redirects and repeated requests whole, whatever the server sends. So all
    bodies are read here, except those that a caller streams.
    """

    def __init__(self) -> None:
        super().__init__(max_retries=Retry(total=2, backoff_factor=_PAUSE_S, respect_retry_after_header=False))

    def send(self, request: Any, stream: bool = False, timeout: Any = None, **options: Any) -> requests.Response:
        """Send a request, with a default time limit; raise CacheError if the answer is too large."""
        for pause_s in (_PAUSE_S, 2 * _PAUSE_S, None):
            response = super().send(request, stream=stream, timeout=timeout or (_CONNECT_S, _READ_S), **options)
            if pause_s is None or response.status_code not in _BUSY or request.method not in ("GET", "HEAD"):
                break
            response.close()
            time.sleep(pause_s)
        if not stream or not response.ok or response.is_redirect:
            _take_body(response)
        return response


def _take_body(response: requests.Response) -> None:
    # Of an error or a redirect only the beginning.
    is_whole = response.ok and not response.is_redirect
    data = response.raw.read(LARGEST_MANIFEST + 1 if is_whole else _LARGEST_ERROR, decode_content=True)
    response.close()
    if len(data) > LARGEST_MANIFEST:
        raise CacheError(f"{response.url} answered with more than {LARGEST_MANIFEST} bytes")
    # As requests itself stores a body.
    response._content, response._content_consumed = data, True


def _client(container: oras.container.Container, plain_http: bool) -> _Client:
    """Return a client with docker's credentials for the registry, if any."""
    # Failures are reported once, by the error.
    logging.getLogger(oras.logger.__name__).setLevel(logging.CRITICAL)
    scheme = "http" if plain_http else "https"
    with _patient(requests.Session()).get(f"{scheme}://{container.registry}/v2/", stream=True) as asked:
        kind = "basic" if asked.headers.get("Www-Authenticate", "").lower().startswith("basic") else "token"
    client = _Client(hostname=container.registry, insecure=plain_http, auth_backend=kind)
    _patient(client.session)
    folder = os.environ.get("DOCKER_CONFIG")
    client.auth.load_configs(container, [os.path.join(folder, "config.json")] if folder else None)
    if kind == "basic" and not hasattr(client.auth, "_basic_auth"):
        raise CacheError(_wants_login(container.registry))
    return client


def _patient(session: requests.Session) -> requests.Session:
    session.mount("http://", _Patient())
    session.mount("https://", _Patient())
    return session


def _wants_login(host: str) -> str:
    return f"the registry {host} wants to know who you are; run `docker login {host}`"


def _pack_layer(url: str, data: bytes) -> _Layer:
    try:
        manifest = parse_object(data.decode())
        kind = manifest.get("artifactType")
        if kind != ARTIFACT_TYPE:
            raise CacheError(f"{url} is not a pack; its artifact type must be {ARTIFACT_TYPE}, got {kind!r:.80}")
        (layer,) = manifest["layers"]
        algorithm, _, digest = layer["digest"].partition(":")
        size = layer["size"]
    except (Corrupt, ValueError, TypeError, AttributeError, LookupError):
        raise Corrupt(f"{url} is not a pack: its manifest reads {data[:60]!r}") from None
    if algorithm != "sha256" or not re.fullmatch("[0-9a-f]{64}", digest) or type(size) is not int:
        raise Corrupt(f"{url} has a manifest that names no sha256 and size of its pack")
    return _Layer(digest, size)
