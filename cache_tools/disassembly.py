"""An artifact's machine code as text, by NVIDIA's nvdisasm."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilekern.cache import CacheError

_TIMEOUT_S = 120


def sass(cubin: bytes) -> str:
    """The SASS of a cubin.

    Raises:
        CacheError: nvdisasm is not installed, or these bytes are none that it can read.
    """
    tool = _nvdisasm()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact.cubin")
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                [tool, "--print-code", path], capture_output=True, timeout=_TIMEOUT_S, check=False, cwd=folder
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CacheError(f"{tool} could not be run: {error}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise CacheError(f"nvdisasm cannot read the artifact: {said[0]}")
    return done.stdout.decode(errors="replace")


def _nvdisasm() -> str:
    """The pip package's program first, then the one on PATH."""
    import importlib.util

    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(root).glob("cu*/bin/nvdisasm"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    found = shutil.which("nvdisasm")
    if found is None:
        raise CacheError("nvdisasm is not installed; install it with: pip install 'tilekern[inspect]'")
    return found
