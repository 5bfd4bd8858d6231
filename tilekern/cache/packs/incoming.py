"""Files that become part of a cache together: all of them, or none if the process dies or the disk is full.

They are written to ``v1/incoming/<name>.tmp/`` under their final paths, and one rename to ``v1/incoming/<name>`` marks
them as complete. Then they are moved to their paths, blobs and signatures first. If the process is killed meanwhile,
the next process that writes to the cache finishes the move. This can be repeated at any point, also by two processes at
once. Until then a reader sees only the records that were moved, each of them whole: reading a cache writes nothing.

A folder in ``v1/incoming`` may be another user's, or have come in an archive. So only real folders of this user are
finished, only regular files of this user are moved, only to paths that a cache has, and no link is followed
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
# Seconds after which a writer counts as killed; moving a pack's files takes far less.
_AT_IT_S = 60.0


class Incoming:
    """A group of files on its way into the cache at ``root``; the end of its ``with`` removes them if not committed."""

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
        """Write files, given by their final paths below the root.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        for path, data in files.items():
            self._added.append(path)
            write_below(self.root, _INCOMING / self._growing / path, data)

    def commit(self) -> None:
        """Make all files that were added part of the cache.

        Raises:
            OSError: the folder cannot be written, or a folder in it is on another disk. If this happens after the one
                rename, the next process that writes to the cache finishes the move.
        """
        # If the disk has no room for a folder, or no file can be moved to it, nothing has happened yet.
        for folder in dict.fromkeys(path.parent for path in self._added):
            with contextlib.suppress(FileNotFoundError):
                _require_movable(self.root, _INCOMING / self._growing, folder)
        with opened(self.root, *_INCOMING.parts) as incoming:
            os.rename(self._growing, self._name, src_dir_fd=incoming, dst_dir_fd=incoming)
        _move(self.root, self._name)


def _require_movable(root: Path, source: PurePosixPath, folder: PurePosixPath) -> None:
    """Raise OSError if no file can be moved from one folder below the root to another.

    Only a file can tell: between two mounts of the same disk nothing can be moved either.
    """
    probe = f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    with opened(root, *source.parts, make=True) as ours, opened(root, *folder.parts, make=True) as target:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=ours))
        try:
            os.rename(probe, probe, src_dir_fd=ours, dst_dir_fd=target)
        except OSError as error:
            os.unlink(probe, dir_fd=ours)
            if error.errno == errno.EXDEV:
                reason = f"{root / folder} is on another disk than the rest; put or link the whole cache there"
                raise OSError(errno.EXDEV, reason) from None
            raise
        os.unlink(probe, dir_fd=target)


def finish_incoming(root: Path) -> None:
    """Move the complete files of killed processes of this user to their paths; leave what cannot be moved."""
    for folder in unfinished(root):
        with contextlib.suppress(OSError):
            _move(root, folder.name)


def unfinished(root: Path) -> list[Path]:
    """Return the folders that :func:`finish_incoming` works on; it may leave files in them that no cache has."""
    return [root / _INCOMING / name for name in _own_folders(root) if not name.endswith(TEMPORARY_SUFFIX)]


def cut_off(root: Path) -> list[Path]:
    """Return the folders of killed processes in which :func:`finish_incoming` has files to move."""
    folders = []
    for folder in unfinished(root):
        inner = _INCOMING / folder.name
        if _last_written(root, folder.name) < time.time() - _AT_IT_S and any(
            is_place(path.relative_to(inner)) for path in files_inside(root, *inner.parts)
        ):
            folders.append(folder)
    return folders


def abandoned_incoming(root: Path, older_than: float) -> list[Path]:
    """Return folders of writers that were killed before their files were complete.

    Only those that were last written before ``older_than``, in seconds since 1970.
    """
    growing = (name for name in _own_folders(root) if name.endswith(TEMPORARY_SUFFIX))
    return [root / _INCOMING / name for name in growing if _last_written(root, name) < older_than]


def remove_abandoned(root: Path, older_than: float) -> None:
    """Delete the folders that :func:`abandoned_incoming` lists."""
    for folder in abandoned_incoming(root, older_than):
        gone = f".{folder.name}"
        with contextlib.suppress(OSError):
            # Renamed first: a writer that is alive after all then fails completely instead of losing some files.
            with opened(root, *_INCOMING.parts) as incoming:
                os.rename(folder.name, gone, src_dir_fd=incoming, dst_dir_fd=incoming)
            _remove(root, gone)
        remove_empty(root, _INCOMING)


def _remove(root: Path, name: str) -> None:
    # RecursionError: the folder is deeper than those of any cache.
    with contextlib.suppress(OSError, RecursionError), opened(root, *_INCOMING.parts) as incoming:
        shutil.rmtree(name, ignore_errors=True, dir_fd=incoming)


def _move(root: Path, name: str) -> None:
    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    whole = _INCOMING / name
    found = list(folders_inside(root, *whole.parts, fail=fail))
    paths = [(folder / file).relative_to(whole) for folder, files in found for file in files]
    # A record must not appear before the files that it refers to.
    for path in sorted(filter(is_place, paths), key=lambda path: (path.parts[1] not in (BLOBS, SIGNATURES), path)):
        _move_file(root, whole, path)
    for folder, _ in reversed(found):
        remove_empty(root, folder)


def _move_file(root: Path, whole: PurePosixPath, path: PurePosixPath) -> None:
    for _ in range(ATTEMPTS):
        try:
            with (
                opened(root, *(whole / path).parent.parts) as source,
                opened(root, *path.parent.parts, make=True) as target,
            ):
                status = os.stat(path.name, dir_fd=source, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    os.replace(path.name, path.name, src_dir_fd=source, dst_dir_fd=target)
        except FileNotFoundError:
            # Either another process moved the same file, or a `clear` deleted the folder meanwhile.
            if os.path.lexists(root / whole / path):
                continue
        return
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(root / path.parent))


def _own_folders(root: Path) -> Iterator[str]:
    """Yield the names of this user's real folders in ``v1/incoming``."""
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
