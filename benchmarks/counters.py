"""Read the GPU's counters for the kernels with the hardest targets, by Nsight Compute (``ncu``).

Kernels run one at a time and several times over, each time with cold caches, at the clocks that the GPU chooses: their
shares of peak rates show what bounds them, and their times differ from the other benchmarks'.
"""

from __future__ import annotations

import csv
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.cases import Case
from benchmarks.environment import facts, require_gpu
from benchmarks.kernels import clone, entrant
from benchmarks.providers import OURS, load
from benchmarks.results import Results, Row
from benchmarks.suite_cases import suite_case
from benchmarks.suites import fixed_cases
from tilekern.errors import InputError, TilekernError

# Cases by label, and the passes to count.
CASES = (
    ("rms_norm 8192x4096", "backward"),
    ("qk_norm_rope 1x8192 32+8x128", "backward"),
    ("attention 4x4096 32+32x128 causal", "forward"),
    ("attention 4x4096 32+32x128 causal", "backward"),
    ("linear 8192x4096x14336", "forward"),
    ("fused_linear_cross_entropy 8192x4096x128256", "forward_backward"),
    ("sparsemax 8192x4096", "forward"),
    ("dyt 8192x4096", "backward"),
    ("group_norm 64x1024x512", "forward"),
    ("group_norm 64x1024x512", "backward"),
    ("poly_norm 8192x4096", "backward"),
    ("layer_norm 8192x4096", "backward"),
    ("kl_div 8192x128256", "forward"),
    ("softmax 8192x4096", "backward"),
)
# Ops of the Liger suite, in the sizes of a Llama-3-8B sweep at these token counts.
_SWEPT, _TOKENS = ("sparsemax", "dyt", "group_norm", "poly_norm", "kl_div"), 8192
SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "ComputeWorkloadAnalysis")
# A fused loss launches the same kernels for each of its chunks.
MOST_LAUNCHES = 24
LIMIT_S = 120
_PERCENT = "%"
# The report's figures by their names in ncu.
_FIGURES: Mapping[str, tuple[str, str]] = {
    "gpu__time_duration.sum": ("time", "us"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("memory, of peak", _PERCENT),
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": ("L2 cache, of peak", _PERCENT),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("multiprocessors, of peak", _PERCENT),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("warps resident", _PERCENT),
    "launch__registers_per_thread": ("registers a thread", "1"),
    "launch__waves_per_multiprocessor": ("waves", "1"),
}
_TENSOR = re.compile(r"^sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_active$")
_MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
# A cubin's symbol is the kernel's name, then a description of its arguments.
_SYMBOL = re.compile(r"^(\w+?)_Kt\d")


def counted_cases() -> list[Case]:
    """Return the cases from which the counted ones are chosen."""
    return [*fixed_cases(), *(suite_case(op, tokens=_TOKENS) for op in _SWEPT)]


def measure() -> Results:
    """Read the counters of each case's kernels with ncu, one process for each case.

    Raises:
        InputError: there is no GPU, or no ncu.
        TilekernError: ncu failed on all of them.
    """
    require_gpu()
    ncu = shutil.which("ncu")
    if ncu is None:
        raise InputError("ncu is not on PATH; it comes with NVIDIA Nsight Compute")
    results = Results(facts())
    for label, metric in CASES:
        try:
            results.rows.extend(rows_of(f"{label} {metric}", _launches(ncu, label, metric)))
        except TilekernError as error:
            results.run["notes"].append(f"{label} {metric} left out: {error}")
    if not results.rows:
        raise TilekernError("; ".join(results.run["notes"]))
    return results


def _launches(ncu: str, label: str, metric: str) -> list[dict[str, str]]:
    """Return ncu's figures of each launch, keyed by ncu's names; ``unit of NAME`` has the unit of ``NAME``."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        sections = [argument for section in SECTIONS for argument in ("--section", section)]
        command = [ncu, "--csv", "--page", "raw", "--log-file", str(log), "--clock-control", "none", *sections]
        command += ["--profile-from-start", "off", "--launch-count", str(MOST_LAUNCHES)]
        command += [sys.executable, "-m", "benchmarks.counters", label, metric]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise TilekernError(f"ncu took more than {LIMIT_S} s") from None
        said = log.read_text(encoding="utf-8") if log.exists() else ""
    if ran.returncode:
        last = [line for line in f"{said}\n{ran.stdout}\n{ran.stderr}".splitlines() if line.strip()]
        raise TilekernError(f"ncu failed: {last[-1][:300] if last else 'it said nothing'}")
    return read_table(said.splitlines())


def read_table(lines: Iterable[str]) -> list[dict[str, str]]:
    """Parse the launches of ncu's raw page in CSV; its second row has the units."""
    header, *rows = csv.reader(line for line in lines if line.startswith('"'))
    if not rows:
        return []
    units = {f"unit of {name}": unit for name, unit in zip(header, rows[0], strict=True)}
    return [dict(zip(header, row, strict=True)) | units for row in rows[1:]]


def rows_of(case: str, launches: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    """Return the figures of each kernel: means over its launches, and the number of launches."""
    kernels: dict[str, list[Mapping[str, str]]] = {}
    for launch in launches:
        kernels.setdefault(short_name(launch["Kernel Name"]), []).append(launch)
    for kernel, found in kernels.items():
        figures: dict[tuple[str, str], list[float]] = {}
        for launch in found:
            for figure, value in _figures(launch):
                figures.setdefault(figure, []).append(value)
        yield Row("counters", f"{case}: {kernel}", OURS, "launches", len(found), "1")
        for (name, unit), values in figures.items():
            yield Row("counters", f"{case}: {kernel}", OURS, name, round(statistics.fmean(values), 4), unit)


def _figures(launch: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], float]]:
    for name, (metric, unit) in _FIGURES.items():
        if launch.get(name):
            factor = _MICROSECONDS[launch[f"unit of {name}"]] if unit == "us" else 1.0
            yield (metric, unit), factor * _number(launch[name])
    tensor = [_number(value) for name, value in launch.items() if _TENSOR.match(name) and value]
    if tensor:
        yield ("tensor cores, of peak", _PERCENT), max(tensor)


def short_name(symbol: str) -> str:
    """Return a kernel's name without the description of arguments in a cubin's symbol."""
    found = _SYMBOL.match(symbol)
    return found[1] if found else symbol.partition("(")[0][:48]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def main(label: str, metric: str) -> None:
    """Run one pass of a case under ncu; nothing before it is profiled."""
    import torch

    case = next(case for case in counted_cases() if case.label == label)
    (provider,) = load([OURS], [])
    tensors = clone(case.tensors("cuda"))
    measured = entrant(case, tensors, provider, metric)
    for profiled in (False, True):
        measured.prepare()
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.start()
        measured.run()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
