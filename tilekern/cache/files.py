"""Reading and writing whole files, so that no reader ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import warnings
from pathlib import Path

from tilekern.cache.errors import CacheError, Missing

TEMPORARY_SUFFIX = ".tmp"
BAD_SUFFIX = ".bad"
_reported: set[str] = set()


def read_whole(path: str | os.PathLike[str], largest: int) -> tuple[bytes, os.stat_result]:
    """The bytes of a file, cut off after ``largest`` of them, and what the file system says of it.

    Raises:
        Missing: there is no such file.
        CacheError: it cannot be read.
    """
    try:
        # Unbuffered: half the time of a small file.
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            return (file.readall() if status.st_size <= largest else file.read(largest)), status
    except (FileNotFoundError, NotADirectoryError):
        raise Missing(f"there is no {path}") from None
    except OSError as error:
        raise CacheError(f"cannot read {path}: {error.strerror}") from None


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old file or the new one; a failure leaves the old one.

    Nobody but its owner may write the file, whatever the umask says: others could change what jobs load. ``mode`` is
    that of the new file, less the umask.

    Raises:
        OSError: the folder cannot be made or written, or the disk is full.
    """
    temporary = path.parent / f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    descriptor = _create(temporary, mode)
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


def _create(path: Path, mode: int, attempts: int = 5) -> int:
    """A new file for writing; its folder may be pruned by a `clear` between being made and being used."""
    try:
        make_folder(path.parent)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileNotFoundError:
        if attempts == 1:
            raise
        return _create(path, mode, attempts - 1)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; others than its owner may write it only where they may write the one above.

    Raises:
        OSError: it cannot be made, or a file stands there.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    above = os.stat(folder.parent).st_mode
    # A folder that all may write and clean up after themselves (/tmp) hands that on to nobody.
    inherited = 0 if above & stat.S_ISVTX else above & 0o022
    try:
        os.mkdir(folder, 0o755 | inherited)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def set_aside(path: Path, seen: os.stat_result) -> bool:
    """Rename a bad file to ``<name>.bad`` so that it is not read again; True where that was done.

    ``seen`` is what was read. Where a writer has put another file there since, that one is put back.
    """
    aside = path.with_name(path.name + BAD_SUFFIX)
    try:
        os.replace(path, aside)
        now = os.stat(aside)
        if (now.st_ino, now.st_mtime_ns, now.st_size) != (seen.st_ino, seen.st_mtime_ns, seen.st_size):
            os.replace(aside, path)
            return False
    except OSError:
        return False
    return True


def report_once(about: str | Path, message: str) -> None:
    """Warn about a file, or something else that has a name, once in this process."""
    if str(about) not in _reported:
        _reported.add(str(about))
        warnings.warn(message, RuntimeWarning, stacklevel=3)
