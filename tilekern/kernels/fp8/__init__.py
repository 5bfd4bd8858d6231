"""Matrices of 8-bit floats with a scale for each row: made, turned, and multiplied."""

from tilekern.kernels.fp8 import gated, product, rows, turned

SPECS = (rows.SPEC, turned.SPEC, product.SPEC, *gated.SPECS)
__all__ = ["SPECS"]
