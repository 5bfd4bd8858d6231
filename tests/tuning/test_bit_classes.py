"""Candidates that give a row the same bits are of one class; those whose rows depend on others are of none."""

import functools
from dataclasses import replace

import cuda.tile as ct
import pytest
from spec_samples import launch_arguments

from tilekern import interpreter
from tilekern.kernels import spec_named
from tilekern.kernels.tiles import ConstInt
from tilekern.spec import Implementation, LibraryCall
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.battery import Battery


def interpret(spec, config, problem, inputs, outputs):
    implementation = spec.implement(problem, config)
    if isinstance(implementation, LibraryCall):
        return implementation.call(*(inputs[name] for name in implementation.inputs))
    grid = (implementation.grid(problem, INTERPRETED.sm_count),)
    return interpreter.launch(implementation.function, grid, launch_arguments(implementation, inputs, outputs))


def class_of(spec, problem, config=None):
    """The bit class by the interpreter; empty if placements differ, None if results are not by rows."""
    config = config or spec.default(problem, INTERPRETED)
    battery = Battery(spec, problem, INTERPRETED.sm_count, "cpu")
    run = functools.partial(interpret, spec, config)
    digests = {battery.digest(placements, config, run) for placements in battery.placements()}
    return None if not digests else digests.pop() if len(digests) == 1 else ""


def swiglu(rows, **more):
    return spec_named("swiglu_forward").problem(**{"rows": rows, "columns": 40, "dtype": "bfloat16"} | more)


def matmul(rows, *on, dtype="float32"):
    spec = spec_named("matmul")
    flags = {d.name: d.name in on for d in spec.dimensions if d.kind == "flag"}
    return spec.problem(rows=rows, inner=160, columns=48, dtype=dtype, **flags)


def test_all_buckets_share_a_class():
    spec = spec_named("swiglu_forward")
    found = {class_of(spec, swiglu(rows)) for rows in (1, 2, 8, 16, 64)}
    assert len(found) == 1
    assert len(found.pop()) == 16
    assert class_of(spec, swiglu(8, columns=48)) != class_of(spec, swiglu(8))


def test_sums_in_another_order_are_another_class():
    spec = spec_named("matmul")
    first = spec.default(matmul(32, "b_transposed"), INTERPRETED)
    by_depth = {
        depth: {class_of(spec, matmul(rows, "b_transposed"), first.but(tile_k=depth)) for rows in (2, 32)}
        for depth in (32, 128)
    }
    assert all(len(found) == 1 and "" not in found for found in by_depth.values())
    assert by_depth[32] != by_depth[128]


def test_a_library_has_a_class_too():
    """The CPU's products differ with the number of rows, or not: a class is what it is found to be."""
    spec = spec_named("matmul")
    library = spec.default(matmul(32, "b_transposed"), INTERPRETED).but(implementation="cublas")
    assert class_of(spec, matmul(32, "b_transposed"), library) is not None


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("matmul", matmul(32, "a_transposed")),
        ("attention_forward", None),
        ("rms_norm_backward", None),
    ],
)
def test_results_that_are_not_by_rows_have_no_class(kernel, problem):
    """Gradients of weights, sequences, and parts of sums."""
    spec = spec_named(kernel)
    sizes = {"bucketed": 8, "exact": 16, "dtype": "float32", "flag": False}
    problem = problem or spec.problem(**{d.name: sizes[d.kind] for d in spec.dimensions})
    assert class_of(spec, problem) is None


@ct.kernel
def centred(
    gate, up, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstInt, bounded: ConstInt
):
    """Subtracts the mean of its tile's rows: a row depends on its neighbours."""
    index = (ct.bid(0), 0)
    x = ct.load(gate, index, (8, 64), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(y, index, (x - ct.sum(x, axis=0, keepdims=True) / 8.0).astype(y.dtype))


def test_a_row_that_depends_on_its_neighbours_is_of_no_class():
    spec, problem = spec_named("swiglu_forward"), swiglu(32)
    config = spec.default(problem, INTERPRETED)
    right = spec.implement(problem, config)
    wrong = Implementation(centred, right.parameters, right.constants, lambda real, _: -(-real["rows"] // 8))
    assert class_of(replace(spec, implement=lambda *_: wrong), problem, config) == ""
