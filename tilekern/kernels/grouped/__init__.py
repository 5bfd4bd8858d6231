"""Products of rows that are sorted by expert with each expert's own weight, the gradients of these, and sums."""

from tilekern.kernels.grouped import product, sums, weight_gradient

SPECS = (*product.SPECS, *weight_gradient.SPECS, *sums.SPECS)

__all__ = ["SPECS"]
