"""Find out who can write the files that a job loads: a record that others can write is code that others can run."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from tilekern.cache.errors import CacheError, Untrusted

SHARED = "TILEKERN_TRUST_SHARED"


def others_may_write() -> bool:
    """Return whether records are loaded even if others can write them (``TILEKERN_TRUST_SHARED=1``)."""
    return os.environ.get(SHARED, "0") not in ("", "0")


def require_unshared(path: str | Path, status: os.stat_result) -> None:
    """Refuse a file or folder with this status if anybody but this user and root can write it.

    A folder with the sticky bit (/tmp) is accepted: nobody can replace another user's files there.

    Raises:
        Untrusted: its group or everybody may write it, or it belongs to another user who is not root.
    """
    if exposure := _exposed(path, status):
        problem, remedy = exposure
        raise Untrusted(f"{problem}; {remedy}, or set {SHARED}=1 where all who can write there may run code as you")


def require_unshared_up(path: Path) -> None:
    """Refuse a file that anybody but this user and root can change or replace.

    This checks the file, its folder and those above it, up to the user's home or to the root; for symbolic links also
    the link itself and the folders above its target. ``TILEKERN_TRUST_SHARED`` has no effect here.

    Raises:
        Untrusted: others can write one of them, or it belongs to another user who is not root.
        CacheError: one of them cannot be looked at.
    """
    home = Path(os.path.expanduser("~"))
    resolved: Path | None = Path(os.path.abspath(path))
    while resolved is not None:
        parents = resolved.parents
        above = [folder for folder in parents if folder.is_relative_to(home)] if home in parents else parents
        for place in (resolved, *above):
            try:
                status = os.lstat(place)
            except OSError as error:
                raise CacheError(f"cannot tell who can write {place}: {error.strerror}") from None
            if exposure := _exposed(place, status):
                problem, remedy = exposure
                raise Untrusted(f"{path} is not used: {problem}; {remedy.replace(' -R', '')}")
        # Then the path with its first symbolic link resolved.
        link = next((place for place in (*reversed(parents), resolved) if place.is_symlink()), None)
        target = link and link.parent / os.readlink(link) / resolved.relative_to(link)
        resolved = target and Path(os.path.abspath(target))


def _exposed(path: str | Path, status: os.stat_result) -> tuple[str, str] | None:
    """Return why others can write a file or folder, and what to do about it; None if they cannot."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {status.st_uid})", "use a copy of your own"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    # The mode of a link has no meaning.
    if status.st_mode & 0o022 and not is_sticky and not stat.S_ISLNK(status.st_mode):
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} can be written by others (mode {mode:04o})", "run chmod -R go-w on it"
    return None


def require_unshared_folders(root: Path, folder: Path) -> None:
    """Refuse a folder below ``root`` if others can write it, ``root`` or a folder between.

    Raises:
        Untrusted: as :func:`require_unshared` says.
        OSError: one of them is not there any more.
    """
    for place in (root, *reversed([f for f in folder.parents if f.is_relative_to(root) and f != root]), folder):
        try:
            status = os.stat(place)
        except OSError as error:
            # As in read_whole: a network file system's client reports a just replaced folder in this way.
            if error.errno != errno.ESTALE:
                raise
            status = os.stat(place)
        require_unshared(place, status)
