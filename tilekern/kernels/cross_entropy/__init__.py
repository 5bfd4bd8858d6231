"""Cross entropy of rows of logits: forward and backward apart, or in one launch if the loss's gradient is known."""

from tilekern.kernels.cross_entropy import fused, separate

SPECS = (*separate.SPECS, *fused.SPECS)
