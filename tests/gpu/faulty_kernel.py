"""Doubling, ``y = 2 x``, in configs of which most do to the GPU, or to their process, what no kernel should.

The test of isolation puts this file among the kernels of a copy of the package.
"""

# ruff: noqa: ARG005 (the forms of a spec's callables are fixed)

import os
import signal

import cuda.tile as ct

from tilekern.kernels.tiles import ConstBool, ConstInt, grid_of, hints, is_bounded, load
from tilekern.spec import ArrayParameter, Config, Dimension, Implementation, KernelSpec, LibraryCall, Space, cdiv

# More rows than checks of odd sizes have.
LATE_ROWS = 2048
# Good ones first; then those that the GPU runs, and those that a library's call makes happen.
GOOD = ("none",)
ON_GPU = ("wrong", "illegal", "late illegal", "spin")
IN_CALL = ("raise", "too much memory", "all memory", "assert", "late sleep", "segfault")
NUMBERS = {fault: number for number, fault in enumerate((*GOOD, *ON_GPU))}
# What a call keeps outlives its error.
_KEPT = []


@ct.kernel
def double(x, y, columns: ConstInt, tile_n: ConstInt, bounded: ConstBool, fault: ConstInt):
    """Blocks that loop over tiles of one row in steps of the grid."""
    if fault == 2:
        write_far_away(y)
    if fault == 3 and x.shape[0] > LATE_ROWS:
        write_far_away(y)
    if fault == 4:
        # What is there is no number, or a result of an earlier run, and does not change.
        while ct.atomic_add(y, (0, 0), 0.0) != 12345.0:
            pass
    across = ct.cdiv(columns, tile_n)
    for item in range(ct.bid(0), x.shape[0] * across, ct.num_blocks(0)):
        index = (item // across, item % across)
        tile = load(x, index, (1, tile_n), bounded, 0, False)
        ct.store(y, index, tile * (3.0 if fault == 1 else 2.0), check_bounds=bounded, allow_tma=False)


def write_far_away(y):
    """Writes to 128 places that lie 3 to 8 GB behind an array of rows of 16 KiB."""
    rows = 200_000 + 2048 * ct.arange(128, dtype=ct.int32)
    ct.scatter(y, (rows, 0), 1.0, check_bounds=False)


def _call(fault):
    import torch

    def call(x):
        late = x.shape[0] > LATE_ROWS
        if fault == "raise":
            raise ValueError("no such shape")
        if fault == "too much memory":
            torch.empty(10 << 40, dtype=torch.uint8, device=x.device)
        while fault == "all memory":
            _KEPT.append(torch.empty(1 << 30, dtype=torch.uint8, device=x.device))
        if fault == "assert":
            x[torch.full((1,), 1 << 40, device=x.device)]
        if fault == "late sleep" and late:
            torch.cuda._sleep(1 << 60)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        return (2 * x,)

    return call


def _implement(problem, config):
    fault = config["fault"]
    if fault in IN_CALL:
        return LibraryCall(_call(fault), ("x",))
    columns, tile_n = problem["columns"], config["tile_n"]
    return Implementation(
        function=double,
        parameters=(
            ArrayParameter("x", problem["dtype"], 2, columns),
            ArrayParameter("y", problem["dtype"], 2, columns, "output"),
        ),
        constants=(
            ("columns", columns),
            ("tile_n", tile_n),
            ("bounded", is_bounded(1, columns, tile_n)),
            ("fault", NUMBERS[fault]),
        ),
        grid=lambda sizes, sm_count: grid_of(sizes["rows"] * cdiv(columns, tile_n), config, sm_count),
        hints=hints(config),
    )


def config(fault, tile_n=1024, occupancy=4):
    return Config(schedule="persistent", fault=fault, tile_n=tile_n, occupancy=occupancy, num_worker_warps=0, tma=False)


def _inputs(problem, generator, device):
    import torch

    shape, dtype = (problem["rows"], problem["columns"]), getattr(torch, problem["dtype"])
    return {"x": torch.randn(shape, generator=generator, device=device, dtype=dtype)}


SPEC = KernelSpec(
    name="faulty",
    summary="y = 2 x, in most configs with a fault",
    module=__name__,
    dimensions=(Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype")),
    space=Space(lambda problem: {name: [value] for name, value in config("none").items()}),
    implement=_implement,
    default=lambda problem, target: config("none"),
    generic=lambda problem: config("none", 256),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"y": ((problem["rows"], problem["columns"]), problem["dtype"])},
    reference=lambda x: {"y": 2 * x.double()},
    bytes_moved=lambda problem: 2 * problem["rows"] * problem["columns"] * 4,
    flops=lambda problem: problem["rows"] * problem["columns"],
    result_dtype=lambda problem: problem["dtype"],
)

SPECS = (SPEC,)
