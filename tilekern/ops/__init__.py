"""Ops: torch functions with gradients over the kernels, one file each."""

from tilekern.ops.rms_norm import rms_norm
from tilekern.ops.rope import rope
from tilekern.ops.swiglu import swiglu

__all__ = ["rms_norm", "rope", "swiglu"]
