"""Matrices of 8-bit floats with a scale for each row, or for blocks: made, turned, and multiplied."""

from tilekern.kernels.fp8 import (
    block_product,
    blocks,
    experts_gate,
    gated,
    grouped,
    grouped_gradient,
    grouped_turned,
    mx_blocks,
    mx_product,
    product,
    rows,
    turned,
    weight_blocks,
)

SPECS = (
    rows.SPEC, turned.SPEC, product.SPEC, *gated.SPECS, blocks.SPEC, weight_blocks.SPEC, block_product.SPEC,
    mx_blocks.SPEC, mx_product.SPEC, grouped_turned.ROWS_SPEC, grouped_turned.WEIGHTS_SPEC, grouped.SPEC,
    grouped_gradient.SPEC, *experts_gate.SPECS,
)  # fmt: skip
__all__ = ["SPECS"]
