"""Inspect this host's GPU: it must be the sweep's target, and records name it with its driver and libraries."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
from collections.abc import Callable
from typing import Any

from tilekern.errors import InputError
from tilekern.runtime.requirements import driver_release, unmet
from tilekern.spec.targets import Target, here

# The fields of a ``gpu`` line that name libraries.
LIBRARIES = ("torch", "cudnn", "cublas")


def check_gpu(target: Target) -> None:
    """Make sure that the GPU here is the sweep's target, the only one for which ``measured`` is written.

    Raises:
        InputError: there is no GPU, or another one, or its driver cannot launch kernels.
    """
    at_hand = here()
    if at_hand is None:
        raise InputError("the measure stage needs a GPU and this machine has none; run it with --stages plan,compile")
    if at_hand.key != target.key:
        raise InputError(f"the sweep is for {target.key}, and the GPU here is {at_hand.key}; measure on the target")
    if wrong := unmet():
        raise InputError(wrong)


def describe_gpu() -> dict[str, str]:
    """Return the GPU, its driver, torch and the libraries that candidates call, as records keep them.

    A measurement of a candidate that a library runs, which has no artifact, counts only for the same versions.
    """
    import torch

    found = {"gpu": torch.cuda.get_device_name(), "driver": driver_release() or "unknown", "torch": torch.__version__}
    return found | versions()


def versions() -> dict[str, str]:
    """Return the versions of cuDNN and cuBLAS: those of the wheels that torch was installed with, or that it loaded."""
    import torch

    found = {}
    for requirement in importlib.metadata.requires("torch") or ():
        if named := re.match(r"nvidia-(cudnn|cublas)\b[\w-]*", requirement):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[named[1]] = importlib.metadata.version(named[0])
    if loaded := torch.backends.cudnn.version():
        found["cudnn"] = str(loaded)
    return found


def serve_any_size() -> None:
    """Let torch reuse freed GPU memory for other sizes; call this before torch first allocates there."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def devices() -> list[str]:
    """Return this host's GPUs of the first one's model, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    given = visible if visible != [""] else [str(index) for index in range(len(names))]
    return [given[index].strip() for index, name in enumerate(names) if name == names[0]]


def load_code(launch: Callable[[], object]) -> None:
    """Load the code of a launch without running it, by capturing the launch into a graph that is dropped.

    Loading code may wait until the GPU is idle, so it cannot overlap with other work.
    """
    _graph_of(launch, 1)


def captured(launch: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that replays ``times`` launches as a graph, for kernels that end before the host queues others.

    A launch before the capture lets a library take the memory that it keeps for a stream.
    """
    import torch

    stream = _capturing()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    replay: Callable[[], None] = _graph_of(launch, times).replay
    return replay


def _graph_of(launch: Callable[[], object], times: int) -> Any:
    """Return a graph of launches, none of which runs now."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_capturing()):
        # The driver refuses to load code while another mode captures.
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            for _ in range(times):
                launch()
        finally:
            graph.capture_end()
    return graph


@functools.cache
def _capturing() -> Any:
    """Return the stream of all captures: cuBLAS keeps 32 MB for each that it has met."""
    import torch

    return torch.cuda.Stream()
