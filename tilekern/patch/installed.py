"""Compare a patch with the installed transformers: does it fit, and what does it replace?"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any, Literal

from tilekern.patch.digests import digest_of, function_of
from tilekern.patch.ledger import Ledger, Touch
from tilekern.patch.table import Patch

Status = Literal["applied", "available", "changed", "missing"]


@dataclass(frozen=True)
class Found:
    """The state of a patch's target in the installed transformers.

    Attributes:
        patch: the row.
        status: ``applied`` (to the class or module), ``available``, ``changed`` (the source is not one that the patch
            knows) or ``missing``.
        reason: one sentence if the target is changed or missing.
        digest: digest of the installed function, if it has one.
        owner: the class or module that holds the function.
        name: the function's name there.
        original: transformers' own function.
    """

    patch: Patch
    status: Status
    reason: str = ""
    digest: str | None = None
    owner: Any = None
    name: str = ""
    original: Any = None

    @property
    def usable(self) -> bool:
        """Whether the replacement may be used."""
        return self.status in ("applied", "available")


def as_read(patch: Patch) -> Found:
    """Return the state of a form's target in a module that was read but not imported."""
    if not patch.attribute:
        return Found(patch, "missing", f"no code of {patch.module} has a form that is known")
    return Found(patch, "available", digest=patch.digests[0])


def examine(patch: Patch, ledger: Ledger) -> Found:
    """Import the patch's module and compare its functions with the digests of the patch."""
    if not patch.attribute:
        return as_read(patch)
    try:
        module = importlib.import_module(patch.module)
    except ImportError as error:
        return Found(patch, "missing", f"{patch.module}, for {patch.attribute}, cannot be imported ({error})")
    try:
        owner, name = holder(module, patch.attribute)
    except AttributeError as error:
        return Found(patch, "missing", f"{patch.target} is not there ({error})")
    touch = ledger.held(owner, name)
    return _compared(patch, module, owner, name, ledger) if touch is None else _touched(patch, touch, owner, name)


def holder(module: Any, path: str) -> tuple[Any, str]:
    """Return the class or module that holds the attribute at a path, and the attribute's name.

    Raises:
        AttributeError: the attribute does not exist.
    """
    *outer, name = path.split(".")
    owner = module
    for part in outer:
        owner = getattr(owner, part)
    getattr(owner, name)
    return owner, name


def version_of(library: str) -> str:
    """Return an installed library's version, without importing it."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def original_at(module: Any, path: str, ledger: Ledger) -> Any:
    """Return transformers' own object at a path, even if another op's patch replaces it now.

    Raises:
        AttributeError: the path does not exist.
    """
    owner, name = holder(module, path)
    touch = ledger.held(owner, name)
    return touch.original if touch is not None and touch.in_place else getattr(owner, name)


def _touched(patch: Patch, touch: Touch, owner: Any, name: str) -> Found:
    """Return the state of a patched target; the target of another op's patch counts as available."""
    status: Status = "applied" if set(patch.ops).issubset(touch.ops) else "available"
    reason = ""
    if not touch.still_runs:
        status, reason = "changed", f"{patch.target} was replaced by something else after tilekern had patched it"
    return Found(patch, status, reason, _digest(touch.original)[0], owner, name, touch.original)


def _compared(patch: Patch, module: Any, owner: Any, name: str, ledger: Ledger) -> Found:
    original = getattr(owner, name)
    digest, reason = _judged(patch.target, original, patch.digests)
    for path, digests in patch.relies_on:
        try:
            reason = reason or _judged(f"{patch.module}.{path}", original_at(module, path, ledger), digests)[1]
        except AttributeError as error:
            return Found(patch, "missing", f"{patch.module}.{path}, on which it relies, is not there ({error})", digest)
    for path in patch.callers:
        reason = reason or _uncalled(module, path, patch, ledger)
    return Found(patch, "changed" if reason else "available", reason, digest, owner, name, original)


def _judged(target: str, value: Any, digests: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the digest of a function, and the reason why it does not match (empty if it does)."""
    digest, reason = _digest(value)
    if digest in digests:
        return digest, ""
    return digest, f"{target} is not the code that the patch was made for ({reason or f'digest {digest}'})"


def _digest(value: Any) -> tuple[str | None, str]:
    try:
        return digest_of(value), ""
    except ValueError as error:
        return None, str(error)


def _uncalled(module: Any, path: str, patch: Patch, ledger: Ledger) -> str:
    """Return the fault of a method that should call the patched function by its global name; empty if it does."""
    try:
        function = function_of(inspect.unwrap(original_at(module, path, ledger)))
    except AttributeError:
        function = None
    if function is not None and patch.attribute in function.__code__.co_names:
        return ""
    return f"{patch.module}.{path} does not call {patch.attribute}"
