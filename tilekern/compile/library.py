"""Libraries that run a config in place of a kernel, as its ``implementation`` says; they make no artifact."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tilekern.compile.backend import Backend, backends, register


def _torch() -> Any:
    import torch

    return torch


class Library(Backend):
    """Calls of cuBLAS, cuDNN and torch, and composites of such calls and of kernels."""

    name, title = "library", "a library"
    is_optional, is_predicted = False, True
    libraries = {  # noqa: RUF012 (never changed)
        "cublas": lambda: bool(_torch().backends.cuda.is_built()),
        "cudnn": lambda: _torch().backends.cudnn.is_available() and _torch().backends.cudnn.enabled,
        "torch": lambda: hasattr(_torch(), "_grouped_mm"),
    }


register(Library())


def library_of(config: Mapping[str, Any]) -> str | None:
    """Return the library that a config needs at run time; None if it needs none, or is a composite that chooses."""
    name = config.get("implementation")
    return name if any(name in backend.libraries for backend in backends()) else None


def libraries_here() -> list[str]:
    """Return the libraries that are installed and not switched off; torch brings each of tilekern's own."""
    checks = {name: check for backend in backends() for name, check in backend.libraries.items()}
    found = []
    for name, is_here in checks.items():
        with contextlib.suppress(ModuleNotFoundError):
            found += [name] if is_here() else []
    return sorted(found)
