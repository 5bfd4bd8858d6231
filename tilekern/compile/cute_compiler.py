"""The backend of CuTe DSL (nvidia-cutlass-dsl): kernels to cubins for any GPU that it knows, with no GPU at hand.

The DSL compiles inside this process and writes a cubin to a file whose name has neither sizes nor config, so each
compile has its own folder. A cubin must take its arguments as cuTile's launcher passes them, which is checked after
each compile; so it runs on a machine without the DSL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator
from importlib import metadata, util
from typing import Any

from tilekern.compile.backend import Backend, Compiled, register
from tilekern.compile.cubin import parameter_bytes
from tilekern.compile.garbage import search_put_off
from tilekern.errors import CompileFailed, ToolchainMissing, compile_failure
from tilekern.spec import ALIGNED, ArrayParameter, CuteKernel
from tilekern.spec.targets import Target

_PACKAGE = "nvidia-cutlass-dsl"
_INSTALL = "pip install 'tilekern[cute]'"
_ADDRESS_BYTES, _NUMBER_BYTES = 8, 4
# Variables of the DSL, and variables that make it use another CUDA toolkit.
_VARIABLES = ("CUTE_DSL_", "CUTE_EXPERIMENTAL_", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_PATH")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@functools.cache
def compiler() -> str | None:
    """Return the compiler's name and version as artifacts state them; None if it is not installed."""
    if util.find_spec("cutlass") is None:
        return None
    try:
        return f"{_PACKAGE} {metadata.version(_PACKAGE)}"
    except metadata.PackageNotFoundError:
        return None


class CuteDsl(Backend):
    """Kernels of CuTe DSL; the generic variant beside each is cuTile's."""

    name, title = "cute", "CuTe DSL"
    implementations = ("cute",)
    needs = {_PACKAGE: ">=4.8.1,<4.9"}  # noqa: RUF012 (never changed)
    install = _INSTALL
    variables = ("CUTE_DSL_",)

    def compiler(self) -> str | None:
        """Return the DSL's name and version; None if it is not installed."""
        return compiler()

    def preload(self) -> None:
        """Import the DSL if it is installed, which takes more than a second."""
        if compiler() is not None:
            with _as_if_nothing_were_set():
                importlib.import_module("cutlass.cute")

    def compile(self, kernel: CuteKernel, target: Target, variant: str, timeout_s: float) -> Compiled:  # noqa: ARG002
        """Compile in this process, with no time limit."""
        assert variant == ALIGNED, "the generic variant of any record is cuTile's"
        started = time.perf_counter()
        cubin, symbol = compile_kernel(kernel, target)
        seconds = time.perf_counter() - started
        return Compiled(cubin, symbol, self.assumptions(kernel, variant), 0.0, seconds, self.launch(kernel), compiler())

    def launch(self, kernel: CuteKernel) -> dict[str, Any]:
        """Return its block, cluster and dynamic shared memory."""
        return {
            "block": [kernel.block, 1, 1],
            "cluster": kernel.cluster,
            "cooperative": kernel.cooperative,
            "shared_bytes": kernel.shared_bytes,
        }

    def code_key(self, kernel: CuteKernel) -> dict[str, Any]:
        """Return its class and its launch."""
        return {"kernel": kernel.kernel, "launch": self.launch(kernel)}

    def front_end_key(self, kernel: CuteKernel) -> Hashable:
        """Return its formulas and its class."""
        return kernel.function, kernel.kernel


register(CuteDsl())


@contextlib.contextmanager
def _as_if_nothing_were_set() -> Iterator[None]:
    """Hide variables that users set for their own kernels, such as ``CUTE_DSL_LINEINFO``: they would change the cubin.

    The DSL reads its variables at import into one object of the process, which is replaced meanwhile. If this is the
    first import, the object is made again from the variables afterwards, for the users' kernels.
    """
    was_here = "cutlass" in sys.modules
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_VARIABLES)}
    try:
        dsl = importlib.import_module("cutlass.cutlass_dsl").CuTeDSL._get_dsl()
        before, dsl.envar = dsl.envar, _read_anew(dsl)
        try:
            yield
        finally:
            os.environ.update(hidden)
            anew = _read_anew(dsl)
            dsl.envar = before if was_here else anew
    finally:
        os.environ.update(hidden)


def _read_anew(dsl: Any) -> Any:
    """Return the DSL's settings from the variables as they are now, with the caches of its readers cleared."""
    for reader in vars(importlib.import_module("cutlass.base_dsl.env_manager")).values():
        if hasattr(reader, "cache_clear"):
            reader.cache_clear()
    return type(dsl.envar)(dsl.name)


@search_put_off()
def compile_kernel(kernel: CuteKernel, target: Target) -> tuple[bytes, str]:
    """Compile the aligned variant of a kernel; return the cubin and its entry symbol.

    Raises:
        ToolchainMissing: nvidia-cutlass-dsl is not installed.
        CompileFailed: the DSL rejected the kernel, or compiled one with other parameters.
        CompileInterrupted: it could not work, for a reason that passes.
    """
    if compiler() is None:
        raise ToolchainMissing(f"{_PACKAGE} is not installed; install it with: {_INSTALL}")
    module, _, name = kernel.kernel.partition(":")
    try:
        with _as_if_nothing_were_set(), tempfile.TemporaryDirectory(prefix="tilekern-") as folder:
            cute = importlib.import_module("cutlass.cute")
            program = getattr(importlib.import_module(module), name)(
                kernel.function, kernel.parameters, capability=target.capability, block=kernel.block,
                cluster=kernel.cluster, **dict(kernel.constants),
            )  # fmt: skip
            # "a" for instructions that only this architecture has.
            arch = target.arch + getattr(program, "arch_suffix", "")
            made = cute.compile(program, program.sample, options=f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}")
            cubin = bytes(made.artifacts.CUBIN)
    except Exception as error:  # the DSL raises many kinds; all mean that this candidate cannot be compiled
        raise compile_failure(error)(f"{type(error).__name__}: {_reason(error)}") from error
    [symbol] = map(str, made.kernel_info)
    if (found := parameter_bytes(cubin, symbol)) != (passed := passed_bytes(kernel)):
        raise CompileFailed(f"{name} has parameters of {found} bytes, where the launcher passes {passed}")
    return cubin, symbol


def passed_bytes(kernel: CuteKernel) -> list[int]:
    """Return the size of each value that cuTile's launcher passes: of an array its address, sizes and strides."""
    ranks = [parameter.ndim if isinstance(parameter, ArrayParameter) else 0 for parameter in kernel.parameters]
    values = ([_ADDRESS_BYTES, *[_NUMBER_BYTES] * 2 * rank] if rank else [_NUMBER_BYTES] for rank in ranks)
    return [value for of_one in values for value in of_one]


def _reason(error: Exception) -> str:
    """Return the first line of an error that is not empty."""
    lines: list[Any] = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
