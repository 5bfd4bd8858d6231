"""The roofline: the longer of a copy of the bytes and of the operations, and which of the two it is."""

import pytest

from tilekern.kernels import spec_named
from tilekern.targets import resolve
from tuning.predict.roofline import ARITHMETIC, LAUNCH_S, MEMORY, launch_s, roofline

H200 = resolve("H200")
MATMUL = ("matmul", {"rows": 8192, "columns": 4096, "inner": 4096})
SWIGLU = ("swiglu_forward", {"rows": 8192, "columns": 12288})


def problem_of(kernel, sizes):
    spec = spec_named(kernel)
    drawn = {d.name: "bfloat16" if d.kind == "dtype" else False for d in spec.dimensions if d.kind in ("dtype", "flag")}
    return spec.problem(**drawn | sizes)


def test_a_product_is_bound_by_arithmetic_however_fast_a_copy_of_its_bytes_is():
    problem = problem_of(*MATMUL)
    found = roofline("matmul", problem, H200, copy_s=1e-6)
    assert found.bound == ARITHMETIC
    assert found.seconds == pytest.approx(2 * 8192 * 4096 * 4096 / (H200.matmul_tflops * 1e12))


def test_what_moves_more_than_it_multiplies_is_bound_by_the_copy_that_was_timed_or_else_the_memory_s_rate():
    problem = problem_of(*SWIGLU)
    moved = spec_named("swiglu_forward").bytes_moved(problem)
    assert roofline("swiglu_forward", problem, H200).bound == MEMORY
    assert roofline("swiglu_forward", problem, H200).seconds == pytest.approx(moved / (H200.copy_gbs * 1e9))
    assert roofline("swiglu_forward", problem, H200, copy_s=0.5).seconds == 0.5
    assert launch_s("swiglu_forward", problem, H200) == pytest.approx(moved / (H200.copy_gbs * 1e9) + LAUNCH_S)
