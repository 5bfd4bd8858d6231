"""Folders that settings name, as absolute paths: a job may change its own folder, and its user may have no home."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from tilekern.cache.errors import NoHome


@functools.cache
def absolute(text: str) -> Path:
    """The folder or file that a setting names, the same for all of this process.

    Args:
        text: the setting; ``~`` is the home, and a relative path begins where this process was when it first asked.

    Raises:
        NoHome: it begins with ``~``, and the user has no home.
    """
    return Path(os.path.abspath(_with_home(text)))


def platform_folder(of: Callable[[str], Path], what: str) -> Path:
    """The folder that platformdirs names for tilekern.

    Args:
        of: the function of platformdirs.
        what: what the folder is for, and the variable that names another, for the error.

    Raises:
        NoHome: the user has no home: ``HOME`` is not set, and there is no entry in ``passwd``.
    """
    try:
        return absolute(str(of("tilekern")))
    except (RuntimeError, NoHome):
        raise NoHome(f"this user has no home folder, and so none for {what}") from None


def _with_home(text: str) -> str:
    # An empty HOME would make ~/cache a folder of the root's.
    found = text if os.environ.get("HOME") == "" else os.path.expanduser(text)
    if found.startswith("~"):
        raise NoHome(f"{text} begins with ~, and this user has no home folder; give an absolute path")
    return found
