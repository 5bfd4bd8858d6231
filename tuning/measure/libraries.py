"""The versions of the libraries that run candidates which have no artifact, such as cuBLAS and cuDNN.

A toolkit names what compiled an artifact. Of a library's candidate these say whether what it once did still counts.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

# The fields of a ``gpu`` line that name libraries; torch brings its own kernels, and often the other two.
NAMES = ("torch", "cudnn", "cublas")


def versions() -> dict[str, str]:
    """The versions of cuDNN and cuBLAS here, of those that can be told: beside a torch that has them built in, none."""
    import torch

    found = _installed()
    if loaded := torch.backends.cudnn.version():
        found["cudnn"] = str(loaded)
    return found


def _installed() -> dict[str, str]:
    """Those that torch was installed with, as wheels of their own."""
    found = {}
    for requirement in importlib.metadata.requires("torch") or ():
        if named := re.match(r"nvidia-(cudnn|cublas)\b[\w-]*", requirement):
            try:
                found[named[1]] = importlib.metadata.version(named[0])
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def of_gpu(gpu: Mapping[str, str]) -> dict[str, str]:
    """The libraries that a ``gpu`` line names."""
    return {name: gpu[name] for name in NAMES if name in gpu}
