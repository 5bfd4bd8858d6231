"""Linear layers of few rows: whole sums in one kernel, or shares of the sums in one and their join in another."""

from tilekern.kernels.skinny import linear, split

SPECS = (*linear.SPECS, *split.SPECS)
