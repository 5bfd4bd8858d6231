"""Products of rows that are sorted by expert with each expert's own weight, and the gradients of these."""

from tilekern.kernels.grouped import bias_gradient, product, weight_gradient

SPECS = (*product.SPECS, *weight_gradient.SPECS, *bias_gradient.SPECS)

__all__ = ["SPECS"]
