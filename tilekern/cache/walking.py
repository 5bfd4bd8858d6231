"""The files below a folder of a cache, and which folders could not be listed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NoReturn

from tilekern.cache.entries import Where
from tilekern.cache.errors import CacheError, Missing

# Far more than a cache has; a folder that is a link to one above it ends there.
_DEEPEST = 8


def files_below(
    folder: Path, skip: Collection[str] = (), where: Where | None = None, fail: Callable[[OSError], None] | None = None
) -> Iterator[str]:
    """All files below a folder, sorted, but for those below ``skip`` and those that ``where`` refuses.

    Folders that are links are followed, as a lookup follows them.

    Args:
        folder: where to begin.
        skip: names of folders in it that are left out.
        where: whether to look at a place, as :meth:`tilekern.cache.Store.entries` says.
        fail: is told of each folder that cannot be listed; of one that another process deleted only where it is
            ``folder`` itself.
    """

    def told(error: OSError) -> None:
        if fail and (error.filename == str(folder) or not is_gone(error)):
            fail(error)

    for place, folders, names in os.walk(folder, onerror=told, followlinks=True):
        above = tuple(place.removeprefix(str(folder)).split(os.sep)[1:])
        folders[:] = sorted(folders if above else set(folders) - set(skip)) if len(above) < _DEEPEST else []
        if where:
            folders[:] = [name for name in folders if where((*above, name))]
            names[:] = [name for name in names if where((*above, name.removesuffix(".json")))]
        for name in sorted(names):
            yield os.path.join(place, name)


def must_list(folder: Path) -> Callable[[OSError], NoReturn]:
    """A ``fail`` for where every file below ``folder`` counts.

    The function raises Missing where ``folder`` was not there, though it may have come since, else CacheError.
    """

    def fail(error: OSError) -> NoReturn:
        if error.filename == str(folder) and (isinstance(error, FileNotFoundError) or is_gone(error)):
            raise Missing(f"there is no {folder}")
        raise CacheError(cannot_list(error))

    return fail


def is_gone(error: OSError) -> bool:
    """Whether a folder could not be listed since it was not there, though it may have come since.

    A link to nothing is there, and where it cannot be told, the folder is.
    """
    if isinstance(error, FileNotFoundError):
        return not os.path.islink(error.filename)
    return isinstance(error, NotADirectoryError) and not os.path.lexists(error.filename)


def cannot_list(error: OSError) -> str:
    """The message about a folder that cannot be listed."""
    return f"cannot list {error.filename}: {error.strerror}"
