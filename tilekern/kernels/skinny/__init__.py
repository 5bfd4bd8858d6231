"""Linear layers of few rows: whole sums in one kernel, of q, k and v too, or shares of sums in one and their join."""

from tilekern.kernels.skinny import linear, projections, split

SPECS = (*linear.SPECS, *projections.SPECS, *split.SPECS)
