"""What share of all cores' speed the compile stage reaches, told from a sample that is compiled on one core."""

import pytest

from benchmarks.compiling import measure_sample
from tilekern.errors import InputError
from tilekern.targets import resolve
from tilekern.toolchain import toolkit
from tuning.compiling import compile_all, default_jobs, wanted
from tuning.models import resolve_model
from tuning.plan import plan
from tuning.sweep import Sweep


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
def test_the_share_is_the_work_over_what_the_cores_were_held(tmp_path):
    sweep = Sweep(tmp_path)
    target = resolve("H200")
    shape = resolve_model("qwen3-0.6b")
    sweep.begin(target, shape.name, plan(shape, [2048], ["bfloat16"], ["swiglu"], target))
    with pytest.raises(InputError, match="compile stage first"):
        measure_sample(tmp_path, 2)
    some = sorted(item.artifact for item in wanted(sweep))[:4]
    done = compile_all(sweep, 1, only=some)
    assert done.compiled == len(some) == done.distinct
    found = {row.metric: row.value for row in measure_sample(tmp_path, 2).rows}
    assert (found["distinct_candidates"], found["sample"]) == (4, 2)
    assert found["slower_together"] > 0
    expected = done.work_share * done.seconds / found["slower_together"] / (default_jobs() * found["seconds"])
    assert found["share_of_linear"] == pytest.approx(expected, rel=0.05)
