"""The roofline: the longer of a copy of the bytes and of the operations, and which of the two it is."""

import pytest
from tuning_samples import H200

from tilekern.kernels import spec_named
from tilekern.spec.targets import resolve
from tilekern.tuning.predict.roofline import ARITHMETIC, LAUNCH_S, MEMORY, launch_s, roofline

MATMUL = ("matmul", {"rows": 8192, "columns": 4096, "inner": 4096})
SWIGLU = ("swiglu_forward", {"rows": 8192, "columns": 12288})


def problem_of(kernel, sizes):
    spec = spec_named(kernel)
    drawn = {d.name: "bfloat16" if d.kind == "dtype" else False for d in spec.dimensions if d.kind in ("dtype", "flag")}
    return spec.problem(**drawn | sizes)


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops"),
    [
        ("H200", "bfloat16", 989),
        ("H200", "float16", 989),
        ("H200", "float32", 989 / 6),  # 494.5 for TF32, of which a product of float32 takes three
        ("B200", "float32", 2250 / 6),
        ("A100", "float32", 312 / 6),
        ("L40S", "float32", 91.6),  # of the scalar units: three products of TF32 would be 60
        ("L40S", "bfloat16", 362),
        ("RTX5090", "float32", 104.8),
    ],
)
def test_a_product_is_bound_by_the_peak_of_its_dtype_however_fast_a_copy_of_its_bytes_is(gpu, dtype, tflops):
    problem = problem_of(MATMUL[0], MATMUL[1] | {"dtype": dtype})
    found = roofline("matmul", problem, resolve(gpu), copy_s=1e-6)
    assert found.bound == ARITHMETIC
    assert found.seconds == pytest.approx(2 * 8192 * 4096 * 4096 / (tflops * 1e12))


@pytest.mark.parametrize(
    ("kernel", "sizes", "dtype"),
    [
        ("matmul", MATMUL[1] | {"dtype": "float16"}, "float16"),
        ("matmul_tf32", MATMUL[1], "tfloat32"),
        # Of its rows, and not of the weight beside them.
        ("rms_norm_forward", {"rows": 9, "columns": 64, "dtype": "bfloat16", "weight_dtype": "float32"}, "bfloat16"),
        ("route_count", {"rows": 64, "experts": 8}, "float32"),
    ],
)
def test_the_dtype_of_a_roofline_is_that_of_what_is_multiplied(kernel, sizes, dtype):
    problem = problem_of(kernel, sizes)
    operations = spec_named(kernel).flops(problem)
    assert roofline(kernel, problem, H200).arithmetic_s == operations / (1e12 * H200.product_tflops(dtype))


def test_the_peak_of_tf32_is_half_of_that_of_half_types():
    assert H200.product_tflops("tfloat32") == 989 / 2


def test_what_moves_more_than_it_multiplies_is_bound_by_the_copy_that_was_timed_or_else_the_memory_s_rate():
    problem = problem_of(*SWIGLU)
    moved = spec_named("swiglu_forward").bytes_moved(problem)
    assert roofline("swiglu_forward", problem, H200).bound == MEMORY
    assert roofline("swiglu_forward", problem, H200).seconds == pytest.approx(moved / (H200.copy_gbs * 1e9))
    assert roofline("swiglu_forward", problem, H200, copy_s=0.5).seconds == 0.5
    assert launch_s("swiglu_forward", problem, H200) == pytest.approx(moved / (H200.copy_gbs * 1e9) + LAUNCH_S)
