"""Runs a function when a module of another package has been imported, without importing that package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, act: Callable[[], object]) -> None:
    """Call ``act`` once ``name`` has been executed: at once if it has been, else within the import of it.

    What ``act`` raises is raised by that import.
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Finds one module as others would, and leaves."""

    def __init__(self, name: str, act: Callable[[], object]):
        self.name, self.act = name, act

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self.act()

        loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
