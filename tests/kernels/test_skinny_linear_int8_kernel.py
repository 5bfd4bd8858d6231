"""Linear layers of few rows with int8 weights, beside the tests of all specs."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import assert_right, both_defaults, inputs_of, launched, one_of_each, resources_of

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.skinny.int8 import FLAGS, MOST_SPLIT
from tilekern.kernels.skinny.linear import sizes
from tilekern.spec import ALIGNED, GENERIC, Config
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

SPEC, PLAIN = spec_named("skinny_linear_int8"), spec_named("skinny_linear")
# The axes by which code differs, besides the hints.
WAYS = ("widening", "tile_m", "tile_n", "tile_k", "ahead")


def problem_of(rows, inner, columns, *on, dtype="bfloat16"):
    flags = {name: name in on for name in FLAGS}
    return SPEC.problem(rows=rows, inner=inner, columns=columns, dtype=dtype, **flags)


@pytest.mark.parametrize("on", [on for n in range(6) for on in itertools.combinations(FLAGS, n)], ids="-".join)
def test_every_epilogue_with_tails_on_all_sides(on):
    problem = problem_of(5, 150, 131, *on, dtype="float32")
    assert_right(SPEC, problem, both_defaults(SPEC, problem), inputs_of(SPEC, problem))


@pytest.mark.parametrize("rows", [1, 2, 9, 17, 64, 65])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_number_of_rows_by_every_shape_of_tile(rows, dtype):
    problem = problem_of(rows, 300, 70, "gated", "silu", dtype=dtype)
    found = one_of_each(SPEC, problem, *WAYS)
    assert any(config["widening"] == "no" for config in found) == (rows <= MOST_SPLIT)
    assert_right(SPEC, problem, found, inputs_of(SPEC, problem))


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("inner", "whole"), [(1024, True), (3072, True), (1040, False)])
def test_rows_of_whole_steps_are_read_without_bounds(rows, inner, whole):
    """Rows that a tile has beyond the last are that one again, and are not stored."""
    problem = problem_of(rows, inner, 70)
    inputs = inputs_of(SPEC, problem)
    found = [config for config in one_of_each(SPEC, problem, *WAYS) if config["widening"] == "no"]
    assert any(dict(SPEC.device(problem, config).constants)["whole"] == whole for config in found)
    assert_right(SPEC, problem, found, inputs)


@pytest.mark.parametrize("rows", [1, 17])
def test_all_numbers_of_int8_are_exact(rows):
    """A row picks one number of each weight."""
    numbers = torch.arange(-128, 128).to(torch.int8)
    problem = problem_of(rows, 2, 256)
    inputs = inputs_of(SPEC, problem)
    inputs |= {"weight": numbers[:, None].expand(-1, 2).contiguous(), "scale": torch.ones(256)}
    inputs["x"] = torch.tensor([[1, 0]]).bfloat16().expand(rows, -1).contiguous()
    for config in one_of_each(SPEC, problem, "tile_n", "widening"):
        assert torch.equal(launched(SPEC, problem, config, inputs)["y"][0], numbers.bfloat16())


def picked(x, inner):
    """The numbers of rows, as products with a unit matrix return them."""
    problem = problem_of(len(x), inner, inner, dtype=str(x.dtype).removeprefix("torch."))
    inputs = inputs_of(SPEC, problem) | {"x": x, "weight": torch.eye(inner, dtype=torch.int8)}
    config = SPEC.default(problem, INTERPRETED)
    assert config["widening"] == "no"
    return launched(SPEC, problem, config, inputs | {"scale": torch.ones(inner)})["y"]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
@given(
    st.lists(
        st.lists(st.floats(-1, 1), min_size=24, max_size=24).map(
            lambda row: [value * 2.0 ** -(place + 3 * (place % 2)) for place, value in enumerate(row)]
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(-90, 100),
)
def test_numbers_of_a_row_are_exact_unless_they_are_next_to_nothing_beside_its_largest(dtype, bits, rows, power):
    x = torch.tensor(rows, dtype=torch.float64) * 2.0 ** (power if dtype == torch.bfloat16 else power // 20)
    x = x.to(dtype)
    found, largest = picked(x, 24), x.double().abs().amax(1, keepdim=True)
    is_normal = largest >= 2.0**-97
    is_held = (x.double().abs() >= largest * 2.0 ** (bits - 30)) & is_normal
    assert torch.equal(found[is_held], x[is_held])
    most = torch.where(is_normal, largest * 2.0**-29, 2.0**-126)
    step = x.double().abs() * 2.0**-bits  # of rounding a result that was cut
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((found.double() - x.double()).abs() <= most + step + smallest).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_least_and_the_largest_rows_and_zeros(dtype):
    info = torch.finfo(dtype)
    ends = torch.tensor([info.max, -info.max, info.smallest_normal, info.smallest_normal * info.eps], dtype=dtype)
    x = torch.stack([ends, -ends, ends.flip(0) * 0, ends[2:].repeat(2)])
    found = picked(x, 4)
    assert torch.equal(found[:3, :2], x[:3, :2])
    assert not found[2].any()
    assert ((found[3].double() - x[3].double()).abs() <= (2.0**-126 if dtype == torch.bfloat16 else 0)).all()
    if dtype == torch.bfloat16:
        small = torch.tensor([[1.75 * 2.0**power, -(2.0**power)] for power in range(-119, -90)]).bfloat16()
        for row in small.split(1):
            assert torch.equal(picked(row, 2), row)


@pytest.mark.parametrize("inner", [2048, 2100])
def test_digits_have_the_same_bits_by_any_config_and_beside_any_rows(inner):
    """Their sums are exact, and the largest are near the end of int32."""
    problem = problem_of(8, inner, 70, "gated", "rounded", "silu")
    inputs = inputs_of(SPEC, problem)
    inputs["x"][3], inputs["weight"][5], inputs["up"][5] = 255 / 128, -128, 127
    right = launched(SPEC, problem, SPEC.default(problem, INTERPRETED), inputs)["y"]
    for config in one_of_each(SPEC, problem, *WAYS):
        if config["widening"] == "no":
            assert torch.equal(launched(SPEC, problem, config, inputs)["y"], right), config
    for rows in (1, 2, 4):
        fewer = problem.but(rows=rows)
        found = launched(SPEC, fewer, SPEC.default(fewer, INTERPRETED), inputs | {"x": inputs["x"][8 - rows :]})["y"]
        assert torch.equal(found, right[8 - rows :])


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_rows_too_long_for_sums_in_int32_are_not_split(target):
    """A sum of 2^17 products of -128 and -128 is 2^31."""
    for inner, widened in (((1 << 17) - 1, False), (1 << 17, True)):
        found = list(SPEC.space.candidates(problem_of(1, inner, 4096), target))
        assert found
        assert {config["widening"] != "no" for config in found} == {widened}
        assert SPEC.default(problem_of(1, inner, 4096), target) in found


@pytest.mark.parametrize("on", [(), ("gated", "rounded", "silu"), ("biased", "gelu_tanh")], ids="-".join)
def test_bits_of_widened_weights_are_those_of_skinny_linear_where_scales_are_powers_of_two(on):
    """Such weights are numbers of bfloat16, and the sums have the same order."""
    problem, plain = problem_of(17, 300, 70, *on), PLAIN.problem(**sizes(17, 300, 70, "bfloat16", on))
    inputs = inputs_of(SPEC, problem)
    inputs |= {name: 2.0 ** torch.randint(-12, -9, inputs[name].shape) for name in ("scale", "up_scale")}
    exact = {name: inputs[name] for name in ("x", "bias")} | {"addend": torch.zeros(1, 1)}
    for name, scale in (("weight", "scale"), ("up", "up_scale")):
        exact[name] = (inputs[name] * inputs[scale][:, None]).bfloat16()
    for config in one_of_each(SPEC, problem, "tile_m", "tile_n", "tile_k"):
        usual = Config({name: x for name, x in config.items() if name != "ahead"} | {"implementation": "tile"})
        wanted = launched(PLAIN, plain, usual, exact)["y"]
        assert torch.equal(launched(SPEC, problem, config, inputs)["y"], wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [9, 17])
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(value, rows):
    problem = problem_of(rows, 300, 70, "gated", "biased")
    inputs = inputs_of(SPEC, problem)
    spoilt = {name: x.clone() for name, x in inputs.items()}
    spoilt["x"][4] = value
    others = [row for row in range(rows) if row != 4]
    for config in one_of_each(SPEC, problem, "tile_m", "tile_n"):
        wanted, found = (launched(SPEC, problem, config, given)["y"] for given in (inputs, spoilt))
        assert torch.equal(found[others], wanted[others])
        assert not found[4].isfinite().any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_one_number_that_is_not_finite_is_nan_if_it_is_split(value):
    x = torch.ones(3, 4).bfloat16()
    x[1, 2] = value
    found = picked(x, 4)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], x[[0, 2]])


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
    for rows, columns, on in (
        (1, 1024, ()), (8, 4096, ()), (16, 4096, ("biased",)), (64, 12288, ("gated", "silu")), (1, 151936, ()),
    ):  # fmt: skip
        problem = problem_of(rows, 4096, columns, *on)
        found = list(SPEC.space.candidates(problem, target))
        assert 2 <= len(found) <= (40 if rows <= MOST_SPLIT else 60)
        assert SPEC.default(problem, target) in found


LARGE = [(64, 12288, ("gated", "rounded", "silu")), (64, 4096, ("biased", "gelu_tanh")), (17, 1024, ())]


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


QWEN3_8B = [
    (4096, 6144, ()), (4096, 4096, ("biased", "gelu_tanh")), (4096, 12288, ("gated", "rounded", "silu")),
    (12288, 4096, ()), (4096, 151936, ()),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("inner", "columns", "on"), QWEN3_8B)
@pytest.mark.parametrize("rows", [1, 8, MOST_SPLIT])
@pytest.mark.share(12)
def test_defaults_of_few_rows_multiply_int8_by_matrix_units_and_spill_nothing(arch, rows, inner, columns, on):
    """Other instructions for products of int8 are those of scalar units, hundreds of them for a tile."""
    target, problem = resolve(arch), problem_of(rows, inner, columns, *on)
    config = SPEC.default(problem, target)
    made = compile_candidate(SPEC, problem, config, target, ALIGNED)
    assert config["widening"] == "no"
    assert resources_of(SPEC, problem, made, target).stack_bytes == 0
    assert read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole.products > 0
