"""The compile stage's share of the speed of all cores, estimated from a sample compiled on one core."""

import pytest

from benchmarks.compiling import measure_sample
from tilekern.compile.toolchain import toolkit
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.stage import default_jobs, wanted
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps
from tilekern.tuning.sweep.folder import Sweep

pytestmark = pytest.mark.processes

TARGET = resolve("H200")


def planned(folder, problems):
    """A sweep whose plan limits each problem to a few configs."""
    limits = {
        (kernel, problem): list(spec_named(kernel).space.candidates(problem, TARGET))[:5]
        for kernel, problem in problems
    }
    sweep = Sweep(folder)
    sweep.begin(TARGET, "qwen3-0.6b", problems, limits)
    return sweep


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.nightly
def test_the_share_is_the_work_of_one_core_over_what_the_cores_were_held(tmp_path):
    problems = plan_of_model("qwen3-0.6b", Steps([2048], ops=["rope"]), TARGET).problems
    sweep = planned(tmp_path, problems)
    found = {row.metric: row.value for row in measure_sample(tmp_path, 3).rows}
    assert not sweep.compiled(), "the folder is left as it was"
    assert found["distinct_candidates"] == len(list(wanted(sweep)))
    assert 3 <= found["sample"] <= found["distinct_candidates"]
    assert (found["failed"], found["jobs"]) == (0, default_jobs())
    alone = (found["sample_before_s"] + found["sample_after_s"]) / 2
    assert found["slower_together"] == pytest.approx(found["sample_together_s"] / alone, rel=1e-2)
    assert found["bound_of_linear"] > 0
    # Whatever the cores did beside the work, they cannot have worked for longer than they were held.
    assert 0 < found["work_share"] < 1
    assert found["share_of_linear"] == pytest.approx(found["work_share"] / found["slower_together"], rel=1e-3)


def test_a_folder_without_a_plan_says_so(tmp_path):
    planned(tmp_path, [])
    with pytest.raises(InputError, match="plan stage first"):
        measure_sample(tmp_path, 2)
