"""Layers of narrow models in few launches: a norm with its product, and all between the attentions of two layers.

A block has its rows whole, so that what one product leaves for the next stays in the block.
"""

from tilekern.kernels.narrow import block, linear

SPECS = (*block.SPECS, *linear.SPECS)
