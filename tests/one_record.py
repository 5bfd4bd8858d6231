"""One problem of SwiGLU's forward for an H200, on which lookups are tried with no GPU."""

import torch

from tilekern.kernels import spec_named
from tilekern.targets import resolve

GPU = torch.device("cuda", 0)
H200 = resolve("H200")
SPEC = spec_named("swiglu_forward")
# No prebuilt pack serves a model of 48 columns.
PROBLEM = SPEC.problem(rows=64, columns=48, dtype="bfloat16")
SIZES = (50, 48, torch.bfloat16)
