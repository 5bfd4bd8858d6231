"""The command sign: every record of a pack or of a cache, by one key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click

from tilekern.cache import CacheError, Missing, Pack, Record, Store, checked_contents, write_pack
from tilekern.cache.folders import write_below
from tilekern.cache.keys import signature_path
from tilekern.cache.trust.signing import SigningKey
from tilekern.cache_tools.shared.options import PlaceType, as_json, command
from tilekern.cache_tools.shared.text import count, print_json
from tilekern.warning import tell


@command
@click.argument("path", metavar="PACK|CACHE", type=PlaceType())
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="The file that `keygen` made.")
@as_json
def sign(path: Path, key_file: Path, as_json: bool) -> None:
    """Sign every record of a pack or of a cache's folder, after it and its artifacts were checked.

    Signatures of other keys stay. JSON: path, public_key, signed, left_out (records that cannot be read).
    """
    key = SigningKey(key_file)
    signed, left_out = _sign_cache(Store(path), key) if path.is_dir() else (_sign_pack(path, key), 0)
    if as_json:
        print_json({"path": str(path), "public_key": key.public_key, "signed": signed, "left_out": left_out})
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    tell(f"signed {count(signed, 'record')} of {path} with key {key.public_key[:16]}{note}")


def _sign_pack(path: Path, key: SigningKey) -> int:
    pack = Pack(path)
    signatures = pack.signatures()

    def signed() -> Iterator[tuple[Record, dict[str, bytes]]]:
        for record, blobs in checked_contents(pack):
            name = str(record.address.path)
            data = pack.read(name)
            if data != record.to_json().encode():
                raise CacheError(f"{path}: {name} is not as tilekern writes it; unpack and pack it, then sign")
            signatures.setdefault(pack.members[name].sha256, {})[key.public_key] = key.sign(data)
            yield record, blobs

    return write_pack(path, signed(), signatures)


def _sign_cache(store: Store, key: SigningKey) -> tuple[int, int]:
    signatures: dict[PurePosixPath, bytes] = {}
    artifacts: set[tuple[str, int]] = set()
    left_out = 0
    store.finish()
    for entry, data in store.read_entries():
        if entry.record is None:
            left_out += 1
            continue
        signatures[signature_path(hashlib.sha256(data).hexdigest(), key.public_key)] = key.sign(data)
        artifacts |= {(artifact.sha256, artifact.size) for artifact in entry.record.artifacts.values()}
    for digest, size_bytes in sorted(artifacts):
        _check_artifact(store, digest, size_bytes)
    for path, signature in signatures.items():
        try:
            write_below(store.root, path, signature)
        except OSError as error:
            raise CacheError(f"cannot write {store.root / path}: {error.strerror}") from None
    return len(signatures), left_out


def _check_artifact(store: Store, digest: str, size_bytes: int) -> None:
    try:
        found = len(store.read_blob(digest))
    except Missing:
        raise CacheError(f"{store.root}: blob {digest} is missing; `verify` lists what is broken") from None
    if found != size_bytes:
        raise CacheError(f"{store.root}: a record says another size of blob {digest}; `verify` lists what is broken")
