"""Kernels of 8-bit floats on a GPU at the sizes of a model: right beside torch, and the same bits twice."""

import pytest
import torch
from gpu_samples import compiled, run_library

from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.spec.targets import here
from tilekern.tuning.verify.canaries import bits, in_whole_rows
from tilekern.tuning.verify.check import compare, expected_results, make_outputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]
ROWS, TURNED, PRODUCT = map(spec_named, ("fp8_rows", "fp8_turned", "fp8_matmul"))
# Tokens that are whole tiles, and that nothing divides.
TOKENS = (8192, 8190)
INNER, COLUMNS = 4096, 6144


@pytest.fixture(autouse=True)
def hopper():
    """Skip GPUs without 8-bit floats."""
    if not here().has_fp8:
        pytest.skip("8-bit floats need a GPU of sm_90 or newer")


def launched_twice(spec, problem, inputs):
    """Run the default config twice into outputs with rows of whole 16 bytes, and return the first run's."""
    launch, found = compiled(spec, problem, spec.default(problem, here()), here()), []
    for _ in range(2):
        outputs = {name: in_whole_rows(x) for name, x in make_outputs(spec, problem, 1, "cuda").items()}
        found.append(launch(inputs, outputs))
    torch.cuda.synchronize()
    assert all(torch.equal(bits(x), bits(found[1][name])) for name, x in found[0].items())
    return found[0]


def drawn(spec, problem):
    """Draw inputs whose rows are whole 16 bytes."""
    inputs = spec.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    return {name: in_whole_rows(x) for name, x in inputs.items()}


def assert_same(found, expected):
    for name, x in expected.items():
        assert torch.equal(found[name].double(), x), name


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("columns", [INNER, 12288])
def test_rows_have_the_bits_of_the_reference(tokens, columns):
    problem = ROWS.problem(rows=tokens, columns=columns, dtype="bfloat16")
    inputs = drawn(ROWS, problem)
    inputs["x"][5, 7] = 1e4
    assert_same(launched_twice(ROWS, problem, inputs), expected_results(ROWS, problem, inputs))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rounded", [True, False])
def test_turned_numbers_have_the_bits_of_the_reference(tokens, rounded):
    problem = TURNED.problem(rows=tokens, columns=INNER, rounded=rounded, dtype="bfloat16")
    inputs = drawn(TURNED, problem)
    assert_same(launched_twice(TURNED, problem, inputs), expected_results(TURNED, problem, inputs))


def test_a_nan_reaches_all_that_is_turned():
    problem = TURNED.problem(rows=8190, columns=INNER, rounded=True, dtype="bfloat16")
    inputs = drawn(TURNED, problem)
    inputs["scale"][77] = torch.nan
    found = launched_twice(TURNED, problem, inputs)
    assert found["common"].isnan().all()
    assert found["y"].float().isnan().all()


FLAGS = {"forward": (), "weight gradient": ("over_rows",), "all": ("biased", "accumulated")}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", FLAGS)
def test_products_are_right(name, tokens):
    flags = {flag: flag in FLAGS[name] for flag in ("over_rows", "biased", "accumulated")}
    problem = PRODUCT.problem(rows=tokens, inner=INNER, columns=COLUMNS, dtype="bfloat16", **flags)
    inputs = drawn(PRODUCT, problem)
    check = compare(
        PRODUCT, problem, launched_twice(PRODUCT, problem, inputs), expected_results(PRODUCT, problem, inputs)
    )
    assert check.passed, check.reason


def test_the_library_s_product_is_right():
    flags = dict.fromkeys(("over_rows", "biased", "accumulated"), False)
    problem = PRODUCT.problem(rows=8190, inner=INNER, columns=COLUMNS, dtype="bfloat16", **flags)
    library = next(c for c in PRODUCT.space.candidates(problem, here()) if PRODUCT.is_library(problem, c))
    check = run_library(PRODUCT, problem, PRODUCT.implement(problem, library), drawn(PRODUCT, problem))
    assert check.passed, check.reason
