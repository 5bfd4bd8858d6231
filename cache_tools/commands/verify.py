"""The command verify: check whether a cache or a pack is whole, and who signed it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import click

from tilekern.cache import (
    DATED,
    STALE,
    CacheError,
    Corrupt,
    Missing,
    Pack,
    Record,
    Store,
    UnknownSchema,
    Untrusted,
    checked_contents,
)
from tilekern.cache.files import identity_of, read_whole
from tilekern.cache.trust.exposure import others_may_write, require_unshared, require_unshared_folders
from tilekern.cache.trust.policy import Reader, Signers, must_be_signed, signature_files, signature_names
from tilekern.cache.trust.signing import SIGNATURE_BYTES, is_signed
from tilekern.cache_tools.shared.installed import freshness_of
from tilekern.cache_tools.shared.options import PLACE, as_json, cache_dir, command
from tilekern.cache_tools.shared.printing import count, print_result
from tilekern.warning import tell

# The most files that are named beside a reason.
_NAMED = 3
_VARYING = re.compile(r"\b[0-9a-f]{64}\b|\b[0-9]+\b")
_STATES = {STALE: "stale", DATED: "not_fresh", None: "unknown_source"}
# Sections of the document that hold faults: their title, and what the paths are.
_FAULTS = {"broken": ("broken", "file"), "exposed": ("not loaded by any job", "record")}
# Sections that hold paths alone: their title, what the paths are, and the reason.
_NOTES = {
    "stale": ("stale", "record", "the kernel's source has changed since"),
    "not_fresh": ("not known to be the best", "record", "the space has changed since"),
    "unknown_source": ("cannot tell whether stale", "record", "the kernel's source is not installed here"),
    "unknown_schema": ("left alone", "record", "another version of tilekern wrote it"),
    "leftovers": ("left over", "file", "set aside as bad, or never finished"),
}
_Fault = dict[str, str]


@command
@click.argument("path", metavar="[PACK|CACHE]", required=False, type=PLACE)
@click.option("--signed", is_flag=True, help="Also fail if a record is not signed by a trust root.")
@cache_dir
@as_json
@click.pass_context
def verify(context: click.Context, path: Path | None, signed: bool, store: Store, as_json: bool) -> None:
    """Check every record, artifact and signature of a pack or a cache; exit code 1 if one is broken.

    Stale records, those that are not known to be the best any more, and those that others can write (which no job
    loads) are reported but are not a fault. A reason is printed once, with how many files it holds for and the first
    of them; --json names all. A folder that --cache-dir names must exist; the user's own cache may be empty.

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
    print_result(document, as_json, lambda: _print(document))
    untrusted = document["records"] - document["signatures"]["trusted"]
    if untrusted and signed and not as_json:
        tell(f"{count(untrusted, 'record')} without a trust root's signature, which signed trust needs")
    if document["broken"] or (untrusted and signed):
        context.exit(1)


def _of_cache(store: Store) -> dict[str, Any]:
    states: dict[str, list[str]] = {name: [] for name in (*_STATES.values(), "unknown_schema")}
    bad: list[_Fault] = []
    exposed: list[_Fault] = []
    # Per path: which file it was, and name, digest and size of each artifact. Little enough for 100,000 records.
    records: dict[str, tuple[tuple[int, int, int] | None, tuple[tuple[str, str, int], ...]]] = {}
    survey, names = _Survey(), signature_names(store.root)

    @functools.cache
    def folder_exposure(folder: str) -> str | None:
        return _refusal(lambda: require_unshared_folders(store.root, Path(folder)))

    def exposure(path: str) -> str | None:
        problem = folder_exposure(os.path.dirname(path))
        return problem or _refusal(lambda: require_unshared(path, os.stat(path)))

    def read(path: PurePosixPath) -> bytes:
        if path.name not in names.get(path.name[:64], ()):
            raise Missing(f"there is no {path}")
        return read_whole(store.root / path, SIGNATURE_BYTES + 1)[0]

    for entry, data in store.read_entries():
        path = str(entry.path)
        if entry.record is None and entry.unknown_schema:
            states["unknown_schema"].append(path)
        elif entry.record is None:
            bad.append(_fault(path, str(entry.problem)))
        else:
            artifacts = entry.record.artifacts.items()
            records[path] = entry.identity, tuple((sys.intern(name), one.sha256, one.size) for name, one in artifacts)
            _note_state(states, path, entry.record)
            if not others_may_write() and (exposed_by := exposure(path)):
                exposed.append(_fault(path, exposed_by))
            digest = hashlib.sha256(data).hexdigest()
            if files := names.get(digest):
                survey.add(path, data, signature_files(store.root, digest, files), read)
            else:
                survey.counted["unsigned"] += 1
    blobs = {blob.sha256: str(blob.path) for blob in store.blobs()}
    referred = {digest for _, named in records.values() for _, digest, _ in named}
    sizes = {digest: _size_or_problem(store, digest) for digest in sorted(referred | blobs.keys())}
    for path, (identity, named) in records.items():
        problems = []
        for name, digest, size in named:
            found = sizes[digest]
            if isinstance(found, str):
                problems.append(f"artifact {name}: {found}")
            elif found != size:
                problems.append(f"artifact {name}: blob {digest} has {found} bytes, and the record says {size}")
        # A record that was deleted or rewritten meanwhile is not at fault.
        if problems and _is_still(path, identity):
            bad += [_fault(path, problem) for problem in problems]
    orphans = sorted(blobs.keys() - referred)
    bad += [_fault(blobs[digest], problem) for digest in orphans if isinstance(problem := sizes[digest], str)]
    return {
        "cache_dir": str(store.root),
        "records": len(records),
        "blobs": len(blobs),
        "broken": bad + survey.bad,
        **states,
        "orphans": len(orphans),
        "leftovers": [str(path) for path in store.leftovers()],
        "signatures": survey.document(),
        "exposed": exposed,
    }


def _of_pack(path: Path) -> dict[str, Any]:
    states: dict[str, list[str]] = {name: [] for name in _STATES.values()}
    document: dict[str, Any] = {"pack": str(path), "records": 0, "blobs": 0, "broken": [], **states}
    survey = _Survey()
    try:
        pack = Pack(path)
        records = [record for record, _ in checked_contents(pack)]
        signatures = pack.signatures()
        for name in pack.records.values():
            if its_own := signatures.get(pack.members[name].sha256):
                survey.add(name, pack.read(name), its_own, lambda file: pack.read(str(file)))
            else:
                survey.counted["unsigned"] += 1
        document["records"] = len(records)
        document["blobs"] = len(frozenset().union(*(record.digests for record in records)))
        document["broken"] = survey.bad
        for record in records:
            _note_state(states, str(record.address.path), record)
    except UnknownSchema:
        raise
    except Corrupt as error:
        survey = _Survey()
        document["broken"] = [_fault(str(path), str(error))]
    return {**document, "signatures": survey.document()}


def _note_state(states: Mapping[str, list[str]], path: str, record: Record) -> None:
    state = freshness_of(record)
    if state in _STATES:
        states[_STATES[state]].append(path)


def _is_still(path: str, identity: tuple[int, int, int] | None) -> bool:
    try:
        return identity_of(os.stat(path)) == identity
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _refusal(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Untrusted as error:
        return str(error)
    except OSError:
        return None
    return None


def _fault(path: str, problem: str) -> _Fault:
    return {"path": path, "problem": problem}


def _size_or_problem(store: Store, digest: str) -> int | str:
    try:
        return len(store.read_blob(digest))
    except Missing:
        return f"blob {digest} is missing"
    except CacheError as error:
        return str(error)


class _Survey:
    """Numbers of trusted, foreign, unsigned and revoked records, and wrong signatures."""

    def __init__(self) -> None:
        self.counted = Counter({"trusted": 0, "other_key": 0, "unsigned": 0, "revoked": 0})
        self.bad: list[_Fault] = []
        self._by: Counter[str] = Counter()
        self._unchecked: str | None = None
        self._signers = Signers()

    def add(self, path: str, data: bytes, signatures: Mapping[str, bytes], read: Reader) -> None:
        """Count a record that has signatures or seals.

        Args:
            path: the record's file.
            data: its bytes.
            signatures: contents of its signature files by public key.
            read: reads a file beside it.
        """
        try:
            if self._signers.is_revoked(data):
                self.counted["revoked"] += 1
                return
            signer = self._signers.signer_of(data, read)
            wrong = [key for key, text in signatures.items() if not is_signed(key, data, text)]
        except CacheError as error:
            self._unchecked, signer, wrong = str(error), None, []
        self.bad += [_fault(path, f"the signature of key {key[:16]} is not its own") for key in wrong]
        self._by.update([signer] if signer else [])
        signed_by_others = len(signatures) > len(wrong)
        self.counted["trusted" if signer else "other_key" if signed_by_others else "unsigned"] += 1

    def document(self) -> dict[str, Any]:
        """Return the part of the document about signatures."""
        by = dict(sorted(self._by.items()))
        return {**self.counted, "by": by, "bad": self.bad, "unchecked": self._unchecked}


def _print(document: dict[str, Any]) -> None:
    lines: list[str] = []
    for section, (title, thing) in _FAULTS.items():
        items = [(item["path"], item["problem"]) for item in document.get(section, [])]
        lines += _by_reason(title, thing, items)
    for section, (title, thing, reason) in _NOTES.items():
        lines += _by_reason(title, thing, [(path, reason) for path in document.get(section, [])])
    broken = len({item["path"] for item in document["broken"]})
    lines.append(
        f"{document.get('pack') or document['cache_dir']}: {count(document['records'], 'record')}, "
        f"{count(document['blobs'], 'blob')}, {document.get('orphans', 0)} without a record; {broken} broken, "
        f"{len(document['stale'])} stale"
    )
    signatures = document["signatures"]
    if signatures["unchecked"]:
        lines.append(f"some signatures were not checked: {signatures['unchecked']}")
    by = ", ".join(f"{number} by {name}" for name, number in signatures["by"].items())
    revoked = f", {signatures['revoked']} revoked" if signatures["revoked"] else ""
    tell(
        *lines,
        f"signatures: {signatures['trusted']} trusted{f' ({by})' if by else ''}, "
        f"{signatures['other_key']} by keys that are not trust roots, {signatures['unsigned']} unsigned{revoked}",
    )


def _by_reason(title: str, thing: str, faults: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each reason once, with the number of files that it holds for and the first of them.

    Reasons that differ only in digests, in numbers, or in the file that they name, are one.
    """
    alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path, problem in faults:
        alike[_VARYING.sub("…", problem.replace(path, "…"))].append((path, problem))
    for reason, found in alike.items():
        paths, texts = list(dict.fromkeys(path for path, _ in found)), {problem for _, problem in found}
        if len(paths) == 1:
            yield from (f"{title}: {path}: {problem}" for path, problem in found)
            continue
        yield f"{title}: {count(len(paths), thing)}: {texts.pop() if len(texts) == 1 else reason}"
        yield from (f"  {path}" for path in paths[:_NAMED])
        if len(paths) > _NAMED:
            yield f"  and {len(paths) - _NAMED:,} more, which --json names"
