"""Ops: torch functions with gradients over the kernels, one file per op, with the op's name.

In a file that declares ops (:mod:`tilekern.ops.operation`) the function with the file's name is exported automatically.
Functions without a declaration, and functions that type checkers must know, are imported by name below. The module
classes of :mod:`tilekern.ops.modules` are exported too.
"""

import importlib
import pkgutil

from tilekern.errors import needing as _needing

with _needing(__name__):
    import torch as _torch  # noqa: F401 (before any op, so that one line says that it is missing)

from tilekern.ops.attention import attention as attention
from tilekern.ops.cross_entropy import cross_entropy as cross_entropy
from tilekern.ops.decode_attention import decode_attention as decode_attention
from tilekern.ops.experts import experts as experts
from tilekern.ops.fused_add_rms_norm import fused_add_rms_norm as fused_add_rms_norm
from tilekern.ops.fused_linear_cross_entropy import fused_linear_cross_entropy as fused_linear_cross_entropy
from tilekern.ops.fused_linear_jsd import fused_linear_jsd as fused_linear_jsd
from tilekern.ops.fused_neighborhood_attention import fused_neighborhood_attention as fused_neighborhood_attention
from tilekern.ops.gated_linear import gated_linear as gated_linear
from tilekern.ops.gated_mlp import gated_mlp as gated_mlp
from tilekern.ops.linear import linear as linear
from tilekern.ops.linear_log_probs import linear_log_probs as linear_log_probs
from tilekern.ops.log_probs import log_probs as log_probs
from tilekern.ops.lora_linear import lora_linear as lora_linear
from tilekern.ops.mlp import mlp as mlp
from tilekern.ops.modules import CLASSES
from tilekern.ops.operation import DECLARED
from tilekern.ops.projections import projections as projections
from tilekern.ops.qk_norm_rope import qk_norm_rope as qk_norm_rope
from tilekern.ops.qwen2vl_mrope import qwen2vl_mrope as qwen2vl_mrope
from tilekern.ops.rms_norm import rms_norm as rms_norm
from tilekern.ops.rope import rope as rope
from tilekern.ops.route import route as route
from tilekern.ops.router import router as router
from tilekern.ops.router_losses import router_losses as router_losses
from tilekern.ops.sample import greedy as greedy
from tilekern.ops.sample import sample as sample
from tilekern.ops.sharded_linear_log_probs import sharded_linear_log_probs as sharded_linear_log_probs
from tilekern.ops.swiglu import swiglu as swiglu
from tilekern.ops.tiled_geglu import tiled_geglu as tiled_geglu
from tilekern.ops.tiled_swiglu import tiled_swiglu as tiled_swiglu

for _file in pkgutil.iter_modules(__path__):
    if not _file.ispkg:
        _module = importlib.import_module(f"{__name__}.{_file.name}")
        is_declared = any(op.formula.__module__ == _module.__name__ for op in DECLARED.values())
        if is_declared and not callable(globals()[_file.name]):
            globals()[_file.name] = getattr(_module, _file.name)

_functions = sorted(name for name, value in globals().items() if callable(value) and not name.startswith("_"))
globals().update(CLASSES)
__all__ = [*_functions, *CLASSES]  # noqa: PLE0604
