"""Reading and writing whole files, so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from pathlib import Path

from tilekern.cache.errors import CacheError, Missing

TEMPORARY_SUFFIX = ".tmp"
BAD_SUFFIX = ".bad"
_reported: set[str] = set()


def read_whole(path: str | os.PathLike[str], largest: int, *, as_use: bool = True) -> tuple[bytes, os.stat_result]:
    """The bytes of a file, cut off after ``largest`` of them, and what the file system said of it before.

    Where ``as_use`` is False the file system notes no access, so that looking at a cache does not count as its use;
    for that the file must be the caller's own, on Linux.

    Raises:
        Missing: there is no such file.
        CacheError: it cannot be read.
    """
    try:
        # Unbuffered: half the time of a small file.
        with open(path, "rb", buffering=0, opener=None if as_use else _open_unnoticed) as file:
            status = os.fstat(file.fileno())
            return (file.readall() if status.st_size <= largest else file.read(largest)), status
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(f"there is no {path}") from None
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from None


def _open_unnoticed(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        return os.open(path, flags)


def write_whole(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old file or the new one; a failure leaves the old one.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full.
    """
    temporary = path.parent / f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    descriptor = _create(temporary)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _create(path: Path, attempts: int = 5) -> int:
    """A new file for writing; its folder may be pruned by a `clear` between being made and being used."""
    try:
        _make_folder(path.parent)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        if attempts == 1:
            raise
        return _create(path, attempts - 1)


def _make_folder(folder: Path) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def set_aside(path: Path, seen: os.stat_result) -> bool:
    """Rename a bad file to ``<name>.bad`` so that it is not read again; True where that was done.

    ``seen`` is what was read. Where a writer has put another file there since, that one is put back.
    """
    aside = path.with_name(path.name + BAD_SUFFIX)
    try:
        os.replace(path, aside)
        if identity_of(os.stat(aside)) != identity_of(seen):
            os.replace(aside, path)
            return False
    except OSError:
        return False
    return True


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """What tells a file from another that was put in its place: inode, time of writing in nanoseconds, bytes."""
    return status.st_ino, status.st_mtime_ns, status.st_size


def unlink_seen(path: Path, identity: tuple[int, int, int]) -> bool:
    """Delete the file that was seen as ``identity``; False where it is gone, or a writer has put another one there.

    Raises:
        OSError: it cannot be deleted.
    """
    aside = path.parent / f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    try:
        if identity_of(os.stat(path)) != identity:
            return False
        # Between the look and the deletion a writer may come; what was moved can still be put back.
        os.rename(path, aside)
    except FileNotFoundError:
        return False
    if identity_of(os.stat(aside)) != identity:
        os.replace(aside, path)
        return False
    os.unlink(aside)
    return True


def report_once(path: Path, message: str) -> None:
    """Warn about a file, once in this process."""
    if str(path) not in _reported:
        _reported.add(str(path))
        warnings.warn(message, RuntimeWarning, stacklevel=3)
