"""The backend of cuTile: device function to Tile IR bytecode to cubin, with no GPU at hand.

cuda-tile's Python front end lowers the device function, by steps that are private to cuda-tile 1.7 (a contract test
compares the bytes with its public function); the ``tileiras`` compiler turns that into a cubin for any GPU that it
knows. tilekern runs ``tileiras`` itself, so that it owns the time limit, and asks for no line tables: they triple a
cubin's size and hold the paths of the machine that compiled it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekern.compile.backend import Backend, Compiled, register
from tilekern.compile.garbage import search_put_off
from tilekern.errors import CompileInterrupted, CompileTimeout, ToolchainMissing, compile_failure
from tilekern.spec import Implementation
from tilekern.spec.targets import Target

# Functions whose lowered form is kept; a worker compiles the candidates of one function after another.
_KEPT = 4
# Variables of cuda-tile's own tests that change its bytecode.
_CHANGE_CODE = ("CUDA_TILE_TESTING_DISABLE_DIV", "CUDA_TILE_TESTING_DISABLE_TOKEN_ORDER")
# The variables that the compiler sees: where programs and libraries are. Others could change its output, for example
# those that select parts of another CUDA toolkit.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
# Signals that say nothing about the candidate: the compiler was ended from outside, or by a limit or a full disk.
_FROM_OUTSIDE = tuple(
    signal.Signals[f"SIG{name}"] for name in ("KILL", "TERM", "INT", "HUP", "QUIT", "BUS", "XCPU", "XFSZ", "PIPE")
)
# A compiler that had the processor for less of its time was starved; on an idle machine the share is near 1.
_STARVED = 0.5


@dataclass(frozen=True)
class Toolkit:
    """A tile compiler: its path, and the versions that an artifact depends on."""

    path: Path
    tileiras: str
    cuda_tile: str

    @property
    def key(self) -> str:
        """The toolkit's folder in a cache."""
        return f"tileiras-{self.tileiras}-cuda_tile-{self.cuda_tile}"

    def describe(self) -> dict[str, str]:
        """The toolkit as a record keeps it."""
        return {"key": self.key, "tileiras": self.tileiras, "cuda_tile": self.cuda_tile}


@dataclass(frozen=True)
class Lowered:
    """Tile IR bytecode with its entry symbol.

    ``digest`` is the sha256 of the bytecode without source files and lines: under one toolkit equal digests compile to
    the same machine code.
    """

    bytecode: bytes
    symbol: str
    digest: str


@functools.cache
def toolkit() -> Toolkit | None:
    """Return the tile compiler here, that of the pip package before the one on PATH; None if there is none."""
    from importlib import metadata

    path = _tileiras()
    if path is None:
        return None
    if "nvidia" in path.parts:  # the pip package knows its version without a process
        with contextlib.suppress(metadata.PackageNotFoundError):
            return Toolkit(path, metadata.version("nvidia-cuda-tileiras"), metadata.version("cuda-tile"))
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"V(\d+(?:\.\d+)+)", text) or re.search(r"(\d+\.\d+(?:\.\d+)*)", text)
    return Toolkit(path, version.group(1) if version else "unknown", metadata.version("cuda-tile"))


def require_toolkit() -> Toolkit:
    """Return the tile compiler of this machine.

    Raises:
        ToolchainMissing: none is installed.
    """
    tools = toolkit()
    if tools is None:
        raise ToolchainMissing(
            "the tile compiler (tileiras) is not installed; install it with: pip install 'tilekern[compile]'"
        )
    return tools


def _tileiras() -> Path | None:
    import importlib.util

    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(root).glob("cu*/bin/tileiras"), reverse=True):
            if os.access(path, os.X_OK):
                return path
    on_path = shutil.which("tileiras")
    return Path(on_path) if on_path else None


class CuTile(Backend):
    """Kernels of cuda-tile."""

    name, title = "cutile", "cuTile"
    implementations = (None, "tile")
    is_optional, is_predicted, adds_warps = False, True, True
    variables = ("CUDA_TILE_", "EXPERIMENTAL_CUDA_TILE_")

    def preload(self) -> None:
        """Import cuda-tile's front end."""
        import cuda.tile._compile  # noqa: F401

    def compile(self, kernel: Implementation, target: Target, variant: str, timeout_s: float) -> Compiled:
        """Lower the device function, and run tileiras on its bytecode."""
        started = time.perf_counter()
        tools, assumed = require_toolkit(), self.assumptions(kernel, variant)
        lowered = _lower(kernel, assumed, target, tools)
        lowered_at = time.perf_counter()
        cubin = _assemble(lowered.bytecode, target, tools, timeout_s)
        times = lowered_at - started, time.perf_counter() - lowered_at
        return Compiled(cubin, lowered.symbol, assumed, *times, bytecode=lowered.digest)

    def symbol(self, kernel: Implementation, variant: str) -> str:
        """Return the name that cuda-tile makes of the function's own name and the assumptions."""
        return _signature(kernel.function, map(constraint, self.assumptions(kernel, variant))).symbol

    def code_key(self, kernel: Implementation) -> dict[str, Any]:
        """Return the compiler's hints."""
        return {"hints": dict(kernel.hints)}

    def lowered_digest(self, kernel: Implementation, target: Target, variant: str) -> str:
        """Return the digest of the bytecode, in 0.2 s."""
        return _lower(kernel, self.assumptions(kernel, variant), target, require_toolkit()).digest


register(CuTile())


def _lower(kernel: Implementation, assumed: list[dict[str, Any]], target: Target, tools: Toolkit) -> Lowered:
    constraints = tuple(map(constraint, assumed))
    try:
        return lower(kernel.function, constraints, kernel.hints, target.arch, _bytecode_version(tools))
    except CompileInterrupted:
        raise
    except Exception as error:  # the front end raises many kinds; all mean that this candidate cannot be lowered
        raise compile_failure(error)(f"{type(error).__name__}: {_first_line(str(error))}") from error


def lower(
    function: Any, assumed: tuple[Any, ...], hints: Mapping[str, int | None], arch: str, bytecode_version: str | None
) -> Lowered:
    """Lower a kernel for one signature.

    Candidates that differ only in hints share everything before the bytecode, and the front end takes as long as a fast
    compile. Its public ``export_kernel`` starts over for each; this calls the two steps behind it.

    ``assumed`` has cuda-tile's constraint of each parameter. The function's own hints are ignored. Without a version of
    the bytecode cuda-tile probes the compiler.

    Raises:
        Exception: the front end rejected the code.
        CompileInterrupted: a variable of cuda-tile's own tests is set.
    """
    from cuda.tile._compile import _get_bytecode
    from cuda.tile._compiler_options import CompilerOptions

    keeper, options = _lowered(function, _Constraints(assumed), arch, bytecode_version), CompilerOptions(**dict(hints))
    bytecode, without_places = (
        bytes(_get_bytecode(keeper, options, anonymize_debug_info=anonymous).bytecode) for anonymous in (False, True)
    )
    symbol = keeper.signatures[0].symbol
    assert symbol is not None
    return Lowered(bytecode, symbol, hashlib.sha256(without_places).hexdigest())


class _Constraints:
    """Constraints as a dictionary's key: some of cuda-tile's cannot be hashed."""

    def __init__(self, parameters: tuple[Any, ...]) -> None:
        self.parameters = parameters
        self._text = repr(parameters)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constraints) and self._text == other._text


@functools.lru_cache(maxsize=_KEPT)
@search_put_off()
def _lowered(function: Any, constraints: _Constraints, arch: str, bytecode_version: str | None) -> Any:
    """Return the front end's result for one signature, with all its passes run."""
    from cuda.tile import _debug
    from cuda.tile._compile import (
        _get_max_supported_bytecode_version,
        _IrKeeper,
        get_function_hir,
        parse_bytecode_version,
    )
    from cuda.tile._context import init_context_config_from_env
    from cuda.tile._passes.ast2hir import HirMode

    for name in _CHANGE_CODE:
        if getattr(_debug, name, False):  # read when cuda.tile was imported
            raise CompileInterrupted(f"{name} is set, which changes what is compiled; unset it")
    if bytecode_version is None:
        version = _get_max_supported_bytecode_version(init_context_config_from_env().temp_dir)
    else:
        version = parse_bytecode_version(bytecode_version)
    keeper = _IrKeeper(
        ann_func=function._annotated_function,
        func_hir=get_function_hir(function._pyfunc, mode=HirMode.ENTRY_POINT),
        signatures=[_signature(function, constraints.parameters)],
        bytecode_version=version,
        sm_arch=arch,
        log_cutile_ir=False,
        keep_all=True,
    )
    keeper.get_final_ir(0)
    return keeper


def _signature(function: Any, constraints: Iterable[Any]) -> Any:
    from cuda.tile.compilation import CallingConvention, KernelSignature

    signature = KernelSignature(list(constraints), CallingConvention.cutile_python_v1())
    return signature.with_mangled_symbol(function._pyfunc.__name__)


def constraint(assumed: Mapping[str, Any]) -> Any:
    """Return the assumptions about one parameter as cuda-tile's own constraint object."""
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ScalarConstraint

    if assumed["kind"] == "constant":
        return ConstantConstraint(assumed["value"])
    dtype = getattr(ct, assumed["dtype"])
    if assumed["kind"] == "scalar":
        return ScalarConstraint(dtype)
    ndim, unit = assumed["ndim"], assumed["last_stride_one"]
    leading = [assumed["stride_elements"]] * (ndim - 1)
    return ArrayConstraint(
        dtype,
        ndim,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[None] * (ndim - 1) + [1] if unit else None,
        stride_divisible_by=[*leading, 1] if unit else 1,
        shape_divisible_by=[1] * (ndim - 1) + [assumed["extent_elements"]],
        base_addr_divisible_by=assumed["base_bytes"],
    )


def _bytecode_version(tools: Toolkit) -> str | None:
    """Return the toolkit's bytecode version; None lets cuda-tile probe a compiler of unknown version."""
    from cuda.tile._compile import parse_bytecode_version

    version = ".".join(tools.tileiras.split(".")[:2])
    try:
        parse_bytecode_version(version)
    except ValueError:
        return None
    return version


def _assemble(bytecode: bytes, target: Target, tools: Toolkit, timeout_s: float) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tilekern-") as folder:
        source, out = Path(folder, "kernel.tileirbc"), Path(folder, "kernel.cubin")
        source.write_bytes(bytecode)
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # The compiler's temporary files are deleted with the folder, even if it was killed.
        environment["TMPDIR"] = folder
        command = [str(part) for part in (tools.path, source, "-o", out, "--gpu-name", target.arch, "-O3")]
        code, said = _run(command, environment, timeout_s)
        if code != 0 or not out.exists():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            kind = CompileInterrupted if -code in _FROM_OUTSIDE else compile_failure(said)
            raise kind(f"tileiras ended with {how}: {_first_line(said)}")
        return out.read_bytes()


def _run(command: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Run the compiler; return its exit code and its errors. It runs ptxas, which is killed with it."""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, errors="replace", process_group=0,
    ) as process:  # fmt: skip
        try:
            _, said = process.communicate(timeout=timeout_s)
        except BaseException as error:
            worked_s = processor_s(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                late = f"tileiras exceeded {timeout_s:g} s"
                if is_starved(worked_s, timeout_s):
                    raise CompileInterrupted(f"{late}, and had the processor for {worked_s:.1f} s of it") from None
                raise CompileTimeout(late) from None
            raise
    return process.returncode, said


def processor_s(group: int) -> float | None:
    """Return the processor time of a process group that is still runnable, in seconds.

    None if it now waits for something else than the processor, or if that is unknown (not on Linux).
    """
    ticks, wants = 0, False
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                # After the name: state, parent, process group, and from the eleventh on the ticks of the process and
                # of the children that it waited for.
                fields = _stat(Path("/proc", name))
                if int(fields[2]) == group:
                    ticks += sum(map(int, fields[11:15]))
                    wants |= any(_stat(thread)[0] == "R" for thread in Path("/proc", name, "task").iterdir())
    return ticks / os.sysconf("SC_CLK_TCK") if wants else None


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def is_starved(worked_s: float | None, limit_s: float) -> bool:
    """Return whether a process exceeded its time limit because it got too little of the processor."""
    return worked_s is not None and worked_s < _STARVED * limit_s


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
