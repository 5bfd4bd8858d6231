"""Rules of what may be loaded: the policy ``TILEKERN_TRUST``, the trust roots, signatures beside records, and seals.

Under ``signed`` a record is loaded only where one of these holds, whatever layer it stands in:

- a trust root signed its bytes (:mod:`tilekern.cache.trust.signing`);
- it carries the seal of this user: a keyed digest that only this user's processes can make, and make only for what
  they tuned or compiled themselves, under that policy;
- it stands in the wheel's own packs, which are as trusted as the code beside them.
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

from tilekern.cache.errors import CacheError, Missing, NoSecret, Untrusted
from tilekern.cache.files import read_whole
from tilekern.cache.folders import absolute
from tilekern.cache.keys import LAYOUT, SIGNATURE_SUFFIX, SIGNATURES, parse_signature_path, signature_path
from tilekern.cache.trust.exposure import require_unshared_up
from tilekern.cache.trust.seals import keyed, secret, settings_folder
from tilekern.cache.trust.signing import PURPOSE, SIGNATURE_BYTES, check_signature, is_signed
from tilekern.warning import warn_once

POLICIES = ("any", "signed")
ROOTS = "TILEKERN_TRUST_ROOTS"
SEAL_SUFFIX = ".seal"
_LARGEST_ROOTS = 2**20
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")
_ROOT = re.compile(r"ed25519 ([0-9a-f]{64})(?: +(.*))?")

Reader = Callable[[PurePosixPath], bytes]


class TrustRoot(NamedTuple):
    """A public key whose signatures count: 32 bytes in hexadecimal, and what its owner is called."""

    public_key: str
    name: str


def must_be_signed() -> bool:
    """Whether the policy is ``signed``.

    Raises:
        CacheError: ``TILEKERN_TRUST`` is neither ``any`` nor ``signed``.
    """
    policy = os.environ.get("TILEKERN_TRUST") or "any"
    if policy not in POLICIES:
        raise CacheError(f"TILEKERN_TRUST must be one of {', '.join(POLICIES)}, got {policy!r}")
    return policy == "signed"


def require_trusted(record: bytes, read: Reader) -> None:
    """Let a record pass that a trust root signed or this user sealed.

    Args:
        record: the bytes of its file.
        read: gives a file of the layer by its path, or raises Missing.

    Raises:
        Untrusted: neither did, or it cannot be told.
    """
    try:
        if Signers().signer_of(record, read) is None:
            raise Untrusted("no trust root signed it, and TILEKERN_TRUST is signed")
    except Untrusted:
        raise
    except CacheError as error:
        raise Untrusted(f"its signature cannot be checked: {error}") from None


class Signers:
    """Trusted signers: this user by the secret of seals, and the trust roots; each is read once, when first needed."""

    def signer_of(self, record: bytes, read: Reader) -> str | None:
        """The name of the trust root that signed a record, ``"this user"`` where it is sealed, or None.

        Args:
            record: the bytes of its file.
            read: gives a file of the layer by its path, or raises Missing.

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


def trust_roots() -> tuple[TrustRoot, ...]:
    """The keys whose signatures count: those in the files that ``TILEKERN_TRUST_ROOTS`` lists, else in the user's.

    Raises:
        CacheError: a file cannot be read, others can change it, or a line of it is not a key.
    """
    listed = [absolute(item) for item in os.environ.get(ROOTS, "").split(os.pathsep) if item]
    if listed:
        return tuple(root for path in listed for root in read_trust_roots(path))
    with contextlib.suppress(Missing):
        return tuple(read_trust_roots(user_trust_roots()))
    return ()


def read_trust_roots(path: Path) -> Iterator[TrustRoot]:
    """The keys of one file; a line is ``ed25519 <64 hexadecimal digits> <name>``, or empty, or begins with ``#``.

    Raises:
        Untrusted: others can change or replace it: the file, its folder or one above (:func:`require_unshared_up`).
        CacheError: it cannot be read, is a private key, or has another line; none of it is shown.
    """
    data, _ = read_whole(path, _LARGEST_ROOTS)
    require_unshared_up(path)
    if _PRIVATE_KEY.search(data):
        raise CacheError(f"{path} is a private key, which stays with its owner; name the .pub file beside it")
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            found = _ROOT.fullmatch(text)
            if found is None:
                # The line is not shown: it may be a part of a secret.
                raise CacheError(f"{path}, line {number} is not a trust root, `ed25519 HEX-DIGITS NAME`")
            yield TrustRoot(found[1], found[2] or found[1][:16])


def user_trust_roots() -> Path:
    """The user's file of trust roots, in the platform's folder for settings."""
    return settings_folder() / "trust-roots"


def seal_of(record: bytes) -> tuple[PurePosixPath, bytes]:
    """The path of this user's seal for a record, and the seal; a missing secret is made.

    Raises:
        NoSecret: there is none, and it cannot be written.
        CacheError: the secret cannot be read.
    """
    key = secret(make=True)
    return _seal_path(hashlib.sha256(record).hexdigest(), key), _seal(record, key)


def own_seal(record: bytes) -> dict[PurePosixPath, bytes]:
    """The path of the seal of a record that this user's own process made, and the seal.

    It is empty where the policy asks for none. So it is, with one warning, where the secret of seals cannot be written,
    as in a home that is read-only: the record is then one that nobody signed, which other machines may still use.

    Raises:
        CacheError: the secret cannot be read, or ``TILEKERN_TRUST`` is not a policy.
    """
    if not must_be_signed():
        return {}
    try:
        path, contents = seal_of(record)
    except NoSecret as error:
        warn_once(
            f"{error}; what is made here is not sealed as yours, and not loaded under TILEKERN_TRUST=signed unless a "
            "trust root signs it; XDG_CONFIG_HOME names another folder for the secret",
            about="no secret of seals",
        )
        return {}
    return {path: contents}


def read_signatures(root: Path, record_sha256: str) -> dict[str, bytes]:
    """The signatures that a cache folder holds for a record, by public key; other contents are left out."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(root.joinpath(LAYOUT, SIGNATURES, record_sha256[:2]))
    found = {}
    for public_key, data in signature_files(root, record_sha256, names).items():
        with contextlib.suppress(CacheError):
            found[public_key] = check_signature(data)
    return found


def signature_files(root: Path, record_sha256: str, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of a record's signature files, by public key, be they a signature or not.

    Args:
        root: the cache's root.
        record_sha256: of the record's bytes.
        names: of files, the record's among them; one that cannot be read holds nothing.
    """
    found = {}
    place = (LAYOUT, SIGNATURES, record_sha256[:2])
    for name in sorted(names):
        if name.startswith(record_sha256) and name.endswith(SIGNATURE_SUFFIX):
            with contextlib.suppress(CacheError):
                _, public_key = parse_signature_path((*place, name))
                found[public_key] = _read_or_nothing(root.joinpath(*place, name))
    return found


def _read_or_nothing(path: Path) -> bytes:
    """A signature's file, empty where it cannot be read; raises Missing where it is gone."""
    try:
        return read_whole(path, SIGNATURE_BYTES + 1)[0]
    except Missing:
        raise
    except CacheError:
        return b""


def signature_names(root: Path) -> dict[str, set[str]]:
    """The names of all signatures and seals that a cache folder holds, by the sha256 of the record's bytes."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, _, names in os.walk(root / LAYOUT / SIGNATURES):
        for name in names:
            found[name[:64]].add(name)
    return found


def remove_signatures(root: Path, kept: Collection[str], older_than: float) -> None:
    """Delete signatures and seals of records that are not among ``kept``, by sha256, from files before a time.

    Args:
        root: the cache's root.
        kept: the sha256 of every record's bytes.
        older_than: seconds since 1970; a younger file may be waiting for its record.
    """
    for place, _, names in os.walk(root / LAYOUT / SIGNATURES):
        for name in names:
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                if name[:64] not in kept and os.stat(path).st_mtime < older_than:
                    os.unlink(path)


def _seal(record: bytes, key: bytes) -> bytes:
    return f"{keyed(key, PURPOSE + record)}\n".encode()


def _seal_path(record_sha256: str, key: bytes) -> PurePosixPath:
    """Seals of several users stand side by side, so the name has a digest of the secret."""
    user = hashlib.sha256(b"the name of a seal\n" + key).hexdigest()
    return PurePosixPath(LAYOUT, SIGNATURES, record_sha256[:2], f"{record_sha256}.{user}{SEAL_SUFFIX}")
