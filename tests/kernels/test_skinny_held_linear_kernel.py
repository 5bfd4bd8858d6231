"""Linear layers of few rows that hold their weights, with a norm or not, beside the tests of all specs."""

import itertools

import pytest
import torch
from spec_samples import assert_right, inputs_of, launched, one_of_each, resources_of

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.skinny import linear
from tilekern.kernels.skinny.held import FLAGS, most_held
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve

SPEC, PLAIN = spec_named("skinny_held_linear"), spec_named("skinny_linear")
# The axes by which code differs, besides the hints.
WAYS = ("held", "schedule", "tile_m", "tile_n", "tile_k")
GPT2, LLAMA = ("normed", "layer", "added", "biased", "gelu_tanh"), ("normed", "added", "gated", "rounded", "silu")
WITHOUT = [("biased",), (), ("added", "gated", "silu")]


def problem_of(rows, inner, columns, *on, dtype="bfloat16"):
    flags = {name: name in on for name in FLAGS}
    return SPEC.problem(rows=rows, inner=inner, columns=columns, dtype=dtype, **flags)


@pytest.mark.parametrize("on", [on for n in range(9) for on in itertools.combinations(FLAGS, n)], ids="-".join)
def test_every_combination_of_flags_with_tails_on_all_sides(on):
    problem = problem_of(3, 150, 37, *on, dtype="float32")
    assert_right(SPEC, problem, one_of_each(SPEC, problem, "held"), inputs_of(SPEC, problem))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 65])
@pytest.mark.parametrize("on", [GPT2, LLAMA, ("biased",)], ids="-".join)
def test_any_number_of_rows_in_every_way(rows, on):
    problem = problem_of(rows, 300, 70, *on)
    assert_right(SPEC, problem, one_of_each(SPEC, problem, *WAYS), inputs_of(SPEC, problem))


def two_launches(problem, inputs):
    """The sum of both and its norm, as launches of their own compute them."""
    rows, inner, layer, added = (problem[name] for name in ("rows", "inner", "layer", "added"))
    kind = "layer_norm_forward" if layer else "rms_norm_forward"
    spec = spec_named(f"fused_add_{kind}" if added else kind)
    sizes = {"rows": rows, "columns": inner, "dtype": problem["dtype"], "weight_dtype": problem["dtype"]}
    given = {name: inputs[name] for name in ("residual", "x", "eps")}
    given |= {"weight": inputs["norm_weight"], "bias": inputs["norm_bias"]}
    of_norm = spec.problem(**sizes)
    return launched(spec, of_norm, spec.default(of_norm, INTERPRETED), given)


def whole_numbers(problem):
    """Inputs whose sums, of squares too, are exact in any order; also the distances from the mean, which is 0."""
    inputs = inputs_of(SPEC, problem)
    for name in ("residual", "x"):
        half = torch.randint(-8, 9, (problem["rows"], problem["inner"] // 2))
        inputs[name] = torch.cat([half, -half], 1).to(inputs["x"].dtype)
    return inputs


@pytest.mark.parametrize(
    "on", [("normed", *on) for on in ((), ("added",), ("layer",), ("layer", "added"))], ids="-".join
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sum_and_norm_have_the_bits_of_a_launch_of_their_own(on, dtype):
    """Each output is an element of the norm, since the weight is a unit matrix."""
    problem = problem_of(3, 256, 256, *on, dtype=dtype)
    inputs = whole_numbers(problem)
    inputs["weight"] = torch.eye(256, dtype=inputs["x"].dtype)
    right = two_launches(problem, inputs)
    for config in one_of_each(SPEC, problem, *WAYS):
        found = launched(SPEC, problem, config, inputs)
        assert torch.equal(found["y"], right["y"]), config
        if "added" in on:
            assert torch.equal(found["total"], right["total"]), config


@pytest.mark.parametrize("on", [GPT2, LLAMA], ids="-".join)
def test_steps_have_the_bits_of_two_launches(on):
    problem = problem_of(5, 512, 70, *on)
    inputs = whole_numbers(problem)
    normed = two_launches(problem, inputs)["y"]
    plain = PLAIN.problem(**linear.sizes(5, 512, 70, "bfloat16", [name for name in on if name in linear.FLAGS]))
    others = {name: inputs[name] for name in ("weight", "up", "bias")} | {"addend": torch.zeros(1, 1)}
    for config in one_of_each(SPEC, problem, *WAYS):
        if config["held"] == "no":
            usual = linear.config_of(5, config["tile_n"], tile_k=config["tile_k"])
            right = launched(PLAIN, plain, usual, {"x": normed, **others})["y"]
            assert torch.equal(launched(SPEC, problem, config, inputs)["y"], right), config


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("on", [GPT2, LLAMA], ids="-".join)
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(value, on):
    problem = problem_of(4, 300, 70, *on)
    inputs = inputs_of(SPEC, problem)
    spoilt = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    spoilt["x"][2, 7] = value
    for config in one_of_each(SPEC, problem, *WAYS):
        wanted, found = (launched(SPEC, problem, config, given) for given in (inputs, spoilt))
        for name in ("total", "y"):
            assert torch.equal(found[name][[0, 1, 3]], wanted[name][[0, 1, 3]])
        assert found["y"][2].isnan().all()


@pytest.mark.parametrize("inner", [150, 256, 300, 1000])
def test_a_mean_far_from_zero_costs_no_more_than_its_own_rounding(inner):
    """The tail of a row must not count as zeros, nor the mean of the squares have that of the row subtracted."""
    problem = problem_of(3, inner, 37, "normed", "layer", dtype="float32")
    inputs = inputs_of(SPEC, problem)
    inputs["x"] += 256
    assert_right(SPEC, problem, one_of_each(SPEC, problem, *WAYS), inputs, most=1e-4)


def test_statistics_of_several_pieces_are_those_of_the_row(monkeypatch):
    """Pieces whose means lie apart."""
    monkeypatch.setattr("tilekern.kernels.skinny.held._NUMBERS", 2)
    problem = problem_of(2, 1000, 37, "normed", "layer", "added", dtype="float32")
    inputs = inputs_of(SPEC, problem)
    inputs["x"] += torch.arange(1000) // 128
    for tile_k, piece in ((128, 128), (32, 64)):
        config = SPEC.generic(problem).but(tile_k=tile_k)
        assert dict(SPEC.device(problem, config).constants)["piece"] == piece
        assert_right(SPEC, problem, [config], inputs)


@pytest.mark.parametrize(
    ("inner", "widths"),
    [(768, {256, 1024}), (384, {128, 256, 512}), (3072, {256, 1024}), (512, {256, 512}), (600, {256, 1024})],
)
@pytest.mark.parametrize("on", WITHOUT, ids="-".join)
def test_weights_without_a_norm_are_held_in_slices(inner, widths, on):
    problem = problem_of(3, inner, 37, *on)
    held = [config for config in one_of_each(SPEC, problem, *WAYS) if config["held"] != "no"]
    assert {config["tile_k"] for config in held} == widths
    assert_right(SPEC, problem, held, inputs_of(SPEC, problem))


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_blocks_hold_the_weights_of_as_many_terms_as_it_says(target, rows):
    for inner in (768, 1024, 3072, 4096):
        problem = problem_of(rows, inner, 768, "biased")
        assert (SPEC.default(problem, target)["held"] != "no") == (inner <= most_held(rows))


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize(
    ("inner", "columns", "on"),
    [
        (768, 2304, GPT2),
        (768, 50257, ("normed", "layer", "added")),
        (4096, 6144, ("normed", "added")),
        (4096, 12288, LLAMA),
        (768, 768, ("biased",)),
        (3072, 768, ("biased",)),
        (3072, 1024, ()),
        (4096, 1024, ()),
        (12288, 4096, ()),
    ],
)
def test_spaces_are_small_and_have_the_default(target, inner, columns, on):
    for rows in (1, 2, 4, 8):
        problem = problem_of(rows, inner, columns, *on)
        found = list(SPEC.space.candidates(problem, target))
        assert 2 <= len(found) <= 40
        assert SPEC.default(problem, target) in found


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_float32_has_no_matrix_units_on_a_gpu(target):
    for rows, inner in ((1, 768), (8, 4096)):
        problem = problem_of(rows, inner, 2304, "normed", dtype="float32")
        found = list(SPEC.space.candidates(problem, target))
        assert SPEC.default(problem, target) in found
        assert all(config["held"] == "registers" or config == SPEC.generic(problem) for config in found)


LARGE = [
    (1, 768, 2304, GPT2), (8, 768, 3072, GPT2), (1, 768, 50257, ("normed", "layer", "added")),
    (4, 1024, 6144, LLAMA), (1, 4096, 12288, LLAMA), (8, 4096, 6144, ("normed", "added")), (1, 768, 768, ("biased",)),
    (1, 3072, 768, ("biased",)), (4, 3072, 1024, ()), (8, 1024, 1024, ()),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("rows", "inner", "columns", "on"), LARGE)
@pytest.mark.share(6)
def test_real_sizes_spill_nothing(arch, rows, inner, columns, on):
    target, problem = resolve(arch), problem_of(rows, inner, columns, *on)
    for config, variant in ((SPEC.default(problem, target), ALIGNED), (SPEC.generic(problem), GENERIC)):
        made = compile_candidate(SPEC, problem, config, target, variant)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
