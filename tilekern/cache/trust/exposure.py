"""Find out who can write what a job would load: a record that others can write is code that others can run."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tilekern.cache.errors import CacheError, Untrusted

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
    if found := _exposed(path, status):
        problem, remedy = found
        raise Untrusted(f"{problem}; {remedy}, or set {SHARED}=1 where all who can write there may run code as you")


def require_unshared_up(path: Path) -> None:
    """Refuse a file that others than this user and root can change or put another in the place of.

    Looked at are the file, its folder and those above it, up to the user's home or to the root, and where a symbolic
    link stands among them, the link and all above what it leads to. ``TILEKERN_TRUST_SHARED`` allows nothing here.

    Raises:
        Untrusted: others can write one of them, or it belongs to another user who is not root.
        CacheError: one of them cannot be looked at.
    """
    home = Path(os.path.expanduser("~"))
    for way in _ways(path):
        parents = way.parents
        above = [folder for folder in parents if folder.is_relative_to(home)] if home in parents else parents
        for place in (way, *above):
            try:
                status = os.lstat(place)
            except OSError as error:
                raise CacheError(f"cannot tell who can write {place}: {error.strerror}") from None
            if found := _exposed(place, status):
                problem, remedy = found
                raise Untrusted(f"{path} is not used: {problem}; {remedy.replace(' -R', '')}")


def _ways(path: Path) -> Iterator[Path]:
    """An absolute form of a path, and then, for each symbolic link on it, where it leads to."""
    way = Path(os.path.abspath(path))
    yield way
    while (link := next((place for place in (*reversed(way.parents), way) if place.is_symlink()), None)) is not None:
        way = Path(os.path.abspath(link.parent / os.readlink(link) / way.relative_to(link)))
        yield way


def _exposed(path: str | Path, status: os.stat_result) -> tuple[str, str] | None:
    """Why others can write a file or folder, and what to do about that; None where they cannot."""
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {status.st_uid})", "use a copy of your own"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    # The mode of a link says nothing.
    if status.st_mode & 0o022 and not is_sticky and not stat.S_ISLNK(status.st_mode):
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} can be written by others (mode {mode:04o})", "run chmod -R go-w on it"
    return None


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
