"""Kernels of 8-bit floats with scales of blocks on a GPU at the sizes of a model, and a layer of a step."""

import pytest
import torch
from gpu_samples import compiled, run_library

from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.ops.fp8_block_linear import fp8_block_linear
from tilekern.spec.targets import here
from tilekern.tuning.verify.canaries import bits, in_whole_rows
from tilekern.tuning.verify.check import compare, expected_results, make_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]
BLOCKS, WEIGHT, PRODUCT = map(spec_named, ("fp8_blocks", "fp8_weight_blocks", "fp8_block_matmul"))
# Tokens that are whole blocks, and that nothing divides.
TOKENS = (8192, 8190)
INNER, COLUMNS = 4096, 6144


@pytest.fixture(autouse=True)
def hopper():
    """Skip GPUs without 8-bit floats."""
    if not here().has_fp8:
        pytest.skip("8-bit floats need a GPU of sm_90 or newer")


def launched_twice(spec, problem, inputs):
    """Run the default config twice, and return the first run's outputs."""
    launch = compiled(spec, problem, spec.default(problem, here()), here())
    found = [launch(inputs, make_outputs(spec, problem, 1, "cuda")) for _ in range(2)]
    torch.cuda.synchronize()
    assert all(torch.equal(bits(x), bits(found[1][name])) for name, x in found[0].items())
    return found[0]


def drawn(spec, problem):
    """Draw inputs whose rows are whole 16 bytes, as the op makes them."""
    inputs = spec.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    return {name: in_whole_rows(x) for name, x in inputs.items()}


def assert_same(found, expected):
    for name, x in expected.items():
        assert torch.equal(found[name].double().nan_to_num(-1.0), x.nan_to_num(-1.0)), name


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("both", [False, True])
def test_blocks_have_the_bits_of_the_reference(tokens, both):
    problem = BLOCKS.problem(rows=tokens, columns=INNER, both=both, dtype="bfloat16")
    inputs = drawn(BLOCKS, problem)
    inputs["x"][5, 7], inputs["x"][77, 300] = 1e4, torch.nan
    assert_same(launched_twice(BLOCKS, problem, inputs), expected_results(BLOCKS, problem, inputs))


@pytest.mark.parametrize("rows", [COLUMNS, 6160])
@pytest.mark.parametrize("turned", [False, True])
def test_weights_have_the_bits_of_the_reference(rows, turned):
    problem = WEIGHT.problem(rows=rows, columns=INNER, turned=turned, dtype="bfloat16")
    inputs = drawn(WEIGHT, problem)
    inputs["x"][5, 7], inputs["x"][700, 300] = 1e4, torch.nan
    assert_same(launched_twice(WEIGHT, problem, inputs), expected_results(WEIGHT, problem, inputs))


FLAGS = {"forward": (), "weight gradient": ("over_rows",), "all": ("biased", "accumulated")}


def problem_of(tokens, *flags):
    named = {flag: flag in flags for flag in ("over_rows", "biased", "accumulated")}
    return PRODUCT.problem(rows=tokens, inner=INNER, columns=COLUMNS, dtype="bfloat16", **named)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", FLAGS)
def test_products_are_right(name, tokens):
    problem = problem_of(tokens, *FLAGS[name])
    inputs = drawn(PRODUCT, problem)
    check = compare(
        PRODUCT, problem, launched_twice(PRODUCT, problem, inputs), expected_results(PRODUCT, problem, inputs)
    )
    assert check.passed, check.reason


@pytest.mark.parametrize("flags", [(), ("over_rows",), ("biased",)], ids="-".join)
def test_the_library_s_product_is_right(flags):
    problem = problem_of(8192, *flags)
    configs = [c for c in PRODUCT.space.candidates(problem, here()) if PRODUCT.is_library(problem, c)]
    if not configs:
        pytest.skip("torch has products with scales of blocks on Hopper alone")
    check = run_library(PRODUCT, problem, PRODUCT.implement(problem, configs[0]), drawn(PRODUCT, problem))
    assert check.passed, check.reason


def test_terms_of_one_sign_lose_nothing_that_grows_with_their_number():
    """A step's 128 terms are summed with 14 bits; one running sum of all would lose 28 % at 16384 terms."""
    torch.manual_seed(0)
    # Numbers that e4m3 has.
    x, weight = ((8 + torch.randint(0, 7, (256, 16384), device="cuda")).bfloat16() / 8 for _ in range(2))
    y = fp8_block_linear(x, weight)
    assert (y.double() / (x.double() @ weight.double().t()) - 1).abs().max() < 0.01


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_layer_s_step_is_near_float32_and_gives_the_same_bits_again(tokens):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 1024, device="cuda"), torch.randn(1536, 1024, device="cuda") / 32
    dy, found = torch.randn(tokens, 1536, device="cuda"), []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        leaves = [each.to(torch.bfloat16).to(dtype).requires_grad_() for each in (x, weight)]
        layer = torch.nn.functional.linear if dtype == torch.float32 else fp8_block_linear
        y = layer(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype))])
    for one, again, want in zip(*found, strict=True):
        assert torch.equal(one, again)
        assert (one.float() - want).norm() < 0.045 * want.norm()
