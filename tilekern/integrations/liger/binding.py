"""Liger-Kernel's internals: its two registries, its functions, and the modules that hold them.

Liger chooses an implementation in two ways. ``liger_kernel.ops`` is a module of classes, each with an ``apply``. An
implementation is a module whose names replace these classes on import if ``LIGER_KERNEL_IMPL`` names it. Other modules
of Liger may have imported the classes before or after that. ``liger_kernel.backends`` chooses among implementations, by
name and by rank, at each call of ``liger_kernel.functional``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from tilekern.integrations.liger.table import TABLE, Function, NotServed
from tilekern.ops.dtensors import is_dtensor
from tilekern.patch.guards import is_plain
from tilekern.warning import warn_once

NAME = "tilekern"
KNOWN_VERSION = "0.8.5"
# A rank so low that tilekern is only chosen by name.
_LAST = 1000
# Calls of each of Liger's functions served by tilekern's ops, and those that Liger's code ran, by reason.
calls: Counter[str] = Counter()
kept: dict[str, Counter[str]] = {}


def version() -> str:
    """Return the version of the installed Liger-Kernel distribution."""
    for distribution in ("liger-kernel", "liger-kernel-nightly"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def offer() -> bool:
    """Enter tilekern in both of Liger's registries; return whether this Liger has them."""
    try:
        implementations = importlib.import_module("liger_kernel.ops.backends.registry")
        dispatched = importlib.import_module("liger_kernel.backends")
        implementations.register_impl(
            implementations.ImplInfo(
                NAME, devices=("cuda", "cpu"), module_path="tilekern.integrations.liger.implementation"
            )
        )
        for name in _dispatched_ops():
            enter = dispatched.register_impl(name, impl_name=NAME, preference_rank=_LAST)
            enter(_dispatched(name))
    except (ImportError, AttributeError, TypeError) as error:
        if isinstance(error, ImportError) and not (error.name or "").startswith("liger_kernel"):
            raise
        warn_once(
            f"liger-kernel {version()} does not fit and runs its own kernels: {error}; tilekern knows {KNOWN_VERSION}"
        )
        return False
    return True


def withdraw() -> None:
    """Take tilekern out of both registries."""
    sys.modules["liger_kernel.ops.backends.registry"].IMPL_REGISTRY.pop(NAME, None)
    registry = sys.modules["liger_kernel.backends.registry"]
    with registry._REGISTRY_LOCK:
        for key in [key for key in registry._REGISTRY if key[1] == NAME]:
            del registry._REGISTRY[key]
    sys.modules["liger_kernel.backends"].clear_available_cache()


@functools.cache
def replacements() -> dict[str, type]:
    """Return, by name, a replacement class for each of Liger's functions that the table serves."""
    theirs = importlib.import_module("liger_kernel.ops")
    other = [name for name, row in TABLE.items() if not _fits(row, getattr(theirs, name, None))]
    if other:
        warn_once(
            f"liger-kernel {version()} does not fit: {', '.join(other)} take other arguments than in {KNOWN_VERSION}, "
            "and stay Liger's"
        )
    return {name: _replacement(row, getattr(theirs, name)) for name, row in TABLE.items() if name not in other}


def bind(ours: bool) -> None:
    """Put the replacements, or the originals, into all of Liger's modules that hold the other."""
    for module in _holders():
        for name, replacement in replacements().items():
            found, original = vars(module).get(name), replacement.original  # type: ignore[attr-defined]
            if found is (original if ours else replacement):
                setattr(module, name, replacement if ours else original)


def is_bound() -> bool:
    """Return whether Liger's functions are tilekern's now."""
    module = sys.modules.get("liger_kernel.ops")
    return module is not None and all(vars(module).get(name) is found for name, found in replacements().items())


def all_functions() -> list[str]:
    """Return the names of all functions of Liger that have an ``apply``."""
    theirs = vars(importlib.import_module("liger_kernel.ops"))
    return sorted(name for name, value in theirs.items() if name.endswith("Function") and hasattr(value, "apply"))


def _holders() -> Iterator[ModuleType]:
    """Yield Liger's modules, except those that define or wrap its own kernels."""
    for name, module in list(sys.modules.items()):
        if name == "liger_kernel.ops" or (
            name.startswith("liger_kernel.") and not name.startswith("liger_kernel.ops.") and module is not None
        ):
            yield module


def _fits(row: Function, original: Any) -> bool:
    """Return whether Liger's function takes the arguments that the table knows."""
    if original is None:
        return False
    known = list(inspect.signature(row.call).parameters)
    if not hasattr(original, "forward"):  # a class that chooses among functions
        return list(inspect.signature(original.apply).parameters) == known
    return list(inspect.signature(original.forward).parameters)[1:] == known


def _replacement(row: Function, original: Any) -> type:
    # Not a subclass: torch.compile would trace a subclass's forward and ignore its apply.
    members = {name: value for name, value in vars(original).items() if not name.startswith("_")}
    return type(row.name, (), {**members, "apply": staticmethod(_serving(row, original.apply)), "original": original})


def _serving(row: Function, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the row's op, or else ``theirs``; it counts both, except under ``torch.compile``."""
    kept.setdefault(row.name, Counter())

    def apply(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        try:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            if not is_plain(*tensors) and not _is_shared(row, args, tensors):
                raise NotServed("a subclass of Tensor")
            result = row.call(*args, **kwargs)
        except NotServed as reason:
            if not compiling:
                _note(row, str(reason))
            return theirs(*args, **kwargs)
        if not compiling:
            calls[row.name] += 1
        return result

    return apply


def _is_shared(row: Function, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
    """Return whether the first ``row.dtensors`` arguments are DTensors, and all others plain tensors or DTensors."""
    if not row.dtensors or not all(is_dtensor(x) for x in args[: row.dtensors]):
        return False
    return all(is_plain(x) or is_dtensor(x) for x in tensors)


def _note(row: Function, reason: str) -> None:
    if reason not in kept[row.name]:
        warn_once(
            f"{row.name} runs Liger's own kernel where it is asked for {reason}, which tilekern's {row.op} does not "
            "have; tilekern.integrations.liger.calls() counts such calls"
        )
    kept[row.name][reason] += 1


def _dispatched_ops() -> list[str]:
    """Return all names that Liger's dispatcher may be asked for; with its variable set, each must exist."""
    return list(importlib.import_module("liger_kernel.backends.registry")._DISCOVERY_MAP)


def _dispatched(name: str) -> Callable[..., Any]:
    """Return the callee of Liger's dispatcher for an op: the table's row, else the best other implementation."""

    def other(*args: Any, **kwargs: Any) -> Any:
        backends = importlib.import_module("liger_kernel.backends")
        tensors = [x for x in args if isinstance(x, torch.Tensor) and x.is_cuda]
        names = backends.available_impls(name, tensors[0].device if tensors else None)
        found = next((found for found in names if found != NAME), None)
        if found is None:
            raise backends.NoImplAvailableError(f"liger: no implementation of {name} but tilekern's is available here")
        registry = importlib.import_module("liger_kernel.backends.registry")
        return registry.get_registered(name, found).call(*args, **kwargs)

    row = next((row for row in TABLE.values() if row.dispatched == name), None)
    if row is None:
        return other
    serving = _serving(row, other)

    def dispatched(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:
        if mode not in (None, "default"):
            raise ValueError(f"tilekern's {row.op} has the mode default alone, got {mode!r}")
        return serving(*args, **kwargs)

    return dispatched
