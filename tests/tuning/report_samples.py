"""Sweeps for the tests of the report: compiled for real, with journal lines that look like a GPU's."""

import shutil
from pathlib import Path

from tuning_samples import SMALL

from tilekern.tuning.sweep.candidates import Candidate
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.sweep.lines import copy_key

# What it compiles to is what SMALL does: the number of rows is no part of it.
LARGE = (SMALL[0], SMALL[1].but(rows=65536))
GPU = {"gpu": "NVIDIA H200", "driver": "580.159.03", "torch": "2.11.0"}
RIGHT = {"passed": True, "relative_error": 1e-7, "elementwise_error": 2e-7}
WRONG = {"passed": False, "relative_error": float("inf"), "elementwise_error": 0.9, "reason": "y: not a number"}
CRASH = "the process died (exit code -11)"
FAILURE = "tileiras: </script><b>out of registers</b>"
COPY_US = 4.0


def timing(median_us: float, samples: int = 85) -> dict:
    return {"median_us": median_us, "spread_us": 0.1, "samples": samples}


def planned(compiled_sweep: Sweep, folder: Path) -> Sweep:
    """A copy of the compiled sweep with two problems, of which nothing is measured."""
    sweep = Sweep(Path(shutil.copytree(compiled_sweep.folder, folder)))
    sweep.begin(sweep.target, "Test-1B <b>", [SMALL, LARGE])
    return sweep


def measured(compiled_sweep: Sweep, folder: Path) -> Sweep:
    """The same with a candidate of every status but ``planned`` in its first problem.

    By number: 0, the default, and 1, the winner, ran to the end of the race; 2 is wrong, 3 crashed, 4 does not
    compile, 5 is not run, 6 is right and not timed, 7 has the code of 1; the others left the race early.
    """
    sweep = planned(compiled_sweep, folder)
    sweep.note("gpu", GPU)
    compiled, items = sweep.compiled(), sweep.candidates(*SMALL)
    sweep.note("compiled", {**compiled[items[4].artifact], "status": "failed", "reason": FAILURE})
    sweep.note("compiled", compiled[items[7].artifact] | {"code_sha256": compiled[items[1].artifact]["code_sha256"]})
    _note(sweep, items[0], timing(10.0))
    _note(sweep, items[1], timing(5.0))
    sweep.note("measured", {"candidate": items[2].key, "check": WRONG})
    sweep.note("quarantine", {"candidate": items[3].key, "reason": CRASH})
    _note(sweep, items[6])
    for number in range(8, 16):
        _note(sweep, items[number], timing(6.0 + (number * 5) % 8, samples=5))
    _note(sweep, items[16])
    for number, item in enumerate(sweep.candidates(*LARGE)[:-1]):
        if number not in (4, 7):
            _note(sweep, item, timing(40.0 + (number * 7) % 16))
    for named in (SMALL, LARGE):
        sweep.note("measured", {"candidate": copy_key(*named), "timing": timing(COPY_US)})
    return sweep


def _note(sweep: Sweep, item: Candidate, time: dict | None = None) -> None:
    line = {"candidate": item.key, "check": RIGHT}
    sweep.note("measured", line if time is None else line | {"timing": time})
