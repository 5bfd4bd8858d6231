"""The aligned variant is what training runs: ordinary tensors of any number of rows must meet what it assumes."""

import pytest
import torch
from spec_samples import compiled, sized

from tilekern.compile.toolchain import assumptions
from tilekern.spec import ALIGNED, ArrayParameter
from tilekern.spec.targets import resolve
from tilekern.tuning.verify.check import odd_problem

SIZES = {
    "columns": 1024, "vocabulary": 1024, "hidden": 256, "inner": 256, "heads": 16, "kv_heads": 8, "head_dim": 128,
    "pairs": 64, "experts": 16, "expert_groups": 2,
}  # fmt: skip
COMPILED = compiled()


def meets(tensor, assumed):
    """Whether a tensor at an aligned address is what a variant assumes."""
    strides = tensor.stride()
    if assumed["last_stride_one"] and strides[-1] != 1 and tensor.shape[-1] != 1:
        return False
    if any(stride % assumed["stride_elements"] for stride in strides[:-1]):
        return False
    return tensor.shape[-1] % assumed["extent_elements"] == 0


@pytest.mark.parametrize("spec", COMPILED, ids=lambda spec: spec.name)
def test_odd_numbers_of_rows_are_aligned(spec):
    problem = odd_problem(spec, sized(spec, "bfloat16", rows=64, tokens=64, queries=64, keys=64, batch=2, **SIZES), 61)
    config = spec.default(problem, resolve("H200"))
    config = spec.generic(problem) if spec.is_library(problem, config) else config
    implementation = spec.device(problem, config)
    arrays = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    for name, (shape, dtype) in spec.outputs(problem, implementation.grid(problem, 132)).items():
        arrays[name] = torch.empty(shape, dtype=getattr(torch, dtype))
    for parameter, assumed in zip(implementation.parameters, assumptions(implementation, ALIGNED), strict=False):
        if isinstance(parameter, ArrayParameter):
            assert meets(arrays[parameter.name], assumed), (parameter, arrays[parameter.name].stride(), assumed)
