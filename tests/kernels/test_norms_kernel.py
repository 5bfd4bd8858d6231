"""Norms over rows and groups, alone and with sums: means far from zero, and the rounding of sums."""

import pytest
import torch
from spec_samples import assert_right, configs, each, inputs_of, launched, one_of_each, plain_inputs, sized

from tilekern.kernels import spec_named
from tilekern.spec.targets import KNOWN

GROUPS = [spec_named(f"group_norm_{name}") for name in ("forward", "backward")]
both = each(GROUPS)
# The axes of tiles.
WAYS = ("passes", "tile_g", "tile_c", "tile_n")
# Channels of a group and positions: several groups a step, one group, and groups in pieces of each form.
SIZES = [(2, 9), (5, 300), (3, 5000), (20, 700), (200, 49), (9000, 1)]
# Kernels, the input that is shifted, and sizes.
SHIFTED = [
    *(
        (spec.name, "x", {"batch": 1, "groups": 2, "channels": 3, "positions": n})
        for spec in GROUPS
        for n in (83, 5000)
    ),
    *(("fused_add_layer_norm_backward", "total", {"rows": 3, "columns": n}) for n in (83, 1500)),
]


@pytest.mark.parametrize(("name", "shifted", "sizes"), SHIFTED, ids=str)
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(name, shifted, sizes):
    spec = spec_named(name)
    """The mean of the squares less the square of the mean would be off by 2e-3."""
    problem = sized(spec, **sizes)
    inputs = plain_inputs(spec, problem)
    inputs[shifted] += 256
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs, most=1e-4)


@both
@pytest.mark.parametrize(("channels", "positions"), SIZES)
@pytest.mark.share(8)
def test_groups_of_every_size(spec, channels, positions):
    problem = sized(spec, "bfloat16", batch=2, groups=3, channels=channels, positions=positions)
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs_of(spec, problem))


@both
@pytest.mark.parametrize(("channels", "positions"), SIZES)
def test_there_are_candidates_and_an_allowed_default_for_groups(spec, channels, positions):
    problem = spec.bucketed(sized(spec, batch=16, groups=32, channels=channels, positions=positions))
    for target in KNOWN:
        default = spec.default(problem, target)
        assert spec.space.violated(problem, default, target) is None, (target, default)
        assert next(spec.space.candidates(problem, target), None) is not None, target


def of_two_columns(spec, residual, x, **more):
    """A problem in bfloat16 of two rows with float32 weights of 1, and its inputs: each row of one number."""
    problem = sized(spec, "bfloat16", rows=2, columns=64).but(weight_dtype="float32")
    inputs = inputs_of(spec, problem) | more
    inputs |= {name: torch.ones(64) for name in ("weight", "next_weight") if name in inputs}
    inputs |= {"residual": torch.full((2, 64), residual).bfloat16(), "x": torch.full((2, 64), x).bfloat16()}
    return problem, inputs


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [("rms_norm", {"eps": 0.0}, 1.0), ("layer_norm", {"bias": torch.full((64,), 0.5)}, 0.5)],
)
def test_the_norm_is_that_of_the_rounded_sum(name, more, expected):
    """4 + 2^-7 lies between two values of bfloat16; a row of this value alone has a norm of 1 once it is rounded."""
    spec = spec_named(f"fused_add_{name}_forward")
    problem, inputs = of_two_columns(spec, 4.0, 2**-7, **more)
    inputs["x"][:, 0] = 0.0
    assert torch.equal(spec.reference(**inputs)["y"], torch.full((2, 64), expected).double())
    assert_right(spec, problem, configs(spec, problem)[:4], inputs)


@pytest.mark.parametrize("name", ["fused_rms_norm_add", "fused_rms_norm_add_rms_norm"])
def test_the_norm_is_rounded_before_the_sum(name):
    """Ones normalised with the weight 1 + 2^-9 give that weight, which bfloat16 lacks: 1 / 512 must not come out."""
    spec = spec_named(f"{name}_forward")
    problem, inputs = of_two_columns(spec, -1.0, 1.0, eps=0.0, offset=0.0)
    inputs["weight"] = torch.full((64,), 1 + 2**-9)
    inputs["residual"][:, 0] = 1.0
    total = next(iter(spec.outputs(problem, 1)))
    assert spec.reference(**inputs, cast=False)[total][0].tolist() == [2.0] + [0.0] * 63
    assert_right(spec, problem, configs(spec, problem)[:4], inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_offset", "fused_add_rms_norm", "fused_add_rms_norm_offset"])
def test_between_products_of_another_dtype_results_have_the_bits_of_casts(name, dtype):
    wide, spec = (spec_named(f"{name}{kind}_forward") for kind in ("", "_to"))
    problem = sized(spec, "float32", rows=5, columns=83).but(product_dtype=dtype)
    inputs = inputs_of(spec, problem)
    for config in one_of_each(spec, problem, "schedule", "passes", "tile_m", "tile_n"):
        found = launched(spec, problem, config, inputs)
        usual = inputs | {"x": inputs["x"].float()}
        expected = launched(wide, sized(wide, "float32", rows=5, columns=83), config, usual)
        expected["y"] = expected["y"].to(getattr(torch, dtype))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_powers_of_large_numbers_are_finite_in_float32(name):
    spec = spec_named(f"poly_norm_{name}")
    problem = sized(spec, rows=3, columns=83)
    inputs = inputs_of(spec, problem)
    inputs["x"] = inputs["x"] * 1e5
    assert_right(spec, problem, [spec.generic(problem)], inputs)
