"""Files below a cache's root.

Folders are reached by opening one after the other, so that no link below the root is followed. The root, and what leads
to it, is the user's choice and may be a link. A link below it may have come in an archive or be another user's: lookups
read through it, but nothing is written, renamed or deleted through it, even if it takes a folder's place at the last
moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import NoReturn

from tilekern.cache.entries import Where
from tilekern.cache.errors import CacheError, Missing
from tilekern.cache.files import ATTEMPTS, BAD_SUFFIX, TEMPORARY_SUFFIX, identity_of, make_folder, shared_bits, write_in

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Far deeper than a cache; a folder that is a link to one above it ends there.
_DEEPEST = 8


@contextlib.contextmanager
def opened(root: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open a folder below ``root``, by the names that lead there, and yield its descriptor for use as a ``dir_fd``.

    With ``make``, missing folders are made as :func:`tilekern.cache.files.make_folder` makes them.

    Raises:
        OSError: one of them is a link (ELOOP, with a message that names it) or a file, is missing, or cannot be made.
    """
    if make:
        make_folder(root)
    folder = os.open(root, _FOLDER)
    try:
        for at, name in enumerate(names):
            inner = _opened_inner(folder, name, root.joinpath(*names[: at + 1]), make)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _opened_inner(folder: int, name: str, path: Path, make: bool) -> int:
    try:
        try:
            return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            if not make:
                raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755 | shared_bits(os.fstat(folder)), dir_fd=folder)
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(path):
            reason = f"{path} is a link, and nothing is written or deleted through a link inside a cache"
            raise OSError(errno.ELOOP, reason, str(path)) from None
        error.filename = str(path)
        raise


def is_linked(root: Path, folder: PurePath) -> bool:
    """Return whether a folder, given by its path below ``root``, is a link or is behind one."""
    return any(os.path.islink(root / path) for path in (folder, *folder.parents) if path.parts)


def write_below(root: Path, path: PurePath, data: bytes) -> None:
    """Write a file as :func:`tilekern.cache.files.write_whole` does, at a path below ``root``.

    Raises:
        OSError: a folder cannot be opened (:func:`opened`), or the file cannot be written.
    """
    for attempt in range(ATTEMPTS + 1):
        try:
            with opened(root, *path.parent.parts, make=True) as folder:
                return write_in(folder, path.name, lambda file: file.write(data))
        except FileNotFoundError:
            # A `clear` or `prune` may delete the folder or the temporary file meanwhile.
            if attempt == ATTEMPTS:
                raise
    return None


def set_aside(root: Path, path: PurePath, seen: os.stat_result) -> bool:
    """Rename a bad file to ``<name>.bad`` so that it is not read again, and return whether that was done.

    It stays if a writer has replaced it since it was ``seen``.
    """
    try:
        with opened(root, *path.parent.parts) as folder:
            return _moved_if(folder, path.name, path.name + BAD_SUFFIX, identity_of(seen))
    except OSError:
        return False


def unlink_seen(root: Path, path: PurePath, identity: tuple[int, int, int]) -> bool:
    """Delete the file with this identity; return False if it is gone, or a writer has replaced it.

    Raises:
        OSError: it cannot be deleted, or is behind a link.
    """
    aside = f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    try:
        with opened(root, *path.parent.parts) as folder:
            if identity_of(os.stat(path.name, dir_fd=folder)) != identity:
                return False
            # A writer may come between this look and the deletion; a file that was moved can be put back.
            if not _moved_if(folder, path.name, aside, identity):
                return False
            os.unlink(aside, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _moved_if(folder: int, name: str, aside: str, identity: tuple[int, int, int]) -> bool:
    """Rename a file, and back if it does not have this identity; return whether it has."""
    os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    if identity_of(os.stat(aside, dir_fd=folder)) == identity:
        return True
    os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    return False


def unlink_below(root: Path, path: PurePath) -> bool:
    """Delete a file, or a link itself; return False if it is gone.

    Raises:
        OSError: it cannot be deleted, or is behind a link.
    """
    try:
        with opened(root, *path.parent.parts) as folder:
            os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def remove_empty(root: Path, folder: PurePath) -> None:
    """Delete ``folder``, a path below ``root``, and those above it while they are empty, but not ``root``."""
    with contextlib.suppress(OSError):
        while folder.parts:
            with opened(root, *folder.parent.parts) as above:
                os.rmdir(folder.name, dir_fd=above)
            folder = folder.parent


def files_inside(
    root: Path, *names: str, skip: Collection[str] = (), fail: Callable[[OSError], None] | None = None
) -> Iterator[PurePosixPath]:
    """Yield the paths below ``root`` of all files that :func:`folders_inside` finds."""
    for folder, files in folders_inside(root, *names, skip=skip, fail=fail):
        yield from (folder / name for name in files)


def folders_inside(
    root: Path, *names: str, skip: Collection[str] = (), fail: Callable[[OSError], None] | None = None
) -> Iterator[tuple[PurePosixPath, list[str]]]:
    """Yield a folder below ``root`` and those below it, from the top down, each with the names of its files.

    No link is followed or listed, nor folders that are deeper than those of any cache.

    Args:
        root: the cache's root.
        names: names of the folders that lead to the folder.
        skip: names of folders in it that are left out.
        fail: called for each folder that cannot be listed; without it, such a folder counts as empty.
    """
    with contextlib.ExitStack() as stack:
        try:
            top = stack.enter_context(opened(root, *names))
        except OSError as error:
            if fail:
                fail(error)
            return
        yield from _folders_below(top, PurePosixPath(*names), skip, fail, _DEEPEST)


def _folders_below(
    folder: int, path: PurePosixPath, skip: Collection[str], fail: Callable[[OSError], None] | None, depth: int
) -> Iterator[tuple[PurePosixPath, list[str]]]:
    # Unlike os.fwalk, this reports a folder that cannot be listed.
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # gone meanwhile
                    if not entry.is_symlink():
                        (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        error.filename = str(path)
        if fail:
            fail(error)
        return
    yield path, sorted(files)
    for name in sorted(name for name in folders if depth and name not in skip):
        try:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if fail:
                fail(error)
            continue
        try:
            yield from _folders_below(inner, path / name, (), fail, depth - 1)
        finally:
            os.close(inner)


def files_below(
    folder: Path, skip: Collection[str] = (), where: Where | None = None, fail: Callable[[OSError], None] | None = None
) -> Iterator[str]:
    """Yield all files below a folder, sorted; follow links, as a lookup does.

    Args:
        folder: the folder.
        skip: names of folders in it that are left out.
        where: which folders and files to yield, as :meth:`tilekern.cache.Store.entries` says.
        fail: called for each folder that cannot be listed; for one that another process has deleted only if it is
            ``folder`` itself.
    """

    def on_error(error: OSError) -> None:
        if fail and (error.filename == str(folder) or not is_gone(error)):
            fail(error)

    for path, folders, names in os.walk(folder, onerror=on_error, followlinks=True):
        above = tuple(path.removeprefix(str(folder)).split(os.sep)[1:])
        folders[:] = sorted(folders if above else set(folders) - set(skip)) if len(above) < _DEEPEST else []
        if where:
            folders[:] = [name for name in folders if where((*above, name))]
            names[:] = [name for name in names if where((*above, name.removesuffix(".json")))]
        for name in sorted(names):
            yield os.path.join(path, name)


def must_list(folder: Path) -> Callable[[OSError], NoReturn]:
    """Return a ``fail`` for :func:`files_below` if every file counts.

    It raises Missing if ``folder`` was not there, though it may have come since, else CacheError.
    """

    def fail(error: OSError) -> NoReturn:
        if error.filename == str(folder) and (isinstance(error, FileNotFoundError) or is_gone(error)):
            raise Missing(f"there is no {folder}")
        raise CacheError(cannot_list(error))

    return fail


def is_gone(error: OSError) -> bool:
    """Return whether a folder could not be listed because it was not there, though it may have come since.

    A link to nothing counts as there, and so does a folder about which nothing is known.
    """
    if isinstance(error, FileNotFoundError):
        return not os.path.islink(error.filename)
    return isinstance(error, NotADirectoryError) and not os.path.lexists(error.filename)


def cannot_list(error: OSError) -> str:
    """Return the message about a folder that cannot be listed."""
    return f"cannot list {error.filename}: {error.strerror}"
