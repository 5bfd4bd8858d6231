"""Calls back after another package's module was imported.

This avoids ``importlib.abc``, which imports a dozen modules: it is part of ``import torch``.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Arrivals:
    """Calls ``arrived`` with the name of each module that ``awaits`` selects, after its import.

    This includes modules that are being imported when the watch begins. The import raises errors of ``arrived``.
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
                spec: Any = module.__spec__
                if not isinstance(spec, _Ending):
                    spec.tells = []
                    spec.__class__ = _Ending
                spec.tells.append(self._arrived)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of an awaited module, with a loader that calls back; None for other modules."""
        if not self._awaits(name):
            return None
        # The finders before it were asked already, or are another one that awaits the same module.
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in after)), None)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Telling(spec.loader, self._arrived)  # type: ignore[assignment]
        return spec


def is_imported(name: str) -> bool:
    """Return whether a module was imported completely."""
    module = sys.modules.get(name)
    return module is not None and not is_being_imported(module)


def is_being_imported(module: Any) -> bool:
    """Return whether the import of a module in ``sys.modules`` has not ended."""
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Ending(importlib.machinery.ModuleSpec):
    """The specification of a module during its import; importlib notes the end of the import on it."""

    tells: list[Callable[[str], object]]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            tells = vars(self).pop("tells")
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            if self.name in sys.modules:  # else its import failed
                for tell in tells:
                    tell(self.name)


class _Telling:
    """Loads a module by another loader, which the module sees as its own, then calls back."""

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
