"""The form and contents of a pack, found by reading all of it as an installation would."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekern.cache import CacheError, Missing, Pack, checked_contents


@dataclass(frozen=True)
class Contents:
    """A pack that was checked from end to end.

    Attributes:
        path: the file.
        sha256: of the file.
        size_bytes: of the file.
        records: their paths below a cache's root, sorted.
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
        """The part of a JSON document that says what is in the pack."""
        return {
            "sha256": self.sha256,
            "bytes": self.size_bytes,
            "records": len(self.records),
            "targets": list(self.targets),
            "toolkits": list(self.toolkits),
        }


def read_contents(path: Path) -> Contents:
    """Check a pack as an installation does, and say what is in it.

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
    """The sha256 of a file, in hexadecimal.

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
