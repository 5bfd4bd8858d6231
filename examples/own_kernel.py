"""A kernel of one's own: written, checked on the CPU, tuned for a GPU that need not be there, and packed in a file.

    python examples/own_kernel.py                          sweeps for an H200: predicted without a GPU, measured on one
    python examples/own_kernel.py --gpu B200 --rows 8192

Needs `pip install 'tilekern[torch,tools,compile]'`. docs/your-kernels.md explains each step. A job that imports
`quick_gelu` from this file launches what the cache or the pack holds.
"""

import argparse
import os
import subprocess
import sys

import cuda.tile as ct

from tilekern.kernels.families.arrays import matrices
from tilekern.kernels.families.elements import each_tile, spec
from tilekern.kernels.tiles import ConstBool, ConstInt
from tilekern.runtime import dispatch


@ct.kernel
def example_quick_gelu(
    x, y, columns: ConstInt, tile_m: ConstInt, tile_n: ConstInt, persistent: ConstBool, bounded: ConstBool
):
    each_tile(lambda x: (x / (1.0 + ct.exp(-1.702 * x)),), (x,), (y,), columns, tile_m, tile_n, persistent, bounded)


def reference(x):
    return {"y": x.double() * (1.702 * x.double()).sigmoid()}


QUICK_GELU = spec(example_quick_gelu, "y = x sigmoid(1.702 x)", matrices(("x",), ("y",)), reference, flops=4)
SPECS = (QUICK_GELU,)  # the tuner and the cache tools find them by this name


def quick_gelu(x):
    """Return x sigmoid(1.702 x), CLIP's activation, of a contiguous matrix [rows, columns]."""
    import torch  # not at the top: each worker of the compiler imports this module

    plan = dispatch.plan_for(QUICK_GELU, x.device, *x.shape, x.dtype)
    if plan is None:  # no record, and none may be compiled
        dispatch.count_fallback(QUICK_GELU)
        return x * (1.702 * x).sigmoid()
    plan.launch(x.get_device(), x, y := torch.empty_like(x))
    return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200", help="the GPU to tune for, by its name")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=3072)
    parser.add_argument("--pack", default="own_kernel.pack", help="the file for the records and the compiled kernels")
    args = parser.parse_args()
    import torch

    os.environ["TILEKERN_INTERPRET"] = "1"  # runs on the CPU; an access outside of an array is an error
    x = torch.randn(50, 300)
    torch.testing.assert_close(quick_gelu(x), reference(x)["y"].float())
    del os.environ["TILEKERN_INTERPRET"]
    print(f"the interpreter agrees with the reference: {dispatch.stats()[QUICK_GELU.name]['launches']} launch")

    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])
    problem = f"{QUICK_GELU.name} rows={args.rows},columns={args.columns},dtype=bfloat16"
    for command in (
        ["tilekern.tune", "--specs", "own_kernel", "--gpu", args.gpu, "--problem", problem],
        ["tilekern.cache_tools", "pack", args.pack, "--kernel", QUICK_GELU.name],
        ["tilekern.cache_tools", "verify", args.pack],
    ):
        print("\n$ python -m", *command, flush=True)
        if code := subprocess.run([sys.executable, "-m", *command], check=False).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
