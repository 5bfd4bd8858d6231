"""What tests of the sources' digests share."""

import functools
import shutil
import subprocess
from pathlib import Path

from tilekern.source import digests as source
from tilekern.source import reachability, whole_modules


def forget():
    """Drop what this process knows of files that have changed."""
    for module in (reachability, source, whole_modules):
        for known in vars(module).values():
            if isinstance(known, functools._lru_cache_wrapper):
                known.cache_clear()


def interpreter(python):
    """The path of another Python: on PATH, or one of pyenv's, whose shims need not lead to one."""
    for path in (*Path.home().glob(f".pyenv/versions/*/bin/{python}"), shutil.which(python)):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None
