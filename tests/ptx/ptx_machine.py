"""Runs PTX on the CPU, as test support: the subset that CuTe DSL emits for the kernels of this library.

:func:`run` simulates one cluster of blocks at a time, all of its threads at once: a register is an array with its bits
in each thread. Threads that a branch has taken apart each have a program counter, and those with the lowest one run:
so they meet again where the branches do.

It raises :class:`~ptx_parser.PtxError` for whatever a GPU does not allow or leaves undefined, with the instruction:

- a global access outside of the elements of a tensor that was given, or not aligned to its own size;
- a read of a register or of shared memory that nobody has written;
- two accesses of shared memory with no barrier between (:class:`~ptx_memory.SharedMemory`);
- a bulk copy into shared memory that may still be read, or whose bytes are read before its mbarrier says that they
  have come (:mod:`ptx_barriers`);
- a global element that two blocks store, or that one stores and another loads later;
- a barrier at which not all threads arrive, and a shuffle that names threads which do not run it;
- an instruction that it does not know.

Approximate functions give the exact result, rounded; a fused product and sum is rounded by way of float64. Where PTX
leaves it to the assembler whether a product and a sum are fused (``mul.f32``, then ``add.f32``), they are not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from ptx_cluster import Cluster
from ptx_decoder import decoded
from ptx_memory import GlobalMemory
from ptx_operations import TYPES, literal
from ptx_parser import Program, PtxError

__all__ = ["PtxError", "run"]


def run(
    ptx: str, grid: int, arguments: Sequence[torch.Tensor | float], *, cluster: int = 1, shared_bytes: int = 0,
    seed: int = 0,
) -> None:  # fmt: skip
    """Run a kernel; it writes into the tensors.

    Args:
        ptx: the text of a module with one kernel.
        grid: the number of blocks, whole clusters.
        arguments: tensors on the CPU and numbers, in the order of the kernel. A tensor is its address, its sizes and
            its strides in elements, as :mod:`tilekern.kernels.cute.arguments` has it.
        cluster: blocks of a cluster.
        shared_bytes: dynamic shared memory of a block.
        seed: of the order of blocks, and of that in which bulk copies finish; results must not depend on it.

    Raises:
        PtxError: the kernel did what a GPU does not allow, or what the interpreter does not know.
    """
    if grid % cluster:
        raise PtxError(f"{grid} blocks are not whole clusters of {cluster}")
    program, steps = decoded(ptx)
    parameters = _parameters(program, arguments)
    memory = GlobalMemory([argument for argument in arguments if isinstance(argument, torch.Tensor)])
    clusters = list(range(grid // cluster))
    random = Random(seed)
    random.shuffle(clusters)
    with np.errstate(all="ignore"):
        for first in clusters:
            Cluster(program, steps, parameters, memory, grid, cluster, first * cluster, shared_bytes, random).run()


def _parameters(program: Program, arguments: Sequence[Any]) -> dict[str, Any]:
    """The bits of each parameter, as an array of one element."""
    values: list[Any] = []
    for argument in arguments:
        is_tensor = isinstance(argument, torch.Tensor)
        values += [argument.data_ptr(), *argument.shape, *argument.stride()] if is_tensor else [argument]
    if len(values) != len(program.parameters):
        raise PtxError(f"the kernel has {len(program.parameters)} parameters, the arguments are {len(values)} values")
    bits: dict[str, Any] = {}
    for (name, kind), value in zip(program.parameters.items(), values, strict=True):
        if isinstance(value, float) != (kind == "f32"):
            raise PtxError(f"parameter {len(bits)} is of type {kind}, its argument is {value!r}")
        number = int.from_bytes(struct.pack("<f", value), "little") if isinstance(value, float) else int(value)
        bits[name] = literal(str(number), TYPES[kind].bits)
    return bits
