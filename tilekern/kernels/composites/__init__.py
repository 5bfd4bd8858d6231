"""Composites over a language model's head: they launch kernels and products chunk by chunk, and compile nothing."""

from tilekern.kernels.composites import fused_linear_cross_entropy, fused_linear_jsd, linear_log_probs

SPECS = (*fused_linear_cross_entropy.SPECS, *fused_linear_jsd.SPECS, *linear_log_probs.SPECS)
