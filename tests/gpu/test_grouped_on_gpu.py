"""Grouped products: every config on every routing, the same bits again, and no wait for the host."""

import pytest
import torch

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.grouped import product, weight_gradient
from tilekern.kernels.grouped.routing import VARIATIONS
from tilekern.kernels.matmul.space import is_tile
from tilekern.ops.grouped_linear import grouped_linear
from tilekern.runtime.launcher import PrebuiltKernel, Variant
from tilekern.runtime.plans import plan_of
from tilekern.spec import ALIGNED
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import arguments_of, compare, expected_results, make_outputs

LINEAR, GRADIENT = spec_named("grouped_linear"), spec_named("grouped_weight_gradient")
SIZES = (4093, 1024, 1536, 8, "bfloat16")
PROBLEMS = [
    LINEAR.problem(**product.sizes(*SIZES, on))
    for on in ((), ("inner_first", "biased", "partial"), ("gathered",), ("gathered", "biased", "partial"))
] + [GRADIENT.problem(**weight_gradient.sizes(*SIZES, on)) for on in ((), ("b_gathered",), ("a_gathered",))]


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_every_config_is_right_on_every_routing_with_the_same_bits_again(problem):
    target, spec = here(), LINEAR if "inner_first" in problem else GRADIENT
    generator = torch.Generator("cuda").manual_seed(0)
    plain = spec.inputs(problem, generator, "cuda")
    routings = [plain, *(plain | vary(problem, generator, "cuda") for vary in VARIATIONS.values())]
    expected = [expected_results(spec, problem, inputs) for inputs in routings]
    for config in filter(is_tile, spec.space.candidates(spec.bucketed(problem), target)):
        made, implementation = compile_candidate(spec, problem, config, target, ALIGNED), spec.device(problem, config)
        variant = Variant(ALIGNED, made.symbol, made.assumptions, lambda made=made: made.cubin)
        kernel = PrebuiltKernel(implementation.function, [variant])
        plan = plan_of(kernel, implementation, config, problem, target)
        for inputs, right in zip(routings, expected, strict=True):
            runs = [make_outputs(spec, problem, plan.blocks, "cuda") for _ in range(2)]
            for outputs in runs:
                plan.launch(0, *arguments_of(implementation, inputs, outputs))
            check = compare(spec, problem, runs[0], right)
            assert check.passed, (config, check.reason)
            assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]), config


@pytest.mark.parametrize("slots", [0, 4])
def test_a_step_waits_for_nothing_on_the_host(slots):
    """In bfloat16, whichever won: a wait would stall the queue once in each layer of a model."""
    rows, experts = 512, 4
    x = torch.randn(rows // slots if slots else rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(experts, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(experts, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([100, 100, 400, 500], dtype=torch.int32, device="cuda")
    order = torch.randperm(rows, device="cuda").int() if slots else None

    def step():
        y = grouped_linear(x, weight, offsets, bias, order, slots or 1)
        return torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))

    first = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
