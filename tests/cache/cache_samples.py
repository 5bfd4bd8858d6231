"""Records and caches for the tests of the cache and of its command line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

from msgspec.structs import replace

from tilekern.cache import SCHEMA, Artifact, CacheError, FolderLayer, Record, Store, lookup, write_pack
from tilekern.cache.trust.signing import SigningKey, generate_key
from tilekern.spec import INVARIANT
from tilekern.spec.source import source_digest

SOURCE = hashlib.sha256(b"source").hexdigest()
H200 = {"key": "sm_90-h200-132", "name": "H200", "arch": "sm_90", "sm_count": 132}
H100 = {"key": "sm_90-h100-132", "name": "H100", "arch": "sm_90", "sm_count": 132}
B200 = {"key": "sm_100-b200-148", "name": "B200", "arch": "sm_100", "sm_count": 148}
PROBLEM = {"rows": 8192, "columns": 4096, "dtype": "bfloat16"}
# The code of an invariant kernel.
SAME = b"same" * 120
PLACE = ("sm_90-h200-132", "tileiras-13.4.92")


def made_today(module: str = "tilekern.kernels.rms_norm") -> dict[str, str]:
    """Return the digests of a record that was made from a kernel's source as it is."""
    return dict.fromkeys(("source_digest", "space_digest"), source_digest(module))


def toolkit(version: str = "13.4.92") -> dict[str, Any]:
    return {"key": f"tileiras-{version}", "tileiras": version, "cuda_tile": "1.7.0"}


def artifact(data: bytes, **changes: Any) -> Artifact:
    return Artifact(
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        symbol="rms_norm_kernel",
        config={"occupancy": 4},
        assumptions=[{"base_divisible_by": 16}],
        resources={"registers": 64, "spill_bytes": 0, "shared_bytes": 1024, "threads": 128},
        **changes,
    )


def make(*contents: bytes, **changes: Any) -> tuple[Record, dict[str, bytes]]:
    """A record with one artifact for each of ``contents``, and its blobs."""
    contents = contents or (b"aligned" * 500, b"generic" * 500)
    artifacts = {name: artifact(data) for name, data in zip(("aligned", "generic"), contents, strict=False)}
    record = Record(
        schema=SCHEMA,
        kernel="rms_norm",
        module="tilekern.kernels.rms_norm",
        problem=dict(PROBLEM),
        target=H200,
        toolkit=toolkit(),
        source_digest=SOURCE,
        space_digest=SOURCE,
        provenance="measured",
        config={"occupancy": 4, "persistent": True},
        artifacts=artifacts,
        measurement={"median_us": 37.8, "default_us": 124.0, "spread_us": 0.4},
        prediction={"time_us": 40.0},
        check={"relative": 0.001},
        runners_up=[{"config": {"occupancy": 2}, "median_us": 38.1}],
        candidates=24,
        failed=1,
        created="2026-08-01T12:00:00+00:00",
        created_by="tilekern 0.1.0",
    )
    blobs = {artifact.sha256: data for artifact, data in zip(artifacts.values(), contents, strict=False)}
    return replace(record, **changes), blobs


def make_classed(**changes: Any) -> tuple[Record, dict[str, bytes]]:
    """A record with an invariant kernel that has an artifact of its own, and its blobs."""
    record, blobs = make(b"fast" * 100, b"generic" * 90)
    same = artifact(SAME)
    facts = {"config": same.config, "bits": "a", "median_us": 42.0, "generic": False}
    measurement = {**(record.measurement or {}), INVARIANT: facts}
    whole = replace(record, artifacts=record.artifacts | {INVARIANT: same}, measurement=measurement)
    return replace(whole, **changes), blobs | {same.sha256: SAME}


def sealed(text: str) -> str:
    """Return the text of a changed record with a new digest at its end."""
    contents = text[: text.rindex('"sha256": ')].rstrip().removesuffix(",")
    return f'{contents},\n "sha256": "{hashlib.sha256(contents.encode()).hexdigest()}"\n}}\n'


def changed(record: Record, **changes: Any) -> str:
    """A record's text with other values in it, of whatever type, as a program would write it that checks nothing."""
    fields = json.loads(record.to_json()) | changes
    del fields["sha256"]
    return sealed(json.dumps({**fields, "sha256": None}, indent=1))


def put(root: Path, *contents: bytes, **changes: Any) -> Path:
    """Write a record to a cache and return its file."""
    return Store(root).write(*make(*contents, **changes))


def digest_of(record: Record) -> str:
    """The sha256 of a record's bytes, by which signatures and lists name it."""
    return hashlib.sha256(record.to_json().encode()).hexdigest()


def new_key(path: Path) -> SigningKey:
    """A private key in a new file."""
    generate_key(path)
    return SigningKey(path)


def signed_pack(path: Path, *keys: SigningKey, records: list[Any] | None = None) -> Path:
    """Write a pack of records that are signed by all keys."""
    records = records or [make()]
    signatures = {
        digest_of(one): {key.public_key: key.sign(one.to_json().encode()) for key in keys} for one, _ in records
    }
    write_pack(path, records, signatures)
    return path


def blob_file(root: Path, data: bytes) -> Path:
    digest = hashlib.sha256(data).hexdigest()
    return root / "v1" / "blobs" / digest[:2] / digest


def failing_folders(monkeypatch: Any) -> list[Path]:
    """Folders that the disk fails to list and to look at, as a list to fill."""
    folders: list[Path] = []

    def failing(call: Any) -> Any:
        def fail(path: Any, *arguments: Any, **options: Any) -> Any:
            if any(Path(path).is_relative_to(folder) for folder in folders):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return call(path, *arguments, **options)

        return fail

    for name in ("scandir", "lstat"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    return folders


def find(layers: list[Any], problem: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A lookup on the H200 with the toolkit and the source that records are made with by default."""
    given = {
        "bucketed": ["rows"],
        "target_key": H200["key"],
        "arch": "sm_90",
        "toolkit_key": "tileiras-13.4.92",
        "source": SOURCE,
    }
    return lookup("rms_norm", problem or PROBLEM, **{**given, **changes}, layers=layers)


def changing(root: Path, change: Callable[[], Any]) -> FolderLayer:
    """A layer in which something happens once, between the reading of a record and that of its blobs."""

    class Changing(FolderLayer):
        done = False

        def read_blob(self, sha256: str) -> bytes:
            if not self.done:
                self.done = True
                change()
            return super().read_blob(sha256)

    return Changing(root, "user")


def put_odd(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "folder":
        (path / "more").mkdir(parents=True)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            raise SkipTest("only root makes devices") from None
    else:
        path.symlink_to("/dev/zero" if kind == "a link to a device" else path.name)


def fill(root: Path, records: int) -> None:
    """A cache of many records with two blobs each, written without the store's fsync."""
    for number in range(records):
        record, blobs = make(
            b"aligned %d" % number + random.Random(number).randbytes(3000),
            b"generic %d" % number,
            problem={**PROBLEM, "columns": number + 1},
            target=(H200, B200)[number % 2],
            runners_up=[{"config": {"occupancy": o, "tile": 1024}, "median_us": 38.1 + o} for o in range(8)],
        )
        for data in blobs.values():
            blob_file(root, data).parent.mkdir(parents=True, exist_ok=True)
            blob_file(root, data).write_bytes(data)
        path = root / record.address.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record.to_json())


def outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of a call, or the message of the CacheError that it raises."""
    try:
        return call(), None
    except CacheError as error:
        return None, str(error)


def files_of(root: Path) -> dict[str, tuple[int, int]]:
    """Every file of a folder with its time and size."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def quietly(layers: list[Any]) -> Any:
    """Return the result of :func:`find`, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find(layers)
