"""The command verify: whether a cache or a pack is whole, and who signed it."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import click

from tilekern.cache import (
    DATED,
    STALE,
    CacheError,
    Corrupt,
    Entry,
    Missing,
    Pack,
    Store,
    UnknownSchema,
    Untrusted,
    checked_contents,
)
from tilekern.cache.files import identity_of, read_whole
from tilekern.cache.trust.exposure import others_may_write, require_unshared, require_unshared_folders
from tilekern.cache.trust.policy import Reader, Signers, must_be_signed, signature_files, signature_names
from tilekern.cache.trust.signing import SIGNATURE_BYTES, is_signed
from tilekern.cache_tools.shared.options import PlaceType, as_json, cache_dir, command
from tilekern.cache_tools.shared.staleness import freshness_of
from tilekern.cache_tools.shared.text import count, print_json
from tilekern.warning import tell

# How many files are named beside a reason that holds for more.
_NAMED = 3
_VARYING = re.compile(r"\b[0-9a-f]{64}\b|\b[0-9]+\b")
# Sections of the document that hold paths alone: what they are called, of what, and the reason.
_NOTES = (
    ("stale", "stale", "record", "the kernel's source has changed since"),
    ("not_fresh", "not known to be the best", "record", "the space has changed since"),
    ("unknown_source", "cannot tell whether stale", "record", "the kernel's source is not installed here"),
    ("unknown_schema", "left alone", "record", "another version of tilekern wrote it"),
    ("leftovers", "left over", "file", "set aside as bad, or never finished"),
)


@command
@click.argument("path", metavar="[PACK|CACHE]", required=False, type=PlaceType())
@click.option("--signed", is_flag=True, help="A record that no trust root signed is a fault, too.")
@cache_dir
@as_json
@click.pass_context
def verify(context: click.Context, path: Path | None, signed: bool, store: Store, as_json: bool) -> None:
    """Check every record, artifact and signature of a pack or a cache; exit code 1 where one is broken.

    Reported, but not a fault, are stale records, those that are not known to be the best any more, and those that
    others can write, which no job loads. A reason is said once, with how many it holds for and the first of them;
    --json names all. A folder that --cache-dir names must be there; the user's own cache may be empty.

    JSON: cache_dir or pack, records, blobs, broken[] {path, problem}, stale[], not_fresh[], unknown_source[],
    signatures {trusted, other_key, unsigned, revoked, by {name: records}, bad[] {path, problem}, unchecked}, and of a
    cache unknown_schema[], orphans, leftovers[], exposed[] {path, problem}.
    """
    if context.get_parameter_source("store") == click.core.ParameterSource.COMMANDLINE:
        if path is not None:
            raise CacheError("verify takes a PACK or CACHE, or --cache-dir, and not both")
        if not store.root.is_dir():
            raise CacheError(f"there is no cache at {store.root}, which --cache-dir names")
    signed = signed or must_be_signed()
    document = _of_pack(path) if path and not path.is_dir() else _of_cache(Store(path) if path else store)
    if as_json:
        print_json(document)
    else:
        _print(document)
    untrusted = document["records"] - document["signatures"]["trusted"]
    if document["broken"] or (untrusted and signed):
        context.exit(1)


def _of_cache(store: Store) -> dict[str, Any]:
    """The document of a cache, each record, blob and signature of which is checked."""
    seen = _Seen(store)
    signatures = _survey(_records_of_store(store, seen.note))
    blobs = {blob.sha256: str(blob.path) for blob in store.blobs()}
    referred = {digest for record in seen.records.values() for digest, _ in record.artifacts}
    found = {digest: _read(store, digest) for digest in sorted(referred | blobs.keys())}
    orphans = sorted(blobs.keys() - referred)
    return {
        "cache_dir": str(store.root),
        "records": len(seen.records),
        "blobs": len(blobs),
        "broken": [
            *seen.bad,
            *_with_bad_artifacts(seen.records, found),
            *(_fault(blobs[digest], problem) for digest in orphans if isinstance(problem := found[digest], str)),
            *signatures["bad"],
        ],
        "stale": seen.stale,
        "not_fresh": seen.not_fresh,
        "unknown_source": seen.unknown_source,
        "unknown_schema": seen.unknown_schema,
        "orphans": len(orphans),
        "leftovers": [str(path) for path in store.leftovers()],
        "signatures": signatures,
        "exposed": seen.exposed,
    }


def _of_pack(path: Path) -> dict[str, Any]:
    """The document of a pack: its form, every hash, every record and signature.

    Raises:
        Missing: there is no such file.
        UnknownSchema: another version of tilekern wrote it.
        CacheError: it cannot be read.
    """
    document: dict[str, Any] = {"pack": str(path), "records": 0, "blobs": 0, "broken": []}
    signatures = _survey(())
    try:
        pack = Pack(path)
        records = [record for record, _ in checked_contents(pack)]
        signatures = _survey(_records_of_pack(pack))
        found_fresh = [(str(record.address.path), freshness_of(record)) for record in records]
        document |= {
            "records": len(records),
            "blobs": len(frozenset().union(*(record.digests for record in records))),
            "broken": signatures["bad"],
            "stale": [name for name, found in found_fresh if found == STALE],
            "not_fresh": [name for name, found in found_fresh if found == DATED],
            "unknown_source": [name for name, found in found_fresh if found is None],
        }
    except UnknownSchema:
        raise
    except Corrupt as error:
        document["broken"] = [{"path": str(path), "problem": str(error)}]
    document |= {name: document.get(name, []) for name in ("stale", "not_fresh", "unknown_source")}
    return {**document, "signatures": signatures}


class _Seen:
    """Findings on a cache's records, one after the other; so little that a hundred thousand are no burden."""

    def __init__(self, store: Store) -> None:
        self.records: dict[str, _Kept] = {}
        self.bad: list[dict[str, str]] = []
        self.stale: list[str] = []
        self.not_fresh: list[str] = []
        self.unknown_source: list[str] = []
        self.unknown_schema: list[str] = []
        self.exposed: list[dict[str, str]] = []
        self._root = store.root
        self._folders: dict[str, str | None] = {}
        self._anywhere = others_may_write()

    def note(self, entry: Entry) -> None:
        """Take in one entry of the cache."""
        path = str(entry.path)
        if entry.record is None:
            if entry.unknown_schema:
                self.unknown_schema.append(path)
            else:
                self.bad.append(_fault(path, str(entry.problem)))
            return
        sizes = tuple(sorted({(one.sha256, one.size) for one in entry.record.artifacts.values()}))
        self.records[path] = _Kept(entry.identity, sizes)
        by_freshness = {STALE: self.stale, DATED: self.not_fresh, None: self.unknown_source}
        by_freshness.get(freshness_of(entry.record), []).append(path)
        if not self._anywhere and (problem := self._exposure(path)):
            self.exposed.append(_fault(path, problem))

    def _exposure(self, path: str) -> str | None:
        """Why no job loads a record: others can write it, or a folder that leads there."""
        folder = os.path.dirname(path)
        if folder not in self._folders:
            self._folders[folder] = _refused(lambda: require_unshared_folders(self._root, Path(folder)))
        return self._folders[folder] or _refused(lambda: require_unshared(path, os.stat(path)))


class _Kept(NamedTuple):
    """Of a record: which file it was, and the sha256 and size of each artifact."""

    identity: tuple[int, int, int] | None
    artifacts: tuple[tuple[str, int], ...]


def _with_bad_artifacts(records: Mapping[str, _Kept], found: Mapping[str, int | str]) -> Iterator[dict[str, str]]:
    """Faults of artifacts, each with its record, but for records that were deleted or written anew meanwhile."""
    for path, record in records.items():
        problems = [problem for digest, size in record.artifacts if (problem := _problem(digest, size, found[digest]))]
        if problems and _is_still(path, record.identity):
            yield from (_fault(path, problem) for problem in problems)


def _problem(digest: str, size: int, found: int | str) -> str | None:
    if isinstance(found, str):
        return found
    return None if found == size else f"blob {digest} has {found} bytes, and the record says {size}"


def _is_still(path: str, identity: tuple[int, int, int] | None) -> bool:
    try:
        return identity_of(os.stat(path)) == identity
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _refused(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Untrusted as error:
        return str(error)
    except OSError:
        return None
    return None


def _fault(path: str, problem: str) -> dict[str, str]:
    return {"path": path, "problem": problem}


def _read(store: Store, digest: str) -> int | str:
    """How many bytes a blob has, or what is wrong with it."""
    try:
        return len(store.read_blob(digest))
    except Missing:
        return f"blob {digest} is missing"
    except CacheError as error:
        return str(error)


class _Signed(NamedTuple):
    """A record's file: its path, its bytes, its signatures by public key, and what reads files beside it.

    ``is_named`` says whether any of these is called after the record, as signatures and seals are.
    """

    path: str
    data: bytes
    signatures: Mapping[str, bytes]
    read: Reader
    is_named: bool


def _records_of_store(store: Store, note: Callable[[Entry], None]) -> Iterator[_Signed]:
    """Records of a cache, by their files; ``note`` is given each entry of the cache, records or not."""
    names = signature_names(store.root)

    def read(path: PurePosixPath) -> bytes:
        if path.name not in names.get(path.name[:64], ()):
            raise Missing(f"there is no {path}")
        return read_whole(store.root / path, SIGNATURE_BYTES + 1)[0]

    for entry, data in store.read_entries():
        note(entry)
        if entry.record:
            digest = hashlib.sha256(data).hexdigest()
            found = names.get(digest, ())
            yield _Signed(str(entry.path), data, signature_files(store.root, digest, found), read, bool(found))


def _records_of_pack(pack: Pack) -> Iterator[_Signed]:
    """All records of a pack."""
    signatures = pack.signatures()
    for name in pack.records.values():
        found = signatures.get(pack.members[name].sha256, {})
        yield _Signed(name, pack.read(name), found, lambda path: pack.read(str(path)), bool(found))


def _survey(records: Iterable[_Signed]) -> dict[str, Any]:
    """How many records are trusted and by whom, signed by others, unsigned, and wrongly signed.

    ``trusted``, ``other_key``, ``unsigned``, ``revoked``: numbers of records; ``by``: records by the trust root's name;
    ``bad``: path and problem of each signature that is not of its record; ``unchecked``: why some records'
    signatures could not be checked, or None.
    """
    counted: Counter[str] = Counter()
    by: Counter[str] = Counter()
    bad: list[dict[str, str]] = []
    unchecked, signers = None, Signers()
    for record in records:
        if not record.is_named:
            counted["unsigned"] += 1
            continue
        try:
            if signers.is_revoked(record.data):
                counted["revoked"] += 1
                continue
            signer = signers.signer_of(record.data, record.read)
            wrong = [key for key, text in record.signatures.items() if not is_signed(key, record.data, text)]
        except CacheError as error:
            unchecked, signer, wrong = str(error), None, []
        bad += [{"path": record.path, "problem": f"the signature of key {key[:16]} is not its own"} for key in wrong]
        by.update([signer] if signer else [])
        signed_by_others = len(record.signatures) > len(wrong)
        counted["trusted" if signer else "other_key" if signed_by_others else "unsigned"] += 1
    numbers = {name: counted[name] for name in ("trusted", "other_key", "unsigned", "revoked")}
    return {**numbers, "by": dict(sorted(by.items())), "bad": bad, "unchecked": unchecked}


def _print_survey(signatures: Mapping[str, Any]) -> None:
    """Print what :func:`_survey` found, on a line or two."""
    if signatures["unchecked"]:
        tell(f"some signatures were not checked: {signatures['unchecked']}")
    by = ", ".join(f"{number} by {name}" for name, number in signatures["by"].items())
    tell(
        f"signatures: {signatures['trusted']} trusted{f' ({by})' if by else ''}, "
        f"{signatures['other_key']} by keys that are not trust roots, {signatures['unsigned']} unsigned"
        f"{f', {number} revoked' if (number := signatures['revoked']) else ''}"
    )


def _print(document: dict[str, Any]) -> None:
    lines = [
        *_by_reason("broken", "file", [(item["path"], item["problem"]) for item in document["broken"]]),
        *_by_reason(
            "not loaded by any job", "record", [(one["path"], one["problem"]) for one in document.get("exposed", [])]
        ),
    ]
    for section, what, thing, reason in _NOTES:
        lines += _by_reason(what, thing, [(path, reason) for path in document.get(section, [])])
    place = document.get("pack") or document["cache_dir"]
    broken = len({item["path"] for item in document["broken"]})
    lines.append(
        f"{place}: {count(document['records'], 'record')}, {count(document['blobs'], 'blob')}, "
        f"{document.get('orphans', 0)} without a record; {broken} broken, {len(document['stale'])} stale"
    )
    tell(*lines)
    _print_survey(document["signatures"])


def _by_reason(what: str, thing: str, faults: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines that say each reason once, with the number of files that it holds for and the first of them.

    Reasons that differ in digests and numbers alone, or in the file that they name, are one.
    """
    alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, problem in faults:
        alike[_VARYING.sub("…", problem.replace(path, "…"))].append((path, problem))
    for reason, found in alike.items():
        paths, texts = list(dict.fromkeys(path for path, _ in found)), {problem for _, problem in found}
        if len(paths) == 1:
            yield from (f"{what}: {path}: {problem}" for path, problem in found)
            continue
        yield f"{what}: {count(len(paths), thing)}: {texts.pop() if len(texts) == 1 else reason}"
        yield from (f"  {path}" for path in paths[:_NAMED])
        if len(paths) > _NAMED:
            yield f"  and {len(paths) - _NAMED:,} more, which --json names"
