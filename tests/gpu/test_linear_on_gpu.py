"""Products that add in place: the addend's memory is the result's, which the cubins were not told."""

import pytest
import torch

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.matmul.product import sizes
from tilekern.kernels.matmul.space import is_tile
from tilekern.runtime.launcher import PrebuiltKernel, Variant
from tilekern.runtime.plans import plan_of
from tilekern.spec import ALIGNED
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import arguments_of

SPEC = spec_named("matmul")


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("rows", [1009, 2048])
@pytest.mark.parametrize("on", [("a_transposed", "accumulated"), ("accumulated",), ("b_transposed", "accumulated")])
def test_every_tile_adds_in_place_what_it_adds_elsewhere(on, rows):
    """The bits of a result in memory of its own, ten times over."""
    target = here()
    problem = SPEC.problem(**sizes(rows, 8192, 4096, "bfloat16", on))
    inputs = SPEC.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    for config in filter(is_tile, SPEC.space.candidates(SPEC.bucketed(problem), target)):
        made, implementation = compile_candidate(SPEC, problem, config, target, ALIGNED), SPEC.device(problem, config)
        variant = Variant(ALIGNED, made.symbol, made.assumptions, lambda made=made: made.cubin)
        kernel = PrebuiltKernel(implementation.function, [variant])
        plan = plan_of(kernel, implementation, config, problem, target)
        c = torch.full_like(inputs["addend"], torch.nan)
        plan.launch(0, *arguments_of(implementation, inputs, {"c": c}))
        for _ in range(10):
            same = inputs["addend"].clone()
            plan.launch(0, *arguments_of(implementation, inputs | {"addend": same}, {"c": same}))
            assert torch.equal(same, c), config
