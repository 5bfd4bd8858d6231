"""Sweeps that the tests of the tuner share."""

import shutil
from pathlib import Path

import pytest
from tuning_samples import SMALL

from tilekern.targets import Target, resolve
from tuning.compile.stage import compile_all
from tuning.sweep.folder import Sweep


@pytest.fixture(scope="session")
def h200() -> Target:
    return resolve("H200")


@pytest.fixture(scope="session")
def compiled_sweep(tmp_path_factory: pytest.TempPathFactory, h200: Target) -> Sweep:
    """One small problem, compiled for the H200 by two workers."""
    sweep = Sweep(Path(tmp_path_factory.mktemp("sweep")))
    sweep.begin(h200, "test", [SMALL])
    summary = compile_all(sweep, jobs=2)
    assert summary.failed == 0
    return sweep


@pytest.fixture
def sweep(compiled_sweep: Sweep, tmp_path: Path) -> Sweep:
    """A copy that a test may add measurements to."""
    shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")
    return Sweep(tmp_path / "sweep")
