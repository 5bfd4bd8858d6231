"""Who signed what: the commands keygen and sign, and what verify says of signatures."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import click

from cache_tools.shared.options import PlaceType
from cache_tools.shared.text import count, print_json
from tilekern.cache import CacheError, Entry, Missing, Pack, Record, Store, checked_contents, write_pack
from tilekern.cache.files import read_whole, write_whole
from tilekern.cache.keys import signature_path
from tilekern.cache.trust.policy import Reader, Signers, signature_files, signature_names, user_trust_roots
from tilekern.cache.trust.signing import SIGNATURE_BYTES, SigningKey, generate_key, is_signed


class Signed(NamedTuple):
    """A record's file: its path, its bytes, its signatures by public key, and what reads files beside it."""

    path: str
    data: bytes
    signatures: Mapping[str, bytes]
    read: Reader


def records_of_store(store: Store, note: Callable[[Entry], None]) -> Iterator[Signed]:
    """Records of a cache, by their files; ``note`` is given each entry of the cache, also of what is no record."""
    names = signature_names(store.root)

    def read(path: PurePosixPath) -> bytes:
        if path.name not in names.get(path.name[:64], ()):
            raise Missing(f"there is no {path}")
        return read_whole(store.root / path, SIGNATURE_BYTES + 1)[0]

    for entry, data in store.read_entries():
        note(entry)
        if entry.record:
            digest = hashlib.sha256(data).hexdigest()
            yield Signed(str(entry.path), data, signature_files(store.root, digest, names.get(digest, ())), read)


def records_of_pack(pack: Pack) -> Iterator[Signed]:
    """All records of a pack."""
    signatures = pack.signatures()
    for name in pack.records.values():
        found = signatures.get(pack.members[name].sha256, {})
        yield Signed(name, pack.read(name), found, lambda path: pack.read(str(path)))


def survey(records: Iterable[Signed]) -> dict[str, Any]:
    """How many records are trusted and by whom, signed by others, unsigned, and wrongly signed.

    ``trusted``, ``other_key``, ``unsigned``: numbers of records; ``by``: records by the trust root's name; ``bad``:
    path and problem of each signature that is none of its record; ``unchecked``: why some records' signatures could not
    be checked, or None.
    """
    counted: Counter[str] = Counter()
    by: Counter[str] = Counter()
    bad: list[dict[str, str]] = []
    unchecked, signers = None, Signers()
    for record in records:
        try:
            signer = signers.signer_of(record.data, record.read)
            wrong = [key for key, text in record.signatures.items() if not is_signed(key, record.data, text)]
        except CacheError as error:
            unchecked, signer, wrong = str(error), None, []
        bad += [{"path": record.path, "problem": f"the signature of key {key[:16]} is not its own"} for key in wrong]
        by.update([signer] if signer else [])
        signed_by_others = len(record.signatures) > len(wrong)
        counted["trusted" if signer else "other_key" if signed_by_others else "unsigned"] += 1
    numbers = {name: counted[name] for name in ("trusted", "other_key", "unsigned")}
    return {**numbers, "by": dict(sorted(by.items())), "bad": bad, "unchecked": unchecked}


def print_survey(signatures: Mapping[str, Any]) -> None:
    """Print what :func:`survey` found, on a line or two."""
    if signatures["unchecked"]:
        click.echo(f"some signatures were not checked: {signatures['unchecked']}")
    by = ", ".join(f"{number} by {name}" for name, number in signatures["by"].items())
    click.echo(
        f"signatures: {signatures['trusted']} trusted{f' ({by})' if by else ''}, "
        f"{signatures['other_key']} by keys that are no trust root, {signatures['unsigned']} unsigned"
    )


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--name", help="What the key's owner is called (else the file's name).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def keygen(file: Path, name: str | None, as_json: bool) -> None:
    """Make a key to sign with: FILE, for you alone, and FILE.pub, the line for others' trust roots.

    JSON: key, public_key, trust_root, trust_roots (the file where a line of yours counts).
    """
    title = " ".join((name or file.stem).split())
    public = file.with_name(f"{file.name}.pub")
    if not title or not title.isprintable():
        raise CacheError(f"--name must be printable and not empty, got {name or file.stem!r}")
    if public.exists():
        raise CacheError(f"{public} is there already, and a key is never overwritten; give another name")
    key = generate_key(file)
    line = f"ed25519 {key} {title}"
    try:
        write_whole(public, f"{line}\n".encode())
    except OSError as error:
        file.unlink()
        raise CacheError(f"cannot write {public}: {error.strerror}") from None
    if as_json:
        roots = str(user_trust_roots())
        print_json({"key": str(file), "public_key": key, "trust_root": line, "trust_roots": roots})
        return
    click.echo(f"wrote {file}, which signs, and {public}, whose line others add to {user_trust_roots()}")


@click.command()
@click.argument("path", metavar="PACK|CACHE", type=PlaceType())
@click.option("--key", "key_file", required=True, type=click.Path(path_type=Path), help="The file that `keygen` made.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
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
    click.echo(f"signed {count(signed, 'record')} of {path} with key {key.public_key[:16]}{note}")


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
            write_whole(store.root / path, signature)
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
