"""A candidate that one sweep put into quarantine costs the next sweep nothing."""

import json
import shutil
from pathlib import Path

import pytest
from recorded import GPU, RecordedExecutor
from tuning_samples import COMPILED, SMALL

from tilekern.errors import TilekernWarning
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED
from tilekern.tuning.measure import gpu as measuring
from tilekern.tuning.measure.stage import measure_all
from tilekern.tuning.publishing import keep_winners
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.quarantine import shared

REASON = "AcceleratorError: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def sweeps(tmp_path, h200):
    """Two sweeps of the same problem in folders of their own."""
    found = [Sweep(tmp_path / name) for name in ("first", "second")]
    for sweep in found:
        sweep.begin(h200, "test", [SMALL])
    return found


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def line(sweep, at=3, **more):
    key = sweep.candidates(*SMALL)[at].key
    return {"candidate": key, "reason": REASON, "toolkit": {"key": "tileiras-13"}, "driver": "580.1"} | more


def test_a_candidate_that_was_lost_in_one_sweep_is_not_tried_in_another(sweeps, root):
    first, second = sweeps
    with shared(first, root):
        first.note("quarantine", line(first))
    with shared(second, root):
        assert second.quarantined() == {line(first)["candidate"]: REASON}


def test_it_is_known_even_where_the_stage_ended_in_an_error(sweeps, root):
    first, second = sweeps

    def stage():
        with shared(first, root):
            first.note("quarantine", line(first))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stage()
    with shared(second, root):
        assert len(second.quarantined()) == 1


def test_another_toolkit_or_driver_tries_it_again(sweeps, root):
    first, second = sweeps
    with shared(first, root):
        first.note("quarantine", line(first, 3), line(first, 4))
    item = second.candidates(*SMALL)[3]
    second.note("compiled", COMPILED | {"key": item.artifact, "toolkit": {"key": "tileiras-14"}})
    with shared(second, root):
        assert list(second.quarantined()) == [line(first, 4)["candidate"]]
        second.note("gpu", {"gpu": "NVIDIA H200", "driver": "590.2"})
        assert second.quarantined() == {}


def test_the_reason_in_the_sweep_itself_wins(sweeps, root):
    first, second = sweeps
    with shared(first, root):
        first.note("quarantine", line(first))
    second.note("quarantine", line(second, reason="no answer within 10 s"))
    with shared(second, root):
        assert list(second.quarantined().values()) == ["no answer within 10 s"]


def test_an_old_finding_does_not_take_the_place_of_a_newer_one(sweeps, root, tmp_path, h200):
    first, second = sweeps
    second.note("quarantine", line(second, driver="570.1"))
    with shared(first, root):
        first.note("quarantine", line(first, driver="580.1"))
    with shared(second, root):
        pass
    third = Sweep(tmp_path / "third")
    third.begin(h200, "test", [SMALL])
    third.note("gpu", {"gpu": "NVIDIA H200", "driver": "580.1"})
    with shared(third, root):
        assert list(third.quarantined()) == [line(first)["candidate"]]


def test_candidates_of_other_problems_and_torn_files_are_left_out(sweeps, root, h200):
    first, second = sweeps
    with shared(first, root):
        first.note("quarantine", line(first))
        first.note("quarantine", line(first) | {"candidate": "swiglu_forward|rows=1|x|aligned|0"})
    folder = root / "quarantine" / h200.key
    assert len(list(folder.glob("*.json"))) == 2
    (folder / "torn.json").write_text('{"candidate": ')
    (folder / "other.json").write_text(json.dumps([1]))
    with shared(second, root):
        assert list(second.quarantined()) == [line(first)["candidate"]]


def test_a_root_that_cannot_be_written_costs_nothing_and_is_said_once(sweeps, root):
    root.touch()
    place = root / "quarantine" / sweeps[0].target.key
    with pytest.warns(TilekernWarning, match=f"cannot write {place}: .* tried again") as said, shared(sweeps[0], root):
        sweeps[0].note("quarantine", line(sweeps[0], 3), line(sweeps[0], 4))
    assert len(said) == 1
    assert len(sweeps[0].quarantined()) == 2


MATMUL = dict.fromkeys(("a_transposed", "b_transposed", "biased", "gelu_tanh", "silu", "accumulated"), False)
MATMUL |= {"rows": 256, "inner": 256, "columns": 256, "dtype": "bfloat16"}
LIBRARIES = {"cudnn": "91900", "cublas": "13.1.0.3"}


@pytest.mark.parametrize("upgraded", [{"torch": "2.12.0"}, {"cudnn": "92000"}, {"cublas": "13.2.0.1"}])
def test_what_a_library_ran_is_tried_again_by_another_library(tmp_path, root, h200, upgraded):
    spec = spec_named("matmul")
    problem = spec.problem(**MATMUL)
    ran = Sweep(tmp_path / "ran")
    ran.begin(h200, "test", [("matmul", problem)])
    calls = [item for item in ran.candidates("matmul", problem) if item.is_library and item.variant == ALIGNED]
    assert calls
    with shared(ran, root):
        measure_all(
            ran, RecordedExecutor(gpu=GPU | LIBRARIES, crashing=[item.config.key for item in calls]), keep_winners
        )
    assert ran.quarantined().keys() == {item.key for item in calls}
    again = Sweep(tmp_path / "again")
    again.begin(h200, "test", [("matmul", problem)])
    with shared(again, root):
        for sweep in (ran, again):
            sweep.note("gpu", GPU | LIBRARIES | upgraded)
            assert sweep.quarantined() == {}
            # One that is not known to have changed holds it, as where an older version noted the GPU.
            sweep.note("gpu", GPU)
            assert sweep.quarantined().keys() == {item.key for item in calls}


def test_what_was_compiled_stays_whatever_the_libraries_are(compiled_sweep, tmp_path):
    sweep = Sweep(Path(shutil.copytree(compiled_sweep.folder, tmp_path / "sweep")))
    bad = sweep.candidates(*SMALL)[3]
    measure_all(sweep, RecordedExecutor(gpu=GPU | LIBRARIES, crashing=[bad.config.key]), keep_winners)
    sweep.note("gpu", GPU | {"torch": "2.12.0", "cudnn": "92000"})
    assert list(sweep.quarantined()) == [bad.key]


def test_libraries_are_those_that_torch_was_installed_with(monkeypatch):
    import torch

    needs = ["filelock", "nvidia-cublas<=13.2,>=13.1; sys_platform == 'linux'", "nvidia-cudnn-cu13==9.19.0.56", "x"]
    there = {"nvidia-cublas": "13.1.0.3", "nvidia-cudnn-cu13": "9.19.0.56"}
    monkeypatch.setattr(measuring.importlib.metadata, "requires", lambda _: needs)
    monkeypatch.setattr(measuring.importlib.metadata, "version", there.__getitem__)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    assert measuring.versions() == {"cublas": "13.1.0.3", "cudnn": "9.19.0.56"}
    # What is loaded counts, whatever was installed.
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert measuring.versions() == {"cublas": "13.1.0.3", "cudnn": "92000"}
