"""Matrix products, beside the tests of all specs."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, assert_right, both_defaults, configs, inputs_of, launched_in_place, seen_as

from tilekern.kernels import spec_named
from tilekern.kernels.matmul.product import by_cublas, by_winner, sizes
from tilekern.kernels.matmul.space import generic, is_tile, tiles, unit_of
from tilekern.runtime.dispatch import counters, plan_for
from tilekern.spec import DTYPES
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.verify.check import compare, expected_results

SPEC = spec_named("matmul")
FLAGS = tuple(d.name for d in SPEC.dimensions if d.kind == "flag")
FORWARD, TO_X, TO_WEIGHT = ("b_transposed",), (), ("a_transposed",)
PRODUCTS = (FORWARD, TO_X, TO_WEIGHT, (*FORWARD, *TO_WEIGHT))


def problem_of(rows, inner, columns, *on, dtype="bfloat16"):
    return SPEC.problem(**sizes(rows, inner, columns, dtype, on))


LARGE = problem_of(8192, 4096, 14336, *FORWARD)


@pytest.mark.parametrize("added", [(), ("biased",), ("accumulated",), ("biased", "accumulated")])
@pytest.mark.parametrize("activation", [(), ("gelu_tanh",), ("silu",), ("gelu_tanh", "silu")])
@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_and_epilogue_with_tails_on_all_sides(product, activation, added):
    problem = problem_of(137, 150, 131, *product, *activation, *added, dtype="float32")
    assert_right(SPEC, problem, both_defaults(SPEC, problem), inputs_of(SPEC, problem))


def test_the_three_products_are_those_of_a_linear_layer():
    x, weight = torch.randn(7, 33, requires_grad=True), torch.randn(21, 33, requires_grad=True)
    y = torch.nn.functional.linear(x, weight)
    dy = torch.randn_like(y)
    wanted = (y, *torch.autograd.grad(y, (x, weight), dy))
    given = (
        (problem_of(7, 33, 21, *FORWARD), x, weight),
        (problem_of(7, 21, 33, *TO_X), dy, weight),
        (problem_of(7, 21, 33, *TO_WEIGHT), dy, x),
    )
    for (problem, a, b), result in zip(given, wanted, strict=True):
        assert SPEC.outputs(problem, 1)["c"][0] == result.shape
        flags = {name: problem[name] for name in FLAGS if name not in ("biased", "accumulated")}
        torch.testing.assert_close(SPEC.reference(a.detach(), b.detach(), **flags)["c"].float(), result.detach())


def test_one_record_serves_nearby_numbers_of_tokens_in_every_product():
    for product in (FORWARD, TO_X, TO_WEIGHT):
        one, other = problem_of(3000, 80, 96, *product), problem_of(4096, 80, 96, *product)
        assert SPEC.bucketed(one) == SPEC.bucketed(other)


@pytest.mark.parametrize("begin", ["zero", "addend"])
def test_addend_and_sums_are_rounded_once(begin):
    """The product rounds up to 1 + 2^-7, which would leave 2^-7."""
    problem = problem_of(1, 3, 1, "accumulated")
    inputs = {
        "a": torch.tensor([[1, 2**-8, 2**-10]]).bfloat16(),
        "b": torch.ones(3, 1).bfloat16(),
        "addend": torch.tensor([[-1.0]]).bfloat16(),
    }
    config = SPEC.default(problem, INTERPRETED).but(sums_begin=begin)
    assert launched_in_place(SPEC, problem, config, inputs, {"c": "addend"})["c"].item() == 2**-8 + 2**-10


def test_sums_begin_at_the_addend_where_no_activation_is_between():
    def begins(*on):
        return {c["sums_begin"] for c in configs(SPEC, problem_of(64, 64, 64, *on)) if is_tile(c)}

    assert begins("accumulated") == begins("accumulated", "biased") == {"zero", "addend"}
    assert begins() == begins("biased", "silu") == begins("accumulated", "silu") == {"zero"}


@pytest.mark.parametrize("more", [(), ("biased",), ("silu",)])
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_library_updates_its_addend_in_place_only(product, more):
    problem = problem_of(9, 24, 17, *product, *more, "accumulated", dtype="float32")
    (config,) = [c for c in SPEC.space.candidates(problem, INTERPRETED) if not is_tile(c)]
    library, inputs = SPEC.implement(problem, config), inputs_of(SPEC, problem)
    expected = expected_results(SPEC, problem, inputs)
    given, before = [inputs[name] for name in library.inputs], inputs["addend"].clone()
    (c,) = library.bound(plan_for)(*given)
    assert torch.equal(inputs["addend"], before)
    assert compare(SPEC, problem, {"c": c}, expected).passed
    (same,) = library.bound(plan_for, in_place=True)(*given)
    assert same is inputs["addend"]
    assert torch.equal(same, c)


@examples(40)
@given(data=st.data())
def test_cublas_and_the_winner_write_into_out(data):
    """The winner that the interpreter has is the kernel; arrays that it reads one by one go to the library."""
    on = (*data.draw(st.sampled_from(PRODUCTS)), *data.draw(st.sampled_from([(), ("accumulated",)])))
    rows, inner, columns = (data.draw(st.integers(1, 70)) for _ in range(3))
    problem = problem_of(rows, inner, columns, *on, dtype=data.draw(st.sampled_from(DTYPES)))
    inputs = inputs_of(SPEC, problem)
    a, b = (seen_as(inputs[name], data.draw(st.sampled_from(VIEWS), label=name)) for name in "ab")
    (shape, _), *_ = SPEC.outputs(problem, 1).values()
    old = inputs.get("addend", torch.full(shape, torch.nan, dtype=a.dtype))
    expected = expected_results(SPEC, problem, inputs)
    for multiply in (by_cublas, lambda *given: by_winner(plan_for, *given)):
        out = seen_as(old, data.draw(st.sampled_from(VIEWS), label="out"))
        assert multiply(a, b, out, on) is out
        check = compare(SPEC, problem, {"c": out}, expected)
        assert check.passed, check.reason


@pytest.mark.parametrize("product", [FORWARD, TO_X, TO_WEIGHT, ("a_transposed", "accumulated")])
def test_the_winner_runs_where_arrays_are_read_in_wide_loads(product):
    def launched(a, b):
        before = counters("matmul").launches
        by_winner(plan_for, a, b, torch.zeros(shape), product)
        return counters("matmul").launches - before

    problem = problem_of(16, 24, 40, *product, dtype="float32")
    inputs = inputs_of(SPEC, problem)
    ((shape, _),) = SPEC.outputs(problem, 1).values()
    assert launched(inputs["a"], inputs["b"]) == 1
    for view in ("wide_rows", "offset", "reversed"):
        assert launched(seen_as(inputs["a"], view), inputs["b"]) == 0
        assert launched(inputs["a"], seen_as(inputs["b"], view)) == 0


def test_no_winner_leaves_the_product_to_the_library():
    a, b = torch.randn(16, 24), torch.randn(40, 24)
    out = by_winner(lambda *_: None, a, b, torch.empty(16, 40), FORWARD)
    torch.testing.assert_close(out, a @ b.t())


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_each_tile_is_computed_once_for_any_bands(group, blocks):
    """19 x 3 tiles: the last band is not full. The interpreter finds tiles that two blocks store."""
    problem = problem_of(19 * 64 - 3, 16, 3 * 64 - 5, *FORWARD, dtype="float32")
    config = generic(problem).but(group_m=group)
    assert tiles(problem, config) == 57
    assert_right(SPEC, problem, [config], inputs_of(SPEC, problem), blocks)


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize("product", [FORWARD, TO_X, TO_WEIGHT, (*TO_WEIGHT, "accumulated")])
def test_spaces_are_small_and_hold_the_library_once(target, product):
    for rows, inner, columns in ((8192, 4096, 14336), (2048, 12288, 4096), (512, 4096, 4096), (1, 4096, 151936)):
        found = list(SPEC.space.candidates(problem_of(rows, inner, columns, *product), target))
        assert 2 <= len(found) <= 48
        assert sum(not is_tile(config) for config in found) == 1


def test_hopper_s_large_problem_has_the_shapes_that_keep_its_matrix_units_busy():
    found = list(SPEC.space.candidates(LARGE, resolve("H200")))
    shapes = {(c["tile_m"], c["tile_n"], c["num_ctas"], c["num_worker_warps"], c["schedule"]) for c in found}
    for shape in [(128, 256, 1, 8), (256, 128, 1, 8), (256, 256, 2, 8), (128, 128, 1, 0)]:
        assert (*shape, "persistent") in shapes


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_float32_is_left_to_the_library_on_a_gpu_and_exact_in_the_interpreter(target):
    problem = problem_of(64, 80, 96, *FORWARD, dtype="float32")
    assert [is_tile(config) for config in SPEC.space.candidates(problem, target)] == [False]
    assert SPEC.is_library(problem, SPEC.default(problem, target))
    assert "TF32" in SPEC.space.violated(problem, SPEC.generic(problem), target)
    assert any(is_tile(config) for config in configs(SPEC, problem))


def test_persistent_blocks_take_as_many_sms_as_their_cluster():
    config = SPEC.default(LARGE, resolve("H200"))
    assert SPEC.device(LARGE, config).grid(LARGE, 132) == 132
    assert SPEC.device(LARGE, config.but(num_ctas=2)).grid(LARGE, 132) == 66
    assert SPEC.device(LARGE, config.but(schedule="block")).grid(LARGE, 132) == 64 * 56


def test_matrix_units_by_compute_capability():
    named = {unit_of(target): target.arch for target in KNOWN}
    assert named.keys() == {"mma", "wgmma", "tcgen05"}
    found = [unit_of(resolve(arch)) for arch in ("sm_89", "sm_90", "sm_103", "sm_120")]
    assert found == ["mma", "wgmma", "tcgen05", "mma"]
