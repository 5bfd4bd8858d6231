"""tilekern: GPU kernels for Hugging Face models, tuned and compiled ahead of time, kept in a cache that can be shipped.

Importing this package loads neither torch nor cuda.tile; each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilekern.integrations.names import register_later as _register_later

# The only place of the version; `.dev0` between releases (docs/releasing.md).
__version__ = "0.2.0.dev0"

_WHERE = {
    "apply": "tilekern.patch",
    "apply_to_model": "tilekern.patch",
    "reset": "tilekern.patch",
    "graphed": "tilekern.patch.graphs",
    "get_patched_ops": "tilekern.patch",
    "list_patches": "tilekern.patch",
    "report": "tilekern.patch.report",
    "register_patch": "tilekern.patch",
    "warmup_all_kernels": "tilekern.patch.warmup",
    "clear_autotune_cache": "tilekern.patch.warmup",
    "prepare": "tilekern.patch.foresight",
    "agree": "tilekern.patch.comparing",
    "cache_digest": "tilekern.patch.comparing",
    "trace": "tilekern.runtime.recorder",
    "tune": "tilekern",
    "preflight": "tilekern.tuning.preflight",
    "invariant": "tilekern.ops.invariance",
    "keep_attention": "tilekern.ops.checkpoints",
    "stats": "tilekern.runtime.counting",
    "check_labels": "tilekern.ops.labels",
    "arrays": "tilekern",
    "fp8": "tilekern",
    "inference": "tilekern",
    "kernels": "tilekern",
    "ops": "tilekern",
    "AdamW": "tilekern.ops.adamw",
    "TrainerCallback": "tilekern.patch.callback",
}
__all__ = ["__version__", *_WHERE]  # noqa: PLE0604

if TYPE_CHECKING:
    from tilekern import arrays as arrays
    from tilekern import fp8 as fp8
    from tilekern import inference as inference
    from tilekern import kernels as kernels
    from tilekern import ops as ops
    from tilekern.ops.adamw import AdamW as AdamW
    from tilekern.ops.checkpoints import keep_attention as keep_attention
    from tilekern.ops.invariance import invariant as invariant
    from tilekern.ops.labels import check_labels as check_labels
    from tilekern.patch import apply as apply
    from tilekern.patch import apply_to_model as apply_to_model
    from tilekern.patch import get_patched_ops as get_patched_ops
    from tilekern.patch import list_patches as list_patches
    from tilekern.patch import register_patch as register_patch
    from tilekern.patch import reset as reset
    from tilekern.patch.callback import TrainerCallback as TrainerCallback
    from tilekern.patch.comparing import agree as agree
    from tilekern.patch.comparing import cache_digest as cache_digest
    from tilekern.patch.foresight import prepare as prepare
    from tilekern.patch.graphs import graphed as graphed
    from tilekern.patch.report import report as report
    from tilekern.patch.warmup import clear_autotune_cache as clear_autotune_cache
    from tilekern.patch.warmup import warmup_all_kernels as warmup_all_kernels
    from tilekern.runtime.counting import stats as stats
    from tilekern.runtime.recorder import trace as trace
    from tilekern.tune import tune as tune
    from tilekern.tuning.preflight import preflight as preflight


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tilekern' has no attribute {name!r}")
    import importlib

    from tilekern.errors import needing

    with needing(f"tilekern.{name}"):
        # A module of this package (arrays, fp8) is that name: importing it would set the attribute anyhow.
        if _WHERE[name] == __name__:
            return importlib.import_module(f"{__name__}.{name}")
        return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


_register_later()
