"""Patch models of transformers to run the kernels; transformers is imported only when a patch is applied.

Use::

    import tilekern

    tilekern.apply()
"""

from tilekern.patch.digests import digest_of
from tilekern.patch.installed import Found
from tilekern.patch.patcher import apply, apply_to_model, get_patched_ops, list_patches, reset
from tilekern.patch.registry import register_patch
from tilekern.patch.table import Patch

__all__ = [
    "Found",
    "Patch",
    "apply",
    "apply_to_model",
    "digest_of",
    "get_patched_ops",
    "list_patches",
    "register_patch",
    "reset",
]
