"""Attention forward and backward, by kernels and by cuDNN."""

from tilekern.kernels.attention import backward, delta, forward, gradients

SPECS = (*forward.SPECS, *backward.SPECS, *delta.SPECS, *gradients.SPECS)
