"""SIGTERM, as ``timeout`` sends it: what was measured is published."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environments import ROOT, environment
from tuning_samples import needs_compiler

from tilekern.cache import Pack
from tilekern.tuning.stopping import Stopped, stopped_by
from tilekern.tuning.sweep.folder import Sweep

pytestmark = [needs_compiler, pytest.mark.processes]
HERE = Path(__file__).parent
PATIENCE_S = 60


@pytest.fixture
def folder(both, tmp_path) -> Path:
    """A copy of a compiled sweep of four problems."""
    folder = Path(shutil.copytree(both.folder, tmp_path / "sweep"))
    for name in ("measured.jsonl", "races.jsonl", "cache"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def stopped(folder: Path, many: int, signals: int) -> tuple[int, str, str]:
    """Run the measure stage, and stop it after some problems; return exit code, output and errors."""
    command = [sys.executable, HERE / "stopped_run.py", folder, folder.with_name("cache"), str(many)]
    with subprocess.Popen(
        command, env=environment(ROOT, HERE), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n", process.communicate()[1]
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
        try:
            output, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, output, errors


@pytest.mark.parametrize("signals", [1, 2], ids=["once", "as timeout does, twice"])
def test_what_was_measured_before_sigterm_is_published(folder, signals):
    code, output, errors = stopped(folder, 2, signals)
    assert code == 143, errors
    assert "SIGTERM: stopped with 2 of 4 problems measured; what was finished is kept" in output
    raced = {race["problem"] for race in Sweep(folder).races().values()}
    assert len(raced) == 2
    assert {address.problem_key for address in Pack(folder / "results.pack").records} == raced
    assert f"2 records in {folder.with_name('cache')}" in output


def test_a_run_that_has_measured_nothing_publishes_nothing(folder):
    shutil.rmtree(folder.with_name("cache"), ignore_errors=True)
    (folder / "results.pack").unlink(missing_ok=True)
    code, output, _ = stopped(folder, 0, 1)
    assert code == 143
    assert "stopped with 0 of 4 problems measured" in output
    assert not (folder / "results.pack").exists()


def test_a_signal_that_follows_at_once_is_the_same_stop():
    before = signal.getsignal(signal.SIGTERM)

    def stop_twice():
        with stopped_by(signal.SIGTERM):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM") as caught:
        stop_twice()
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
