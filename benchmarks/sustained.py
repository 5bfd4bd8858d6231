"""Measure rates that the GPU holds for seconds, with the power drawn: these bound a training step.

A short measurement after idle time finds the clock at its highest. Under matrix products back to back the GPU reaches
its power limit and lowers the clock, so the floor of a training step is set by these rates.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.environment import facts
from benchmarks.power import Draw, PowerMeter
from benchmarks.results import Results, Row

# (rows, inner, columns) of products in Qwen3-8B's layers at 8192 tokens.
PRODUCTS = ((8192, 4096, 12288), (8192, 12288, 4096), (8192, 4096, 4096))
COPY_BYTES = 2 << 30
OPTIMIZER_ELEMENTS, OPTIMIZER_TENSORS = 12288 * 4096, 20
# Parameter, gradient and both moments are read; all except the gradient are written.
OPTIMIZER_STREAMS = 7
ITEM_BYTES = 2
SETTLE_S, TIMED_S, PAUSE_S = 1.0, 1.5, 0.5
Work = tuple[str, str, Callable[[], Any], float, str]


def measure() -> Results:
    """Measure matrix products of random numbers and of zeros, a copy, and both AdamW, each alone and back to back."""
    import torch

    results = Results(facts())
    for case, provider, run, amount, unit in _works():
        rate, draw = sustained(run, amount)
        results.rows.append(Row("sustained", case, provider, "rate", round(rate / 1e12, 3), unit))
        if draw:
            figures = (("power_w", draw.watts, "W"), ("power_limit_w", draw.limit_watts, "W"))
            for metric, value, of in (*figures, ("sm_clock_mhz", draw.sm_mhz, "MHz")):
                results.rows.append(Row("sustained", case, provider, metric, round(value, 1), of))
        torch.cuda.empty_cache()
        time.sleep(PAUSE_S)
    return results


def sustained(run: Callable[[], Any], amount: float) -> tuple[float, Draw | None]:
    """Return the rate of a repeated call in ``amount`` a second, and the power drawn."""
    with PowerMeter() as meter:
        _repeat(run, SETTLE_S)
        started = time.perf_counter()
        count = _repeat(run, TIMED_S)
        ended = time.perf_counter()
        return amount * count / (ended - started), meter.between(started, ended)


def _repeat(run: Callable[[], Any], seconds: float) -> int:
    import torch

    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        count += 10
    return count


def _works() -> Iterator[Work]:
    import torch

    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    for rows, inner, columns in PRODUCTS:
        x, weight = torch.randn(rows, inner, **options), torch.randn(columns, inner, **options)
        out, flops = torch.empty(rows, columns, **options), 2.0 * rows * inner * columns
        case = f"matmul {rows}x{inner}x{columns}"
        yield case, "torch", functools.partial(torch.mm, x, weight.t(), out=out), flops, "TFLOP/s"
    x.zero_()
    yield f"{case} of zeros", "torch", lambda: torch.mm(x, weight.t(), out=out), flops, "TFLOP/s"
    source = torch.randint(0, 255, (COPY_BYTES,), device="cuda", dtype=torch.uint8)
    sink = torch.empty_like(source)
    yield "copy 2 GiB", "torch", lambda: sink.copy_(source), 2.0 * COPY_BYTES, "TB/s"
    yield from _optimizers(options)


def _optimizers(options: dict[str, Any]) -> Iterator[Work]:
    import torch

    import tilekern

    moved = float(OPTIMIZER_STREAMS * ITEM_BYTES * OPTIMIZER_TENSORS * OPTIMIZER_ELEMENTS)
    parameters = [torch.randn(OPTIMIZER_ELEMENTS // 4096, 4096, **options) for _ in range(OPTIMIZER_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    case = f"AdamW {OPTIMIZER_TENSORS} x {OPTIMIZER_ELEMENTS}"
    yield case, "torch fused", torch.optim.AdamW(parameters, lr=1e-5, fused=True).step, moved, "TB/s"
    yield case, "tilekern", tilekern.AdamW(parameters, lr=1e-5).step, moved, "TB/s"
