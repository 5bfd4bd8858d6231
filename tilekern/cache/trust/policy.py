"""Which records may be loaded: the policy ``TILEKERN_TRUST``, trust roots, signatures beside records, and seals.

Under ``signed`` a record of any layer is loaded only if

- a trust root signed its bytes (:mod:`tilekern.cache.trust.signing`);
- or it has the seal of this user: a keyed digest that only this user's processes can make, for records that they tuned
  or compiled themselves under this policy;
- or it is in the wheel's own packs, which are as trusted as the code beside them.

A record that a trust root has revoked (:mod:`tilekern.cache.trust.revoking`) is loaded only from the wheel's packs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tilekern.cache.absolute_paths import absolute
from tilekern.cache.errors import CacheError, Missing, NoSecret, Untrusted
from tilekern.cache.files import read_whole
from tilekern.cache.folders import files_inside, unlink_below
from tilekern.cache.keys import (
    LAYOUT,
    SEAL_SUFFIX,
    SIGNATURES,
    is_signature_name,
    parse_signature_path,
    signature_path,
)
from tilekern.cache.trust.exposure import require_unshared_up
from tilekern.cache.trust.revoking import revoked_beside
from tilekern.cache.trust.seals import keyed, secret, settings_folder
from tilekern.cache.trust.signing import PURPOSE, SIGNATURE_BYTES, check_signature, is_signed
from tilekern.warning import warn_once

POLICIES = ("any", "signed")
ROOTS = "TILEKERN_TRUST_ROOTS"
_LARGEST_ROOTS = 2**20
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")
_ROOT = re.compile(r"ed25519 ([0-9a-f]{64})(?: +(.*))?")

Reader = Callable[[PurePosixPath], bytes]


class TrustRoot(NamedTuple):
    """A public key whose signatures count: 32 bytes in hexadecimal, and the name of its owner."""

    public_key: str
    name: str


def must_be_signed() -> bool:
    """Return whether the policy is ``signed``.

    Raises:
        CacheError: ``TILEKERN_TRUST`` is neither ``any`` nor ``signed``.
    """
    policy = os.environ.get("TILEKERN_TRUST") or "any"
    if policy not in POLICIES:
        raise CacheError(f"TILEKERN_TRUST must be one of {', '.join(POLICIES)}, got {policy!r}")
    return policy == "signed"


def require_trusted(record: bytes, read: Reader) -> None:
    """Refuse a record that neither a trust root signed nor this user sealed, or that a trust root has revoked.

    Args:
        record: the bytes of its file.
        read: returns a file of the layer by its path, or raises Missing.

    Raises:
        Untrusted: it is refused, or its signature cannot be checked.
    """
    signers = Signers()
    try:
        if signers.is_revoked(record):
            raise Untrusted("a trust root has revoked it, and TILEKERN_TRUST is signed")
        if signers.signer_of(record, read) is None:
            raise Untrusted("no trust root signed it, and TILEKERN_TRUST is signed")
    except Untrusted:
        raise
    except CacheError as error:
        raise Untrusted(f"its signature cannot be checked: {error}") from None


class Signers:
    """Trusted signers: the trust roots, and this user by seals. Files are read once, when first needed."""

    def is_revoked(self, record: bytes) -> bool:
        """Return whether a trust root has revoked the record with these bytes.

        Raises:
            CacheError: the trust roots or a list beside them cannot be read, or checking one needs ``cryptography``.
        """
        return bool(self._revoked) and hashlib.sha256(record).hexdigest() in self._revoked

    def signer_of(self, record: bytes, read: Reader) -> str | None:
        """Return the name of the trust root that signed a record, ``"this user"`` if it is sealed, or None.

        Arguments are those of :func:`require_trusted`.

        Raises:
            CacheError: the trust roots, the seal's secret or a signature cannot be read, or checking one needs
                ``cryptography``.
        """
        digest = hashlib.sha256(record).hexdigest()
        if self._secret:
            with contextlib.suppress(Missing):
                if hmac.compare_digest(read(_seal_path(digest, self._secret)), _seal(record, self._secret)):
                    return "this user"
        for root in self._roots:
            with contextlib.suppress(Missing):
                if is_signed(root.public_key, record, read(signature_path(digest, root.public_key))):
                    return root.name
        return None

    @functools.cached_property
    def _secret(self) -> bytes:
        return secret()

    @functools.cached_property
    def _roots(self) -> tuple[TrustRoot, ...]:
        return trust_roots()

    @functools.cached_property
    def _revoked(self) -> frozenset[str]:
        folders = (path.parent for path in _root_files())
        return revoked_beside(folders, lambda: {root.public_key for root in self._roots})


def _root_files() -> list[Path]:
    listed = [absolute(item) for item in os.environ.get(ROOTS, "").split(os.pathsep) if item]
    return listed or [user_trust_roots()]


def trust_roots() -> tuple[TrustRoot, ...]:
    """Return the keys in the files that ``TILEKERN_TRUST_ROOTS`` lists, else in the user's file.

    Raises:
        CacheError: a file cannot be read, others can change it, or a line of it is not a key.
    """
    if os.environ.get(ROOTS, "").strip(os.pathsep):
        return tuple(root for path in _root_files() for root in read_trust_roots(path))
    with contextlib.suppress(Missing):
        return tuple(read_trust_roots(user_trust_roots()))
    return ()


def read_trust_roots(path: Path) -> Iterator[TrustRoot]:
    """Yield the keys of one file; a line is ``ed25519 <64 hexadecimal digits> <name>``, empty, or starts with ``#``.

    Raises:
        Untrusted: others can change or replace it (:func:`require_unshared_up`).
        CacheError: it cannot be read, is a private key, or has another line. The message shows none of its contents.
    """
    data, _ = read_whole(path, _LARGEST_ROOTS)
    require_unshared_up(path)
    if _PRIVATE_KEY.search(data):
        raise CacheError(f"{path} is a private key, which stays with its owner; name the .pub file beside it")
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            match = _ROOT.fullmatch(text)
            if match is None:
                # The line is not shown: it may be part of a secret.
                raise CacheError(f"{path}, line {number} is not a trust root, `ed25519 HEX-DIGITS NAME`")
            yield TrustRoot(match[1], match[2] or match[1][:16])


def user_trust_roots() -> Path:
    """Return the user's file of trust roots, in the platform's folder for settings."""
    return settings_folder() / "trust-roots"


def own_seal(record: bytes) -> dict[PurePosixPath, bytes]:
    """Return the path and contents of the seal of a record that this process made; make a missing secret.

    The result is empty if the policy needs no seals; also, with one warning, if the secret cannot be written, as in a
    read-only home: the record is then unsigned, and other machines may still use it.

    Raises:
        CacheError: the secret cannot be read, or ``TILEKERN_TRUST`` is not a policy.
    """
    if not must_be_signed():
        return {}
    try:
        key = secret(make=True)
    except NoSecret as error:
        warn_once(
            f"{error}; records made here are not sealed as yours, and not loaded under TILEKERN_TRUST=signed unless a "
            "trust root signs them; set XDG_CONFIG_HOME to another folder for the secret",
            about="no secret of seals",
        )
        return {}
    return {_seal_path(hashlib.sha256(record).hexdigest(), key): _seal(record, key)}


def read_signatures(root: Path, record_sha256: str) -> dict[str, bytes]:
    """Return the signatures that a cache folder has for a record, by public key; leave out other contents."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(root.joinpath(LAYOUT, SIGNATURES, record_sha256[:2]))
    found = {}
    for public_key, data in signature_files(root, record_sha256, names).items():
        with contextlib.suppress(CacheError):
            found[public_key] = check_signature(data)
    return found


def signature_files(root: Path, record_sha256: str, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of a record's signature files, out of ``names``, by public key.

    They need not be signatures; a file that cannot be read counts as empty.
    """
    files = {}
    folder = (LAYOUT, SIGNATURES, record_sha256[:2])
    for name in sorted(names):
        if name.startswith(record_sha256):
            with contextlib.suppress(CacheError):  # the name of a seal
                _, public_key = parse_signature_path((*folder, name))
                try:
                    files[public_key] = read_whole(root.joinpath(*folder, name), SIGNATURE_BYTES + 1)[0]
                except Missing:
                    continue
                except CacheError:
                    files[public_key] = b""
    return files


def signature_names(root: Path) -> dict[str, set[str]]:
    """Return the names of all signatures and seals in a cache folder by the sha256 of the record's bytes."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, _, names in os.walk(root / LAYOUT / SIGNATURES):
        for name in names:
            found[name[:64]].add(name)
    return found


def remove_signatures(root: Path, kept: Collection[str], older_than: float) -> None:
    """Delete signatures and seals of records that are not among the sha256 in ``kept``.

    Files that are younger than ``older_than``, in seconds since 1970, may be waiting for their record and stay.
    """
    for path in files_inside(root, LAYOUT, SIGNATURES):
        if is_signature_name(path.name) and path.name[:64] not in kept:
            with contextlib.suppress(OSError):
                if os.lstat(root / path).st_mtime < older_than:
                    unlink_below(root, path)


def _seal(record: bytes, key: bytes) -> bytes:
    return f"{keyed(key, PURPOSE + record)}\n".encode()


def _seal_path(record_sha256: str, key: bytes) -> PurePosixPath:
    """Return a seal's path; its name has a digest of the secret because several users may share a cache."""
    user = hashlib.sha256(b"the name of a seal\n" + key).hexdigest()
    return PurePosixPath(LAYOUT, SIGNATURES, record_sha256[:2], f"{record_sha256}.{user}{SEAL_SUFFIX}")
