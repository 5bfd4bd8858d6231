"""Write the launches of both directions: arrays in the kernels' shapes, and memory for their outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tilekern.ops.declaration import Declaration, arrays_of
from tilekern.ops.writing.shapes import (
    Lines,
    axes,
    block,
    dtype_of,
    function,
    leader,
    leading,
    leads,
    row,
    sized,
    twin,
    values,
)
from tilekern.spec import Array, KernelSpec, ScalarParameter


def launch(op: Declaration) -> str:
    """``launch(plans, *arguments)``: the results."""
    return function("launch", ("plans", *op.arguments), _unpacked(op, _forward(op)))


def launch_backward(op: Declaration) -> str:
    """``launch_backward(plans, needs, *slopes, *saved, *scalars)``: the gradients."""
    arguments = ("plans", "needs", *op.backward_arguments)
    if op.backward is None:
        return function("launch_backward", arguments, [f"return fallback_backward({', '.join(op.backward_arguments)})"])
    return function("launch_backward", arguments, _unpacked(op, _backward(op, op.backward)))


def facts(op: Declaration) -> dict[str, str]:
    """The rest of the tuple of plans: names that the launches use, with their expressions in ``find``."""
    first = op.tensors[0]
    known = {"device": f"{first}.device", "index": f"{first}.get_device()"}
    if any(map(leads, op.inputs.values())):
        known["flat"] = f"{leader(op).name}.dim() == {len(leader(op).shape)}"
        known["see"] = f"Rows if {first}.is_cuda else viewed"
        known["rows"] = values(op)["rows"]
    known |= {name: name for name in axes(op)}
    for spec in op.specs:
        for array in arrays_of(spec, "output"):
            like, dtype = twin(array, arrays_of(spec, "input")), dtype_of(op, array)
            known[f"{array.name}_dtype"] = dtype if like is None else f"other({dtype}, {dtype_of(op, like)})"
    known |= {f"{name}_dtype": dtype_of(op, array) for name, array in _cast(op).items()}
    bodies = [] if op.launch else _forward(op)
    if op.backward is not None and not op.launch_backward:
        bodies = [*bodies, *_backward(op, op.backward)]
    return {name: said for name, said in known.items() if name in _words(bodies)}


def plan_names(op: Declaration) -> Lines:
    """The names of the plans and of the facts after them."""
    return ["forward_plan", "backward_plan", *(["sum_plan"] if op.sums else []), *facts(op)]


def partial(op: Declaration) -> Array:
    """The array of partial gradients that ``column_sum`` adds up."""
    found = [array for spec in op.specs for array in arrays_of(spec, "scratch")]
    if len(found) != 1 or len(found[0].shape) != 2:
        raise TypeError(f"{op.name}: for sums, its backward must have one scratch array [blocks, ...]")
    return found[0]


def _unpacked(op: Declaration, body: Lines) -> Lines:
    """A body after a line that unpacks the fields of ``plans`` that it uses."""
    used = _words(body)
    return [f"{', '.join(name if name in used else '_' for name in plan_names(op))} = plans", *body]


def _words(lines: Iterable[str]) -> set[str]:
    return set(re.findall(r"\w+", "\n".join(lines)))


def _forward(op: Declaration) -> Lines:
    if op.optional:
        raise TypeError(f"{op.name}: {min(op.optional)} may be None, so launch must be given")
    return [*_prepared(op, op.forward), *_launched(op, op.forward, "forward_plan"), f"return {', '.join(op.results)}"]


def _cast(op: Declaration) -> dict[str, Array]:
    """The slopes of results that have a dimension for their dtype, which the backward lacks and takes another for."""
    if op.backward is None:
        return {}
    lacking = {d.name for d in op.forward.dimensions} - {d.name for d in op.backward.dimensions}
    slopes = {f"d{name}" for name in op.shown if op.outputs[name].dtype in lacking}
    return {array.name: array for array in arrays_of(op.backward, "input") if array.name in slopes}


def _backward(op: Declaration, spec: KernelSpec) -> Lines:
    body = [*(f"{name} = {name}.to({name}_dtype)" for name in _cast(op)), *_prepared(op, spec)]
    launched = _launched(op, spec, "backward_plan")
    returned = f"return {', '.join(op.made)}"
    if not op.sums:
        return [*body, *launched, returned]
    memory = f"{partial(op).name} = empty(backward_plan.blocks, {_width(op)}, dtype=float32, device=device)"
    return [*body, memory, *launched, *_summed(op), returned]


def _width(op: Declaration) -> str:
    return sized(partial(op).shape[1], {name: name for name in axes(op)})


def _summed(op: Declaration) -> Lines:
    """The gradients of the weights, summed as one row, unless none of them is needed."""
    names, weight = [op.gradients[name] for name in op.sums], op.sums[0]
    unneeded = " and ".join(f"not needs[{op.arguments.index(name)}]" for name in op.sums)
    without = ", ".join("None" if name in names else name for name in op.made)
    lines = block(f"if {unneeded}:", [f"return {without}"])
    if len(names) == 1:
        return [*lines, f"{names[0]} = empty_like({weight})", f"sum_plan.launch(index, {partial(op).name}, {names[0]})"]
    return [
        *lines,
        f"summed = empty({_width(op)}, dtype={weight}.dtype, device=device)",
        f"sum_plan.launch(index, {partial(op).name}, summed)",
        f"{', '.join(names)} = summed.chunk({len(names)})",
    ]


def _prepared(op: Declaration, spec: KernelSpec) -> Lines:
    """Variables for which tensors are contiguous, and the outputs, in the shape of the results.

    Outputs are no views of rows, since autograd would not allow changing a view in place.
    """
    written = arrays_of(spec, "output")
    models = [twin(array, arrays_of(spec, "input")) for array in written]
    lines: Lines = []
    for array in arrays_of(spec, "input"):
        if op.strided and array in models:
            lines += block(f"if not {array.name}.is_contiguous():", [f"{array.name} = readable({array.name})"])
        elif array in models or leads(array):
            lines.append(f"{array.name}_whole = {array.name}.is_contiguous()")
    return [*lines, *(f"{x.name} = {_memory(op, x, like)}" for x, like in zip(written, models, strict=True))]


def _memory(op: Declaration, array: Array, like: Array | None) -> str:
    """An expression that allocates an output."""
    dtype = f"{array.name}_dtype"
    if like is None:
        sizes = [sized(size, {name: name for name in axes(op)}) for size in array.shape[leads(array) :]]
        return f"empty({row([*([f'*{leading(op)}'] if leads(array) else []), *sizes])}, dtype={dtype}, device=device)"
    if op.strided and like.dtype != array.dtype:
        return f"empty_like({like.name}) if {dtype} is None else empty_like({like.name}, dtype={dtype})"
    if op.strided:
        return f"empty_like({like.name})"
    if like.dtype == array.dtype:
        return f"empty_like({like.name}) if {like.name}_whole else fresh({like.name})"
    return f"empty_like({like.name}) if {like.name}_whole and {dtype} is None else fresh({like.name}, {dtype})"


def _launched(op: Declaration, spec: KernelSpec, plan: str) -> Lines:
    """The launch: one call for tensors with two dimensions, and one for others, if these differ."""

    def call(flat: bool) -> Lines:
        return [f"{plan}.launch(", "    index,", *(f"    {_given(op, spec, x, flat)}," for x in spec.arrays), ")"]

    if call(flat=True) == call(flat=False):
        return call(flat=True)
    return [*block("if flat:", call(flat=True)), *block("else:", call(flat=False))]


def _given(op: Declaration, spec: KernelSpec, array: Array | ScalarParameter, flat: bool) -> str:
    """An argument of a launch."""
    x = array.name
    if isinstance(array, ScalarParameter):
        # A whole number, as configurations write 30 for 30.0, is an integer to the launcher, which no cubin takes.
        return f"float({x})" if array.dtype == "float32" else x
    if array.role == "scratch":
        return x
    seen = x if flat or not leads(array) else f"see({x}, {_rows(op, array)})"
    is_model = array in [twin(output, arrays_of(spec, "input")) for output in arrays_of(spec, "output")]
    if array.role == "output" or (op.strided and is_model):
        return seen
    if len(array.shape) == 1:
        copy = f"{x}.contiguous()" if flat or not leads(array) else f"{x}.contiguous().view(-1)"
    else:
        copy = f"as_rows({x})" if leads(array) else f"readable({x})"
    return f"{seen} if {f'{x}_whole' if leads(array) or is_model else f'{x}.is_contiguous()'} else {copy}"


def _rows(op: Declaration, array: Array) -> str:
    """The shape of an array of rows."""
    dimensions = {name: name for name in axes(op)}
    return row(["rows", *(sized(size, dimensions) for size in array.shape[1:])])
