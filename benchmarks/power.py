"""Read the GPU's power and clock by nvidia-smi while something runs."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

EVERY_MS = 50
_QUERY = "power.draw.instant,clocks.sm,enforced.power.limit"


@dataclass(frozen=True)
class Draw:
    """Medians over a stretch of time: watts drawn, the limit in watts, the clock of the SMs in MHz."""

    watts: float
    limit_watts: float
    sm_mhz: float
    samples: int


class PowerMeter:
    """Reads power and clock of one GPU from the start of the block to its end; nothing without a GPU.

    Args:
        device: the index among the GPUs that this process sees.
    """

    def __init__(self, device: int = 0) -> None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        self._name = visible[device] if visible else str(device)
        self._readings: list[tuple[float, list[float]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PowerMeter:
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--id={self._name}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [*command, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._thread is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()

    def _read(self, process: subprocess.Popen[str]) -> None:
        lines: Any = process.stdout
        for line in lines:
            reading = parsed(line)
            if reading:
                self._readings.append((time.perf_counter(), reading))

    def between(self, start_s: float, end_s: float) -> Draw | None:
        """Return the medians of the readings between two values of ``time.perf_counter``; None if there are none."""
        found = [values for at, values in self._readings if start_s <= at <= end_s]
        if not found:
            return None
        watts, clock, limit = (statistics.median(column) for column in zip(*found, strict=True))
        return Draw(watts, limit, clock, len(found))


def parsed(line: str) -> list[float] | None:
    """Parse a line of nvidia-smi into watts, MHz and the limit in watts; None if a figure is missing."""
    try:
        values = [float(part) for part in line.split(",")]
    except ValueError:
        return None
    return values if len(values) == len(_QUERY.split(",")) else None
