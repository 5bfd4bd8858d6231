"""Packs: made of chosen records of a cache, and read as an installation reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tilekern.cache import PACK_SUFFIX, CacheError, Missing, Pack, Record, Store, checked_contents, write_pack
from tilekern.cache.trust.policy import read_signatures
from tilekern.cache_tools.shared.selection import Selection


@dataclass(frozen=True)
class Contents:
    """A pack that was checked from end to end.

    Attributes:
        path: the file.
        sha256: digest of the file.
        size_bytes: size of the file.
        records: paths of the records below a cache's root, sorted.
        targets: the target keys, sorted.
        toolkits: the toolkit keys, sorted.
    """

    path: Path
    sha256: str
    size_bytes: int
    records: tuple[str, ...]
    targets: tuple[str, ...]
    toolkits: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the part of a JSON document that describes the pack."""
        return {
            "sha256": self.sha256,
            "bytes": self.size_bytes,
            "records": len(self.records),
            "targets": list(self.targets),
            "toolkits": list(self.toolkits),
        }


def read_contents(path: Path) -> Contents:
    """Check a pack as an installation does, and describe its contents.

    Raises:
        Corrupt: anything in the pack is wrong.
        UnknownSchema: another version of tilekern wrote it.
        CacheError: it cannot be read.
    """
    addresses = [record.address for record, _ in checked_contents(Pack(path))]
    return Contents(
        path,
        sha256_of(path),
        path.stat().st_size,
        tuple(sorted(str(address.path) for address in addresses)),
        tuple(sorted({address.target_key for address in addresses})),
        tuple(sorted({address.toolkit_key for address in addresses})),
    )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal.

    Raises:
        Missing: there is no such file.
        CacheError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise Missing(f"there is no {path}") from None
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from None


@contextmanager
def packs_or_selected(
    packs: Sequence[Path], store: Store, selection: Selection
) -> Iterator[tuple[list[Contents], int]]:  # fmt: skip
    """Yield the given packs, or without any a temporary one of selected records; and how many were unreadable.

    Raises:
        CacheError: packs and filters were both given, a pack is bad, or no pack can be made of the records.
    """
    if packs and not selection.is_empty:
        raise CacheError("--pack takes a pack as it is, with no filters; leave one of them out")
    with TemporaryDirectory() as folder:
        left_out = 0
        if not packs:
            packs = [Path(folder, f"records{PACK_SUFFIX}")]
            _, left_out = write_selected(store, packs[0], selection)
        yield [read_contents(pack) for pack in packs], left_out


def check_suffix(path: Path) -> None:
    """Raise CacheError if a file does not have the name of a pack."""
    if path.suffix != PACK_SUFFIX:
        raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {path.name!r}")


def write_selected(
    store: Store, path: Path, selection: Selection, is_needed: Callable[[Record], bool] = lambda _: True
) -> tuple[int, int]:
    """Write a pack of the selected records that are needed, with their blobs and signatures.

    Returns:
        The number of records in the pack, and of unreadable ones that were left out.

    Raises:
        CacheError: the file's name is wrong, no record is selected, a record or a blob is bad, a folder that may hold
            selected records cannot be listed, or the file cannot be written.
    """
    check_suffix(path)
    signatures: dict[str, dict[str, bytes]] = {}
    written = left_out = 0

    def chosen() -> Iterator[tuple[Record, dict[str, bytes]]]:
        nonlocal written, left_out
        for entry in filter(selection.matches, store.entries(selection.where)):
            record = entry.record
            if entry.is_folder:
                raise CacheError(f"{entry.problem}; its records would be missing from the pack")
            if record is None:
                left_out += 1
            elif is_needed(record):
                try:
                    text = record.to_json()
                except CacheError as error:
                    raise CacheError(f"{entry.path}: {error}; remove it or tune it again") from None
                digest = hashlib.sha256(text.encode()).hexdigest()
                signatures[digest] = read_signatures(store.root, digest)
                yield record, _blobs_of(store, entry.path, record)
                written += 1
        if not written:
            raise CacheError(
                f"no record in {store.root} matches, and a pack must hold at least one; `ls` lists what is there"
            )

    return write_pack(path, chosen(), signatures), left_out


def _blobs_of(store: Store, path: Path, record: Record) -> dict[str, bytes]:
    """Return the blobs of the record at ``path``.

    Raises:
        CacheError: one is missing or bad.
    """
    blobs = {}
    for name, artifact in record.artifacts.items():
        try:
            blobs[artifact.sha256] = store.read_blob(artifact.sha256)
        except CacheError as error:
            raise type(error)(f"{path}: artifact {name}: {error}; `verify` lists what is broken") from None
    return blobs
