"""Write the checks and the search for plans, which run for calls that are not in the memo."""

from __future__ import annotations

from tilekern.ops.declaration import Declaration
from tilekern.ops.writing.launches import facts, partial, plan_names
from tilekern.ops.writing.shapes import Lines, axes, axis, block, function, is_plain, leading, leads, row, sized, values
from tilekern.spec import Array, KernelSpec, size_of


def check(op: Declaration) -> str:
    """``check(*arguments)``: refuse shapes, dtypes and devices that do not fit."""
    body: Lines = []
    known: dict[str, str] = {}
    for number, array in enumerate(op.inputs.values()):
        before = tuple(op.inputs.values())[:number] if array.shape != ("rows",) else ()
        other = next((a.name for a in before if a.shape == array.shape and leads(a)), None)
        condition, message = _refusal(op, array, known) if other is None else _unlike(array.name, other)
        if array.name in op.optional:
            condition = f"{array.name} is not None and ({condition})"
        body += block(f"if {condition}:", [f'raise ValueError(f"{op.name}: {message}")'])
        for place, size in enumerate(array.shape):
            if is_plain(size):
                known.setdefault(size, axis(array, place))
    whole = [f'"{name}"' for name, array in op.inputs.items() if "int" in array.dtype]
    given = ", ".join([f'"{op.name}"', *whole, *(f"{name}={name}" for name in op.tensors)])
    return function("check", op.arguments, [*body, f"check_tensors({given})"])


def _unlike(x: str, other: str) -> tuple[str, str]:
    """The condition and the message for a tensor that does not have the shape of another."""
    got = f"{{list({other}.shape)}} and {{list({x}.shape)}}"
    return f"{x}.shape != {other}.shape", f"{other} and {x} must have one shape, got {got}"


def _refusal(op: Declaration, array: Array, known: dict[str, str]) -> tuple[str, str]:
    """The condition and the message for a tensor whose sizes differ from those of tensors before it."""
    x, got = array.name, f"got {{list({array.name}.shape)}}"
    if array.shape == ("rows",):
        return f"{x}.shape != {leading(op)}", f"{x} must have the shape {{list({leading(op)})}}, {got}"
    conditions = [f"{x}.dim() < {len(array.shape) - 1}" if leads(array) else f"{x}.dim() != {len(array.shape)}"]
    sizes = ["..." if size == "rows" else size for size in array.shape]
    for number, size in enumerate(array.shape):
        if size_of(size)[0] in known:
            conditions.append(f"{axis(array, number)} != {sized(size, known)}")
            sizes[number] = f"{{{sized(size, known)}}}"
    return " or ".join(conditions), f"{x} must have the shape [{', '.join(sizes)}], {got}"


def find(op: Declaration) -> str:
    """``find(graded, *arguments)``: the plans and facts of a kind of call, or None if torch must do the work."""
    known, first = values(op), op.tensors[0]
    sizes = _sizes(op, op.forward, known)
    body = [
        *block(f"if {' or '.join(_unserved(op))}:", ["return None"]),
        *(f"{name} = {said}" for name, said in axes(op).items()),
        f"sizes = {sizes}",
        f"forward_plan = plan_for(FORWARD, {first}.device, *sizes)",
        *block("if forward_plan is None:", ["return None"]),
        f"backward_plan = {'sum_plan = ' if op.sums else ''}None",
    ]
    if op.backward is not None:
        others = _sizes(op, op.backward, known | dict(op.backward_flags))
        graded = [f"sizes = {others}"] if others != sizes else []
        graded.append(f"backward_plan = plan_for(BACKWARD, {first}.device, *sizes)")
        graded += block("if backward_plan is None:", ["return None"])
        body += block("if graded:", [*graded, *_sum(op, known)])
    said = facts(op)
    body += [f"{name} = {value}" for name, value in said.items() if name != value]
    return function("find", ("graded", *op.arguments), [*body, f"return {row(plan_names(op))}"])


def _sum(op: Declaration, known: dict[str, str]) -> Lines:
    """The plan of the sum, after that of the backward."""
    if not op.sums:
        return []
    width, dtype = sized(partial(op).shape[1], known), f"{op.sums[0]}.dtype"
    plan = f"sum_plan = plan_for(SUM, {op.tensors[0]}.device, backward_plan.blocks, {width}, {dtype})"
    return [plan, *block("if sum_plan is None:", ["return None"])]


def _sizes(op: Declaration, spec: KernelSpec, known: dict[str, str]) -> str:
    if missing := [d.name for d in spec.dimensions if d.name not in known]:
        raise TypeError(f"{op.name}: no tensor and no flag says what {missing[0]} of {spec.name} is")
    return row([known[d.name] for d in spec.dimensions])


def _unserved(op: Declaration) -> Lines:
    """Conditions in which no kernel runs: no elements, or a dtype that no kernel takes."""
    shapes = {array.shape: name for name, array in reversed(op.inputs.items()) if len(array.shape) > 1}
    conditions = [f"not {name}.numel()" for name in op.tensors if name in shapes.values()]
    kinds = {d.name for d in op.forward.dimensions if d.kind == "dtype"}
    said = {array.dtype: f"{name}.dtype" for name, array in reversed(op.inputs.items()) if array.dtype in kinds}
    for name, array in op.inputs.items():
        expected = said.get(array.dtype, f"torch.{array.dtype}")
        if expected != f"{name}.dtype":
            differs = f"{name}.dtype != {expected}"
            conditions.append(f"({name} is not None and {differs})" if name in op.optional else differs)
    return [*conditions, *([f"not ({op.served})"] if op.served else [])]


def plans_of(op: Declaration) -> str:
    """``plans_of(graded, *arguments)``: the result of ``find``, remembered for each kind of call after the checks.

    On the CPU it depends on the environment, so it is looked up each time and never remembered. A remembered result is
        therefore that of a GPU.
    """
    key = []
    for name in op.tensors:
        seen = ", ".join((op.shapes.get(name, f"{name}.shape"), f"{name}.dtype", f"{name}.get_device()"))
        key.append(f"None if {name} is None else ({seen})" if name in op.optional else seen)
    flags = [said for said in dict.fromkeys((*op.flags.values(), *op.key)) if said not in ("True", "False")]
    given = ", ".join(op.arguments)
    found, checked = f"find(graded, {given})", f"check({given})"
    body = [
        f"key = {row([*key, *flags, 'graded'])}",
        *block("try:", ["return known[key]"]),
        *block(
            "except KeyError:",
            [
                checked,
                *block(f"if not {op.tensors[0]}.is_cuda:", [f"return {found}"]),
                f"return keep(known, key, {found})",
            ],
        ),
    ]
    return function("plans_of", ("graded", *op.arguments), body)
