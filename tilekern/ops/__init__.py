"""Ops: torch functions with gradients over the kernels, one file each, called after its op.

Of each file that declares ops (:mod:`tilekern.ops.operation`) the function that has the file's name is found by itself:
an op, or a function that calls the file's ops. The others are imported by name below: those that call ops of other
files, and those that type checkers must know, to which a name that is found later is the module of the op. The module
classes of :mod:`tilekern.ops.modules` stand beside the ops.
"""

import importlib
import pkgutil

from tilekern.ops.attention import attention
from tilekern.ops.cross_entropy import cross_entropy
from tilekern.ops.experts import experts
from tilekern.ops.fused_add_rms_norm import fused_add_rms_norm
from tilekern.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from tilekern.ops.fused_linear_jsd import fused_linear_jsd
from tilekern.ops.fused_neighborhood_attention import fused_neighborhood_attention
from tilekern.ops.gated_mlp import gated_mlp
from tilekern.ops.linear import linear
from tilekern.ops.linear_log_probs import linear_log_probs
from tilekern.ops.mlp import mlp
from tilekern.ops.modules import CLASSES
from tilekern.ops.operation import DECLARED
from tilekern.ops.projections import projections
from tilekern.ops.qk_norm_rope import qk_norm_rope
from tilekern.ops.qwen2vl_mrope import qwen2vl_mrope
from tilekern.ops.rms_norm import rms_norm
from tilekern.ops.rope import rope
from tilekern.ops.route import route
from tilekern.ops.router import router
from tilekern.ops.router_losses import router_losses
from tilekern.ops.sharded_linear_log_probs import sharded_linear_log_probs
from tilekern.ops.swiglu import swiglu
from tilekern.ops.tiled_geglu import tiled_geglu
from tilekern.ops.tiled_swiglu import tiled_swiglu

__all__ = [
    "attention",
    "cross_entropy",
    "experts",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "fused_linear_jsd",
    "fused_neighborhood_attention",
    "gated_mlp",
    "linear",
    "linear_log_probs",
    "mlp",
    "projections",
    "qk_norm_rope",
    "qwen2vl_mrope",
    "rms_norm",
    "rope",
    "route",
    "router",
    "router_losses",
    "sharded_linear_log_probs",
    "swiglu",
    "tiled_geglu",
    "tiled_swiglu",
]

for _file in pkgutil.iter_modules(__path__):
    if _file.ispkg:  # makes ops, and is none
        continue
    _module = importlib.import_module(f"{__name__}.{_file.name}")
    if _file.name not in __all__ and any(op.formula.__module__ == _module.__name__ for op in DECLARED.values()):
        globals()[_file.name] = getattr(_module, _file.name)
        __all__.append(_file.name)

globals().update(CLASSES)
__all__.extend(CLASSES)
