"""The product of two matrices, by a kernel and by cuBLAS."""

from tilekern.kernels.matmul.product import SPECS

__all__ = ["SPECS"]
