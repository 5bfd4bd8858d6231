"""Candidates of CuTe DSL in a sweep: there where it is installed, measured where it is not, launched from a record."""

import json
from multiprocessing import get_context

import pytest
import simulated_gpu
from test_simulated_gpu import SimulatedExecutor

from tilekern.cache import FolderLayer, Store
from tilekern.compile import cute_compiler
from tilekern.kernels import spec_named
from tilekern.runtime.launcher import prebuilt
from tilekern.runtime.plans import ExtendedPlan, plan_of
from tilekern.spec import ALIGNED, GENERIC, Config
from tilekern.tuning import pipeline
from tilekern.tuning.compile.stage import compile_all, settled
from tilekern.tuning.measure import process
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.predict.ranking import predict_best, ranking
from tilekern.tuning.publishing import keep_winners, winners
from tilekern.tuning.sweep.folder import Sweep

SPEC = spec_named("softmax_forward")
PROBLEM = SPEC.problem(rows=64, columns=512, dtype="bfloat16")
NAMED = (SPEC.name, PROBLEM)
needs_cute = pytest.mark.skipif(cute_compiler.compiler() is None, reason="nvidia-cutlass-dsl is not installed")


def in_cute(target, count):
    found = (c for c in SPEC.space.candidates(PROBLEM, target) if c.get("implementation") == "cute")
    return [next(found) for _ in range(count)]


@pytest.fixture
def without_cute(monkeypatch):
    monkeypatch.setattr(cute_compiler, "compiler", lambda: None)


def of_cute(sweep):
    return [item for item in sweep.candidates(*NAMED) if item.backend.name == "cute"]


def test_without_the_dsl_cutile_s_are_swept_alone_which_is_said(h200, tmp_path, without_cute):
    sweep = Sweep(tmp_path / "sweep")
    named = [NAMED, ("swiglu_forward", spec_named("swiglu_forward").problem(rows=64, columns=64, dtype="bfloat16"))]
    sweep.begin(h200, "test", named)
    assert not of_cute(sweep)
    assert sweep.candidates(*NAMED)[-1].variant == GENERIC
    [said] = pipeline.without_backends(sweep, named)
    assert said.startswith("nvidia-cutlass-dsl is not installed: 1 of 2 kernels are swept without CuTe DSL")
    assert not list(pipeline.without_backends(sweep, named[1:]))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, h200):
    """A sweep of cuTile's default and two configs of CuTe DSL."""
    sweep = Sweep(tmp_path_factory.mktemp("both"))
    sweep.begin(h200, "test", [NAMED], {NAMED: [SPEC.default(PROBLEM, h200), *in_cute(h200, 2)]})
    assert compile_all(sweep, jobs=2).failed == 0
    return sweep


@needs_cute
@pytest.mark.processes
class TestASweepOfBoth:
    """Compiled where the DSL is, measured and published as where it is not."""

    @pytest.mark.usefixtures("without_cute")
    def test_what_was_compiled_elsewhere_has_its_candidates_where_the_dsl_is_not(self, compiled):
        assert len(of_cute(compiled)) == 2
        assert settled(compiled) >= {item.artifact for item in compiled.candidates(*NAMED)}

    def test_a_journal_s_line_has_the_launch_and_the_compiler(self, compiled):
        lines = [compiled.compiled()[item.artifact] for item in of_cute(compiled)]
        for item, line in zip(of_cute(compiled), lines, strict=True):
            assert line["compiler"] == cute_compiler.compiler()
            assert line["launch"]["block"] == [item.config["threads"] * item.config["rows"], 1, 1]
            assert line["resources"]["threads"] == line["launch"]["block"][0]
        others = [line for line in compiled.compiled().values() if line not in lines]
        assert len(others) == 2
        assert not any({"launch", "compiler"} & line.keys() for line in others)

    def test_the_predicted_winner_is_cutile_s(self, compiled, h200):
        order = [item.backend.name == "cute" for item, _ in ranking(compiled, *NAMED, h200)]
        assert order == [False, True, True]
        assert predict_best(compiled, *NAMED, h200).config == SPEC.default(PROBLEM, h200)

    def test_one_that_wins_is_published_beside_cutile_s_generic_variant(self, h200, tmp_path, monkeypatch):
        sweep, [config] = Sweep(tmp_path / "sweep"), in_cute(h200, 1)
        sweep.begin(h200, "test", [NAMED], {NAMED: [config]})
        compile_all(sweep, jobs=1)
        monkeypatch.setattr(process, "serve", simulated_gpu.serve)
        monkeypatch.setattr(process, "get_context", lambda _: get_context("fork"))
        monkeypatch.setattr("tilekern.tuning.executors.local.devices", lambda: ["0"])
        measure_all(sweep, SimulatedExecutor(sweep.cache), keep_winners)
        [(winner, blobs)] = winners(sweep, {"key": "none"})
        record = winner.record
        assert (record.provenance, Config(record.config)) == ("measured", config)
        aligned, generic = record.artifacts[ALIGNED], record.artifacts[GENERIC]
        assert aligned.compiler == cute_compiler.compiler()
        assert aligned.launch.block == (config["threads"] * config["rows"], 1, 1)
        assert (generic.compiler, generic.launch) == (None, None)
        assert generic.config == dict(SPEC.generic(PROBLEM))

        store = Store(tmp_path / "cache")
        store.write(record, blobs)
        read = FolderLayer(tmp_path / "cache", "cache").read_record(*record.address[:3], dict(PROBLEM))
        assert read == record
        made = SPEC.device(PROBLEM, config)
        kernel = prebuilt(made.function, read.artifacts, lambda variant: blobs[read.artifacts[variant].sha256])
        plan = plan_of(kernel, made, config, PROBLEM, h200)
        assert isinstance(plan, ExtendedPlan)
        assert [variant.name for variant in kernel.variants] == [ALIGNED]
        assert [variant.name for variant in kernel.otherwise.variants] == [GENERIC]
        assert json.loads(record.to_json())["artifacts"][ALIGNED]["launch"]["cluster"] == 1
