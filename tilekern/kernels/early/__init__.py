"""Kernels of many rows whose launches overlap the end of the kernel before, for whole sequences.

Each of a chain of kernels that take 3 to 10 us loses about 1 us to its launch and its first loads. So each waits for
its predecessor by itself, and lets its successor be launched as soon as it has waited (programmatic dependent launch).
A successor is launched when all blocks of its predecessor run, so that it takes no room from any of them. Attention and
norms are copies of those for training, which do not overlap.
"""

from tilekern.kernels.early import attention, linear, norms

SPECS = (*attention.SPECS, *linear.SPECS, *norms.SPECS)
