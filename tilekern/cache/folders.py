"""Files below a cache's root, reached by opening one folder after the other, so that no link below it is followed.

The root is the user's choice: it, and what leads to it, may be links. A link below it may have come in an archive or be
another user's. It is read through, as by a lookup, but nothing is written, renamed or deleted through it, also where it
takes a folder's place at the last moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePath, PurePosixPath

from tilekern.cache.files import ATTEMPTS, BAD_SUFFIX, TEMPORARY_SUFFIX, identity_of, make_folder, shared_bits, write_in

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Far more than a cache has.
_DEEPEST = 8


@contextlib.contextmanager
def opened(root: Path, *names: str, make: bool = False) -> Iterator[int]:
    """The descriptor of a folder below ``root``, for calls that take a ``dir_fd``.

    Args:
        root: the cache's root, which may be a link.
        names: of the folders that lead there.
        make: whether folders that are missing are made, as :func:`tilekern.cache.files.make_folder` makes them.

    Raises:
        OSError: one of them is a link (ELOOP, with a message that names it) or a file, is missing, or cannot be made.
    """
    if make:
        make_folder(root)
    folder = os.open(root, _FOLDER)
    try:
        for at, name in enumerate(names):
            inner = _inner(folder, name, root.joinpath(*names[: at + 1]), make)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _inner(folder: int, name: str, path: Path, make: bool) -> int:
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
            said = f"{path} is a link, and nothing is written or deleted through a link inside a cache"
            raise OSError(errno.ELOOP, said, str(path)) from None
        error.filename = str(path)
        raise


def is_linked(root: Path, folder: PurePath) -> bool:
    """Whether a folder, given by its path below ``root``, is a link or stands behind one."""
    return any(os.path.islink(root / place) for place in (folder, *folder.parents) if place.parts)


def write_below(root: Path, path: PurePath, data: bytes) -> None:
    """Write a file as :func:`tilekern.cache.files.write_whole` does, at a path below ``root``.

    Raises:
        OSError: as of :func:`opened`, or the file cannot be written.
    """
    for _ in range(ATTEMPTS):
        # A `clear` or `prune` may take the folder or the temporary file away in the middle.
        with contextlib.suppress(FileNotFoundError):
            return _write_once(root, path, data)
    return _write_once(root, path, data)


def _write_once(root: Path, path: PurePath, data: bytes) -> None:
    with opened(root, *path.parent.parts, make=True) as folder:
        write_in(folder, path.name, lambda file: file.write(data))


def set_aside(root: Path, path: PurePath, seen: os.stat_result) -> bool:
    """Rename a bad file to ``<name>.bad`` so that it is not read again; True where that was done.

    ``seen`` is what was read. Where a writer has put another file there since, that one is put back.
    """
    aside = path.name + BAD_SUFFIX
    try:
        with opened(root, *path.parent.parts) as folder:
            return _moved_if(folder, path.name, aside, identity_of(seen))
    except OSError:
        return False


def unlink_seen(root: Path, path: PurePath, identity: tuple[int, int, int]) -> bool:
    """Delete the file that was seen as ``identity``; False where it is gone, or a writer has put another one there.

    Raises:
        OSError: it cannot be deleted, or stands behind a link.
    """
    aside = f".{os.urandom(12).hex()}{TEMPORARY_SUFFIX}"
    try:
        with opened(root, *path.parent.parts) as folder:
            if identity_of(os.stat(path.name, dir_fd=folder)) != identity:
                return False
            # Between the look and the deletion a writer may come; what was moved can still be put back.
            if not _moved_if(folder, path.name, aside, identity):
                return False
            os.unlink(aside, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _moved_if(folder: int, name: str, aside: str, identity: tuple[int, int, int]) -> bool:
    """Rename a file, and back where it was not the one of this identity; whether it was."""
    os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=folder)
    if identity_of(os.stat(aside, dir_fd=folder)) == identity:
        return True
    os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
    return False


def unlink_below(root: Path, path: PurePath) -> bool:
    """Delete a file, or a link itself; False where it is gone.

    Raises:
        OSError: it cannot be deleted, or stands behind a link.
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
    """The paths below ``root`` of all files in one of its folders and those below it; no link is followed or listed.

    Args:
        root: the cache's root.
        names: of the folders that lead to the folder.
        skip: names of folders in it that are left out.
        fail: is told of each folder that cannot be listed, which else holds nothing.
    """
    for place, files in folders_inside(root, *names, skip=skip, fail=fail):
        yield from (place / name for name in files)


def folders_inside(
    root: Path, *names: str, skip: Collection[str] = (), fail: Callable[[OSError], None] | None = None
) -> Iterator[tuple[PurePosixPath, list[str]]]:
    """One of the folders below ``root`` and those below it, from the top down, each with the names of its files.

    No link is followed or listed, and a folder deeper than a cache has any is left out. The arguments are those of
    :func:`files_inside`.
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
    folder: int, place: PurePosixPath, skip: Collection[str], fail: Callable[[OSError], None] | None, deep: int
) -> Iterator[tuple[PurePosixPath, list[str]]]:
    # os.fwalk tells of a folder that cannot be opened, and raises where one cannot be listed.
    try:
        with os.scandir(folder) as entries:
            kinds = {entry.name: _kind_of(entry) for entry in entries}
    except OSError as error:
        error.filename = str(place)
        if fail:
            fail(error)
        return
    yield place, sorted(name for name, kind in kinds.items() if kind == "file")
    for name in sorted(name for name, kind in kinds.items() if kind == "folder" and deep and name not in skip):
        try:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if fail:
                fail(error)
            continue
        try:
            yield from _folders_below(inner, place / name, (), fail, deep - 1)
        finally:
            os.close(inner)


def _kind_of(entry: os.DirEntry[str]) -> str:
    try:
        return "link" if entry.is_symlink() else "folder" if entry.is_dir() else "file"
    except OSError:
        return "gone"
