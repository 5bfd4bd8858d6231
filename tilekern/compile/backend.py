"""What a compiler, or a library, must say of itself so that the rest of tilekern can use it: the class Backend.

A config's implementation names its backend (``DeviceKernel.backend``). The tuner, the cache and dispatch ask the
backend, never its name. A new one is a subclass and a class of implementations, in one file that calls
:func:`register`; tests/compile/test_backends.py has an example. This module imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilekern.errors import ToolchainMissing
from tilekern.spec import ALIGNED, ITEM_BYTES, ArrayParameter, DeviceKernel, LibraryCall

if TYPE_CHECKING:
    from tilekern.compile.cubin import Resources
    from tilekern.spec.targets import Target

# Divisibility that the aligned variant assumes of base addresses and row strides: what TMA and 16-byte loads need.
ALIGNMENT_BYTES = 16
# The only divisibility of an extent that cuda.tile's launcher states.
EXTENT_ELEMENTS = 16


@dataclass(frozen=True)
class Compiled:
    """A cubin with its entry symbol, its assumptions about the arguments, and the time to make it.

    ``frontend_s`` and ``tileiras_s`` are wall seconds in Python and in the compiler. ``launch``, ``compiler`` and
    ``bytecode`` are as those of :class:`tilekern.cache.Artifact`.
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
        """Return the resources of an SM that a block needs, the dynamic shared memory of its launch included.

        Raises:
            ToolchainMissing: pyelftools is not installed.
        """
        from tilekern.compile.cubin import read_resources

        try:
            resources = read_resources(self.cubin, self.symbol)
        except ImportError:
            raise ToolchainMissing(
                "pyelftools, which reads cubins, is not installed; install it with: pip install 'tilekern[compile]'"
            ) from None
        dynamic_bytes = self.launch["shared_bytes"] if self.launch else 0
        return replace(resources, shared_bytes=resources.shared_bytes + dynamic_bytes)


class Backend:
    """A way to run configs: a compiler that makes artifacts, or libraries that make none.

    Attributes:
        name: as its implementations carry it (``DeviceKernel.backend``).
        title: the name for people.
        implementations: values of a config's ``implementation`` that it runs; None is a config without that axis.
        needs: the packages that it compiles with, and their versions.
        install: the command that installs them.
        is_optional: whether its candidates are left out of a sweep on a machine without its compiler.
        is_predicted: whether the cost model can compare its candidates with others; the rest are ranked last.
        adds_warps: whether its compiler adds warps to those that a config asks for.
        variables: prefixes of environment variables that change the code it makes; compile workers do not see them.
        libraries: by a config's ``implementation``, whether the library that such configs need at run time is here.
    """

    name: str
    title: str
    implementations: tuple[str | None, ...] = ()
    needs: Mapping[str, str] = {}
    install: str = ""
    is_optional: bool = True
    is_predicted: bool = False
    adds_warps: bool = False
    variables: tuple[str, ...] = ()
    libraries: Mapping[str, Callable[[], bool]] = {}

    def compiler(self) -> str | None:
        """Return the compiler's name and version as artifacts state them.

        None if it is not installed, or if the toolkit of a record tells it (cuTile).
        """
        return None

    def preload(self) -> None:
        """Import what compiles, so that forked workers share it."""

    def compile(self, kernel: Any, target: Target, variant: str, timeout_s: float) -> Compiled:
        """Compile an implementation; the arguments and errors are those of ``toolchain.compile_candidate``."""
        raise NotImplementedError(f"{self.title} makes no artifacts")

    def assumptions(self, kernel: Any, variant: str) -> list[dict[str, Any]]:
        """Return the assumptions of a variant about each argument, as plain data for a record."""
        scalar_or_array = [
            _array_assumptions(parameter, aligned=variant == ALIGNED)
            if isinstance(parameter, ArrayParameter)
            else {"kind": "scalar", "dtype": parameter.dtype}
            for parameter in kernel.parameters
        ]
        return [*scalar_or_array, *({"kind": "constant", "value": value} for _, value in kernel.constants)]

    def symbol(self, kernel: Any, variant: str) -> str | None:  # noqa: ARG002
        """Return the entry symbol that an artifact of a variant will have; None if only compiling tells."""
        return None

    def launch(self, kernel: Any) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the fields of :class:`tilekern.cache.Launch`; None if the cubin says its block and cluster itself."""
        return None

    def code_key(self, kernel: Any) -> dict[str, Any]:
        """Return what the machine code depends on beside function, assumptions, architecture and source."""
        return {"backend": self.name, "launch": self.launch(kernel)}

    def front_end_key(self, kernel: Any) -> Hashable:
        """Return the source of a kernel: kernels with equal keys, parameters and constants share one lowering."""
        return kernel.function

    def lowered_digest(self, kernel: Any, target: Target, variant: str) -> str | None:  # noqa: ARG002
        """Return :attr:`Compiled.bytecode` without compiling; None if the backend has no bytecode.

        Raises:
            ToolchainMissing: no compiler is installed.
            CompileFailed: the front end rejected the config, or could not work.
        """
        return None


def _array_assumptions(parameter: ArrayParameter, *, aligned: bool) -> dict[str, Any]:
    plain = {"kind": "array", "dtype": parameter.dtype, "ndim": parameter.ndim}
    if not (aligned and parameter.aligned):
        return plain | {"base_bytes": 1, "stride_elements": 1, "last_stride_one": aligned, "extent_elements": 1}
    even = parameter.extent is not None and parameter.extent % EXTENT_ELEMENTS == 0
    return plain | {
        "base_bytes": ALIGNMENT_BYTES,
        "stride_elements": ALIGNMENT_BYTES // ITEM_BYTES[parameter.dtype],
        "last_stride_one": True,
        "extent_elements": EXTENT_ELEMENTS if even else 1,
    }


_BACKENDS: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Make a backend known by its name."""
    _BACKENDS[backend.name] = backend


def backends() -> Iterator[Backend]:
    """Return the known backends."""
    return iter(list(_BACKENDS.values()))


def backend_of(implementation: DeviceKernel | LibraryCall) -> Backend:
    """Return the backend of an implementation."""
    return _BACKENDS[implementation.backend]
