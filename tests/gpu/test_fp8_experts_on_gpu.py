"""Experts by 8-bit floats on a GPU: kernels beside their references, and the layer beside float64 and itself."""

import pytest
import torch
from experts_samples import GATES, by_loop, layer, results, wide
from gpu_samples import compiled, nothing_waits, run_library

from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.grouped.routing import OF_SUMS
from tilekern.ops.fp8_experts import fp8_experts
from tilekern.runtime import dispatch
from tilekern.spec.targets import here
from tilekern.tuning.verify.canaries import bits
from tilekern.tuning.verify.check import compare, expected_results, make_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]
TURNED, WEIGHTS, PRODUCT, GRADIENT = map(
    spec_named,
    ("fp8_grouped_turned", "fp8_expert_weights_turned", "fp8_grouped_matmul", "fp8_grouped_weight_gradient"),
)
ROUTINGS = (None, "zipf", "one expert gets all", "empty experts")
SIZES = {"inner": 1024, "columns": 1536, "experts": 16}


@pytest.fixture(autouse=True)
def hopper():
    """Skip GPUs without 8-bit floats."""
    if not here().has_fp8:
        pytest.skip("8-bit floats need a GPU of sm_90 or newer")


def drawn(spec, problem, routing=None):
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = spec.inputs(problem, generator, "cuda")
    return inputs | (spec.variations[routing](problem, generator, "cuda") if routing else {})


def launched_twice(spec, problem, inputs):
    """Run the default kernel twice, and return the first run's outputs."""
    config = spec.default(problem, here())
    launch = compiled(spec, problem, config, here())
    found = [launch(inputs, make_outputs(spec, problem, 1, "cuda")) for _ in range(2)]
    torch.cuda.synchronize()
    assert all(torch.equal(bits(x), bits(found[1][name])) for name, x in found[0].items())
    return found[0]


def assert_same(found, expected):
    """Compare all that is written; what is not, is NaN in both."""
    for name, x in expected.items():
        assert torch.equal(found[name].double().nan_to_num(-1.0), x.nan_to_num(-1.0)), name


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gathered", [False, True])
def test_turned_rows_have_the_bits_of_the_reference(routing, gathered):
    assert routing is None or routing in OF_SUMS
    problem = TURNED.problem(rows=8190, columns=1024, experts=16, gathered=gathered)
    inputs = drawn(TURNED, problem, routing)
    inputs["scale"][77] = torch.nan
    assert_same(launched_twice(TURNED, problem, inputs), expected_results(TURNED, problem, inputs))


@pytest.mark.parametrize("rows", [1536, 1456])
def test_turned_weights_have_the_bits_of_the_reference(rows):
    problem = WEIGHTS.problem(experts=16, rows=rows, columns=1024, dtype="bfloat16")
    inputs = drawn(WEIGHTS, problem)
    assert_same(launched_twice(WEIGHTS, problem, inputs), expected_results(WEIGHTS, problem, inputs))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_right(routing, turned):
    problem = PRODUCT.problem(rows=8190, **SIZES, turned=turned, dtype="bfloat16")
    inputs = drawn(PRODUCT, problem, routing)
    found, expected = launched_twice(PRODUCT, problem, inputs), expected_results(PRODUCT, problem, inputs)
    check = compare(PRODUCT, problem, found, expected)
    assert check.passed, check.reason


@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradients_of_weights_are_right(routing):
    problem = GRADIENT.problem(rows=8190, **SIZES, dtype="bfloat16")
    inputs = drawn(GRADIENT, problem, routing)
    found, expected = launched_twice(GRADIENT, problem, inputs), expected_results(GRADIENT, problem, inputs)
    check = compare(GRADIENT, problem, found, expected)
    assert check.passed, check.reason


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_library_s_product_is_right(routing):
    problem = PRODUCT.problem(rows=8190, **SIZES, turned=False, dtype="bfloat16")
    configs = [c for c in PRODUCT.space.candidates(problem, here()) if PRODUCT.is_library(problem, c)]
    if not configs:
        pytest.skip("torch's product of experts is a candidate on Hopper alone")
    check = run_library(PRODUCT, problem, PRODUCT.implement(problem, configs[0]), drawn(PRODUCT, problem, routing))
    assert check.passed, check.reason


LAYERS = {
    "gpt_oss": (600, 4, 8, 320, 352, {"biased": True, "transposed": True}),
    "silu": (600, 8, 32, 256, 96, {}),
}


def on_gpu(gate):
    *sizes, more = LAYERS[gate]
    given = layer(*sizes, dtype=torch.bfloat16, weight_dtype=torch.float32, **more)
    return {name: x.detach().cuda().requires_grad_(x.requires_grad) for name, x in given.items()}


def how(gate):
    """A gate without a limit that is near: rounding next to it switches gradients on or off."""
    return GATES[gate] | ({"limit": 1e3} if "limit" in GATES[gate] else {})


@pytest.mark.parametrize("gate", LAYERS)
def test_results_and_gradients_are_those_of_float64_but_for_the_roundings(gate):
    given = on_gpu(gate)
    slope = torch.randn(given["x"].shape)
    found = results(fp8_experts, given, slope.cuda(), **how(gate))
    on_cpu = {name: x.detach().cpu().requires_grad_(x.requires_grad) for name, x in given.items()}
    expected = results(by_loop, wide(on_cpu), slope.bfloat16().double(), **how(gate))
    for name, x in expected.items():
        assert (found[name].cpu().double() - x).norm() < 0.1 * x.norm(), name
    names = ("fp8_rows", "fp8_grouped_turned", "fp8_expert_weights_turned", "fp8_grouped_matmul", "fp8_experts_gate")
    for kernel in (*names, "fp8_experts_gate_backward", "fp8_grouped_weight_gradient"):
        assert dispatch.counters(kernel).launches > 0
        assert dispatch.counters(kernel).fallbacks == 0


@pytest.mark.parametrize("gate", LAYERS)
def test_nothing_waits_for_the_gpu_and_two_runs_give_the_same_bits(gate):
    given = on_gpu(gate)
    slope = torch.randn(given["x"].shape, device="cuda", dtype=torch.bfloat16)
    first = results(fp8_experts, given, slope, **how(gate))
    with nothing_waits():
        second = results(fp8_experts, given, slope, **how(gate))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_terms_of_one_sign_lose_nothing_that_grows_with_their_number():
    """Steps of 128 terms are summed with 14 bits; one running sum of all would lose 28 % at 16384 terms."""
    numbers = (8 + torch.randint(0, 7, (512, 16384), device="cuda")).to(torch.float8_e4m3fn)
    weight = (8 + torch.randint(0, 7, (2, 128, 16384), device="cuda")).to(torch.float8_e4m3fn)
    problem = PRODUCT.problem(rows=512, inner=16384, columns=128, experts=2, turned=False, dtype="bfloat16")
    inputs = {
        "a": numbers, "b": weight, "a_scale": torch.ones(512, device="cuda"),
        "b_scale": torch.ones(2, 128, device="cuda"),
        "offsets": torch.tensor([200, 512], dtype=torch.int32, device="cuda"),
    }  # fmt: skip
    (c,), (want,) = (
        launched_twice(PRODUCT, problem, inputs).values(),
        expected_results(PRODUCT, problem, inputs).values(),
    )
    assert (c.double() / want - 1).abs().max() < 0.01
