"""Files that become part of a cache together: all of them, or none where the process dies or the disk is full.

They are written to ``v1/incoming/<name>.tmp/`` under the paths that they will have, and one rename to
``v1/incoming/<name>`` says that they are whole. From then on whoever next writes or lists the cache, or looks up in it
as its owner, moves them to their places; that can be begun again at any point, by any process, and by two at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from tilekern.cache.files import TEMPORARY_SUFFIX, make_folder, remove_empty, write_whole
from tilekern.cache.keys import BLOBS, INCOMING, LAYOUT, SIGNATURES

# Of a move whose folder keeps vanishing.
_ATTEMPTS = 20


class Incoming:
    """A group of files on its way into the cache at ``root``; the end of a ``with`` without a commit undoes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._whole = root / LAYOUT / INCOMING / os.urandom(12).hex()
        self._growing = self._whole.with_name(self._whole.name + TEMPORARY_SUFFIX)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        left: list[PurePosixPath] = []
        with contextlib.suppress(OSError):
            left = _files_of(self._growing)
        shutil.rmtree(self._growing, ignore_errors=True)
        for folder in {(self.root / path).parent for path in left} | {self._whole.parent}:
            remove_empty(folder, self.root)

    def add(self, files: Mapping[PurePosixPath, bytes]) -> None:
        """Write files, by the path that they will have below the root.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        for path, data in files.items():
            write_whole(self._growing / path, data)

    def commit(self) -> None:
        """Make all files that were added part of the cache.

        Raises:
            OSError: the folder cannot be written, or a folder in it is on another disk. Where that is after the one
                rename, the files are whole and in the cache's folder, and are moved to their places by the next process
                that can.
        """
        # Where the disk has no room for a folder, or is another one, nothing has happened yet.
        for folder in sorted({(self.root / path).parent for path in _files_of(self._growing)}):
            with contextlib.suppress(FileNotFoundError):
                make_folder(folder)
                _require_movable(self._growing, folder)
        os.rename(self._growing, self._whole)
        _move(self._whole, self.root)


def _require_movable(source: Path, folder: Path) -> None:
    """Find out, by a file, whether files can be moved from one folder into another.

    Links lead to other disks, and the same disk may be mounted in two places, between which nothing can be moved.

    Raises:
        OSError: they cannot.
    """
    probe = f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    os.close(os.open(source / probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        os.rename(source / probe, folder / probe)
    except OSError as error:
        os.unlink(source / probe)
        if error.errno == errno.EXDEV:
            what = f"{folder} is on another disk than the rest; put or link the whole cache there"
            raise OSError(errno.EXDEV, what) from None
        raise
    os.unlink(folder / probe)


def finish_incoming(root: Path) -> None:
    """Move to their places what a killed process had made whole and not moved; a cache that cannot be written stays."""
    for place in _places(root):
        if not place.endswith(TEMPORARY_SUFFIX):
            with contextlib.suppress(OSError):
                _move(Path(place), root)


def abandoned_incoming(root: Path, older_than: float) -> list[Path]:
    """Folders of writers that were killed before their files were whole; none that was written since ``older_than``.

    Args:
        root: the cache's root.
        older_than: seconds since 1970.
    """
    growing = [Path(place) for place in _places(root) if place.endswith(TEMPORARY_SUFFIX)]
    return [folder for folder in growing if _last_written(folder) < older_than]


def remove_abandoned(root: Path, older_than: float) -> None:
    """Delete what :func:`abandoned_incoming` lists."""
    for folder in abandoned_incoming(root, older_than):
        with contextlib.suppress(OSError):
            # Renamed first: were its writer alive after all, it would fail as a whole instead of losing some files.
            gone = folder.with_name(f".{folder.name}")
            os.rename(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)
        remove_empty(folder.parent, root)


def _move(whole: Path, root: Path) -> None:
    for path in _files_of(whole):
        _move_file(whole / path, root / path)
    # Folders alone: a file that could not be listed is not lost by this.
    for place, _, _ in os.walk(whole, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(place)
    remove_empty(whole.parent, root)


def _move_file(source: Path, to: Path) -> None:
    for _ in range(_ATTEMPTS):
        try:
            make_folder(to.parent)
            os.replace(source, to)
        except FileNotFoundError:
            # Either another process moved the same file, or a `clear` took the folder away in the middle.
            if os.path.lexists(source):
                continue
        return
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(to.parent))


def _files_of(folder: Path) -> list[PurePosixPath]:
    """Paths below ``folder`` in the order in which they must appear: what a record refers to before the record.

    Raises:
        OSError: a folder cannot be listed; one that is gone holds nothing.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or os.path.lexists(error.filename):
            raise error

    found = [
        PurePosixPath(os.path.relpath(os.path.join(place, name), folder))
        for place, _, names in os.walk(folder, onerror=fail)
        for name in names
    ]
    return sorted(found, key=lambda path: (path.parts[1] not in (BLOBS, SIGNATURES), path))


def _places(root: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(root / LAYOUT / INCOMING) as found:
        yield from [entry.path for entry in found]


def _last_written(folder: Path) -> float:
    newest = 0.0
    for place, _, names in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in names)):
            with contextlib.suppress(OSError):
                newest = max(newest, os.stat(path).st_mtime)
    return newest or time.time()
