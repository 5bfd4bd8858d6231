"""Ed25519 keys and signatures of records; only this file uses ``cryptography``, the extra ``tilekern[trust]``.

A signature covers a line that names the purpose, then the record's bytes, which name the sha256 of every artifact. It
stays valid wherever the record is copied.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilekern.cache.errors import CacheError, Corrupt
from tilekern.cache.files import read_whole, write_whole

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PURPOSE = b"tilekern record signature 1\n"
SIGNATURE_BYTES = 129
_SIGNATURE = re.compile(rb"[0-9a-f]{128}\n")
_LARGEST_KEY = 2**16


class SigningKey:
    """A private key, read from the file that :func:`generate_key` wrote.

    Attributes:
        public_key: the public half, 32 bytes in hexadecimal.

    Raises:
        CacheError: the file cannot be read, others can read it, or it is not an Ed25519 key.
    """

    def __init__(self, path: Path) -> None:
        data, status = read_whole(path, _LARGEST_KEY)
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise CacheError(f"others can read the private key {path} (mode {mode:04o}); run chmod 600 on it")
        ed25519 = _ed25519()
        from cryptography.exceptions import InternalError, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        key: object = None
        # InternalError: an X448 key of 32 bytes.
        with contextlib.suppress(ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            key = load_pem_private_key(data, None)
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise CacheError(f"{path} is not an Ed25519 private key in PEM without a password; `keygen` makes one")
        self._key: Ed25519PrivateKey = key
        self.public_key = self._key.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes, purpose: bytes = PURPOSE) -> bytes:
        """Return the signature of data as a file's contents: hexadecimal digits and a newline.

        Args:
            data: the bytes, by default of a record.
            purpose: a line that names what the data is; a signature is valid for one purpose only.
        """
        return f"{self._key.sign(purpose + data).hex()}\n".encode()


def generate_key(path: Path) -> str:
    """Write a new private key to ``path`` (PEM, PKCS #8, readable only by its owner); return the public half.

    Raises:
        CacheError: the file exists already, or cannot be written.
    """
    ed25519 = _ed25519()
    from cryptography.hazmat.primitives import serialization

    if os.path.lexists(path):
        raise CacheError(f"{path} exists already, and a key is never overwritten; give another name")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        write_whole(path, pem, mode=0o600)
    except OSError as error:
        raise CacheError(f"cannot write {path}: {error.strerror}") from None
    return str(key.public_key().public_bytes_raw().hex())


def is_signed(public_key: str, data: bytes, signature: bytes, purpose: bytes = PURPOSE) -> bool:
    """Return whether ``signature``, as in its file, is a key's signature of data for this purpose.

    Raises:
        CacheError: ``cryptography`` is not installed.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    if not _SIGNATURE.fullmatch(signature):
        return False
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature[:128].decode()), purpose + data)
    except (InvalidSignature, ValueError):
        return False
    return True


def check_signature(data: bytes) -> bytes:
    """Return ``data`` if it has the form of a signature's file, else raise Corrupt."""
    if not _SIGNATURE.fullmatch(data):
        raise Corrupt(f"a signature must be 128 lower-case hexadecimal digits and a newline, got {data!r:.60}")
    return data


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise CacheError("signatures need cryptography: pip install 'tilekern[trust]'") from None
    return ed25519
