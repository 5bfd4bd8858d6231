"""A kernel that leaves rows for another is timed with the best known config of the nearest problem behind it."""

from pathlib import Path

import pytest
import torch
from recorded import RIGHT
from tuning_samples import COMPILED

from tilekern.kernels import all_specs, spec_named
from tilekern.spec.targets import Target
from tilekern.tuning.measure.followers import followers, inputs_behind
from tilekern.tuning.measure.stage import Settled
from tilekern.tuning.measure.tasks import Entrant
from tilekern.tuning.sweep.candidates import Candidate, candidates
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.verify.check import arguments_of, make_outputs

NORM, SUM = spec_named("rms_norm_backward"), spec_named("column_sum")
PROBLEM = NORM.problem(rows=8192, columns=4096, dtype="bfloat16", weight_dtype="float16")


def sums(rows: int, columns: int = 4096, dtype: str = "float16"):
    return SUM.problem(rows=rows, columns=columns, dtype=dtype)


@pytest.fixture
def sweep(tmp_path: Path, h200: Target):
    sweep = Sweep(tmp_path)
    others = [sums(256, columns=2048), sums(256, dtype="bfloat16"), sums(256), sums(512)]
    sweep.begin(h200, "test", [(NORM.name, PROBLEM), *((SUM.name, problem) for problem in others)])
    return sweep


def compiled(sweep: Sweep, *found: Candidate):
    sweep.note("compiled", *(COMPILED | {"key": item.artifact, "sha256": item.artifact} for item in found))


def timed(sweep: Sweep, found: dict[Candidate, float]):
    timings = {item: {"median_us": time_us, "spread_us": 0.1, "samples": 9} for item, time_us in found.items()}
    lines = ({"candidate": item.key, "check": RIGHT, "timing": timing} for item, timing in timings.items())
    sweep.note("measured", *lines)


def behind(sweep: Sweep, **axes):
    """The follower of the first config of the norm that has some values of axes, by its blocks."""
    items = candidates(NORM.name, PROBLEM, sweep.target)
    item = next(item for item in items if axes.items() <= item.config.items())
    return followers(Settled(sweep, "race"), [Entrant(item, COMPILED)])


def test_nothing_follows_where_nothing_of_it_is_compiled(sweep):
    assert behind(sweep, occupancy=1) == {}


def test_the_first_config_that_is_compiled_follows_until_one_is_timed(sweep, h200):
    default, other, *_ = candidates(SUM.name, sums(512), h200)
    compiled(sweep, other, default)
    assert {blocks: found.candidate for blocks, found in behind(sweep, occupancy=2).items()} == {264: default}
    timed(sweep, {default: 3.0, other: 2.0})
    assert {blocks: found.candidate for blocks, found in behind(sweep, occupancy=2).items()} == {264: other}


def test_it_is_of_the_bucket_or_else_of_the_nearest_problem_of_the_same_columns_and_dtype(sweep, h200):
    near, far, wide, wrong = (
        candidates(SUM.name, problem, h200)[:3]
        for problem in (sums(256), sums(512), sums(256, columns=2048), sums(256, dtype="bfloat16"))
    )
    compiled(sweep, *near, *wide, *wrong)  # rows are no part of an artifact
    timed(sweep, {near[0]: 2.0, near[1]: 3.0, far[0]: 3.0, far[1]: 2.0, wide[2]: 1.0, wrong[2]: 1.0})
    for occupancy, expected in ((1, {132: near[0]}), (2, {264: far[1]}), (4, {528: far[1]})):
        found = behind(sweep, occupancy=occupancy)
        assert {blocks: one.candidate for blocks, one in found.items()} == expected


def test_a_wrong_config_does_not_follow(sweep, h200):
    default, other, *_ = candidates(SUM.name, sums(512), h200)
    compiled(sweep, default, other)
    timed(sweep, {default: 3.0})
    sweep.note("measured", {"candidate": other.key, "check": RIGHT | {"passed": False}, "timing": {
        "median_us": 1.0, "spread_us": 0.1, "samples": 9}})  # fmt: skip
    assert [found.candidate for found in behind(sweep, occupancy=2).values()] == [default]


def test_the_join_of_splits_follows_attention_to_a_cache_unless_it_has_one():
    spec = spec_named("decode_attention")
    sizes = {"exact": 64, "bucketed": 32, "dtype": "float16", "flag": False}
    problem = spec.problem(**{d.name: sizes[d.kind] for d in spec.dimensions})
    join = spec_named(spec.follower.kernel)
    found = join.problem(**spec.follower.dimensions(problem, 4 * 32))
    assert found["splits"] == 4
    parts = join.inputs(found, torch.Generator(), "cpu")["parts"]
    assert (tuple(parts.shape), "float32") == spec.outputs(problem, 4 * 32)[spec.follower.array]
    assert spec.follower.dimensions(problem, 32) is None


@pytest.mark.parametrize("spec", [one for one in all_specs().values() if one.follower], ids=lambda one: one.name)
def test_a_follower_is_launched_on_what_is_left_with_all_of_its_own_numbers(spec, h200):
    sizes = {"exact": 64, "bucketed": 32, "dtype": "float16", "flag": False}
    problem = spec.problem(**{d.name: sizes[d.kind] for d in spec.dimensions})
    follower = spec_named(spec.follower.kernel)
    found = follower.problem(**spec.follower.dimensions(problem, 128))
    shape, dtype = spec.outputs(problem, 128)[spec.follower.array]
    left = torch.empty(shape, dtype=getattr(torch, dtype))
    made = make_outputs(follower, found, 1, "cpu")
    device = follower.device(found, follower.default(found, h200))
    arguments = arguments_of(device, inputs_behind(follower, found, left), made)
    assert sum(x is left for x in arguments) == 1


def test_each_sum_over_blocks_says_what_follows():
    """A spec that leaves one row for each block names the sum, whose problem is that of the array."""
    leave = [
        spec
        for spec in map(spec_named, all_specs())
        if any(getattr(a, "role", None) == "scratch" and a.shape[0] == "blocks" for a in spec.arrays)
    ]
    assert {"rms_norm_backward", "layer_norm_backward", "qk_norm_rope_backward"} <= {spec.name for spec in leave}
    for spec in leave:
        sizes = {"exact": 64, "bucketed": 32, "dtype": "float16", "flag": False}
        problem = spec.problem(**{d.name: sizes[d.kind] for d in spec.dimensions})
        shape, dtype = spec.outputs(problem, 7)[spec.follower.array]
        found = spec_named(spec.follower.kernel).problem(**spec.follower.dimensions(problem, 7))
        assert (shape, dtype) == ((found["rows"], found["columns"]), "float32"), spec.name
