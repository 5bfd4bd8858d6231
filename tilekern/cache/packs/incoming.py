"""Files that become part of a cache together: all of them, or none where the process dies or the disk is full.

They are written to ``v1/incoming/<name>.tmp/`` under the paths that they will have, and one rename to
``v1/incoming/<name>`` says that they are whole. Then they are moved to their places, blobs and signatures first. Where
the process is killed in the middle of that, whoever next writes to the cache goes on with it, which can be begun again
at any point, by any process, and by two at once. Until then a reader sees the records that were moved, each of them
whole, and nothing of the others: looking at a cache writes nothing.

A folder in ``v1/incoming`` may be another's, or have come in an archive. So only real folders of this user are gone on
with, only regular files of this user are moved, only to places that a cache has, and no link is followed
(:mod:`tilekern.cache.folders`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from tilekern.cache.files import ATTEMPTS, TEMPORARY_SUFFIX
from tilekern.cache.folders import files_inside, folders_inside, opened, remove_empty, write_below
from tilekern.cache.keys import BLOBS, INCOMING, LAYOUT, SIGNATURES, is_place

_INCOMING = PurePosixPath(LAYOUT, INCOMING)
# Moving a pack's files takes far less.
_AT_IT_S = 60.0


class Incoming:
    """A group of files on its way into the cache at ``root``; the end of a ``with`` without a commit undoes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._name = os.urandom(12).hex()
        self._growing = self._name + TEMPORARY_SUFFIX
        self._added: list[PurePosixPath] = []

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self.root, self._growing)
        for folder in {path.parent for path in self._added} | {_INCOMING}:
            remove_empty(self.root, folder)

    def add(self, files: Mapping[PurePosixPath, bytes]) -> None:
        """Write files, by the path that they will have below the root.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        for path, data in files.items():
            self._added.append(path)
            write_below(self.root, _INCOMING / self._growing / path, data)

    def commit(self) -> None:
        """Make all files that were added part of the cache.

        Raises:
            OSError: the folder cannot be written, or a folder in it is on another disk. Where that is after the one
                rename, the files are whole and in the cache's folder, and are moved to their places by the next process
                that writes to it.
        """
        # Where the disk has no room for a folder, or no file can be moved to it, nothing has happened yet.
        for folder in dict.fromkeys(path.parent for path in self._added):
            with contextlib.suppress(FileNotFoundError):
                _require_movable(self.root, _INCOMING / self._growing, folder)
        with opened(self.root, *_INCOMING.parts) as incoming:
            os.rename(self._growing, self._name, src_dir_fd=incoming, dst_dir_fd=incoming)
        _move(self.root, self._name)


def _require_movable(root: Path, source: PurePosixPath, folder: PurePosixPath) -> None:
    """Find out, by a file, whether files can be moved from one folder below the root to another.

    The same disk may be mounted in two places, between which nothing can be moved.

    Raises:
        OSError: they cannot.
    """
    probe = f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    with opened(root, *source.parts, make=True) as ours, opened(root, *folder.parts, make=True) as there:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=ours))
        try:
            os.rename(probe, probe, src_dir_fd=ours, dst_dir_fd=there)
        except OSError as error:
            os.unlink(probe, dir_fd=ours)
            if error.errno == errno.EXDEV:
                what = f"{root / folder} is on another disk than the rest; put or link the whole cache there"
                raise OSError(errno.EXDEV, what) from None
            raise
        os.unlink(probe, dir_fd=there)


def finish_incoming(root: Path) -> None:
    """Move to their places what a killed process of this user had made whole and not moved, for whoever writes.

    What cannot be moved stays.
    """
    for folder in unfinished(root):
        with contextlib.suppress(OSError):
            _move(root, folder.name)


def unfinished(root: Path) -> list[Path]:
    """The folders that :func:`finish_incoming` goes on with; in some it leaves files that no cache has."""
    return [root / _INCOMING / name for name in _own_folders(root) if not name.endswith(TEMPORARY_SUFFIX)]


def cut_off(root: Path) -> list[Path]:
    """The folders of killed processes that :func:`finish_incoming` moves files from, for people."""
    lately = time.time() - _AT_IT_S
    return [
        folder for folder in unfinished(root) if _last_written(root, folder.name) < lately and _places(root, folder)
    ]


def _places(root: Path, folder: Path) -> list[PurePosixPath]:
    whole = PurePosixPath(*folder.relative_to(root).parts)
    return [path for path in files_inside(root, *whole.parts) if is_place(path.relative_to(whole))]


def abandoned_incoming(root: Path, older_than: float) -> list[Path]:
    """Folders of writers that were killed before their files were whole; none that was written since ``older_than``.

    Args:
        root: the cache's root.
        older_than: seconds since 1970.
    """
    growing = (name for name in _own_folders(root) if name.endswith(TEMPORARY_SUFFIX))
    return [root / _INCOMING / name for name in growing if _last_written(root, name) < older_than]


def remove_abandoned(root: Path, older_than: float) -> None:
    """Delete what :func:`abandoned_incoming` lists."""
    for folder in abandoned_incoming(root, older_than):
        gone = f".{folder.name}"
        with contextlib.suppress(OSError):
            # Renamed first: were its writer alive after all, it would fail as a whole instead of losing some files.
            with opened(root, *_INCOMING.parts) as incoming:
                os.rename(folder.name, gone, src_dir_fd=incoming, dst_dir_fd=incoming)
            _remove(root, gone)
        remove_empty(root, _INCOMING)


def _remove(root: Path, name: str) -> None:
    # The second error is of a folder that is deeper than any cache's.
    with contextlib.suppress(OSError, RecursionError), opened(root, *_INCOMING.parts) as incoming:
        shutil.rmtree(name, ignore_errors=True, dir_fd=incoming)


def _move(root: Path, name: str) -> None:
    whole = _INCOMING / name
    found = list(folders_inside(root, *whole.parts, fail=_raise))
    paths = [(folder / file).relative_to(whole) for folder, files in found for file in files]
    # A record must not appear before what it refers to.
    for path in sorted(filter(is_place, paths), key=lambda path: (path.parts[1] not in (BLOBS, SIGNATURES), path)):
        _move_file(root, whole, path)
    for folder, _ in reversed(found):
        remove_empty(root, folder)


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _move_file(root: Path, whole: PurePosixPath, path: PurePosixPath) -> None:
    for _ in range(ATTEMPTS):
        try:
            with (
                opened(root, *(whole / path).parent.parts) as source,
                opened(root, *path.parent.parts, make=True) as there,
            ):
                status = os.stat(path.name, dir_fd=source, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    os.replace(path.name, path.name, src_dir_fd=source, dst_dir_fd=there)
        except FileNotFoundError:
            # Either another process moved the same file, or a `clear` took the folder away in the middle.
            if os.path.lexists(root / whole / path):
                continue
        return
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(root / path.parent))


def _own_folders(root: Path) -> Iterator[str]:
    """The names in ``v1/incoming`` of this user's real folders."""
    with contextlib.suppress(OSError), opened(root, *_INCOMING.parts) as incoming:
        for name in sorted(os.listdir(incoming)):
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=incoming, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    yield name


def _last_written(root: Path, name: str) -> float:
    newest = 0.0
    for folder, files in folders_inside(root, *_INCOMING.parts, name):
        for path in (folder, *(folder / file for file in files)):
            with contextlib.suppress(OSError):
                newest = max(newest, os.lstat(root / path).st_mtime)
    return newest or time.time()
