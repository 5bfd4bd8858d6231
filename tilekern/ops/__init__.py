"""Ops: torch functions with gradients over the kernels, one file each."""

from tilekern.ops.add_rms_norm import add_rms_norm
from tilekern.ops.attention import attention
from tilekern.ops.cross_entropy import cross_entropy
from tilekern.ops.gated_mlp import gated_mlp
from tilekern.ops.linear import linear
from tilekern.ops.linear_cross_entropy import linear_cross_entropy
from tilekern.ops.projections import projections
from tilekern.ops.qk_norm_rope import qk_norm_rope
from tilekern.ops.rms_norm import rms_norm
from tilekern.ops.rope import rope
from tilekern.ops.swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "gated_mlp",
    "linear",
    "linear_cross_entropy",
    "projections",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "swiglu",
]
