"""Inspect this host's GPU: it must be the sweep's target, and records name it with its driver."""

from __future__ import annotations

import os
from collections.abc import Callable

from tilekern.errors import InputError
from tilekern.runtime.requirements import driver_release, unmet
from tilekern.spec.targets import Target, here


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
    """Return the GPU, its driver and torch, as records keep them with a measurement."""
    import torch

    return {"gpu": torch.cuda.get_device_name(), "driver": driver_release() or "unknown", "torch": torch.__version__}


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
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        # The driver refuses to load code while another mode captures.
        graph.capture_begin(capture_error_mode="relaxed")
        try:
            launch()
        finally:
            graph.capture_end()
