"""Warnings of the library: a plain line for people, and an ordinary warning for programs."""

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from environments import ROOT, environment

from tilekern import warning
from tilekern.errors import TilekernWarning
from tilekern.warning import warn, warn_once

pytestmark = pytest.mark.processes

TEXT = "the cache is full; make room"
WARN = f"tilekern.warning.warn({TEXT!r})"


def python(code, *flags, folder=ROOT, **env):
    env = environment(without=("TILEKERN_", "PYTHONWARNINGS"), **env)
    return subprocess.run(
        [sys.executable, *flags, *code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def test_a_job_shows_one_line_with_no_line_of_source(tmp_path):
    """Also where a file of the library's name lies in the job's folder."""
    (tmp_path / "tilekern").write_text("a line that is no source of anything\n" * 3)
    script = tmp_path / "job.py"
    script.write_text(f"from tilekern.warning import warn\nwarn({TEXT!r})\nwarn({TEXT!r})\nwarn('two\\n  lines')\n")
    ran = python([script.name], folder=tmp_path)
    assert ran.stderr == f"tilekern:0: TilekernWarning: {TEXT}\ntilekern:0: TilekernWarning: two lines\n"


ONE = ["--gpu", "H200", "--problem", "swiglu rows=64,columns=48,dtype=bfloat16"]


@pytest.mark.parametrize(
    "command",
    [
        # Of a GPU without records: a record is listed with its age, which differs from run to run.
        ["-m", "tilekern.cache_tools", "ls", "--layers", "--gpu", "sm_121"],
        pytest.param(["-m", "tilekern.tune", "preflight", *ONE], marks=pytest.mark.nightly),
    ],
    ids=["cache_tools", "tune"],
)
def test_a_command_line_shows_a_plain_line(command, tmp_path):
    env = {"TILEKERN_CACHE_DIR": str(tmp_path), "TILEKERN_CACHE_PATH": "nowhere"}
    text = "TILEKERN_CACHE_PATH names nowhere, which is neither a folder nor a pack; it is left out\n"
    ran = python(command, **env)
    assert ran.stderr == f"tilekern: {text}"
    silent = python(command, "-W", "ignore::tilekern.errors.TilekernWarning", **env)
    assert (silent.stderr, silent.stdout) == ("", ran.stdout)
    raised = python(command, "-W", "error::tilekern.errors.TilekernWarning", **env)
    assert (raised.returncode, raised.stdout, raised.stderr.count("\n")) == (2, "", 1)
    assert raised.stderr.endswith(text)


@pytest.mark.parametrize("_test", ["first", "second"])
def test_what_comes_once_in_a_process_comes_in_each_test(_test):
    with pytest.warns(TilekernWarning, match="the cache is full"):
        warn_once(TEXT)


@pytest.mark.parametrize("category", [TilekernWarning, UserWarning, RuntimeWarning])
def test_a_warning_is_caught_by_its_class_and_both_bases(category):
    with pytest.warns(category, match="the cache is full") as caught:
        warn(TEXT)
    assert [(w.filename, w.lineno, w.category) for w in caught] == [("tilekern", 0, TilekernWarning)]


@pytest.mark.parametrize(
    "how", [{"category": TilekernWarning}, {"module": "tilekern"}, {"message": "the cache"}], ids=str
)
def test_filters_find_it(how):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", **how)
        with pytest.raises(TilekernWarning):
            warn(TEXT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", **how)
        warn(TEXT)
    assert not caught


def test_warn_once_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in (TEXT, TEXT, "another"):
            warn_once(text)
        for number in range(3):
            warn_once(f"{number}", about="one file")
    assert [str(w.message) for w in caught] == [TEXT, "another", "0"]


def test_logging_takes_it_as_one_line():
    code = f"import logging, tilekern.warning; logging.basicConfig(); logging.captureWarnings(True); {WARN}"
    assert python(["-c", code]).stderr.split("\n")[0] == f"WARNING:py.warnings:tilekern:0: TilekernWarning: {TEXT}"


def test_warnings_of_others_are_shown_as_before(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import warnings, tilekern.warning\nbefore = warnings.showwarning\n"
        f"with tilekern.warning.shown_plainly():\n    {WARN}\n    warnings.warn('another')\n"
        "assert warnings.showwarning is before\n"
    )
    shown = f"{script}:5: UserWarning: another\n  warnings.warn('another')\n"
    assert python([str(script)]).stderr == f"tilekern: {TEXT}\n{shown}"


def test_an_op_without_a_gpu_says_so_in_one_line_and_pythons_own_hooks_stay(tmp_path):
    code = (
        "import warnings; before = warnings.showwarning, warnings.formatwarning\n"
        "import torch, tilekern.runtime.dispatch, tilekern.patch, tilekern.cache, tilekern.warning\n"
        "import tilekern.tuning.cli, tilekern.cache_tools.__main__\n"
        "from tilekern.ops import swiglu\n"
        "assert before == (warnings.showwarning, warnings.formatwarning)\n"
        "x = torch.ones(2, 16)\nfor _ in range(3): swiglu(x, x)"
    )
    ran = python(["-c", code], TILEKERN_CACHE_DIR=str(tmp_path))
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert ran.stderr.startswith("tilekern:0: TilekernWarning: swiglu_forward was called on cpu; ")


def test_every_warning_goes_this_way():
    """But for torch's own of a wait, which a rehearsal of a captured step takes for what it is."""
    apart = {Path(warning.__file__), ROOT / "tilekern" / "patch" / "captured.py"}
    for package in ("tilekern", "tuning", "cache_tools", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            if path not in apart:
                assert not re.search(r"warnings\.(warn|showwarning|formatwarning)", path.read_text()), path
