"""Read and write whole files, so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from tilekern.cache.errors import CacheError, Corrupt, Missing

TEMPORARY_SUFFIX = ".tmp"
BAD_SUFFIX = ".bad"
DROPPED_SUFFIX = ".dropped"
# Attempts at a write whose folder keeps vanishing; fifty processes that clear one cache need a handful.
ATTEMPTS = 20
# Attempts to read a file that comes and goes.
_LOOKS = 10


def read_whole(path: str | os.PathLike[str], largest: int, *, as_use: bool = True) -> tuple[bytes, os.stat_result]:
    """Return the bytes of a regular file of at most ``largest`` bytes, and its status from before they were read.

    Files in shared folders are read by this: a pipe or a device does not block, and a huge file takes no memory. If not
    ``as_use``, the access time is not updated (on Linux, for the user's own files), so that inspecting a cache does not
    count as its use.

    Raises:
        Missing: there is no such file.
        Corrupt: it is larger, or not a regular file.
        CacheError: it cannot be read.
    """
    try:
        try:
            return _read_once(path, largest, as_use)
        except OSError as error:
            # A client of a network file system reports a file that another client has just replaced in this way.
            if error.errno != errno.ESTALE:
                raise
            return _read_once(path, largest, as_use)
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(f"there is no {path}") from None
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from None


def ask_for(paths: Iterable[str]) -> None:
    """Tell the disk to fetch files that are read next, on Linux; files that cannot be opened are skipped."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = _open(path, as_use=True)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)


def read_if_there(path: str, largest: int) -> tuple[bytes, os.stat_result] | None:
    """Return :func:`read_whole` of a file without counting as its use; None if it was deleted since it was listed.

    Raises:
        CacheError: the file is there but cannot be read.
    """
    for _ in range(_LOOKS):
        try:
            return read_whole(path, largest, as_use=False)
        except Missing:
            # If it is there, it was deleted and then written again.
            if not os.path.lexists(path):
                return None
    raise CacheError(f"cannot read {path}, which is there")


def _read_once(path: str | os.PathLike[str], largest: int, as_use: bool) -> tuple[bytes, os.stat_result]:
    descriptor, status = open_regular(path, largest, as_use=as_use)
    try:
        left = min(status.st_size + 1, largest)
        pieces = []
        while left and (piece := os.read(descriptor, left)):
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), status
    finally:
        os.close(descriptor)


def open_regular(
    path: str | os.PathLike[str], largest: int, *, as_use: bool = True
) -> tuple[int, os.stat_result]:  # fmt: skip
    """Open a regular file of at most ``largest`` bytes for reading; return its descriptor and status.

    Raises:
        Corrupt: it is larger, or not a regular file.
        OSError: it cannot be opened.
    """
    descriptor = _open(path, as_use)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Corrupt(f"{path} is not a regular file")
        if status.st_size > largest:
            raise Corrupt(f"{path} has {status.st_size} bytes, and may have at most {largest}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def open_to_append(path: str | os.PathLike[str], mode: int) -> int:
    """Open a regular file to append to, creating it if it is missing, and return its descriptor; follow no link.

    Raises:
        OSError: it is a link, has several names or is not a regular file, or it cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a link, and nothing is appended through one", str(path)) from None
        raise
    if reason := why_not_its_own(path, os.fstat(descriptor)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, reason, str(path))
    return descriptor


def why_not_its_own(path: str | os.PathLike[str], status: os.stat_result) -> str | None:
    """Return why writing to a file with this status would change no file or several; None if it would not."""
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    if status.st_nlink > 1:
        return f"{path} has {status.st_nlink} names (hard links), which all would change; use a copy"
    return None


def _open(path: str | os.PathLike[str], as_use: bool) -> int:
    # A file object would take twice as long for a small file. O_NONBLOCK: opening a pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if not as_use:
        with contextlib.suppress(PermissionError):  # of another user's file
            return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    return os.open(path, flags)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file in one step: a reader sees the old file or the new one, and a failure leaves the old one.

    Missing folders are made. Only its owner may write the file, whatever the umask, because others could change what
    jobs load. ``mode`` is that of the new file, less the umask.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full.
    """
    write_by(path, lambda file: file.write(data), mode)


def write_by(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """Write a file as :func:`write_whole` does, by ``write``, which may be called more than once."""
    for attempt in range(ATTEMPTS + 1):
        try:
            make_folder(path.parent)
            return write_in(None, str(path), write, mode)
        except FileNotFoundError:
            # A `clear` or `prune` may delete the folder or the temporary file meanwhile.
            if attempt == ATTEMPTS:
                raise
    return None


def write_in(folder: int | None, path: str, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """Write a file as :func:`write_by` does, once, into a folder that exists.

    ``path`` is relative to the folder with the descriptor ``folder``, or to the current one. Raises OSError.
    """
    temporary = os.path.join(os.path.dirname(path), f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; others may write it only if they may write the one above.

    Raises:
        OSError: it cannot be made, or there is a file in its place.
    """
    if os.path.isdir(folder):
        return
    make_folder(folder.parent)
    try:
        os.mkdir(folder, 0o755 | handed_on(folder.parent))
    except FileExistsError:
        if not os.path.isdir(folder):
            # If nothing is there now, it was a folder that another process has just deleted.
            code = errno.ENOTDIR if os.path.lexists(folder) else errno.ENOENT
            raise OSError(code, os.strerror(code), str(folder)) from None


def handed_on(folder: Path) -> int:
    """Return the mode bits by which others may write what is made in a folder: those by which they may write it.

    A sticky folder such as /tmp hands on none.

    Raises:
        OSError: there is no such folder.
    """
    return shared_bits(os.stat(folder))


def shared_bits(status: os.stat_result) -> int:
    """Return :func:`handed_on` for the folder with this status."""
    return 0 if status.st_mode & stat.S_ISVTX else status.st_mode & 0o022


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return what tells a file from another one in its place: inode, time of writing in nanoseconds, size in bytes."""
    return status.st_ino, status.st_mtime_ns, status.st_size
