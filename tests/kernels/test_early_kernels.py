"""Kernels that overlap the end of the kernel before, beside the tests of all specs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_samples import assert_right, inputs_of, launched, one_of_each, one_of_each_code, resources_of, sized

from tilekern.compile.cubin import code_of
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.compile.machine_code import read_machine_code

LINEAR = spec_named("early_linear")
COPIES = {
    f"early_{name}": spec_named(name)
    for name in ("attention_forward", "fused_add_layer_norm_forward", "fused_add_rms_norm_forward")
}
# Inner size and columns of GPT-2's products with 1024 rows, and of its head.
QKV, OUTPUT, UP, DOWN, HEAD = (768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50257)


def problem_of(inner, columns, *on, rows=1024, dtype="bfloat16"):
    flags = {name: name in on for name in ("biased", "gelu_tanh")}
    return LINEAR.problem(rows=rows, inner=inner, columns=columns, **flags, dtype=dtype)


@given(
    rows=st.integers(1, 200), inner=st.integers(1, 100), columns=st.integers(1, 300), biased=st.booleans(),
    gelu=st.booleans(), dtype=st.sampled_from(("float32", "bfloat16", "float16")),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_any_second_tile_at_any_size_against_float64(rows, inner, columns, biased, gelu, dtype):
    on = [name for name, is_on in (("biased", biased), ("gelu_tanh", gelu)) if is_on]
    problem = problem_of(inner, columns, *on, rows=rows, dtype=dtype)
    found = [c for c in one_of_each(LINEAR, problem, "tile_m", "tile_n", "more_n") if c["more_n"]]
    assert found
    assert_right(LINEAR, problem, found, inputs_of(LINEAR, problem))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_leaves_the_bits_of_the_others(value):
    problem = problem_of(90, 200, "biased", rows=20)
    inputs = inputs_of(LINEAR, problem)
    spoilt = inputs | {"x": inputs["x"].clone()}
    spoilt["x"][3, 7] = value
    others = [row for row in range(20) if row != 3]
    for config in one_of_each(LINEAR, problem, "tile_n", "more_n"):
        wanted, found = (launched(LINEAR, problem, config, given)["y"] for given in (inputs, spoilt))
        assert torch.equal(found[others], wanted[others])
        assert not found[3].isfinite().any()


def test_a_product_reads_nothing_before_it_waits():
    """Its weight may have been written right before, as an int8 one's numbers are; the interpreter sees to the rest."""
    problem = sized(LINEAR)
    made = LINEAR.device(problem, LINEAR.generic(problem))
    assert made.dependent
    assert not made.constant_arrays


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_has_the_configs_and_the_bits_of_its_kernel(name, dtype):
    spec, of = spec_named(name), COPIES[name]
    problem = sized(of, dtype, rows=70, columns=300, queries=9, keys=9)
    assert dict(spec.problem(**problem)) == dict(problem)
    target = resolve("H200")
    wanted = [c for c in of.space.candidates(problem, target) if not of.is_library(problem, c) and "apart" not in c]
    assert list(spec.space.candidates(problem, target)) == wanted
    inputs = inputs_of(of, problem)
    for config in one_of_each_code(spec, problem)[:4]:
        found, right = launched(spec, problem, config, inputs), launched(of, problem, config, inputs)
        assert all(torch.equal(found[key], right[key]) for key in right), config


@pytest.mark.parametrize(
    ("sizes", "tiles"), [(QKV, (64, 256, 32)), (OUTPUT, (64, 64, 32)), (UP, (128, 128, 64)), (DOWN, (64, 64, 32))]
)
def test_products_of_gpt2_have_blocks_for_nearly_all_sms_at_once(sizes, tiles):
    target, problem = resolve("H200"), problem_of(*sizes, "biased")
    config = LINEAR.default(problem, target)
    assert tuple(config[name] for name in ("tile_m", "tile_n", "more_n")) == tiles
    assert LINEAR.device(problem, config).grid(problem, target.sm_count) == 128


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize("sizes", [UP, HEAD], ids=str)
def test_spaces_are_small_and_have_the_default(sizes, target):
    problem = problem_of(*sizes)
    found = list(LINEAR.space.candidates(problem, target))
    assert len(found) <= 56
    assert LINEAR.default(problem, target) in found
    assert all(LINEAR.device(problem, c).grid(problem, 132) <= target.sm_count for c in found if c["more_n"])


def test_two_blocks_share_an_sm_for_a_head():
    target = resolve("H200")
    for sizes, wanted in ((HEAD, {(128, 128)}), ((128, 50257), {(128, 128), (64, 128), (128, 64)})):
        problem = problem_of(*sizes)
        found = [c for c in LINEAR.space.candidates(problem, target) if c["occupancy"] == 2]
        assert {(config["tile_m"], config["tile_n"]) for config in found} == wanted


def test_float32_has_no_matrix_units_on_a_gpu():
    problem = problem_of(*QKV, dtype="float32")
    assert list(LINEAR.space.candidates(problem, resolve("H200"))) == [LINEAR.generic(problem)]
    assert LINEAR.default(problem, INTERPRETED) != LINEAR.generic(problem)


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("sizes", [QKV, OUTPUT, UP, HEAD], ids=str)
@pytest.mark.share(4)
def test_real_sizes_multiply_by_matrix_units_and_spill_next_to_nothing(sizes, arch):
    """The store of a head's last columns, without TMA, spills on sm_100, as that of ``matmul`` does, and more."""
    target, problem = resolve(arch), problem_of(*sizes, *(("biased", "gelu_tanh") if sizes == UP else ()))
    made = compile_candidate(LINEAR, problem, LINEAR.default(problem, target), target, ALIGNED)
    assert resources_of(LINEAR, problem, made, target).stack_bytes <= (256 if sizes == HEAD else 0)
    assert read_machine_code(code_of(made.cubin, made.symbol), target.capability).whole.products > 0
    assert compile_candidate(LINEAR, problem, LINEAR.generic(problem), target, GENERIC).cubin


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.share(4)
def test_no_second_tile_nor_second_block_on_an_sm_spills():
    target = resolve("H200")
    for sizes in (QKV, (128, 50257)):
        problem = problem_of(*sizes, "biased")
        is_own = (lambda config: config["more_n"] > 0) if sizes == QKV else (lambda config: config["occupancy"] == 2)
        for config in list(filter(is_own, LINEAR.space.candidates(problem, target)))[1::3]:
            made = compile_candidate(LINEAR, problem, config, target, ALIGNED)
            assert resources_of(LINEAR, problem, made, target).stack_bytes == 0, config
