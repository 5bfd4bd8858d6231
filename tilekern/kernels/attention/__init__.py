"""Attention forward and backward, by kernels and by cuDNN."""

from tilekern.kernels.attention import backward, forward, gradients

SPECS = (*forward.SPECS, *backward.SPECS, *gradients.SPECS)
