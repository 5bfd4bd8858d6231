"""Decisions of the tuner's command line that need no compiler."""

import json
from pathlib import Path

import pytest

from tilekern.targets import resolve
from tuning import cli
from tuning.commands import tune
from tuning.compiling import compile_all
from tuning.sweep import Sweep


@pytest.mark.parametrize(
    ("at_hand", "words"),
    [(None, "no GPU here"), ("H200", "the GPU here is a H200, not a B200"), ("B200", None)],
)
def test_a_whole_run_measures_on_the_target_alone(monkeypatch, at_hand, words):
    monkeypatch.setattr(tune, "here", lambda: at_hand and resolve(at_hand))
    absent = tune._absent(resolve("B200"))
    assert (absent is None) == (words is None)
    if words:
        assert absent.startswith(words)
        assert absent.endswith("the winners are predicted")


def test_a_run_on_another_gpu_predicts(compiled_sweep: Sweep, monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(tune, "here", lambda: resolve("B200"))
    code = cli.main(
        ["--stages", "compile,measure", "--sweep", str(compiled_sweep.folder), "--cache-dir", str(tmp_path), "--json"]
    )
    assert code == 0
    outcome = json.loads(capsys.readouterr().out)
    assert [p["provenance"] for p in outcome["problems"]] == ["predicted"]
    assert "the GPU here is a B200, not a H200" in outcome["notes"][0]


def test_a_sweep_in_which_nothing_compiled_is_an_error(monkeypatch, tmp_path: Path, capsys, h200):
    from tuning_samples import SMALL

    sweep = Sweep(tmp_path / "sweep")
    sweep.begin(h200, "test", [SMALL])
    compile_all(sweep, jobs=2, timeout_s=0.001)
    monkeypatch.setattr("tuning.compiling.wanted", lambda *_: {})
    code = cli.main(["--stages", "compile,measure", "--sweep", str(sweep.folder), "--cache-dir", str(tmp_path / "c")])
    assert code == 2
    assert "no candidate compiled and passed its check" in capsys.readouterr().err


@pytest.mark.parametrize("timeout", ["0", "-1", "0.001", "x"])
def test_a_timeout_below_a_second_is_refused(timeout: str, capsys):
    assert cli.main(["qwen3-8b", "--gpu", "B200", "--timeout", timeout]) == 2
    assert "--timeout" in capsys.readouterr().err
