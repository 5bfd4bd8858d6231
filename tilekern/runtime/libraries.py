"""The libraries that may run a config in the place of a kernel, as its ``implementation`` says: are they here?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tilekern.errors import CannotRun
from tilekern.spec import Config

if TYPE_CHECKING:
    from tilekern.cache import Record


def _has_cublas() -> bool:
    import torch

    return bool(torch.backends.cuda.is_built())


def _has_cudnn() -> bool:
    import torch

    return bool(torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled)


def _has_grouped_mm() -> bool:
    import torch

    return hasattr(torch, "_grouped_mm")


_IS_HERE: dict[str, Callable[[], bool]] = {"cublas": _has_cublas, "cudnn": _has_cudnn, "torch": _has_grouped_mm}


def library_of(config: Mapping[str, Any]) -> str | None:
    """The library that a config needs; None where kernels alone run it, or a composite that chooses for itself."""
    name = config.get("implementation")
    return name if name in _IS_HERE else None


def libraries_here() -> list[str]:
    """The libraries that are installed and not switched off."""
    return sorted(name for name, is_here in _IS_HERE.items() if is_here())


def runnable(record: Record) -> Config:
    """The winner of a record, or its best kernel where the winner's library is not installed, or is switched off.

    Raises:
        CannotRun: the record has no best kernel.
    """
    library = library_of(record.config)
    if library is None or _IS_HERE[library]():
        return Config(record.config)
    if record.best_kernel is None:
        what = f"{record.kernel} {record.address.problem_key}"
        raise CannotRun(f"{library}, which won {what}, is not here, and its record holds no kernel; tune it again")
    return Config(record.best_kernel.config)
