"""The lines of a sweep's journals that count: this user's, which carry a seal, and those that a trust root signed.

A sweep folder says of itself which cubin belongs to which candidate, and how fast it was; whoever can write the folder
can write that. So each line that a record is made of is sealed when it is appended (:mod:`tilekern.cache.trust.seals`).
Lines without the seal are passed over as if they were not there, and what they are about is done anew. A folder that
another user or machine compiled is signed for those who take it over, an artifact a line of ``signatures.jsonl``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilekern.cache import CacheError
from tilekern.cache.trust.exposure import others_may_write, require_unshared
from tilekern.cache.trust.policy import TrustRoot, trust_roots
from tilekern.cache.trust.seals import Sealer
from tilekern.cache.trust.signing import SigningKey, is_signed
from tilekern.errors import InputError
from tilekern.tuning.sweep.journal import Journal, Line

# The journals that records are made of.
SEALED = ("compiled", "measured", "races", "chosen")
# The one of them whose lines say which machine code runs.
COMPILED = "compiled"
_SEAL = "seal"
_PURPOSE = b"tilekern sweep line 1\n"


class Lines:
    """Seals the lines of one journal, and tells which lines of it count.

    Args:
        name: the journal's.
        signatures: the sweep's journal of signatures.
        foreign: whether every line counts, whoever wrote it.

    Attributes:
        others: how many lines were read that neither this user wrote nor a trust root signed.
    """

    def __init__(self, name: str, signatures: Journal, *, foreign: bool) -> None:
        self._is_sealed = name in SEALED
        self._is_code = name == COMPILED
        self._sealer = Sealer(_PURPOSE + name.encode() + b"\n")
        self._signatures = signatures
        self._foreign = foreign
        self._known_roots: tuple[TrustRoot, ...] | None = None
        self.others = 0

    def sealed(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the line as it is appended.

        Raises:
            CacheError: the secret of seals is damaged, or others can read or replace it.
        """
        return {**line, _SEAL: self._sealer.seal(_text(line))} if self._is_sealed else line

    def count(self, line: Line) -> bool:
        """Return whether a line counts: this user wrote it, a trust root signed it, or all count.

        Raises:
            CacheError: the secret of seals or the trust roots cannot be read, and not any line counts.
        """
        if not self._is_sealed:
            return True
        text = _text(line)
        try:
            if self._sealer.is_sealed(text, line.get(_SEAL)) or (self._is_code and self._is_signed(text)):
                return True
        except CacheError:
            if not self._foreign:
                raise
        self.others += 1
        return self._foreign

    def _is_signed(self, text: bytes) -> bool:
        found = self._signatures.latest()
        if not found:
            return False
        if self._known_roots is None:
            self._known_roots = trust_roots()
        names = {root.public_key: _signature_name(text, root.public_key) for root in self._known_roots}
        return any(
            is_signed(key, text, found[name]["signature"].encode(), _PURPOSE)
            for key, name in names.items()
            if name in found
        )


def signatures_of(lines: Iterable[Line], key: SigningKey) -> list[Line]:
    """Return the signatures of lines of ``compiled.jsonl``, as lines of ``signatures.jsonl``."""
    texts = map(_text, lines)
    return [
        {"signed": _signature_name(text, key.public_key), "signature": key.sign(text, _PURPOSE).decode()}
        for text in texts
    ]


def require_own_folder(folder: Path, names: Iterable[str]) -> None:
    """Refuse a sweep folder that others than this user and root can write, or that has links in it.

    Args:
        folder: the sweep folder; one that is not there yet is not refused.
        names: of the files and folders in it that are read.

    Raises:
        InputError: it is one; ``TILEKERN_TRUST_SHARED=1`` allows that others write it.
    """
    for path in (folder / name for name in names):
        if path.is_symlink():
            raise InputError(f"{path} is a link; the files of a sweep folder are its own, so use a copy")
    if others_may_write():
        return
    for path in (folder, *(folder / name for name in names)):
        try:
            require_unshared(path, os.lstat(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise InputError(f"cannot tell who can write {path}: {error.strerror}") from None
        except CacheError as error:
            raise InputError(f"the sweep folder {folder} is not used: {error}") from None


def _text(line: Mapping[str, Any]) -> bytes:
    """Return the part of a line that is sealed and signed: all but the seal."""
    return json.dumps({name: line[name] for name in line if name != _SEAL}, sort_keys=True).encode()


def _signature_name(text: bytes, public_key: str) -> str:
    return f"{hashlib.sha256(text).hexdigest()}|{public_key}"
