"""Layers of narrow models in few launches, beside the tests of all specs."""

import itertools

import pytest
import torch
from spec_samples import assert_right, inputs_of, launched, one_of_each, resources_of

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.narrow import block, linear
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve

LINEAR, BLOCK = spec_named("narrow_linear"), spec_named("narrow_block")
FLAGS = {"narrow_linear": linear.FLAGS, "narrow_block": block.FLAGS}
# The axes by which code differs, besides the hints.
WAYS = ("schedule", "tile_m", "tile_n", "tile_h")
SPECS = (LINEAR, BLOCK)
RESULTS = {"narrow_linear": ("y",), "narrow_block": ("y", "normed", "following")}
both = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
GPT2 = ("layer", "added", "biased", "out_biased", "followed", "next_biased")
LLAMA = ("gated", "followed", "ended")
each_norm = pytest.mark.parametrize("on", [("layer",), ()], ids=str)


def problem_of(spec, rows, width, other, *on, dtype="bfloat16", attended=None):
    """A problem whose other size is the columns, or the hidden size."""
    sizes = {"columns": other} if spec is LINEAR else {"hidden": other, "attended": attended or width, "columns": 77}
    flags = {name: name in on for name in FLAGS[spec.name]}
    return spec.problem(rows=rows, width=width, **sizes, **flags, dtype=dtype)


@pytest.mark.parametrize("count", range(8))
@both
def test_every_combination_of_flags_with_tails_on_all_sides(spec, count):
    for on in itertools.combinations(FLAGS[spec.name], count):
        problem = problem_of(spec, 21, 50, 149, *on, dtype="float32", attended=36)
        assert_right(spec, problem, one_of_each(spec, problem, *WAYS)[:3], inputs_of(spec, problem))


@pytest.mark.parametrize("rows", [1, 16, 17, 130])
@pytest.mark.parametrize("on", [GPT2, LLAMA], ids="-".join)
@both
def test_any_number_of_rows_in_every_way(spec, rows, on):
    problem = problem_of(spec, rows, 96, 200, *on)
    assert_right(spec, problem, one_of_each(spec, problem, *WAYS), inputs_of(spec, problem))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@each_norm
@both
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(spec, on, value):
    problem = problem_of(spec, 20, 50, 70, *on, "followed", "ended")
    inputs = inputs_of(spec, problem)
    spoilt = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    spoilt["x"][3, 7] = value
    others = [row for row in range(20) if row != 3]
    for config in one_of_each(spec, problem, *WAYS):
        wanted, found = (launched(spec, problem, config, given) for given in (inputs, spoilt))
        for name in RESULTS[spec.name]:
            assert torch.equal(found[name][others], wanted[name][others])
            assert found[name][3].isnan().all()


@pytest.mark.parametrize("on", [("layer",), ("layer", "added"), (), ("added",)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sum_and_norm_have_the_bits_of_a_launch_of_their_own(on, dtype):
    """Sums of whole numbers are exact in any order; each output is an element of the norm by a unit matrix."""
    problem = problem_of(LINEAR, 40, 128, 128, *on, dtype=dtype)
    inputs = inputs_of(LINEAR, problem)
    for name in ("residual", "x"):
        half = torch.randint(-8, 9, (40, 64), generator=torch.Generator().manual_seed(1))
        inputs[name] = torch.cat([half, -half], 1).to(inputs["x"].dtype)
    inputs["weight"] = torch.eye(128, dtype=inputs["x"].dtype)
    kind = "layer_norm_forward" if "layer" in on else "rms_norm_forward"
    norm = spec_named(f"fused_add_{kind}" if "added" in on else kind)
    of_norm = norm.problem(rows=40, columns=128, dtype=dtype, weight_dtype=dtype)
    given = inputs | {"weight": inputs["norm_weight"], "bias": inputs["norm_bias"]}
    right = launched(norm, of_norm, norm.default(of_norm, INTERPRETED), given)
    for config in one_of_each(LINEAR, problem, *WAYS):
        found = launched(LINEAR, problem, config, inputs)
        assert torch.equal(found["y"], right["y"]), config
        if "added" in on:
            assert torch.equal(found["total"], right["total"]), config


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_block_rounds_its_products_before_it_adds_them(dtype):
    """As launches apart do: a product of three parts that are lost in the sum, but not before it is rounded."""
    problem = problem_of(BLOCK, 20, 64, 128, "layer", dtype=dtype)
    inputs = inputs_of(BLOCK, problem)
    of = inputs["x"].dtype
    inputs["down"] = torch.zeros_like(inputs["down"])
    inputs["residual"] = torch.randn(20, 64, generator=torch.Generator().manual_seed(2)).to(of)
    product = inputs["x"].double() @ inputs["out_weight"].double().t()
    right = (inputs["residual"].float() + product.to(of).float()).to(of)
    once = (inputs["residual"].double() + product).to(of)
    assert (once != right).any()
    for config in one_of_each(BLOCK, problem, *WAYS):
        found = launched(BLOCK, problem, config, inputs)["y"]
        # The order of sums leaves a rounding here and there.
        assert (found != right).sum() <= 2
        assert (found != once).sum() > 2


@each_norm
def test_what_follows_a_block_has_the_bits_of_launches_of_their_own(on):
    """The final norm, and the next layer's norm with its product, of the same residual stream."""
    problem = problem_of(BLOCK, 40, 128, 256, *on, "followed", "next_biased", "ended")
    inputs = inputs_of(BLOCK, problem)
    # Whole numbers, whose sums are exact in any order.
    half = torch.randint(-8, 9, (40, 64), generator=torch.Generator().manual_seed(1))
    inputs["residual"] = torch.cat([half, -half], 1).to(inputs["x"].dtype)
    for name in ("out_weight", "down"):
        inputs[name] = torch.zeros_like(inputs[name])
    of_next = problem_of(LINEAR, 40, 128, 77, *on, "biased")
    given = {
        "residual": inputs["x"], "x": inputs["residual"], "norm_weight": inputs["next_norm_weight"],
        "norm_bias": inputs["next_norm_bias"], "eps": inputs["eps"], "weight": inputs["next_weight"],
        "bias": inputs["next_bias"],
    }  # fmt: skip
    kind = "layer_norm_forward" if "layer" in on else "rms_norm_forward"
    norm = spec_named(kind)
    of_norm = norm.problem(rows=40, columns=128, dtype="bfloat16", weight_dtype="bfloat16")
    alone = {"x": inputs["residual"], "weight": given["norm_weight"], "bias": given["norm_bias"], "eps": given["eps"]}
    normed = launched(norm, of_norm, norm.default(of_norm, INTERPRETED), alone)["y"]
    following = launched(LINEAR, of_next, LINEAR.default(of_next, INTERPRETED), given)["y"]
    for config in one_of_each(BLOCK, problem, *WAYS):
        found = launched(BLOCK, problem, config, inputs)
        assert torch.equal(found["y"], inputs["residual"])
        assert torch.equal(found["normed"], normed)
        assert torch.equal(found["following"], following)


@pytest.mark.parametrize("width", [50, 64, 200])
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(width):
    """The tail of a row must not count as zeros, nor the mean of the squares have that of the row subtracted."""
    problem = problem_of(LINEAR, 18, width, 37, "layer", dtype="float32")
    inputs = inputs_of(LINEAR, problem)
    inputs["x"] += 256
    assert_right(LINEAR, problem, one_of_each(LINEAR, problem, *WAYS), inputs, most=1e-4)


# Widths of minGPT's small models, and the rows of 8 x 128 and of 4 x 64 tokens.
SIZES = list(itertools.product((48, 64, 128, 192, 256), (1024, 256)))


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@both
def test_spaces_are_small_and_have_the_default(spec, target):
    for width, rows in SIZES:
        problem = problem_of(spec, rows, width, 4 * width, *GPT2)
        found = list(spec.space.candidates(problem, target))
        assert len(found) <= 24
        assert spec.default(problem, target) in found


@both
def test_float32_has_no_matrix_units_on_a_gpu(spec):
    problem = problem_of(spec, 1024, 128, 512, dtype="float32")
    assert list(spec.space.candidates(problem, resolve("H200"))) == [spec.generic(problem)]


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("width", [48, 128, 256])
@pytest.mark.parametrize("on", [GPT2, LLAMA], ids="-".join)
@both
@pytest.mark.share(4)
def test_real_sizes_spill_nothing(spec, on, width, arch):
    target, problem = resolve(arch), problem_of(spec, 1024, width, 4 * width, *on)
    made = compile_candidate(spec, problem, spec.default(problem, target), target, ALIGNED)
    assert resources_of(spec, problem, made, target).stack_bytes == 0
    assert compile_candidate(spec, problem, spec.generic(problem), target, GENERIC).cubin
