"""Patch models of transformers to run the kernels; transformers is imported only when a patch is applied.

Use::

    import tilekern

    tilekern.apply()

Its names are loaded when they are first used, since the command line ``python -m tilekern.patch`` imports this package
also where torch is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilekern.errors import needing

_WHERE = {
    "Found": "tilekern.patch.installed",
    "Patch": "tilekern.patch.table",
    "apply": "tilekern.patch.patcher",
    "apply_to_model": "tilekern.patch.patcher",
    "digest_of": "tilekern.patch.digests",
    "get_patched_ops": "tilekern.patch.patcher",
    "list_patches": "tilekern.patch.patcher",
    "register_patch": "tilekern.patch.registry",
    "reset": "tilekern.patch.patcher",
}
__all__ = [*_WHERE]  # noqa: PLE0604

if TYPE_CHECKING:
    from tilekern.patch.digests import digest_of as digest_of
    from tilekern.patch.installed import Found as Found
    from tilekern.patch.patcher import apply as apply
    from tilekern.patch.patcher import apply_to_model as apply_to_model
    from tilekern.patch.patcher import get_patched_ops as get_patched_ops
    from tilekern.patch.patcher import list_patches as list_patches
    from tilekern.patch.patcher import reset as reset
    from tilekern.patch.registry import register_patch as register_patch
    from tilekern.patch.table import Patch as Patch


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    with needing(__name__):
        return getattr(importlib.import_module(_WHERE[name]), name)
