"""Compiles kernels of CuTe DSL (nvidia-cutlass-dsl) to cubins for any GPU that it knows, with no GPU at hand.

The DSL compiles inside this process, and hands a cubin over through a file whose name holds neither sizes nor config:
each compile has a folder of its own. A cubin takes its arguments as cuTile's launcher passes them, which is looked at
after each compile, so that it runs on a machine without the DSL.
"""

from __future__ import annotations

import functools
import importlib
import re
import tempfile
from importlib import metadata, util
from typing import Any

from tilekern.cubin import parameter_bytes
from tilekern.errors import CompileFailed, ToolchainMissing
from tilekern.garbage import search_put_off
from tilekern.spec import ArrayParameter, CuteKernel
from tilekern.targets import Target

_PACKAGE = "nvidia-cutlass-dsl"
_ADDRESS_BYTES, _NUMBER_BYTES = 8, 4
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@functools.cache
def compiler() -> str | None:
    """The compiler's name and version, as artifacts name it; None where it is not installed."""
    if util.find_spec("cutlass") is None:
        return None
    try:
        return f"{_PACKAGE} {metadata.version(_PACKAGE)}"
    except metadata.PackageNotFoundError:
        return None


def preload() -> None:
    """Import the DSL where it is installed, which takes more than a second."""
    if compiler() is not None:
        importlib.import_module("cutlass.cute")


@search_put_off()
def compile_kernel(kernel: CuteKernel, target: Target) -> tuple[bytes, str]:
    """The cubin and its entry symbol; it is an aligned variant.

    Args:
        kernel: the kernel of a candidate.
        target: the GPU.

    Raises:
        ToolchainMissing: nvidia-cutlass-dsl is not installed.
        CompileFailed: the DSL rejected the kernel, or made one with other parameters.
    """
    if compiler() is None:
        raise ToolchainMissing(f"{_PACKAGE} is not installed; install it with: pip install 'tilekern[cute]'")
    cute = importlib.import_module("cutlass.cute")
    module, _, name = kernel.kernel.partition(":")
    try:
        program = getattr(importlib.import_module(module), name)(
            kernel.function, kernel.parameters, capability=target.capability, block=kernel.block,
            cluster=kernel.cluster, **dict(kernel.constants),
        )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="tilekern-") as folder:
            made = cute.compile(
                program, program.sample, options=f"--gpu-arch {target.arch} --keep-cubin --dump-dir {folder}"
            )
            cubin = bytes(made.artifacts.CUBIN)
    except Exception as error:  # the DSL raises many kinds; all mean that this candidate cannot be compiled
        raise CompileFailed(f"{type(error).__name__}: {_reason(error)}") from error
    [symbol] = map(str, made.kernel_info)
    if (found := parameter_bytes(cubin, symbol)) != (passed := passed_bytes(kernel)):
        raise CompileFailed(f"{name} has parameters of {found} bytes, where the launcher passes {passed}")
    return cubin, symbol


def passed_bytes(kernel: CuteKernel) -> list[int]:
    """The size of each value that cuTile's launcher passes: of an array its address, its sizes and its strides."""
    ranks = [parameter.ndim if isinstance(parameter, ArrayParameter) else 0 for parameter in kernel.parameters]
    values = ([_ADDRESS_BYTES, *[_NUMBER_BYTES] * 2 * rank] if rank else [_NUMBER_BYTES] for rank in ranks)
    return [value for of_one in values for value in of_one]


def _reason(error: Exception) -> str:
    """The first line of an error that says something."""
    lines: list[Any] = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
