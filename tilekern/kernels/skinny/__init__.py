"""Linear layers of few rows: whole sums in one kernel, of q, k and v too, or with the norm before it, or shares of sums
in one and their join.

Weights are in the dtype of the rows, or int8 with a scale for each output.
"""

from tilekern.kernels.skinny import int8, linear, normed, projections, split

SPECS = (*linear.SPECS, *int8.SPECS, *normed.SPECS, *projections.SPECS, *split.SPECS)
