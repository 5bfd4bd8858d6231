"""Linear layers of few rows: whole sums in one kernel, of q, k and v too, or in blocks that hold their weights, with or
without the norm before them, or shares of sums in one and their join.

Weights are in the dtype of the rows, or int8 with a scale for each output.
"""

from tilekern.kernels.skinny import held, int8, linear, projections, split

SPECS = (*held.SPECS, *int8.SPECS, *linear.SPECS, *projections.SPECS, *split.SPECS)
