"""Kernels that fault, hang, take all memory or kill their process cost themselves and nobody else, on a real GPU.

The faulty kernel goes into a copy of the package, which a process of its own sweeps: the tuner runs as it always does.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_processes import ROOT, clean_environment

from tilekern.compile.toolchain import toolkit

HERE = Path(__file__).parent
# A launch of the faulty kernel takes microseconds.
LIMIT_S = 4.0
pytestmark = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What became of each config: of the good ones alone, and with the bad ones among them."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(ROOT / "tilekern", folder / "tilekern", ignore=shutil.ignore_patterns("__pycache__", "*.pack"))
    shutil.copy(HERE / "faulty_kernel.py", folder / "tilekern" / "kernels" / "faulty.py")
    ran = subprocess.run(
        [sys.executable, HERE / "faulty_sweep.py", folder / "sweeps", str(LIMIT_S)],
        env=clean_environment(folder), cwd=folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    sys.stdout.write(json.dumps(told, indent=1))
    return told


def faults(configs):
    return {re.search("fault=([^,]*)", config)[1] for config in configs}


# What is quarantined, and how its reason begins.
FATAL = {
    "illegal": "AcceleratorError: CUDA error: an illegal memory access",
    "late illegal": "AcceleratorError: CUDA error: an illegal memory access",
    "spin": "no answer within 4",
    "late sleep": "no answer within 4",
    "assert": "AcceleratorError: CUDA error: device-side assert",
    "all memory": "OutOfMemoryError: CUDA out of memory",
    "segfault": "the process died (SIGSEGV)",
}
# What fails its check.
WRONG = {
    "wrong": "relative error",
    "raise": "ValueError: no such shape",
    "too much memory": "OutOfMemoryError: CUDA out of memory",
}


def test_each_fatal_candidate_is_quarantined_with_its_reason(found):
    quarantined = found["every"]["quarantined"]
    assert faults(quarantined) == set(FATAL)
    for fault, reason in FATAL.items():
        (said,) = [text for config, text in quarantined.items() if f"fault={fault}," in config]
        assert said.startswith(reason), (fault, said)


def test_each_wrong_candidate_fails_its_check_with_its_reason(found):
    failed = found["every"]["failed"]
    assert faults(failed) == set(WRONG)
    for fault, reason in WRONG.items():
        (said,) = [text for config, text in failed.items() if f"fault={fault}," in config]
        assert reason in said, (fault, said)


def test_all_good_candidates_are_timed_and_no_other(found):
    good, every = found["good"]["timed"], found["every"]["timed"]
    assert len(good) == 8
    assert set(every) == set(good)
    assert found["good"]["quarantined"] == found["good"]["failed"] == {}


def test_the_figures_of_the_good_ones_are_those_that_they_have_alone(found):
    good, every = found["good"]["timed"], found["every"]["timed"]
    assert every == pytest.approx(good, rel=0.05, abs=1.0)


def test_a_problem_whose_inputs_do_not_fit_is_left_out_and_the_others_are_measured(found):
    (reason,) = found["every"]["skipped"]
    assert reason.startswith("inputs: OutOfMemoryError: CUDA out of memory")


def test_a_loss_costs_its_time_limit_and_three_seconds_at_most(found):
    losses = len(FATAL) + len(found["every"]["skipped"])
    spent = found["every"]["seconds"] - found["good"]["seconds"]
    assert spent <= losses * (LIMIT_S + 3), found["every"]["came"]


def test_none_of_them_is_tried_again_in_this_sweep_or_another(found):
    assert found["left"] == []
    assert faults(found["other"]) == {"none", *WRONG}
