"""Attention forward and backward, by kernels and by cuDNN."""

from tilekern.kernels.attention import backward, forward, gradients, kept

SPECS = (*forward.SPECS, *backward.SPECS, *kept.SPECS, *gradients.SPECS)
