"""Linear layers of few rows: whole sums in one kernel, of q, k and v too, or with the norm before them, in blocks that
hold their weights or in blocks that stream them, or shares of sums in one and their join.

Weights are in the dtype of the rows, or int8 with a scale for each output.
"""

from tilekern.kernels.skinny import held, int8, linear, projections, scaled, split

SPECS = (*held.SPECS, *int8.SPECS, *linear.SPECS, *projections.SPECS, *scaled.SPECS, *split.SPECS)
