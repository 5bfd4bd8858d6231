"""Start the ranks that train one model, and share the model among them."""

from __future__ import annotations

import contextlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from benchmarks.models import layers_of

# The title of each way; expert parallelism also shares the tensors of the other layers.
WAYS = {
    "fsdp": "FSDP2", "tp": "tensor parallel", "ep": "tensor and expert parallel", "cp": "context parallel and FSDP2",
}  # fmt: skip


def rank() -> int:
    """Return this process's number among the ranks."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def others(ranks: int, arguments: list[str]) -> Iterator[None]:
    """Start the other ranks if this is the first of several; they end with it, and it ends if any of them fails."""
    environment = os.environ | {"WORLD_SIZE": str(ranks)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training", *arguments], stdin=subprocess.DEVNULL,
            env=environment | {"RANK": str(other), "LOCAL_RANK": str(other)},
        )
        for other in range(1, ranks if rank() == 0 else 1)
    ]  # fmt: skip
    for child in children:
        threading.Thread(target=_end_with, args=(child, children), daemon=True).start()
    try:
        yield
    finally:
        for child in children:
            child.kill()


def _end_with(child: subprocess.Popen[bytes], children: list[subprocess.Popen[bytes]]) -> None:
    # Waiting for a dead rank would last until the benchmark's limit; that rank has reported why it ended.
    if child.wait() > 0:
        for other in children:
            other.kill()
        os._exit(child.returncode)


def join(ranks: int, device: str, meet: str) -> None:
    """Connect to the other ranks through a file; each rank has its own GPU."""
    import torch

    if ranks == 1:
        return
    os.environ |= {"RANK": str(rank()), "LOCAL_RANK": str(rank()), "WORLD_SIZE": str(ranks)}
    if device == "cuda":
        torch.cuda.set_device(rank())
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{meet}", rank=rank(), world_size=ranks)


def shared(model: Any, way: str, ranks: int, device: str) -> Any:
    """Share a model that each rank has made whole: each rank keeps a part, by FSDP2 of layers or the model's plan."""
    import torch

    if way in ("fsdp", "cp"):
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh(device, (ranks,))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    kind, settings = type(model), {"tp_size": ranks} | ({"ep_size": ranks} if way == "ep" else {})
    config, _, meshes = kind.prepare_distribute_model(configured(settings))
    model = kind.maybe_distribute_model(model, config, meshes)
    # A part by rows is a view, which would keep the whole tensor in memory.
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    return model


def mesh_of(model: Any, way: str, ranks: int, device: str, drops_masks: bool) -> Any:
    """Return the ranks that share sequences, or None; torch's own attention then takes no masks, which are dropped."""
    import torch

    if way != "cp":
        return None
    if drops_masks:
        from accelerate.big_modeling import _attach_context_parallel_hooks

        _attach_context_parallel_hooks(model)
    return torch.distributed.init_device_mesh(device, (ranks,))


@contextlib.contextmanager
def inputs_of(ids: Any, mesh: Any) -> Iterator[dict[str, Any]]:
    """Yield a step's inputs; with a mesh this rank's part of each sequence, for the forward and the backward inside.

    The mean of the ranks' losses is the loss of whole sequences.
    """
    if mesh is None:
        yield {"input_ids": ids, "labels": ids}
        return
    import torch
    from torch.distributed.tensor.experimental import context_parallel

    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
    given = {"input_ids": ids.clone(), "labels": labels, "shift_labels": labels.clone(), "position_ids": places}
    counted = ids.shape[0] * (ids.shape[1] - 1) / mesh.size()
    buffers = list(given.values())
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
        yield given | {"num_items_in_batch": counted}


def configured(settings: dict[str, int]) -> Any:
    """Return transformers' configuration for sharing a model; None if this release does not support the way."""
    from transformers.distributed import DistributedConfig

    if "ep_size" in settings and "ep_size" not in inspect.signature(DistributedConfig).parameters:
        # Up to 5.20, the ranks of tensor parallelism share the experts, and then no other parts.
        if "fsdp_size" in settings:
            return None
        return DistributedConfig(tp_size=settings["tp_size"], enable_expert_parallel=True)
    return DistributedConfig(**settings)


def averaged(loss: Any) -> Any:
    """Return the mean of the ranks' losses: under FSDP2 each rank has the loss of its own sequences."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        loss = loss.clone()
        torch.distributed.all_reduce(loss)
        loss /= torch.distributed.get_world_size()
    return loss
