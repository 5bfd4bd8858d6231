"""Plans for arrays that need not be torch's come by the same lookup, counts and rules of misses as an op's."""

import pytest
from marks import needs_compiler
from msgspec.structs import replace
from one_record import GPU, H200, PROBLEM, SIZES, SPEC, numbers

from tilekern import cache
from tilekern.errors import CacheMiss
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch

pytestmark = needs_compiler
EXACT = SPEC.problem(rows=50, columns=48, dtype="bfloat16")


def plan(problem=EXACT, device=0):
    return dispatch.array_plan_for(SPEC, device, H200, problem)


def test_both_sides_run_the_same_record_and_code_and_count_together(filled):
    ours, torchs = plan(), dispatch.plan_for(SPEC, GPU, *SIZES)
    assert ours is plan()
    assert ours is not plan(device=1)
    assert ours is not torchs
    assert (ours.config, ours.grid, ours._kernel) == (torchs.config, torchs.grid, torchs._kernel)
    assert dispatch.stats()[SPEC.name] == numbers(hits=3)
    assert dispatch.resolved()[SPEC.name, PROBLEM].provenance == "default"


def test_a_miss_is_compiled_once_for_both_sides(root):
    assert plan().config == SPEC.default(EXACT, H200)
    assert dispatch.plan_for(SPEC, GPU, *SIZES).config == plan().config
    assert dispatch.stats()[SPEC.name] == numbers(misses=1, compiled=1, hits=1)


@pytest.mark.parametrize("policy", ["fallback", "error"])
def test_where_a_model_would_run_its_own_op_there_is_an_error_and_nothing_is_compiled(root, policy):
    dispatch.set_miss_policy(policy)
    for _ in range(2):
        with pytest.raises(CacheMiss, match=r"no cache holds swiglu_forward for rows=64,columns=48.*tune it with: "):
            plan()
    assert dispatch.stats()[SPEC.name] == numbers(misses=2)
    [wanted] = cache.read_wanted(root)
    assert wanted["kernel"] == SPEC.name


def test_a_plan_that_torch_s_side_was_refused_does_not_stand_in_the_way(root):
    dispatch.set_miss_policy("fallback")
    with pytest.warns(UserWarning, match="the model's own op runs"):
        assert dispatch.plan_for(SPEC, GPU, *SIZES) is None
    dispatch.set_miss_policy("compile")
    assert plan() is not None


def test_without_a_compiler_the_error_says_how_to_get_one(root, no_compiler):
    with pytest.raises(CacheMiss, match=r"could not be compiled .*pip install 'tilekern\[compile\]'.*; tune it with: "):
        plan()


def test_a_default_that_only_torch_can_run_is_named(root):
    spec = spec_named("fused_linear_cross_entropy")
    values = {"dtype": "bfloat16", "flag": False}
    problem = spec.problem(**{d.name: values.get(d.kind, 512) for d in spec.dimensions})
    with pytest.raises(CacheMiss, match="its default is a call of torch, which takes no other arrays"):
        dispatch.array_plan_for(spec, 0, H200, problem)


def test_a_record_that_is_published_later_is_taken_by_the_next_plan(root, compiled, monkeypatch):
    monkeypatch.setenv("TILEKERN_LOOKUP_AGAIN_S", "0")
    before = plan()
    layer = cache.FolderLayer(compiled, "compiled")
    [tools] = layer.toolkits(H200.key)
    record = layer.read_record(H200.key, tools, SPEC.name, dict(PROBLEM))
    other = next(c for c in SPEC.space.candidates(PROBLEM, H200) if c != before.config)
    times = {"median_us": 1.0, "default_us": 2.0}
    better = replace(record, provenance="measured", measurement=times, config=dict(other))
    cache.Store(root).write(better, {digest: layer.read_blob(digest) for digest in record.digests})
    assert plan() is before
    assert dispatch.look_again() == 1
    assert plan().config == other
    assert before.config == SPEC.default(EXACT, H200), "a plan in use keeps its record"
