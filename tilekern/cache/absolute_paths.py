"""Absolute paths of the folders in settings; a job may change its folder, and its user may have no home."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from tilekern.cache.errors import NoHome


@functools.cache
def absolute(text: str) -> Path:
    """Return the folder or file that a setting names; the result stays the same for the whole process.

    Args:
        text: the setting; ``~`` is the home, and a relative path is relative to the folder of the first call.

    Raises:
        NoHome: it begins with ``~``, and the user has no home; or it is relative, and the working directory has been
            removed.
    """
    # An empty HOME would turn ~/cache into a folder of the root.
    path = text if os.environ.get("HOME") == "" else os.path.expanduser(text)
    if path.startswith("~"):
        raise NoHome(f"{text} begins with ~, and this user has no home folder; give an absolute path")
    try:
        return Path(os.path.abspath(path))
    except FileNotFoundError:
        raise NoHome(
            f"{text} is relative to a working directory that has been removed; give an absolute path"
        ) from None


def platform_folder(folder_of: Callable[[str], Path], what: str) -> Path:
    """Return the folder of tilekern according to a function of platformdirs; ``what`` is for the error.

    Raises:
        NoHome: the user has no home: ``HOME`` is not set, and there is no entry in ``passwd``.
    """
    try:
        return absolute(str(folder_of("tilekern")))
    except (RuntimeError, NoHome):
        raise NoHome(f"this user has no home folder, and so none for {what}") from None
