"""Linear layers of few rows whose norm's factor is taken out of the product, beside the tests of all specs."""

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, assert_right, inputs_of, launched, one_of_each, resources_of, seen_as

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.interpreter.races import Launch
from tilekern.kernels import spec_named
from tilekern.kernels.skinny.scaled import FLAGS
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import KNOWN, resolve

SPEC = spec_named("skinny_scaled_linear")
# The axes by which code differs, besides the hints.
WAYS = ("schedule", "tile_m", "tile_n", "tile_k", "early")
LLAMA = ("added", "gated", "rounded", "silu")


def problem_of(rows, inner, columns, *on):
    return SPEC.problem(rows=rows, inner=inner, columns=columns, **{name: name in on for name in FLAGS})


@examples(40)
@given(
    rows=st.integers(1, 20), inner=st.one_of(st.integers(8, 400), st.sampled_from([64, 128, 256, 512])),
    columns=st.integers(1, 150), on=st.sets(st.sampled_from(FLAGS)),
    views=st.lists(st.sampled_from(VIEWS), min_size=4, max_size=4), data=st.data(),
)  # fmt: skip
def test_any_sizes_strides_and_flags(rows, inner, columns, on, views, data):
    problem = problem_of(rows, inner, columns, *on)
    inputs = inputs_of(SPEC, problem)
    for name, view in zip(("residual", "x", "weight", "up"), views, strict=True):
        inputs[name] = seen_as(inputs[name], view)
    config = data.draw(st.sampled_from(one_of_each(SPEC, problem, *WAYS)), label="config")
    assert_right(SPEC, problem, [config], inputs)


@pytest.mark.parametrize("on", [on for n in range(7) for on in itertools.combinations(FLAGS, n)], ids="-".join)
def test_every_combination_of_flags_with_tails_on_all_sides(on):
    problem = problem_of(3, 150, 37, *on)
    assert_right(SPEC, problem, one_of_each(SPEC, problem, "schedule", "early"), inputs_of(SPEC, problem))


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 65])
@pytest.mark.parametrize("inner", [300, 512])
def test_any_number_of_rows_in_every_way(rows, inner):
    """Steps of 512 terms are whole, of which no bounds are checked, or the last has a tail."""
    problem = problem_of(rows, inner, 70, *LLAMA)
    assert_right(SPEC, problem, one_of_each(SPEC, problem, *WAYS), inputs_of(SPEC, problem))


@pytest.mark.parametrize("on", [("added",), ("added", "gated", "rounded")], ids="-".join)
@pytest.mark.parametrize("inner", [512, 600])
def test_bits_are_those_of_the_formula_if_sums_are_exact(on, inner):
    """Whole numbers, whose products with weights of the norm are not rounded."""
    problem = problem_of(3, inner, 70, *on)
    inputs, generator = inputs_of(SPEC, problem), torch.Generator().manual_seed(7)
    for name in ("residual", "x", "weight", "up"):
        inputs[name] = torch.randint(-8, 9, inputs[name].shape, generator=generator).bfloat16()
    inputs["norm_weight"] = 2.0 ** torch.randint(-1, 2, (inner,), generator=generator).bfloat16()
    total = (inputs["residual"].float() + inputs["x"].float()).bfloat16()
    rstd = torch.rsqrt(total.float().square().sum(1, keepdim=True) / inner + inputs["eps"])
    terms = total.double() * inputs["norm_weight"].double()
    of_products = ("weight", "up") if "gated" in on else ("weight",)
    products = [rstd * (terms @ inputs[name].double().t()).float() for name in of_products]
    y = products[0].bfloat16()
    if "gated" in on:
        y = (y.float() * products[1].bfloat16().float()).bfloat16()
    for config in one_of_each(SPEC, problem, *WAYS):
        found = launched(SPEC, problem, config, inputs)
        assert torch.equal(found["total"], total), config
        assert torch.equal(found["y"], y), config


def test_a_term_is_rounded_once():
    """The norm's weight makes 1 + 2^-7 of each number, and its square has no place in bfloat16."""
    problem = problem_of(1, 128, 16)
    inputs = inputs_of(SPEC, problem)
    inputs |= {name: torch.full_like(inputs[name], 1 + 2**-7) for name in ("x", "norm_weight")}
    inputs["weight"] = torch.ones_like(inputs["weight"])
    term, rstd = 1 + 2**-6, torch.rsqrt(torch.tensor((1 + 2**-7) ** 2 + inputs["eps"]))
    for config in one_of_each(SPEC, problem, *WAYS):
        assert torch.equal(launched(SPEC, problem, config, inputs)["y"][0, 0], (rstd * 128 * term).bfloat16())


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**50])
def test_rows_may_be_tiny_or_huge(scale):
    problem = problem_of(3, 300, 37, "added")
    inputs = inputs_of(SPEC, problem) | {"eps": 0.0}
    wanted = launched(SPEC, problem, SPEC.generic(problem), inputs)["y"]
    for name in ("residual", "x"):
        inputs[name] = inputs[name] * scale
    found = launched(SPEC, problem, SPEC.generic(problem), inputs)["y"]
    assert torch.equal(found, wanted), "a power of two changes no bit"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(value):
    problem = problem_of(4, 300, 70, *LLAMA)
    inputs = inputs_of(SPEC, problem)
    spoilt = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    spoilt["x"][2, 7] = value
    for config in one_of_each(SPEC, problem, *WAYS):
        wanted, found = (launched(SPEC, problem, config, given) for given in (inputs, spoilt))
        for name in ("total", "y"):
            assert torch.equal(found[name][[0, 1, 3]], wanted[name][[0, 1, 3]])
        assert found["y"][2].isnan().all()


def test_a_row_has_the_bits_that_it_has_alone():
    problem = problem_of(8, 600, 70, *LLAMA)
    inputs = inputs_of(SPEC, problem)
    alone = inputs | {name: inputs[name][5:6] for name in ("residual", "x")}
    for config in one_of_each(SPEC, problem, *WAYS):
        found = launched(SPEC, problem, config, inputs)["y"][5:6]
        assert torch.equal(launched(SPEC, problem_of(1, 600, 70, *LLAMA), config, alone)["y"], found), config


def test_early_weights_alone_are_loaded_before_the_wait(monkeypatch):
    before, loaded = [], Launch.loaded

    def noted(launch, operation, array, access):
        if not launch.waited:
            before.append(array.name)
        loaded(launch, operation, array, access)

    monkeypatch.setattr(Launch, "loaded", noted)
    problem = problem_of(2, 300, 70, *LLAMA)
    for config in one_of_each(SPEC, problem, "early", "tile_n"):
        before.clear()
        launched(SPEC, problem, config, inputs_of(SPEC, problem))
        blocks = SPEC.device(problem, config).grid(problem, 1)
        assert before == (["weight", "up"] * blocks if config["early"] else [])


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize(
    ("inner", "columns", "on"),
    [(4096, 6144, ("added",)), (4096, 12288, LLAMA), (4096, 151936, ("added",)), (2048, 2048, ()), (2048, 64, LLAMA)],
)
def test_spaces_are_small_and_have_the_default(target, inner, columns, on):
    for rows in (1, 2, 4, 8):
        problem = problem_of(rows, inner, columns, *on)
        found = list(SPEC.space.candidates(problem, target))
        assert 2 <= len(found) <= 60
        assert SPEC.default(problem, target) in found


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("columns", "on"), [(6144, ("added",)), (12288, LLAMA), (151936, ("added",))])
@pytest.mark.share(6)
def test_real_sizes_spill_nothing(arch, rows, columns, on):
    target, problem = resolve(arch), problem_of(rows, 4096, columns, *on)
    default = SPEC.default(problem, target)
    others = [default.but(early=0), default.but(tile_k=64, occupancy=4, early=0)]
    for config, variant in ((SPEC.generic(problem), GENERIC), *((c, ALIGNED) for c in (default, *others))):
        made = compile_candidate(SPEC, problem, config, target, variant)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
