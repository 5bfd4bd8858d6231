"""Attention forward and backward, by kernels and by cuDNN."""

from tilekern.kernels.attention import apart, backward, forward, gradients, kept

SPECS = (*forward.SPECS, *backward.SPECS, *kept.SPECS, *apart.SPECS, *gradients.SPECS)
