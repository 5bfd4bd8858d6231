"""Who can write what a job would load: a record that others can put there or change is code that others can run."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from tilekern.cache.errors import Untrusted

SHARED = "TILEKERN_TRUST_SHARED"


def others_may_write() -> bool:
    """Whether records are loaded from places that others can write (``TILEKERN_TRUST_SHARED=1``)."""
    return os.environ.get(SHARED, "0") not in ("", "0")


def require_unshared(path: str | Path, status: os.stat_result) -> None:
    """Refuse a file or folder that others than this user and root can write; ``status`` is what is known of it.

    In a folder with the sticky bit (/tmp) nobody moves or replaces what is another's, and what others add there is
    refused as theirs.

    Raises:
        Untrusted: its group or everybody may write it, or it belongs to another user who is not root.
    """
    remedy = f"or set {SHARED}=1 where all who can write there may run code as you"
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"{path} belongs to another user (uid {status.st_uid}); use a copy of your own, {remedy}")
    if status.st_mode & 0o022 and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        raise Untrusted(f"{path} can be written by others (mode {mode:04o}); run chmod -R go-w on it, {remedy}")


def require_unshared_folders(root: Path, folder: Path) -> None:
    """Refuse a folder below ``root``, where others can write it, ``root`` or one between.

    Raises:
        Untrusted: as :func:`require_unshared` says.
        OSError: one of them is not there any more.
    """
    for place in (root, *reversed([f for f in folder.parents if f.is_relative_to(root) and f != root]), folder):
        require_unshared(place, _status(place))


def _status(folder: Path) -> os.stat_result:
    try:
        return os.stat(folder)
    except OSError as error:
        # As in read_whole: a client of a network file system says so of what another one has just replaced.
        if error.errno != errno.ESTALE:
            raise
        return os.stat(folder)
