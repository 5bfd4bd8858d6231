"""How far results may be from those in float64: one table for the tests of ops, with the reasons.

Errors are relative: ``||error|| / ||reference||`` over a whole tensor.
"""

import torch

# Some units in the last place: of float32 a sum over a hundred numbers adds to them, and what is rounded to a half type
# on its way (the norm before its weight, probabilities before their values) is rounded twice.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# Of a kernel that computes in float32 and rounds once: half a unit in the last place, as norms go, and some room.
ONCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Autocast to bfloat16 rounds what goes into a product, and its result.
CAST = 3e-2
# The same steps in another order, as a graph or another path of an op takes them.
REORDERED = 1e-5
# Torch's own operations in float64 against the same formula; some round a number of the formula to float32.
FLOAT64 = 1e-6
