"""A library's win where that library is not."""

import warnings

import pytest
import torch
from marks import needs_compiler
from one_record import GPU, H200

from tilekern import cache
from tilekern.compile import library, toolchain
from tilekern.errors import CacheMiss, TilekernWarning, ToolchainMissing
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.plans import LibraryPlan
from tilekern.runtime.records import artifact_of, record_of
from tilekern.spec import ALIGNED, GENERIC, Config

MATMUL = spec_named("matmul")
FLAGS = {d.name: False for d in MATMUL.dimensions if d.kind == "flag"}
PROBLEM = MATMUL.problem(rows=64, inner=64, columns=64, dtype="bfloat16", **FLAGS)
TILE = MATMUL.generic(PROBLEM)
CUBLAS = TILE.but(implementation="cublas")
ASKED = tuple(getattr(torch, value) if value == "bfloat16" else value for value in PROBLEM.values())

pytestmark = [needs_compiler, pytest.mark.usefixtures("root")]


@pytest.fixture(scope="module")
def kernel():
    """The artifacts of a kernel of the problem, with their bytes."""
    made = {v: toolchain.compile_candidate(MATMUL, PROBLEM, TILE, H200, v) for v in (ALIGNED, GENERIC)}
    artifacts = {variant: artifact_of(one, TILE) for variant, one in made.items()}
    return artifacts, {artifacts[variant].sha256: one.cubin for variant, one in made.items()}


@pytest.fixture
def here(monkeypatch):
    """Say which libraries are here."""

    def say(**which):
        monkeypatch.setattr(library.Library, "libraries", {n: lambda n=n: which[n] for n in which})

    return say


def won_by(config, artifacts, blobs, best_kernel, root, spec=MATMUL, problem=PROBLEM):
    tools = toolchain.toolkit().describe()
    record = record_of(
        spec, problem, config, H200, tools, artifacts, "measured", measurement={"median_us": 9.0},
        best_kernel=best_kernel,
    )  # fmt: skip
    cache.Store(root).write(record, blobs)
    return record


def test_a_library_s_call_runs_if_the_library_is_here(kernel, root, here):
    won_by(CUBLAS, *kernel, cache.BestKernel(dict(TILE), {"median_us": 11.0}, None), root)
    here(cublas=True)
    with warnings.catch_warnings(action="error"):
        plan = dispatch.plan_for(MATMUL, GPU, *ASKED)
    assert isinstance(plan, LibraryPlan)
    assert plan.config == CUBLAS


def test_the_best_kernel_runs_if_the_library_is_missing(kernel, root, here):
    record = won_by(CUBLAS, *kernel, cache.BestKernel(dict(TILE), {"median_us": 11.0}, None), root)
    here(cublas=False)
    with pytest.warns(TilekernWarning, match="cublas is not here; matmul runs its best kernel"):
        plan = dispatch.plan_for(MATMUL, GPU, *ASKED)
    assert not isinstance(plan, LibraryPlan)
    assert plan.config == TILE
    assert plan.blocks == MATMUL.device(PROBLEM, TILE).grid(PROBLEM, H200.sm_count)
    assert dispatch.resolved() == {("matmul", PROBLEM): record}


def test_a_record_that_holds_no_kernel_leaves_the_model_its_own_op(root, here):
    won_by(CUBLAS, {}, {}, None, root)
    here(cublas=False)
    with pytest.warns(TilekernWarning, match="holds no kernel; tune it again; the model's own op runs"):
        assert dispatch.plan_for(MATMUL, GPU, *ASKED) is None
    assert dispatch.resolved() == {("matmul", PROBLEM): None}
    dispatch.forget()
    dispatch.set_miss_policy("error")
    with pytest.raises(CacheMiss, match="cublas, which won matmul rows=64"):
        dispatch.plan_for(MATMUL, GPU, *ASKED)


GROUPED = spec_named("grouped_linear")
GROUPED_PROBLEM = GROUPED.problem(
    rows=64, inner=64, columns=64, experts=4, dtype="bfloat16",
    **{d.name: False for d in GROUPED.dimensions if d.kind == "flag"},
)  # fmt: skip
ASKED_OF_GROUPED = tuple(getattr(torch, v) if v == "bfloat16" else v for v in GROUPED_PROBLEM.values())


@pytest.fixture
def no_compiler(monkeypatch):
    for module in ("compile.cutile", "runtime.records"):
        monkeypatch.setattr(f"tilekern.{module}.require_toolkit", toolkit_is_missing)


def toolkit_is_missing():
    raise ToolchainMissing("the tile compiler is not installed")


def test_a_default_that_a_library_runs_needs_no_compiler(no_compiler, root, here):
    here(torch=True)
    with pytest.warns(TilekernWarning, match="its default, a call of torch, runs"):
        plan = dispatch.plan_for(GROUPED, GPU, *ASKED_OF_GROUPED)
    assert isinstance(plan, LibraryPlan)
    assert plan.config == GROUPED.default(GROUPED_PROBLEM, H200)
    assert dispatch.stats()["grouped_linear"]["misses"] == 1
    assert not list(root.rglob("grouped_linear/*.json"))


@pytest.mark.parametrize("policy", ["fallback", "compile"])
def test_the_model_s_own_op_runs_by_policy_or_without_the_library(policy, no_compiler, here):
    here(torch=policy == "fallback")
    dispatch.set_miss_policy(policy)
    with pytest.warns(TilekernWarning, match="the model's own op runs"):
        assert dispatch.plan_for(GROUPED, GPU, *ASKED_OF_GROUPED) is None


def test_a_composite_of_kernels_runs_without_the_library(root, here):
    spec = spec_named("attention_backward")
    sizes = {d.name: {"dtype": "bfloat16", "flag": False}.get(d.kind, 64) for d in spec.dimensions}
    problem = spec.problem(**sizes)
    best = cache.BestKernel({"implementation": "kernels"}, {"median_us": 11.0}, None)
    won_by(Config(implementation="cudnn"), {}, {}, best, root, spec, problem)
    here(cudnn=False)
    asked = (getattr(torch, value) if value == "bfloat16" else value for value in problem.values())
    with pytest.warns(TilekernWarning, match="cudnn is not here"):
        plan = dispatch.plan_for(spec, GPU, *asked)
    assert plan.config == Config(implementation="kernels")


def test_cudnn_counts_as_here_unless_it_is_switched_off(monkeypatch):
    for available in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda available=available: available)
        for enabled in (True, False):
            with torch.backends.cudnn.flags(enabled=enabled):
                assert ("cudnn" in library.libraries_here()) == (available and enabled)


def test_configs_name_known_libraries():
    named = {
        value
        for spec in (MATMUL, spec_named("attention_forward"), spec_named("attention_backward"))
        for value in spec.space.axes(problem_of(spec))["implementation"]
    }
    assert {name for name in named if library.library_of(Config(implementation=name))} == {"cublas", "cudnn"}
    for spec in (MATMUL, spec_named("attention_forward"), spec_named("attention_backward")):
        problem = problem_of(spec)
        for value in spec.space.axes(problem)["implementation"]:
            config = spec.default(problem, H200).but(implementation=value)
            runs = spec.is_library(problem, config) and not spec.implement(problem, config).composite
            assert runs == (library.library_of(config) is not None), value


def problem_of(spec):
    return spec.problem(**{d.name: {"dtype": "bfloat16", "flag": False}.get(d.kind, 64) for d in spec.dimensions})
