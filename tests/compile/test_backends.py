"""A third compiler: one class of implementations and one backend, planned, compiled, recorded and launched."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
from marks import needs_compiler

from tilekern.cache import FolderLayer, Store
from tilekern.compile import backend as backends
from tilekern.compile.backend import Backend, Compiled, register
from tilekern.compile.library import library_of
from tilekern.compile.toolchain import backend_of, compile_candidate
from tilekern.kernels import all_specs, spec_named
from tilekern.runtime.launcher import prebuilt
from tilekern.runtime.plans import ExtendedPlan, plan_of
from tilekern.runtime.records import artifact_of, record_of
from tilekern.spec import ALIGNED, GENERIC, Config, Constraint, DeviceKernel, Space
from tilekern.spec.targets import resolve
from tilekern.tuning.compile.order import lowered_as
from tilekern.tuning.compile.stage import compile_all, settled
from tilekern.tuning.pipeline import without_backends
from tilekern.tuning.predict.ranking import ranking
from tilekern.tuning.publishing import winners
from tilekern.tuning.report.implementations import standings
from tilekern.tuning.sweep.folder import Sweep

CUTILE = spec_named("scale")
H200 = resolve("H200")


@dataclass(frozen=True)
class ToyKernel(DeviceKernel):
    """A kernel of the toy compiler: cuTile's generic one, launched with a block of its own."""

    backend: ClassVar[str] = "toy"

    block: int


class Toy(Backend):
    """Compile with cuTile, and launch differently."""

    name, title = "toy", "the toy"
    implementations = ("toy",)
    needs: ClassVar = {"toy-compiler": ">=1"}
    install = "pip install toy-compiler"
    version = "toy-compiler 1.0"

    def compiler(self):
        """Return the version, unless a test takes it away."""
        return self.version

    def compile(self, kernel, target, variant, timeout_s):  # noqa: ARG002
        """Give cuTile's cubin."""
        problem = CUTILE.problem(rows=64, columns=64, dtype="bfloat16")
        made = compile_candidate(CUTILE, problem, CUTILE.generic(problem), target, variant)
        return Compiled(
            made.cubin, made.symbol, self.assumptions(kernel, variant), 0.0, 0.1, self.launch(kernel), self.version
        )

    def launch(self, kernel):
        """Return the block."""
        return {"block": [kernel.block, 1, 1], "cluster": 1, "cooperative": False, "shared_bytes": 0}


def implement(problem, config):
    if config.get("implementation") != "toy":
        return CUTILE.implement(problem, config)
    generic = CUTILE.device(problem, CUTILE.generic(problem))
    return ToyKernel(generic.function, generic.parameters, generic.constants, generic.grid, config["threads"])


SPEC = dataclasses.replace(
    CUTILE,
    name="toy_scale",
    implement=implement,
    space=dataclasses.replace(
        CUTILE.space,
        beside=(
            Space(
                lambda _: {"implementation": ["toy"], "schedule": ["block"], "threads": [64, 128, 256]},
                (Constraint("few threads", lambda _problem, config, _target: config["threads"] < 256),),
            ),
        ),
    ),
)
PROBLEM = SPEC.problem(rows=64, columns=64, dtype="bfloat16")
NAMED = (SPEC.name, PROBLEM)
TOYS = [Config(implementation="toy", schedule="block", threads=threads) for threads in (64, 128)]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """The backend and the kernel that it compiles, known for one test."""
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))
    monkeypatch.setitem(all_specs(), SPEC.name, SPEC)
    register(Toy())


def at_once(order, compiles, *_):
    """Compile in this process, where the toy is known."""
    item = order.take(None)
    while item is not None:
        yield compiles(item)
        item = order.take(item)


@pytest.fixture
def sweep(tmp_path):
    """A sweep of cuTile's default and all of the toy's configs, not compiled yet."""
    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(H200, "test", [NAMED], {NAMED: [SPEC.default(PROBLEM, H200), *TOYS]})
    return sweep


def test_a_third_backend_s_configs_are_candidates_of_their_own_artifacts(sweep):
    items = sweep.candidates(*NAMED)
    assert [item.backend.name for item in items] == ["cutile", "toy", "toy", "cutile"]
    assert len({item.artifact for item in items}) == 4
    assert lowered_as(items[1]) == lowered_as(items[2])
    assert {config for config in SPEC.space.candidates(PROBLEM, H200) if "threads" in config} == set(TOYS)


def test_without_its_compiler_its_configs_are_left_out_and_that_is_said(sweep, monkeypatch):
    assert not list(without_backends(sweep, [NAMED]))
    monkeypatch.setattr(Toy, "version", None)
    assert [item.backend.name for item in sweep.candidates(*NAMED)] == ["cutile", "cutile"]
    assert list(without_backends(sweep, [NAMED])) == [
        "toy-compiler is not installed: 1 of 1 kernels are swept without the toy (pip install toy-compiler)"
    ]


@needs_compiler
def test_a_third_backend_is_compiled_recorded_and_planned_for_launch(sweep, tmp_path):
    assert compile_all(sweep, jobs=1, pool=at_once).failed == 0
    toys = [item for item in sweep.candidates(*NAMED) if item.backend.name == "toy"]
    assert {sweep.compiled()[item.artifact]["compiler"] for item in toys} == {"toy-compiler 1.0"}
    assert settled(sweep) >= {item.artifact for item in toys}
    assert [item.backend.name for item, _ in ranking(sweep, *NAMED, H200)] == ["cutile", "toy", "toy"]
    [(winner, _)] = winners(sweep, {"key": "none"})
    assert winner.record.provenance == "predicted"

    made = {variant: SPEC.generic(PROBLEM) for variant in (ALIGNED, GENERIC)} | {ALIGNED: TOYS[1]}
    compiled = {variant: compile_candidate(SPEC, PROBLEM, config, H200, variant) for variant, config in made.items()}
    artifacts = {variant: artifact_of(one, made[variant]) for variant, one in compiled.items()}
    blobs = {artifacts[variant].sha256: one.cubin for variant, one in compiled.items()}
    record = record_of(SPEC, PROBLEM, TOYS[1], H200, {"key": "none"}, artifacts, "predicted", prediction={"rank": 1})
    Store(tmp_path / "cache").write(record, blobs)
    read = FolderLayer(tmp_path / "cache", "cache").read_record(*record.address[:3], dict(PROBLEM))
    kernel = prebuilt(
        SPEC.device(PROBLEM, TOYS[1]).function, read.artifacts, lambda variant: blobs[read.artifacts[variant].sha256]
    )
    plan = plan_of(kernel, SPEC.device(PROBLEM, TOYS[1]), TOYS[1], PROBLEM, H200)
    assert isinstance(plan, ExtendedPlan)
    assert kernel.attributes.block == (128, 1, 1)
    assert kernel.otherwise.variants[0].name == GENERIC


def test_a_backend_has_defaults():
    timed = {"kernel": "scale", "earlier_race": False, "status": "timed"}
    rows = [
        SimpleNamespace(config=TOYS[0], measured_us=1.0, **timed),
        SimpleNamespace(config={}, measured_us=2.0, **timed),
    ]
    assert [standing.implementation for standing in standings([rows])] == ["the toy", "cuTile"]
    assert library_of(TOYS[0]) is None
    kernel = SPEC.device(PROBLEM, TOYS[0])
    assert backend_of(kernel).lowered_digest(kernel, H200, ALIGNED) is None
