"""Reading and writing whole files, so that no reader ever sees half of one."""

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
# Of a write whose folder keeps vanishing; some fifty processes that clear one cache need a handful.
ATTEMPTS = 20
# At a file that comes and goes, before it is called unreadable.
_LOOKS = 10


def read_whole(path: str | os.PathLike[str], largest: int, *, as_use: bool = True) -> tuple[bytes, os.stat_result]:
    """The bytes of a regular file of at most ``largest`` bytes, and what the file system said of it before.

    Whatever others put into a shared folder goes through this: a pipe or a device keeps nobody waiting, and a huge file
    takes no memory. Where ``as_use`` is False the file system notes no access, so that looking at a cache does not
    count as its use; for that the file must be the caller's own, on Linux.

    Raises:
        Missing: there is no such file.
        Corrupt: it is larger, or not a regular file.
        CacheError: it cannot be read.
    """
    try:
        try:
            return _read_once(path, largest, as_use)
        except OSError as error:
            # A client of a network file system says so of a file that another one has just replaced.
            if error.errno != errno.ESTALE:
                raise
            return _read_once(path, largest, as_use)
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(f"there is no {path}") from None
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from None


def ask_for(paths: Iterable[str]) -> None:
    """Have the disk fetch files that are read next; nothing comes of one that is not there, or elsewhere than on Linux.

    No access is noted.
    """
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
    """The result of :func:`read_whole`, without counting as a use; None where the file was deleted since it was listed.

    Raises:
        CacheError: it is there and cannot be read.
    """
    for _ in range(_LOOKS):
        try:
            return read_whole(path, largest, as_use=False)
        except Missing:
            # Else it was deleted and then written anew.
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
    """The descriptor of a regular file of at most ``largest`` bytes, open for reading, and its status.

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
    """The descriptor of a regular file to append to, which is made where it is missing; no link is followed.

    Raises:
        OSError: it is a link, has several names or is not a regular file, which the message says, or it cannot be
            opened.
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
    """Why writing into a file would change another one or none, and what is known of it is ``status``; else None."""
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is not a regular file"
    if status.st_nlink > 1:
        return f"{path} has {status.st_nlink} names (hard links), which all would change; use a copy"
    return None


def _open(path: str | os.PathLike[str], as_use: bool) -> int:
    # A file object takes twice as long over a small file. Whoever opens a pipe that stands there waits for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    return os.open(path, flags) if as_use else _open_unnoticed(path, flags)


def _open_unnoticed(path: str | os.PathLike[str], flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        return os.open(path, flags)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old file or the new one; a failure leaves the old one.

    Nobody but its owner may write the file, whatever the umask says: others could change what jobs load. ``mode`` is
    that of the new file, less the umask.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full.
    """
    write_by(path, lambda file: file.write(data), mode)


def write_by(path: Path, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """Write a file as :func:`write_whole` does, by ``write``, which may be called more than once."""
    for _ in range(ATTEMPTS):
        # A `clear` or `prune` may take the folder or the temporary file away in the middle.
        with contextlib.suppress(FileNotFoundError):
            return _write_once(path, write, mode)
    return _write_once(path, write, mode)


def _write_once(path: Path, write: Callable[[BinaryIO], object], mode: int) -> None:
    make_folder(path.parent)
    write_in(None, str(path), write, mode)


def write_in(folder: int | None, path: str, write: Callable[[BinaryIO], object], mode: int = 0o644) -> None:
    """Write a file as :func:`write_by` does, once; its folder is there.

    Args:
        folder: the descriptor of the folder that the path starts at; None for the current one.
        path: the file.
        write: is given the open file.
        mode: of the new file, less the umask.

    Raises:
        OSError: it cannot be written.
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
    """Make a folder and those above it; others than its owner may write it only where they may write the one above.

    Raises:
        OSError: it cannot be made, or a file stands there.
    """
    if os.path.isdir(folder):
        return
    make_folder(folder.parent)
    try:
        os.mkdir(folder, 0o755 | handed_on(folder.parent))
    except FileExistsError:
        if not os.path.isdir(folder):
            # Where nothing is there now, it was a folder that another process has just deleted.
            what = errno.ENOTDIR if os.path.lexists(folder) else errno.ENOENT
            raise OSError(what, os.strerror(what), str(folder)) from None


def handed_on(folder: Path) -> int:
    """The bits of a mode by which others than its owner may write what is made in a folder, as they may write that.

    A folder that all may write and clean up after themselves (/tmp) hands that on to nobody.

    Raises:
        OSError: there is no such folder.
    """
    return shared_bits(os.stat(folder))


def shared_bits(status: os.stat_result) -> int:
    """As :func:`handed_on`, for a folder that ``status`` is of."""
    return 0 if status.st_mode & stat.S_ISVTX else status.st_mode & 0o022


def identity_of(status: os.stat_result) -> tuple[int, int, int]:
    """The identity of a file, to tell it from another in its place: inode, time of writing in nanoseconds, bytes."""
    return status.st_ino, status.st_mtime_ns, status.st_size
