"""The only file that compiles: spec, config and target become an artifact.

cuda-tile's Python front end lowers the device function to Tile IR bytecode (:mod:`tilekern.compile.frontend`); the
``tileiras`` compiler turns that into a cubin for any GPU that it knows, with no GPU at hand. tilekern runs ``tileiras``
itself, so that it owns the time limit, and asks for no line tables: they triple a cubin's size and hold the paths of
the machine that compiled it. :mod:`tilekern.compile.cute_compiler` compiles kernels of CuTe DSL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilekern import spec as specs
from tilekern.compile import cute_compiler
from tilekern.compile.cubin import Resources, read_resources
from tilekern.errors import CompileInterrupted, CompileTimeout, ToolchainMissing, compile_failure
from tilekern.spec import ArrayParameter, Config, CuteKernel, Implementation, KernelSpec, Problem
from tilekern.spec.targets import Target

if TYPE_CHECKING:
    from tilekern.compile.frontend import Lowered

_MISSING = "the tile compiler (tileiras) is not installed; install it with: pip install 'tilekern[compile]'"
# Divisibility that the aligned variant assumes of base addresses and row strides: what TMA and 16-byte loads need.
ALIGNMENT_BYTES = 16
# The only divisibility of an extent that cuda.tile's launcher states.
EXTENT_ELEMENTS = 16
# The variables that the compiler sees: where programs and libraries lie. Others change what it makes, as those do by
# which it would take the parts of another CUDA toolkit, or are nobody's business.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
# Signals that tell nothing of the candidate: somebody ended the compiler, or a limit or a full disk did.
_FROM_OUTSIDE = tuple(
    signal.Signals[f"SIG{name}"] for name in ("KILL", "TERM", "INT", "HUP", "QUIT", "BUS", "XCPU", "XFSZ", "PIPE")
)
# The share of its time that a compiler has the processor for, where nobody else wants it, is near 1.
_STARVED = 0.5


@dataclass(frozen=True)
class Toolkit:
    """A tile compiler: where it is, and the versions that an artifact depends on."""

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
class Compiled:
    """A cubin with its entry symbol, what it assumes of its arguments, and what making it took.

    ``frontend_s`` and ``tileiras_s`` are wall seconds in Python and in the compiler; CuTe DSL is all compiler.
    ``launch``, ``compiler`` and ``bytecode`` are as those of :class:`tilekern.cache.Artifact`.
    """

    cubin: bytes
    symbol: str
    assumptions: list[dict[str, Any]]
    frontend_s: float
    tileiras_s: float
    launch: dict[str, Any] | None = None
    compiler: str | None = None
    bytecode: str | None = None

    def resources(self) -> Resources:
        """The resources of an SM that it needs, the dynamic shared memory of its launch among them.

        Raises:
            ToolchainMissing: pyelftools is not installed.
        """
        try:
            found = read_resources(self.cubin, self.symbol)
        except ImportError:
            what = "pyelftools is not installed, without which no cubin is read"
            raise ToolchainMissing(f"{what}; install it with: pip install 'tilekern[compile]'") from None
        dynamic_bytes = self.launch["shared_bytes"] if self.launch else 0
        return replace(found, shared_bytes=found.shared_bytes + dynamic_bytes)


@functools.cache
def toolkit() -> Toolkit | None:
    """The tile compiler of this machine: the pip package's first, then the one on PATH; None where there is none."""
    from importlib import metadata

    path = _tileiras()
    if path is None:
        return None
    if "nvidia" in path.parts:  # the pip package knows its version without a process
        with contextlib.suppress(metadata.PackageNotFoundError):
            return Toolkit(path, metadata.version("nvidia-cuda-tileiras"), metadata.version("cuda-tile"))
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"V(\d+(?:\.\d+)+)", said) or re.search(r"(\d+\.\d+(?:\.\d+)*)", said)
    return Toolkit(path, found.group(1) if found else "unknown", metadata.version("cuda-tile"))


def require_toolkit() -> Toolkit:
    """The tile compiler of this machine.

    Raises:
        ToolchainMissing: there is none.
    """
    found = toolkit()
    if found is None:
        raise ToolchainMissing(_MISSING)
    return found


def _tileiras() -> Path | None:
    import importlib.util

    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(root).glob("cu*/bin/tileiras"), reverse=True):
            if os.access(path, os.X_OK):
                return path
    on_path = shutil.which("tileiras")
    return Path(on_path) if on_path else None


def compile_candidate(
    spec: KernelSpec, problem: Problem, config: Config, target: Target, variant: str, *, timeout_s: float = 120
) -> Compiled:
    """Compile one candidate for one target.

    Args:
        variant: ``aligned`` (16-byte base addresses and row strides, last stride 1) or ``generic`` (only dtypes and
            ranks are assumed).
        timeout_s: wall seconds that tileiras may take. CuTe DSL compiles inside this process, which only another one
            can end.

    Raises:
        ToolchainMissing: no compiler is installed.
        CompileFailed: the front end or the compiler rejected the candidate, crashed, or took too long.
        CompileInterrupted: the compiler could not work, for a reason that passes.
        OSError: there is no room for its files, or the compiler cannot be run.
    """
    implementation = spec.device(problem, config)
    assumed = assumptions(implementation, variant)
    started = time.perf_counter()
    if isinstance(implementation, CuteKernel):
        assert variant == specs.ALIGNED, "the generic variant of any record is cuTile's"
        cubin, symbol = cute_compiler.compile_kernel(implementation, target)
        seconds = time.perf_counter() - started
        return Compiled(cubin, symbol, assumed, 0.0, seconds, launch_of(implementation), cute_compiler.compiler())
    tools = require_toolkit()
    made = _lower(implementation, assumed, target, tools)
    lowered = time.perf_counter()
    cubin = _assemble(made.bytecode, target, tools, timeout_s)
    compiled = time.perf_counter()
    return Compiled(cubin, made.symbol, assumed, lowered - started, compiled - lowered, bytecode=made.digest)


def lowered_digest(implementation: Implementation, target: Target, variant: str) -> str:
    """Return :attr:`Compiled.bytecode` of a config without running the compiler behind the front end (0.2 s).

    Raises:
        ToolchainMissing: no compiler is installed.
        CompileFailed: the front end rejected the config.
        CompileInterrupted: the front end could not work, for a reason that passes.
    """
    return _lower(implementation, assumptions(implementation, variant), target, require_toolkit()).digest


def launch_of(kernel: CuteKernel) -> dict[str, Any]:
    """The fields of :class:`tilekern.cache.Launch` for a kernel."""
    return {
        "block": [kernel.block, 1, 1],
        "cluster": kernel.cluster,
        "cooperative": kernel.cooperative,
        "shared_bytes": kernel.shared_bytes,
    }


def assumptions(implementation: Implementation | CuteKernel, variant: str) -> list[dict[str, Any]]:
    """The assumptions of a variant about each argument, as plain data for a record."""
    found: list[dict[str, Any]] = []
    for parameter in implementation.parameters:
        if isinstance(parameter, ArrayParameter):
            found.append(_array_assumptions(parameter, aligned=variant == specs.ALIGNED))
        else:
            found.append({"kind": "scalar", "dtype": parameter.dtype})
    return found + [{"kind": "constant", "value": value} for _, value in implementation.constants]


def _array_assumptions(parameter: ArrayParameter, *, aligned: bool) -> dict[str, Any]:
    plain = {"kind": "array", "dtype": parameter.dtype, "ndim": parameter.ndim}
    if not aligned:
        return plain | {"base_bytes": 1, "stride_elements": 1, "last_stride_one": False, "extent_elements": 1}
    if not parameter.aligned:
        return plain | {"base_bytes": 1, "stride_elements": 1, "last_stride_one": True, "extent_elements": 1}
    elements = ALIGNMENT_BYTES // specs.ITEM_BYTES[parameter.dtype]
    even = parameter.extent is not None and parameter.extent % EXTENT_ELEMENTS == 0
    return plain | {
        "base_bytes": ALIGNMENT_BYTES,
        "stride_elements": elements,
        "last_stride_one": True,
        "extent_elements": EXTENT_ELEMENTS if even else 1,
    }


def _lower(implementation: Implementation, assumed: list[dict[str, Any]], target: Target, tools: Toolkit) -> Lowered:
    """Return what the front end makes of an implementation."""
    from tilekern.compile.frontend import lower

    constraints = tuple(constraint(a) for a in assumed)
    try:
        return lower(implementation.function, constraints, implementation.hints, target.arch, _bytecode_version(tools))
    except CompileInterrupted:
        raise
    except Exception as error:  # the front end raises many kinds; all mean that this candidate cannot be lowered
        raise compile_failure(error)(f"{type(error).__name__}: {_first_line(str(error))}") from error


def constraint(assumed: Mapping[str, Any]) -> Any:
    """One parameter's assumptions as cuda-tile's own constraint object."""
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
    """The toolkit's own bytecode version; None lets cuda-tile probe a compiler whose version it does not know."""
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
        # The compiler's own temporary files go with the folder, also those of one that was killed.
        environment["TMPDIR"] = folder
        command = [str(part) for part in (tools.path, source, "-o", out, "--gpu-name", target.arch, "-O3")]
        code, said = _run(command, environment, timeout_s)
        if code != 0 or not out.exists():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            kind = CompileInterrupted if -code in _FROM_OUTSIDE else compile_failure(said)
            raise kind(f"tileiras ended with {how}: {_first_line(said)}")
        return out.read_bytes()


def _run(command: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Run the compiler; its exit code and what it said. It runs ptxas, which is killed with it."""
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
    """The time that a process group had the processor for while it wanted more of it, in seconds.

    None where it wants none now, since it waits for something else, and where it cannot be told (off Linux).
    """
    ticks, wants = 0, False
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent, process group, and from the eleventh on the
                # ticks of the process and of the children that it waited for.
                fields = _stat(Path("/proc", name))
                if int(fields[2]) == group:
                    ticks += sum(map(int, fields[11:15]))
                    wants |= any(_stat(thread)[0] == "R" for thread in Path("/proc", name, "task").iterdir())
    return ticks / os.sysconf("SC_CLK_TCK") if wants else None


def _stat(process: Path) -> list[str]:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def is_starved(worked_s: float | None, limit_s: float) -> bool:
    """Whether a process that exceeded its time got too little of the processor for that to be its own doing."""
    return worked_s is not None and worked_s < _STARVED * limit_s


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "no message"
