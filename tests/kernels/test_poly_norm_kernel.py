import pytest
import torch
from spec_samples import assert_right, configs, inputs_of, interpret, one_of_each, sized

from tilekern.kernels import spec_named

FORWARD, BACKWARD = spec_named("poly_norm_forward"), spec_named("poly_norm_backward")
both = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)


@both
@pytest.mark.parametrize(("rows", "columns"), [(3, 5121), (2, 9000), (3, 20000)])
def test_long_rows(spec, rows, columns):
    """Rows of several tiles, and rows that are read twice, by a config of each way to go over them."""
    problem = sized(spec, "bfloat16", rows=rows, columns=columns)
    inputs = inputs_of(spec, problem)
    assert_right(spec, problem, one_of_each(spec, problem, "schedule", "passes", "tile_n"), inputs)


def test_rows_beyond_the_last_add_nothing_to_the_sums_though_their_norms_are_infinite():
    problem = sized(BACKWARD, rows=5, columns=83)
    inputs = inputs_of(BACKWARD, problem) | {"eps": 0.0}
    several = [config for config in configs(BACKWARD, problem) if config["tile_m"] > 1]
    assert_right(BACKWARD, problem, several[:3], inputs)


@both
def test_powers_of_large_numbers_are_finite_in_float32(spec):
    problem = sized(spec, rows=3, columns=83)
    inputs = inputs_of(spec, problem)
    inputs["x"] = inputs["x"] * 1e5
    check = interpret(spec, problem, spec.generic(problem), inputs)
    assert check.passed, check.reason


@both
def test_bytes_are_those_of_all_inputs_and_outputs(spec):
    problem = sized(spec, "bfloat16", rows=7, columns=84)
    inputs = spec.inputs(problem, torch.Generator().manual_seed(0), "cpu")
    read = sum(x.nbytes for x in inputs.values() if isinstance(x, torch.Tensor))
    sizes = {"bfloat16": 2, "float32": 4}
    written = [torch.Size(shape).numel() * sizes[dtype] for shape, dtype in spec.outputs(problem, 1).values()]
    assert spec.bytes_moved(problem) == read + sum(written)
