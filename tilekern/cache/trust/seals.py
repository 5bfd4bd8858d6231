"""Seals: keyed digests by which this user's processes recognise what they made themselves.

The key is a secret in the user's settings, made when it is first needed. A seal means nothing to anybody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
from pathlib import Path

from tilekern.cache.absolute_paths import platform_folder
from tilekern.cache.errors import CacheError, Missing, NoHome, NoSecret
from tilekern.cache.files import make_folder, read_whole, write_whole
from tilekern.cache.trust.exposure import require_unshared_up
from tilekern.warning import warn_once

_SECRET = re.compile(rb"[0-9a-f]{64}\n")


class Sealer:
    """Seals data of one purpose for readers of this user.

    If the settings cannot be written, the secret belongs to this process alone, and no other recognises its seals.

    Args:
        purpose: one line that names what the data is; seals of another purpose are not valid.
    """

    def __init__(self, purpose: bytes) -> None:
        self._purpose = purpose
        self._secret = b""

    def seal(self, data: bytes) -> str:
        """Return the seal in hexadecimal; make the secret if there is none.

        Raises:
            CacheError: the secret is damaged, or others can read or replace it.
        """
        if not self._secret:
            self._secret = secret()
        if not self._secret:
            try:
                self._secret = secret(make=True)
            except NoSecret as error:
                warn_once(f"{error}; what this run compiles, a later run compiles anew", "the secret of seals")
                if not _PASSING:
                    _PASSING.append(os.urandom(32))
                self._secret = _PASSING[0]
        return keyed(self._secret, self._purpose + data)

    def is_sealed(self, data: bytes, seal: object) -> bool:
        """Return whether ``seal`` is this user's for ``data``; raises as :meth:`seal` does, but makes no secret."""
        if not isinstance(seal, str) or not seal.isascii():
            return False
        if not self._secret:
            self._secret = secret()
        return any(
            hmac.compare_digest(keyed(known, self._purpose + data), seal)
            for known in (self._secret, *_PASSING)
            if known
        )


# The secret of a process that could not write one; at most one.
_PASSING: list[bytes] = []


def keyed(key: bytes, data: bytes) -> str:
    """Return the digest of data under a key, in hexadecimal."""
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def secret(make: bool = False) -> bytes:
    """Return the user's secret; empty if there is none and none is to be made.

    Raises:
        CacheError: it is damaged, or others can read or replace it.
        NoSecret: it is missing and cannot be written.
    """
    try:
        path = settings_folder() / "seal.key"
        data, status = read_whole(path, 2**10)
    except NoHome as error:
        if make:
            raise NoSecret(str(error)) from None
        return b""
    except Missing:
        if not make:
            return b""
        ours = path.with_name(f".{os.urandom(12).hex()}.tmp")
        try:
            make_folder(path.parent)
            write_whole(ours, f"{os.urandom(32).hex()}\n".encode(), mode=0o600)
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(ours, path)
        except OSError as error:
            raise NoSecret(f"cannot write the secret of your seals, {path}: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                ours.unlink(missing_ok=True)
        return secret()
    if status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise CacheError(f"{path} must be yours and readable only by you; run chmod 600 on it, or delete it")
    require_unshared_up(path)
    if not _SECRET.fullmatch(data):
        raise CacheError(f"{path} is damaged; delete it, and sign or tune again what it sealed")
    return data


def settings_folder() -> Path:
    """Return the platform's folder for this user's settings of tilekern.

    Raises:
        NoHome: it would be in the user's home, and the user has none.
    """
    import platformdirs  # slow to import, and seldom needed

    return platform_folder(platformdirs.user_config_path, "settings; set XDG_CONFIG_HOME to a folder")
