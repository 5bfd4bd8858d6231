"""Layers of narrow models in few launches: a norm and its product, and all that is behind attention.

A block has its rows whole, so that what one product leaves for the next never leaves the block.
"""

from tilekern.kernels.narrow import block, linear

SPECS = (*block.SPECS, *linear.SPECS)
