"""``tilekern.arrays.plan``: the kernel that the caches have for a problem, launched on arrays of any library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilekern.arrays.views import Array, Form, empty, form_of
from tilekern.errors import DriverError, InputError, NoVariant
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.driver import Device, Stream
from tilekern.runtime.driver import device as device_numbered
from tilekern.runtime.plans import Plan
from tilekern.spec import ArrayParameter, Config, KernelSpec, Problem, ScalarParameter

# Combinations of forms that a plan remembers as right; a job has few, since the shapes are the problem's.
_MOST_FORMS = 1024
# Kernels index with 32 bits.
_MOST_ELEMENTS = (1 << 31) - 1


def plan(kernel: str | KernelSpec, *, device: Device | int = 0, **sizes: int | bool | str) -> ArrayPlan:
    """Return the plan of a problem on a GPU, by the same records, rules of misses and counters as a model's ops::

        plan("matmul", rows=16, inner=4096, columns=4096, b_transposed=True, dtype="bfloat16").launch(stream, a, b, c)

    A record whose winner is a call of torch or cuBLAS serves by its best kernel. A plan keeps the record that it was
    made with; ask again to use one that was published since.

    Args:
        kernel: a spec, or its name, for which all kernels are loaded.
        device: the GPU, or its number.
        sizes: the spec's dimensions, with real sizes; flags that are left out are off.

    Raises:
        InputError: the kernel is unknown, or a size is missing, unknown or wrong.
        CannotRun: there is no such GPU, or the driver is missing or too old.
        CacheMiss: no record serves, and no default may be compiled (``TILEKERN_ON_MISS``) or can be.
    """
    spec = spec_named(kernel) if isinstance(kernel, str) else kernel
    try:
        problem = spec.problem(**spec.with_flags_off(sizes))
    except ValueError as error:
        raise InputError(str(error)) from None
    gpu = device_numbered(device) if isinstance(device, int) else device
    return ArrayPlan(spec, problem, gpu, dispatch.array_plan_for(spec, gpu.number, gpu.target, problem))


class ArrayPlan:
    """A kernel for one problem on one GPU; :func:`plan` returns it.

    Attributes:
        kernel: the name of its spec.
        problem: the problem with its real sizes.
        device: the GPU.
        config: the config that runs.
        blocks: the number of blocks of a launch.
        parameters: the arrays and scalars of a launch, in their order.
    """

    def __init__(self, spec: KernelSpec, problem: Problem, device: Device, plan: Plan) -> None:
        self.kernel, self.problem, self.device, self._plan = spec.name, problem, device, plan
        self.config: Config = plan.config
        self.blocks = plan.blocks
        self.parameters = spec.device(problem, plan.config).parameters
        outputs = spec.outputs(problem, plan.blocks)
        by_blocks = spec.outputs(problem, plan.blocks + 1)
        # A kernel stores a single number as an axis of one.
        self._written = {name: (shape or (1,), dtype) for name, (shape, dtype) in outputs.items()}
        self._shapes = [
            _wanted(parameter, outputs[parameter.name][0], by_blocks[parameter.name][0])
            if parameter.name in outputs
            else getattr(parameter, "shape", None)
            for parameter in self.parameters
        ]
        self._passed: set[tuple[Form | None, ...]] = set()

    def __repr__(self) -> str:
        parameters = ", ".join(map(_words, self.parameters, self._shapes))
        return f"{self.kernel}({parameters}) on GPU {self.device.number}"

    def outputs(self, stream: Stream) -> dict[str, Array]:
        """Return new arrays for all that a launch writes, by their names and in their order."""
        return {name: empty(shape, dtype, stream) for name, (shape, dtype) in self._written.items()}

    def launch(self, stream: Any, *arguments: Any) -> None:
        """Queue the kernel on a stream.

        The arrays must be ready on the stream and live until the kernel has run, and other streams that use them must
        wait for it. Libraries whose arrays are read by DLPack make the stream wait until they are ready.

        Args:
            stream: a stream of this plan's GPU: tilekern's, another library's, or the driver's handle as a number.
            arguments: an array or number for each of the :attr:`parameters`. Arrays are tilekern's, or have
                ``__cuda_array_interface__`` or DLPack.

        Raises:
            InputError: an argument does not fit the problem, or the stream is of another GPU.
            NoVariant: the kernel was compiled for arrays that lie in memory in another way.
            DriverError: the driver refuses the launch.
        """
        handle = stream.handle if type(stream) is Stream and stream.device is self.device else self._handle_of(stream)
        if len(arguments) != len(self.parameters):
            raise InputError(f"{self!r} takes {len(self.parameters)} arguments, got {len(arguments)}")
        forms: list[Form | None] = []
        given: list[Any] = []
        addresses: list[int] = []
        for parameter, argument in zip(self.parameters, arguments, strict=True):
            taken: Any
            form, address = None, 0
            if type(argument) is Array:
                form, taken, address = argument.form, argument.interface, argument.address
            elif isinstance(parameter, ArrayParameter):
                form, taken, address = form_of(argument, f"{self.kernel}: {parameter.name}", self.device, handle)
            else:
                taken = _number(argument, parameter, self.kernel)
            forms.append(form)
            given.append(taken)
            addresses.append(address)
        if (key := tuple(forms)) not in self._passed:
            for complaint in self._complaints(key):
                raise InputError(f"{self.kernel}: {complaint}")
            if len(self._passed) < _MOST_FORMS:
                self._passed.add(key)
        try:
            if self.device.is_current:
                self._plan.queue(handle, *given)
            else:
                with self.device.current():
                    self._plan.queue(handle, *given)
        except NoVariant:
            raise NoVariant(f"{self.kernel}: {self._misfit(forms, addresses)}") from None
        except RuntimeError as error:
            where = f"GPU {self.device.number} ({self.device.target.name})"
            raise DriverError(f"{self.kernel} cannot be launched on {where}: {error}") from None

    def _handle_of(self, stream: Any) -> int:
        """Return the driver's handle of a stream, which CuPy's streams have as ``ptr`` and older torch's otherwise."""
        if isinstance(stream, Stream):
            if stream.device is not self.device:
                number, other = self.device.number, stream.device.number
                raise InputError(f"{self.kernel}: the stream is of GPU {other}, and the plan is for GPU {number}")
            return stream.handle
        if hasattr(stream, "__cuda_stream__"):
            return int(stream.__cuda_stream__()[1])
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        if not isinstance(handle, int) or isinstance(handle, bool):
            raise InputError(f"{self.kernel}: launch takes a stream first, got {type(stream).__name__}")
        return handle

    def _complaints(self, forms: Sequence[Form | None]) -> Iterator[str]:
        """Yield what is wrong with arrays for this problem."""
        for parameter, form, shape in zip(self.parameters, forms, self._shapes, strict=True):
            name = parameter.name
            if not isinstance(parameter, ArrayParameter):
                if form is not None:
                    yield f"{name} is an array, and must be a number of Python"
                continue
            assert form is not None
            if form.dtype != parameter.dtype:
                yield f"{name} is {form.dtype}, and must be {parameter.dtype}"
            axes = shape or (*(None,) * (parameter.ndim - 1), parameter.extent)
            fits = len(form.shape) == len(axes) and all(
                size in (None, real) for size, real in zip(axes, form.shape, strict=True)
            )
            if not fits:
                yield f"{name} has the shape {_axes(form.shape)}, and must have {_axes(axes)} for {self.problem.key}"
            if form.device not in (self.device.number, -1):
                yield f"{name} is on GPU {form.device}, and the plan is for GPU {self.device.number}"
            if form.is_read_only and parameter.role == "output":
                yield f"{name} is read-only, and the kernel writes it"
            reach = sum((size - 1) * stride for size, stride in zip(form.shape, form.strides, strict=True))
            if any(stride < 0 for stride in form.strides):
                yield f"{name} has the strides {_axes(form.strides)}, and kernels take no negative ones"
            if reach >= _MOST_ELEMENTS:
                yield f"{name} reaches over {reach} elements, and kernels index up to {_MOST_ELEMENTS}"

    def _misfit(self, forms: Sequence[Form | None], addresses: Sequence[int]) -> str:
        """Return which array no variant allows, and what the one that allows most would take."""
        kernel = self._plan._kernel
        assumptions = (kernel.otherwise or kernel).variants[-1].assumptions
        for parameter, form, address, assumed in zip(self.parameters, forms, addresses, assumptions, strict=True):
            if form is None:
                continue
            name, strides = parameter.name, form.strides
            if assumed["last_stride_one"] and strides and strides[-1] != 1:
                return f"{name} must have neighbours along its last axis, and its strides are {_axes(strides)}"
            if address % assumed["base_bytes"]:
                return f"{name} must begin at a multiple of {assumed['base_bytes']} bytes, and begins at {address:#x}"
            wrong = [stride for stride in strides[:-1] if stride % assumed["stride_elements"]]
            if wrong:
                return f"{name} must have strides that {assumed['stride_elements']} divides, not {wrong[0]}"
        return "no variant of its kernel allows the arrays; copy them to contiguous ones"


def _wanted(parameter: Any, shape: tuple[int, ...], of_more_blocks: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the shape that an output must have; a size that neither problem nor blocks set, as a cache's, is any."""
    if not shape:
        return (1,)
    stated = parameter.shape or (None,) * len(shape)
    return tuple(
        size if known is not None or size != other else None
        for known, size, other in zip(stated, shape, of_more_blocks, strict=True)
    )


def _number(argument: Any, parameter: ScalarParameter, kernel: str) -> int | float:
    allowed = (int, float) if parameter.dtype.startswith("float") else (int,)
    if isinstance(argument, bool) or not isinstance(argument, allowed):
        raise InputError(f"{kernel}: {parameter.name} must be a number of Python, got {type(argument).__name__}")
    return float(argument) if parameter.dtype.startswith("float") else argument


def _words(parameter: ArrayParameter | ScalarParameter, shape: Sequence[int | None] | None) -> str:
    """Return a parameter as text: its name, dtype and shape."""
    if isinstance(parameter, ScalarParameter):
        return f"{parameter.name} {parameter.dtype}"
    return f"{parameter.name} {parameter.dtype}{_axes(shape or (None,) * parameter.ndim)}"


def _axes(sizes: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in sizes)}]"
