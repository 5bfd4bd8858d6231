"""Plans: the results of lookups, ready to be launched, and their counters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from tilekern.errors import CannotRun, NoVariant
from tilekern.spec import Config, DeviceKernel, Implementation, Problem, name_of
from tilekern.spec.targets import Target


class Plan:
    """How one problem runs: a kernel object, which has its constants, and a grid of ``blocks`` blocks."""

    __slots__ = ("__weakref__", "_kernel", "blocks", "config", "counters", "grid", "launches")

    # Where its launches are counted, once it is (:meth:`Counters.add`).
    counters: Counters

    def __init__(self, kernel: Any, config: Config, blocks: int) -> None:
        self._kernel = kernel
        self.config, self.blocks, self.grid = config, blocks, (blocks,)
        self.launches = 0

    def __del__(self) -> None:
        # Its launches still count after the last owner (a memo, an op, an autograd graph) has dropped it.
        if counters := getattr(self, "counters", None):
            counters.end(self)

    def launch(self, device: int, *arguments: Any) -> None:
        """Queue the kernel on the current stream of CUDA device number ``device``, whichever device is current.

        Raises:
            NoVariant: the kernel has no cubin that allows the arguments.
            NotImplementedError: an argument carries a tangent of forward-mode AD, which no output would have.
        """
        if _forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        if _current_device() != device:
            return self._launch_elsewhere(device, arguments)
        try:
            _ct_launch(_raw_stream(device), self.grid, self._kernel, arguments)
        except RuntimeError as error:
            return self._launch_in_context(device, arguments, error)
        self.launches += 1
        return None

    def queue(self, stream: int, *arguments: Any) -> None:
        """Queue the kernel on a stream of the current context, by its handle; without torch and what it guards against.

        Raises:
            NoVariant: the kernel has no cubin that allows the arguments.
        """
        self._queue(stream, arguments)
        self.launches += 1

    def _queue(self, stream: int, arguments: tuple[Any, ...]) -> None:
        _ct_launch(stream, self.grid, self._kernel, arguments)

    def _launch_elsewhere(self, device: int, arguments: tuple[Any, ...]) -> None:
        """Launch on a device that is not the current one.

        The number of a default stream is 0 on each device, and names that of the current context.
        """
        import torch

        with torch.cuda.device(device):
            self.launch(device, *arguments)

    def _launch_in_context(self, device: int, arguments: tuple[Any, ...], error: Exception) -> None:
        """Launch again if the thread had no context, as autograd's threads before they allocate; else raise."""
        from tilekern.runtime.driver import enter_context

        if not enter_context(device):
            raise error
        self.launch(device, *arguments)

    def run(self, device: int, inputs: tuple[Any, ...], allocate: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the outputs: the kernel fills those of ``allocate``, a library returns its own."""
        outputs = allocate()
        self.launch(device, *inputs, *outputs)
        return outputs


class DependentPlan(Plan):
    """A plan whose kernel waits for its predecessor by itself, so that its launch may overlap the predecessor's end."""

    __slots__ = ()

    def launch(self, device: int, *arguments: Any) -> None:
        """Queue the kernel; raises as a plan of any kernel does."""
        if _forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        if _current_device() != device:
            return self._launch_elsewhere(device, arguments)
        try:
            _ct_launch(_raw_stream(device), self.grid, self._kernel, arguments, programmatic_dependent_launch=True)
        except RuntimeError as error:
            return self._launch_in_context(device, arguments, error)
        self.launches += 1
        return None

    def _queue(self, stream: int, arguments: tuple[Any, ...]) -> None:
        _ct_launch(stream, self.grid, self._kernel, arguments, programmatic_dependent_launch=True)


class ExtendedPlan(Plan):
    """A plan whose launch states block and cluster, for artifacts with a ``launch``.

    The kernel's other variant runs on the same grid for arguments that its cubin does not allow. A ``dependent`` launch
    may overlap the end of its predecessor.
    """

    __slots__ = ("_block", "_options")

    def __init__(self, kernel: Any, config: Config, blocks: int, *, dependent: bool) -> None:
        super().__init__(kernel, config, blocks)
        attributes = kernel.attributes
        self._block = attributes.block
        cluster = {"block_in_cluster_count": (attributes.cluster,)} if attributes.cluster > 1 else {}
        cooperative = {"cooperative": True} if attributes.cooperative else {}
        self._options: dict[str, Any] = {**cluster, **cooperative}
        if dependent:
            self._options["programmatic_dependent_launch"] = True

    def launch(self, device: int, *arguments: Any) -> None:
        """Queue the kernel; raises as a plan of any kernel does."""
        if _forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        if _current_device() != device:
            return self._launch_elsewhere(device, arguments)
        try:
            self._queue(_raw_stream(device), arguments)
        except (RuntimeError, CannotRun) as error:
            return self._launch_in_context(device, arguments, error)
        self.launches += 1
        return None

    def _queue(self, stream: int, arguments: tuple[Any, ...]) -> None:
        try:
            _extended_launch(stream, self.grid, self._block, self._kernel, arguments, **self._options)
        except NoVariant:
            if self._kernel.otherwise is None:
                raise
            _ct_launch(stream, self.grid, self._kernel.otherwise, arguments)


def plan_of(kernel: Any, implementation: DeviceKernel, config: Config, problem: Problem, target: Target) -> Plan:
    """Return the plan of a kernel object on a GPU; jobs, the tuner and benchmarks launch by it."""
    blocks, dependent = implementation.grid(problem, target.sm_count), may_depend(implementation, target)
    if kernel.attributes is not None:
        return ExtendedPlan(kernel, config, blocks, dependent=dependent)
    return (DependentPlan if dependent else Plan)(kernel, config, blocks)


def may_depend(implementation: DeviceKernel, target: Target) -> bool:
    """Return whether an implementation may be launched before its predecessor has ended on this target."""
    return implementation.dependent and target.has_dependent_launch


class InterpretedPlan(Plan):
    """A plan whose kernel is interpreted on the CPU, block by block."""

    __slots__ = ("_checks", "_constants", "_parameters")

    def __init__(self, implementation: Implementation, config: Config, blocks: int) -> None:
        super().__init__(implementation.function, config, blocks)
        from tilekern.interpreter.arguments import Parameters

        self._constants = tuple(value for _, value in implementation.constants)
        self._parameters = Parameters(name_of(implementation.function), implementation.parameters)
        self._checks = {"dependent": implementation.dependent, "constants": implementation.constant_arrays}

    def launch(self, device: int, *arguments: Any) -> None:  # noqa: ARG002
        """Run the kernel at once.

        Raises:
            InterpreterError: no artifact on a GPU is compiled for such arguments.
            NotImplementedError: as a plan of any kernel.
        """
        import torch

        from tilekern import interpreter

        if _forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        self._parameters.check(arguments)
        self.launches += 1
        # The interpreter computes by torch's operations, which no kernel's caller may cast.
        with _uncounted(arguments), torch.autocast("cpu", enabled=False):
            unwatched(interpreter.launch)(self._kernel, self.grid, arguments + self._constants, **self._checks)


def _uncounted(arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Let writes give tensors no new version, as a launch on a GPU gives none."""
    import torch

    written = tuple(x for x in arguments if isinstance(x, torch.Tensor) and not x.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(written)


class LibraryPlan(Plan):
    """A plan that a library runs, on any device that it supports; it launches no kernel of tilekern.

    Torch's operations handle tangents of forward-mode AD, or refuse them.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., tuple[Any, ...]], config: Config) -> None:
        self._call, self.config, self.launches = call, config, 0
        self._kernel, self.blocks, self.grid = None, 1, (1,)

    def launch(self, device: int, *arguments: Any) -> None:  # noqa: ARG002
        """Raise TypeError: a library has no launch."""
        raise TypeError(f"{self.config.key} is a library's call; use run")

    def run(self, device: int, inputs: tuple[Any, ...], allocate: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:  # noqa: ARG002
        """Call the library on its inputs."""
        self.launches += 1
        return self._call(*inputs)


def unwatched(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a library's call that a watch over torch's functions does not see: its bits are known."""
    import torch

    def run(*inputs: Any, **options: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return call(*inputs, **options)

    return run


@dataclass
class Counters:
    """Counts of one kernel in this process.

    ``nearest`` counts those hits that another bucket's record served, ``substitutes`` lookups after which a default
    runs that needs no record, or other kernels of a composite than those of its config, ``fallbacks`` calls that ran
    the model's own op and ``reasons`` why, ``launches`` launches of the kernel.
    """

    hits: int = 0
    nearest: int = 0
    misses: int = 0
    substitutes: int = 0
    fallbacks: int = 0
    compiled: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    past_launches: int = 0
    # By their ids, those that live.
    _plans: dict[int, ref[Plan]] = field(default_factory=dict, repr=False)

    def add(self, plan: Plan) -> None:
        """Count the launches of a plan, those of its past too; a copy of it counts nowhere."""
        plan.counters = self
        self._plans[id(plan)] = ref(plan)

    def end(self, plan: Plan) -> None:
        """Keep the number of launches of a plan whose life ends."""
        # Not by the reference's callback: of a plan in a cycle, that is called before the plan's own end.
        if self._plans.pop(id(plan), None) is not None:
            self.past_launches += plan.launches

    @property
    def launches(self) -> int:
        """Launches of the kernel so far."""
        living = (found() for found in list(self._plans.values()))
        return self.past_launches + sum(plan.launches for plan in living if plan is not None)


class _NotAsked:
    """Stands for torch's module of forward-mode AD until a launch asks it: other arrays' plans need no torch."""

    @property
    def _current_level(self) -> int:
        global _forward_ad  # noqa: PLW0603
        from torch.autograd import forward_ad

        _forward_ad = forward_ad
        return int(forward_ad._current_level)


_forward_ad: Any = _NotAsked()


def _refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """Refuse tensors with a tangent.

    Every launch of every op passes here, the registered ones' too, while a level of forward-mode AD is entered;
    ``torch.func.jvp`` enters one. An op of torch's that has no tangent raises the same error.
    """
    import torch

    for argument in arguments:
        given = getattr(argument, "tensor", argument)  # of what stands for one
        if isinstance(given, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(given).tangent is not None:
            raise NotImplementedError(
                "tilekern: trying to use forward-mode AD with a kernel that does not support it; use reverse mode "
                "(backward, torch.autograd.grad), or the model's own operations (tilekern.reset(), sdpa as attention)"
            )


def _ct_launch(*arguments: Any, **options: Any) -> None:
    """Replaces itself by cuda.tile's launch when first called, so that importing this file loads neither.

    Its own, not what ``cuda.tile.launch`` is by then: TileGym puts a function there that takes no options.
    """
    _load_launchers()
    _ct_launch(*arguments, **options)


def _extended_launch(*arguments: Any, **options: Any) -> None:
    """As :func:`_ct_launch`, for launches that say their block."""
    _load_launchers()
    _extended_launch(*arguments, **options)


def _load_launchers() -> None:
    global _ct_launch, _extended_launch
    from cuda.tile._cext import launch, launch_extended

    _ct_launch, _extended_launch = launch, launch_extended


def _raw_stream(device: int) -> int:
    """Replaces itself by torch's function when first called, and :func:`_current_device` too."""
    _load_devices()
    return _raw_stream(device)


def _current_device() -> int:
    """As :func:`_raw_stream`: the number of this thread's device."""
    _load_devices()
    return _current_device()


def _load_devices() -> None:
    global _raw_stream, _current_device
    import torch

    # torch's takes 0.1 us; the only GPU of a process is always number 0, which ``int()`` says in a quarter of that.
    current = int if torch.cuda.device_count() == 1 else torch._C._cuda_getDevice
    _raw_stream, _current_device = torch._C._cuda_getCurrentRawStream, current
