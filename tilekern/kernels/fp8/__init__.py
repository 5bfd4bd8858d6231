"""Matrices of 8-bit floats with a scale for each row: made, turned, and multiplied."""

from tilekern.kernels.fp8 import product, rows, turned

SPECS = (rows.SPEC, turned.SPEC, product.SPEC)
__all__ = ["SPECS"]
