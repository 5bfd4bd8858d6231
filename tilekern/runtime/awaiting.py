"""Modules of other packages that are imported later: what waits for one is told as soon as it is there.

Nothing here is of ``importlib.abc``, which imports a dozen modules: this is part of ``import torch``.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Arrivals:
    """Calls ``arrived`` with the name of each module, of those that ``awaits`` says, after it was imported.

    A module that is being imported when the watch begins is one of them. Errors of ``arrived`` are raised by the
    import.
    """

    def __init__(self, awaits: Callable[[str], bool], arrived: Callable[[str], object]) -> None:
        self._awaits, self._arrived = awaits, arrived

    def watch(self) -> None:
        """Begin; once is enough."""
        if self in sys.meta_path:
            return
        sys.meta_path.insert(0, self)
        for name, module in list(sys.modules.items()):
            if self._awaits(name) and is_being_imported(module):
                _tell_at_the_end(module.__spec__, self._arrived)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The specification of a module that is awaited, with a loader that tells of it; None of others."""
        if not self._awaits(name):
            return None
        # Those before it have been asked, or ask it: another that awaits the same module.
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in after)), None)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Telling(spec.loader, self._arrived)  # type: ignore[assignment]
        return spec


def is_imported(name: str) -> bool:
    """Whether a module is there as a whole."""
    module = sys.modules.get(name)
    return module is not None and not is_being_imported(module)


def is_being_imported(module: Any) -> bool:
    """Whether a module of ``sys.modules`` is not whole yet."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Ending(importlib.machinery.ModuleSpec):
    """The specification of a module that is being imported, on which importlib notes the end of that."""

    tells: list[Callable[[str], object]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            tells = vars(self).pop("tells")
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            if self.name in sys.modules:  # else its import failed
                for tell in tells:
                    tell(self.name)


def _tell_at_the_end(spec: Any, arrived: Callable[[str], object]) -> None:
    if not isinstance(spec, _Ending):
        spec.tells = []
        spec.__class__ = _Ending
    spec.tells.append(arrived)


class _Telling:
    """Loads a module as the loader in it does, and tells that it is there; the module knows that one alone."""

    def __init__(self, loader: importlib.abc.Loader, arrived: Callable[[str], object]) -> None:
        self._loader, self._arrived = loader, arrived

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._arrived(module.__name__)
