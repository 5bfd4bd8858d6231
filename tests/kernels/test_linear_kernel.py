"""Matrix products: what is special to them beside the tests of all specs."""

import pytest
import torch
from spec_samples import configs, inputs_of, interpret

from tilekern.cubin import read_resources
from tilekern.kernels import spec_named
from tilekern.kernels.linear_space import generic, is_tile, tiles, unit_of
from tilekern.spec import ALIGNED, GENERIC
from tilekern.targets import INTERPRETED, KNOWN, resolve
from tilekern.toolchain import compile_candidate, toolkit

SPEC = spec_named("matmul")
FLAGS = ("a_transposed", "b_transposed", "biased", "gelu_tanh", "silu")
FORWARD, TO_X, TO_WEIGHT = ("b_transposed",), (), ("a_transposed",)


def problem_of(rows, inner, columns, *on, dtype="bfloat16"):
    return SPEC.problem(rows=rows, inner=inner, columns=columns, dtype=dtype, **{flag: flag in on for flag in FLAGS})


LARGE = problem_of(8192, 4096, 14336, *FORWARD)


@pytest.mark.parametrize("biased", [(), ("biased",)])
@pytest.mark.parametrize("activation", [(), ("gelu_tanh",), ("silu",), ("gelu_tanh", "silu")])
@pytest.mark.parametrize("product", [FORWARD, TO_X, TO_WEIGHT, (*FORWARD, *TO_WEIGHT)])
def test_every_product_and_epilogue_with_tails_on_all_sides(product, activation, biased):
    problem = problem_of(137, 150, 131, *product, *activation, *biased, dtype="float32")
    inputs = inputs_of(SPEC, problem)
    for config in (SPEC.default(problem, INTERPRETED), SPEC.generic(problem)):
        check = interpret(SPEC, problem, config, inputs)
        assert check.passed, (config, check.reason)


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
        flags = {name: problem[name] for name in FLAGS if name != "biased"}
        torch.testing.assert_close(SPEC.reference(a.detach(), b.detach(), **flags)["c"].float(), result.detach())


def test_one_record_serves_nearby_numbers_of_tokens_in_every_product():
    for product in (FORWARD, TO_X, TO_WEIGHT):
        one, other = problem_of(3000, 80, 96, *product), problem_of(4096, 80, 96, *product)
        assert SPEC.bucketed(one) == SPEC.bucketed(other)


@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_each_tile_is_computed_once_whatever_the_bands(group, blocks):
    """19 x 3 tiles: the last band is not full. The interpreter finds tiles that two blocks store."""
    problem = problem_of(19 * 64 - 3, 16, 3 * 64 - 5, *FORWARD, dtype="float32")
    config = generic(problem).but(group_m=group)
    assert tiles(problem, config) == 57
    assert interpret(SPEC, problem, config, inputs_of(SPEC, problem), blocks).passed


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
@pytest.mark.parametrize("product", [FORWARD, TO_X, TO_WEIGHT])
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


@pytest.mark.parametrize(
    ("on", "moved"),
    [(FORWARD, 2 * (30 + 15 + 50)), ((*TO_WEIGHT, "biased"), 2 * (30 + 50 + 15 + 5))],
)
def test_bytes_and_operations_counted_by_hand(on, moved):
    problem = problem_of(10, 3, 5, *on)
    assert SPEC.bytes_moved(problem) == moved
    assert SPEC.flops(problem) == 300


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("product", [FORWARD, TO_X, TO_WEIGHT])
@pytest.mark.parametrize("epilogue", [(), ("biased", "gelu_tanh", "silu")])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_defaults_of_a_large_problem_spill_nothing(arch, epilogue, product):
    target, problem = resolve(arch), problem_of(8192, 4096, 12288, *product, *epilogue)
    made = compile_candidate(SPEC, problem, SPEC.default(problem, target), target, ALIGNED)
    resources = read_resources(made.cubin, made.symbol)
    assert resources.stack_bytes == 0
    assert resources.shared_bytes <= target.shared_bytes


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
def test_the_generic_float32_kernel_compiles():
    """It runs where a record's winner is a tile and an argument is not aligned; float32's is the library."""
    target, problem = resolve("sm_90"), problem_of(8192, 4096, 12288, *FORWARD, dtype="float32")
    assert compile_candidate(SPEC, problem, SPEC.generic(problem), target, GENERIC).cubin


def test_units_are_told_apart_by_compute_capability():
    named = {unit_of(target): target.arch for target in KNOWN}
    assert named.keys() == {"mma", "wgmma", "tcgen05"}
    assert [unit_of(resolve(arch)) for arch in ("sm_89", "sm_90", "sm_103", "sm_120")] == [
        "mma",
        "wgmma",
        "tcgen05",
        "mma",
    ]
