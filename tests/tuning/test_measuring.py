"""What stands around the measuring processes: who is measured where, and what timings and checks are."""

import pytest
from tuning_samples import SMALL

from tilekern.errors import InputError
from tilekern.spec.targets import here
from tilekern.tuning.executors.local import LocalExecutor
from tilekern.tuning.measure import stage as measuring
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.publishing import keep_winners
from tilekern.tuning.verify.check import compare, odd_problem


@pytest.mark.skipif(here() is not None, reason="this machine has a GPU")
def test_measuring_without_a_gpu_is_refused(compiled_sweep):
    with pytest.raises(InputError, match="needs a GPU and this machine has none"):
        measuring.measure_all(compiled_sweep, LocalExecutor(compiled_sweep.cache), keep_winners)


def test_a_timing_of_samples():
    assert Timing.of([5.0]) == Timing(5.0, 0.0, 1)
    found = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median_us, found.spread_us, found.samples) == (3.0, 1.0, 5)


def test_odd_sizes_are_inside_the_bucket_and_odd():
    kernel, problem = SMALL
    from tilekern.kernels import spec_named

    odd = odd_problem(spec_named(kernel), problem)
    assert odd["rows"] == 251
    assert odd["columns"] == problem["columns"]


def test_a_poisoned_output_fails_the_check():
    import torch

    from tilekern.kernels import spec_named

    spec = spec_named("column_sum")
    problem = spec.problem(rows=3, columns=4, dtype="float32")
    expected = {"y": torch.ones(4, dtype=torch.float64)}
    right = torch.ones(4)
    assert compare(spec, problem, {"y": right}, expected).passed
    holed = right.clone()
    holed[2] = float("nan")
    check = compare(spec, problem, {"y": holed}, expected)
    assert not check.passed
    assert check.relative_error == float("inf")
