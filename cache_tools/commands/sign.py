"""The command sign: sign every record of a pack or of a cache with one key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import click

from tilekern.cache import CacheError, Missing, Pack, Record, Store, checked_contents, write_pack
from tilekern.cache.folders import write_below
from tilekern.cache.keys import signature_path
from tilekern.cache.trust.signing import SigningKey
from tilekern.cache_tools.shared.options import PLACE, as_json, command, key_file
from tilekern.cache_tools.shared.printing import count, note_left_out, print_result


@command
@click.argument("path", metavar="PACK|CACHE", type=PLACE)
@key_file
@as_json
def sign(path: Path, key_file: Path, as_json: bool) -> None:
    """Sign every record of a pack or of a cache's folder, after checking it and its artifacts.

    Signatures of other keys stay. JSON: path, public_key, signed, left_out (records that cannot be read).
    """
    key = SigningKey(key_file)
    signed, left_out = _sign_cache(Store(path), key) if path.is_dir() else (_sign_pack(path, key), 0)
    document = {"path": str(path), "public_key": key.public_key, "signed": signed, "left_out": left_out}
    text = f"signed {count(signed, 'record')} of {path} with key {key.public_key[:16]}{note_left_out(left_out)}"
    print_result(document, as_json, text)


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
    artifacts: dict[tuple[str, int], str] = {}
    left_out = 0
    store.finish()
    for entry, data in store.read_entries():
        if entry.record is None:
            left_out += 1
            continue
        signatures[signature_path(hashlib.sha256(data).hexdigest(), key.public_key)] = key.sign(data)
        for name, one in entry.record.artifacts.items():
            artifacts.setdefault((one.sha256, one.size), f"{entry.path}: artifact {name}")
    for (digest, size_bytes), what in sorted(artifacts.items()):
        try:
            is_whole = len(store.read_blob(digest)) == size_bytes
        except CacheError as error:
            why = f"blob {digest} is missing" if isinstance(error, Missing) else str(error)
            raise CacheError(f"{what}: {why}; `verify` lists what is broken") from None
        if not is_whole:
            raise CacheError(f"{what}: the record says another size of blob {digest}; `verify` lists what is broken")
    for path, signature in signatures.items():
        try:
            write_below(store.root, path, signature)
        except OSError as error:
            raise CacheError(f"cannot write {store.root / path}: {error.strerror}") from None
    return len(signatures), left_out
