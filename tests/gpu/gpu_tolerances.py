"""Tolerances of results on a GPU, each with its reason."""

import torch

# ||error|| / ||reference in float64||: sums of float32 in another order; results rounded to 8 bits, and gradients that
# are made of such results.
OF_OPS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
# Of a loss relative to it, where weights of bfloat16 have been moved: orders of sums differ from the first step on.
OF_LOSSES = 2e-2
# Of the norm of a parameter's gradient in bfloat16, relative to it.
OF_GRADIENT_NORMS = 3e-2
# The rank of a division by which two groups of six curves count as told apart: by chance once in 462 times.
TOLD_APART = 1 / 400
