"""Linear layers of few rows with int8 weights, beside the tests of all specs."""

import itertools

import pytest
import torch
from spec_samples import assert_right, both_defaults, inputs_of, launched, one_of_each, resources_of

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.skinny.int8 import FLAGS
from tilekern.kernels.skinny.linear import sizes
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import KNOWN, resolve

SPEC, PLAIN = spec_named("skinny_linear_int8"), spec_named("skinny_linear")


def problem_of(rows, inner, columns, *on, dtype="bfloat16"):
    flags = {name: name in on for name in FLAGS}
    return SPEC.problem(rows=rows, inner=inner, columns=columns, dtype=dtype, **flags)


@pytest.mark.parametrize("on", [on for n in range(6) for on in itertools.combinations(FLAGS, n)], ids="-".join)
def test_every_epilogue_with_tails_on_all_sides(on):
    problem = problem_of(5, 150, 131, *on, dtype="float32")
    assert_right(SPEC, problem, both_defaults(SPEC, problem), inputs_of(SPEC, problem))


@pytest.mark.parametrize("rows", [1, 9, 64, 65])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_number_of_rows_by_every_shape_of_tile(rows, dtype):
    problem = problem_of(rows, 300, 70, "gated", "silu", dtype=dtype)
    found = one_of_each(SPEC, problem, "tile_m", "tile_n", "tile_k", "widening")
    assert_right(SPEC, problem, found, inputs_of(SPEC, problem))


def test_all_numbers_from_127_below_zero_to_127_are_exact():
    """A row picks one number of each weight."""
    numbers = torch.arange(-127, 128).to(torch.int8)
    problem = problem_of(1, 2, 255)
    inputs = inputs_of(SPEC, problem)
    inputs |= {"weight": numbers[:, None].expand(-1, 2).contiguous(), "scale": torch.ones(255)}
    inputs["x"] = torch.tensor([[1, 0]]).bfloat16()
    for config in one_of_each(SPEC, problem, "tile_n", "widening"):
        assert torch.equal(launched(SPEC, problem, config, inputs)["y"][0], numbers.bfloat16())


@pytest.mark.parametrize("on", [(), ("gated", "rounded", "silu"), ("biased", "gelu_tanh")], ids="-".join)
def test_bits_are_those_of_skinny_linear_where_scales_are_powers_of_two(on):
    """Such weights are numbers of bfloat16, and the sums have the same order."""
    problem, plain = problem_of(9, 300, 70, *on), PLAIN.problem(**sizes(9, 300, 70, "bfloat16", on))
    inputs = inputs_of(SPEC, problem)
    inputs |= {name: 2.0 ** torch.randint(-12, -9, inputs[name].shape) for name in ("scale", "up_scale")}
    exact = {name: inputs[name] for name in ("x", "bias")} | {"addend": torch.zeros(1, 1)}
    for name, scale in (("weight", "scale"), ("up", "up_scale")):
        exact[name] = (inputs[name] * inputs[scale][:, None]).bfloat16()
    for config in one_of_each(SPEC, problem, "tile_m", "tile_n", "tile_k"):
        wanted = launched(PLAIN, plain, config.but(implementation="tile"), exact)["y"]
        assert torch.equal(launched(SPEC, problem, config, inputs)["y"], wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(value):
    problem = problem_of(9, 300, 70, "gated", "biased")
    inputs = inputs_of(SPEC, problem)
    spoilt = {name: x.clone() for name, x in inputs.items()}
    spoilt["x"][4] = value
    others = [row for row in range(9) if row != 4]
    for config in one_of_each(SPEC, problem, "tile_m", "tile_n"):
        wanted, found = (launched(SPEC, problem, config, given)["y"] for given in (inputs, spoilt))
        assert torch.equal(found[others], wanted[others])
        assert not found[4].isfinite().any()


def test_an_output_whose_scale_is_nan_is_nan_and_no_other_is():
    problem = problem_of(3, 300, 70)
    inputs = inputs_of(SPEC, problem)
    inputs["scale"][5] = torch.nan
    for config in one_of_each(SPEC, problem, "tile_n"):
        found = launched(SPEC, problem, config, inputs)["y"].isnan()
        assert found[:, 5].all()
        assert found.sum() == 3


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_spaces_are_small_and_have_the_default(target):
    for rows, columns, on in ((1, 1024, ()), (16, 4096, ("biased",)), (64, 12288, ("gated", "silu")), (1, 151936, ())):
        problem = problem_of(rows, 4096, columns, *on)
        found = list(SPEC.space.candidates(problem, target))
        assert 6 <= len(found) <= 60
        assert SPEC.default(problem, target) in found


LARGE = [(64, 12288, ("gated", "rounded", "silu")), (1, 4096, ("biased", "gelu_tanh")), (1, 1024, ())]


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("rows", "columns", "on"), LARGE)
@pytest.mark.share(6)
def test_real_sizes_spill_nothing_by_either_way_of_widening(arch, rows, columns, on):
    target, problem = resolve(arch), problem_of(rows, 4096, columns, *on)
    default = SPEC.default(problem, target)
    ways = [(default.but(widening=way), ALIGNED) for way in ("direct", "float32")]
    for config, variant in (*ways, (SPEC.generic(problem), GENERIC)):
        made = compile_candidate(SPEC, problem, config, target, variant)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
