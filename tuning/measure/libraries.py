"""Find the versions of the libraries that run candidates without an artifact, such as cuBLAS and cuDNN.

A measurement of such a candidate counts only for the same versions.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

# The fields of a ``gpu`` line that name libraries.
NAMES = ("torch", "cudnn", "cublas")


def versions() -> dict[str, str]:
    """Return the versions of cuDNN and cuBLAS, unless torch has them built in."""
    import torch

    found = _installed()
    if loaded := torch.backends.cudnn.version():
        found["cudnn"] = str(loaded)
    return found


def _installed() -> dict[str, str]:
    """Return the versions of the libraries that torch was installed with as separate wheels."""
    found = {}
    for requirement in importlib.metadata.requires("torch") or ():
        if named := re.match(r"nvidia-(cudnn|cublas)\b[\w-]*", requirement):
            try:
                found[named[1]] = importlib.metadata.version(named[0])
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def of_gpu(gpu: Mapping[str, str]) -> dict[str, str]:
    """Return the libraries that a ``gpu`` line names."""
    return {name: gpu[name] for name in NAMES if name in gpu}
