"""Train linear layers, and experts where chosen, with products of 8-bit floats (docs/fp8.md)::

import tilekern.fp8

tilekern.fp8.convert(model)
"""

from tilekern.patch.fp8 import BlockwiseLinear, Linear, Mxfp8Linear, convert, restore
from tilekern.patch.gathering import gather

__all__ = ["BlockwiseLinear", "Linear", "Mxfp8Linear", "convert", "gather", "restore"]
