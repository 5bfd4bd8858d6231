"""A recording without a GPU that sees what a CUDA graph sees: operations on tensors, and no Python around them."""

import contextlib
import random

import numpy as np
import rerunning
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tilekern.patch import captured

ATEN = torch.ops.aten
# Operations whose result, or its shape, the host reads.
WAITING = {
    ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN._unique2, ATEN.unique_dim, ATEN.unique_consecutive,
    ATEN.unique_dim_consecutive, ATEN.equal, ATEN.bincount,
}  # fmt: skip


def _alias(x):
    """Return the same memory with the shape of now: code may change that of a tensor in place."""
    return x.detach() if isinstance(x, torch.Tensor) else x


class Notes(TorchDispatchMode):
    """Notes each operation with its very arguments and results, and so keeps them alive, as a graph's memory is."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        noted = pytree.tree_map(_alias, (args, kwargs))
        result = func(*args, **kwargs)
        self.operations.append((func, *noted, pytree.tree_map(_alias, pytree.tree_leaves(result))))
        return result


class Waiting(TorchDispatchMode):
    """Raises, as torch.cuda.set_sync_debug_mode does, where the host reads a value."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        indices = [x for x in args[1] if x is not None] if packet in (ATEN.index, ATEN.index_put_) else []
        is_mask = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        repeats = packet is ATEN.repeat_interleave and not (kwargs or {}).get("output_size")
        if packet in WAITING or (packet is ATEN.index and is_mask) or repeats:
            raise RuntimeError(f"called a synchronizing CUDA operation: {packet}")
        return func(*args, **(kwargs or {}))


class Tape:
    """A recording of the operations of one run."""

    def record(self, run):
        before = torch.get_rng_state()
        with Notes() as notes:
            results = run()
        torch.set_rng_state(before)  # a capture draws nothing
        self._operations = notes.operations
        return results

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, results in self._operations:
                new = pytree.tree_leaves(func(*args, **kwargs))
                for mine, x in zip(results, new, strict=True):
                    if isinstance(x, torch.Tensor) and x.data_ptr() != mine.data_ptr():
                        mine.copy_(x)


@contextlib.contextmanager
def _waiting_refused(_):
    with Waiting():
        yield


def use(monkeypatch):
    """Let graphs of models on the CPU be such recordings."""
    rerunning.use(monkeypatch, Tape)
    monkeypatch.setattr(captured, "_waiting_refused", _waiting_refused)


def seeded():
    """Let the random numbers of torch, Python and numpy begin anew."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
