"""GPU time of launches: CUDA events around each, the L2 cache flushed before it, rounds interleaved over candidates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Launch = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Times of one candidate in microseconds; the spread is half the distance between the quartiles."""

    median_us: float
    spread_us: float
    samples: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        """Summarise samples."""
        if len(times_us) < 2:
            return cls(times_us[0], 0.0, len(times_us))
        low, middle, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return cls(middle, (high - low) / 2, len(times_us))

    def as_dict(self) -> dict[str, float | int]:
        """The timing as a record keeps it."""
        return {"median_us": round(self.median_us, 3), "spread_us": round(self.spread_us, 3), "samples": self.samples}


class Stopwatch:
    """Times launches on the current stream of the current device."""

    def __init__(self, flush_bytes: int) -> None:
        import torch

        self._torch = torch
        self._flush = torch.empty(max(flush_bytes, 1 << 26), dtype=torch.int8, device="cuda")

    def warm_clocks(self, seconds: float = 0.4) -> None:
        """Keep the GPU busy until its clocks have risen."""
        torch = self._torch
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        end = torch.cuda.Event(enable_timing=True)
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        while True:
            for _ in range(20):
                a @ a
            end.record()
            end.synchronize()
            if start.elapsed_time(end) > 1000 * seconds:
                return

    def round(self, launches: Sequence[Launch]) -> list[float]:
        """Time each launch once, in microseconds. The flush before it outlasts the host's work for the launch."""
        torch = self._torch
        events: list[tuple[Any, Any]] = []
        for launch in launches:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            start.record()
            launch()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in events]

    def measure(self, launch: Launch, samples: int = 50) -> Timing:
        """Time one launch many times, after warm-up."""
        self.round([launch] * 5)
        return Timing.of(self.round([launch] * samples))
