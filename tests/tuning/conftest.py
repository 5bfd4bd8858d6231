"""Sweeps that the tests of the tuner share."""

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from recorded import Known, RecordedExecutor
from tuning_samples import SMALL, THREE, WIDE

from tilekern.kernels import spec_named
from tilekern.spec.targets import Target, resolve
from tilekern.tuning import pipeline
from tilekern.tuning.compile.stage import compile_all
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.publishing import keep_winners
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.plan import Limits


@pytest.fixture(scope="session")
def h200() -> Target:
    return resolve("H200")


@pytest.fixture(scope="session")
def compiled_sweep(tmp_path_factory: pytest.TempPathFactory, h200: Target) -> Sweep:
    """One small problem, compiled for the H200 by two workers; by one of pytest's workers for all of them."""
    folder = Path(tmp_path_factory.mktemp("sweep"))
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return compile_small(folder, h200)
    shared = tmp_path_factory.getbasetemp().parent / "compiled_sweep"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            sweep = compile_small(folder, h200)
            shutil.copytree(folder, shared)
            return sweep
    shutil.copytree(shared, folder, dirs_exist_ok=True)
    # Each of pytest's workers has a secret of its own, with which its lines are sealed.
    lines = Sweep(shared, foreign=True).compiled().values()
    (folder / "compiled.jsonl").unlink()
    sweep = Sweep(folder)
    sweep.note("compiled", *lines)
    return sweep


def compile_small(folder: Path, target: Target) -> Sweep:
    sweep = Sweep(folder)
    sweep.begin(target, "test", [SMALL])
    summary = compile_all(sweep, jobs=2)
    assert summary.failed == 0
    return sweep


@pytest.fixture(scope="session")
def first_configs(h200: Target) -> Limits:
    """Six configs of the small problem, all of them compiled by tileiras."""
    configs = [item.config for item in candidates(*SMALL, h200) if not item.config.get("implementation")]
    return {SMALL: configs[:6]}


@pytest.fixture
def sweep(compiled_sweep: Sweep, tmp_path: Path) -> Sweep:
    """A copy that a test may add measurements to."""
    shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")
    return Sweep(tmp_path / "sweep")


@pytest.fixture
def default_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan only the default config of each problem, as compiling a whole space takes long."""
    begin = Sweep.begin

    def begin_defaults(self, target, model, problems, limits=None, launches=None, invariant=(), tokens=()):
        defaults = {(kernel, problem): [spec_named(kernel).default(problem, target)] for kernel, problem in problems}
        begin(self, target, model, problems, limits or defaults, launches, invariant, tokens)

    monkeypatch.setattr(Sweep, "begin", begin_defaults)


@pytest.fixture
def known(compiled_sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> Known:
    """Pipelines over THREE take their artifacts from the compiled sweep, so nothing is compiled."""
    pool = Known(compiled_sweep)
    monkeypatch.setattr(pipeline, "compile_in_order", pool)
    monkeypatch.setattr(pipeline, "start_server", lambda: None)
    return pool


@pytest.fixture(scope="session")
def both(compiled_sweep: Sweep, tmp_path_factory: pytest.TempPathFactory, h200: Target) -> Sweep:
    """Four problems of two shapes, four configs each, compiled by one stage and then measured by the other."""
    sweep = Sweep(tmp_path_factory.mktemp("apart"))
    limits = {named: [item.config for item in candidates(*named, h200)][:4] for named in (*THREE, WIDE)}
    sweep.begin(h200, "test", [*THREE, WIDE], limits)
    keys = {item.artifact for named in sweep.problems() for item in sweep.candidates(*named)}
    for key, line in compiled_sweep.compiled().items():
        if key in keys:
            sweep.store(compiled_sweep.cubin(line["sha256"]))
            sweep.note("compiled", line)
    assert compile_all(sweep, jobs=2).failed == 0
    measure_all(sweep, RecordedExecutor(), keep_winners)
    return sweep
