"""Split the GPU time of a training step into parts, and compute its floor: its matmuls alone, one by one."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

IDLE = "idle"
TOTAL = "total"
OTHER = "elementwise, copies and other"
# The first pattern in a kernel's name gives its category: kernels of cuTile and Triton are named by their functions.
CATEGORIES = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (
            "attention backward",
            r"attention_(backward|delta|sums|dkdv|dq)|flash_bwd|bprop|dot_do_o|convert_dq|sdpa.*(bwd|backward)|fmha.*bwd",
        ),
        ("attention forward", r"attention_forward|flash_fwd|fprop|sdpa|fmha"),
        ("loss", r"cross_entropy|nll_loss|soft_?max|lse_"),
        ("optimizer", r"multi_tensor|adam"),
        ("norm, rope, swiglu", r"rms_?norm|qk_norm|rope|rotary|swiglu|silu|column_sum|_ct_.*norm"),
        ("matmul", r"gemm|nvjet|cutlass|cublas|matmul|splitk|xmma"),
    )
)
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
SAMPLES = 12


def category(kernel: str) -> str:
    """Return the category of a kernel by its name."""
    return next((name for name, pattern in CATEGORIES if pattern.search(kernel)), OTHER)


def parts_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return milliseconds of each category in a trace's events, of the idle gaps, and of the whole.

    Where two kernels overlap, the later one counts from the earlier one's end, so that the parts add up to the whole.
    """
    work = sorted((e for e in events if e.get("cat") in _ON_GPU), key=lambda event: event["ts"])
    if not work:
        return {}
    parts: dict[str, float] = {}
    until = work[0]["ts"]
    for event in work:
        start, end = event["ts"], event["ts"] + event["dur"]
        _add(parts, IDLE, start - until)
        name = category(event["name"]) if event["cat"] == "kernel" else OTHER
        _add(parts, name, end - max(start, until))
        until = max(until, end)
    return {**parts, TOTAL: (until - work[0]["ts"]) / 1000}


def _add(parts: dict[str, float], name: str, duration_us: float) -> None:
    if duration_us > 0:
        parts[name] = parts.get(name, 0.0) + duration_us / 1000


def profile(step: Callable[[], Any]) -> dict[str, float]:
    """Return milliseconds of each category of one step on the GPU."""
    return parts_of(events_of(step))


def events_of(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return the events of a trace of the GPU's work, whichever library queues it."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.export_chrome_trace(str(path))
        return list(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def products(config: Any, layers: int) -> dict[tuple[int, int], int]:
    """Count the linear layers of each (in_features, out_features), the head included."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    each = [
        (hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden),
        (hidden, intermediate), (hidden, intermediate), (intermediate, hidden),
    ]  # fmt: skip
    counts = {(hidden, config.vocab_size): 1}
    for sizes in each:
        counts[sizes] = counts.get(sizes, 0) + layers
    return counts


def matmul_floor_ms(config: Any, layers: int, tokens: int, device: str) -> float:
    """Return milliseconds of all matmuls of a step if each were as fast as alone: forward and both gradients."""
    from tilekern.tuning.measure.timing import Stopwatch

    watch = Stopwatch(0)
    watch.warm_clocks()
    total_us = 0.0
    for (columns, rows), count in products(config, layers).items():
        for run in _three_products(tokens, columns, rows, device):
            total_us += count * watch.measure(run, SAMPLES).median_us
    return total_us / 1000


def _three_products(tokens: int, columns: int, rows: int, device: str) -> Iterable[Callable[[], Any]]:
    """Yield y = x w^T, dx = dy w and dw = dy^T x; only one output lives at a time."""
    import torch

    def random(*sizes: int) -> Any:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16)

    x, w, dy = random(tokens, columns), random(rows, columns), random(tokens, rows)
    for left, right in ((x, w.T), (dy, w), (dy.T, x)):
        out = torch.empty(left.shape[0], right.shape[1], device=device, dtype=torch.bfloat16)
        yield functools.partial(torch.mm, left, right, out=out)
