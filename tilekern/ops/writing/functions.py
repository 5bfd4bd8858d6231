"""Write the functions that users, autograd and torch's dispatcher call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilekern.ops.declaration import Declaration
from tilekern.ops.writing.shapes import Lines, axes, block, either, function, leading, leads, row, sized, twin
from tilekern.spec import Array, size_of


def public(op: Declaration) -> str:
    """The public function: a registered op if torch's operations are watched, torch's own operations in transforms.

    Dispatch modes with meta tensors are those of planning, which needs plans.
    """
    given = ", ".join(op.arguments)
    refused = [_requires(op, name) for name in op.ungraded if "int" not in op.inputs[name].dtype]
    unserved = f" or ({either(refused)} and is_grad_enabled())" if refused and op.is_differentiable else ""
    launched = [f"return {_shown(op, f'launch(plans, {given})')}"]
    graded, refusal = "False", []
    if op.is_differentiable:
        wanted = either([_requires(op, name) for name in op.gradients])
        graded, launched = "graded", [*block("if graded:", [f"return apply({given}, plans)"]), *launched]
    elif op.no_gradient:
        floating = [_requires(op, name) for name, array in op.inputs.items() if "int" not in array.dtype]
        refusal = block(f"if is_grad_enabled() and {either(floating)}:", ["refuse()"])
    called_by = (*op.arguments, *(f"{name}={op.signature.parameters[name].default!r}" for name in op.options))
    body = [
        *_special(op),
        *refusal,
        *block(
            f"if is_compiling() or transforms() or (modes() and not {op.tensors[0]}.is_meta):",
            [
                f"check({given})",
                *block("if not is_compiling() and transforms():", [f"return fallback({given})"]),
                f"return {_shown(op, f'registered({given})')}",
            ],
        ),
        *([f"graded = is_grad_enabled() and {wanted}"] if op.is_differentiable else []),
        *([f"graded = graded and {row([_requires(op, name) for name in op.apart])}"] if op.apart else []),
        f"plans = plans_of({graded}, {given})",
        *block(f"if plans is None{unserved}:", [f"return fallback({given})"]),
        *block("try:", launched),
        *_where_refused("FORWARD", [f"return fallback({given})"]),
    ]  # fmt: skip
    return function(op.name, called_by, body)


def refuse(op: Declaration) -> str:
    """``refuse()``: say that there is no gradient."""
    said = f"{op.name} has no gradient, and one of its arguments requires one; {op.no_gradient}"
    return function("refuse", (), [f'raise RuntimeError("{said}")'])


def _where_refused(spec: str, instead: Lines) -> Lines:
    """The end of a ``try``: if no variant of a kernel allows the arguments, warn and let torch do the work."""
    return block("except NoVariant as error:", [f"refused({spec}, error)", *instead])


def _special(op: Declaration) -> Lines:
    """Calls that other code serves: one condition for all, then one for each."""
    sharded, body = "", []
    if op.gathered is not None:
        given = f"is_dtensor({', '.join(op.tensors)})"
        arguments = [op.name, row(op.sharded), row(op.shared), *op.scalars, *op.options, f"gathered={op.gathered}"]
        body = [f"return by_shards({', '.join(arguments)})"]
        sharded = f"{op.sharded[-1]}.__class__ is not Tensor and {given}"
        if op.unless:
            sharded, body = f"({sharded})", block(f"if {given}:", body)
    if op.unless:
        body.append(f"return otherwise({', '.join((*op.arguments, *op.options))})")
    return block(f"if {' or '.join(filter(None, [op.unless, sharded]))}:", body) if body else []


def _shown(op: Declaration, results: str) -> str:
    """The results that a caller gets."""
    if not op.kept:
        return results
    return f"{results}[0]" if len(op.shown) == 1 else f"{results}[:{len(op.shown)}]"


def _requires(op: Declaration, name: str) -> str:
    required = f"{name}.requires_grad"
    return f"({name} is not None and {required})" if name in op.optional else required


def autograd(op: Declaration) -> str:
    """The autograd function: the eager path, with less host time than a registered op."""
    given = ", ".join((*op.slopes, *op.saved, *(["*ctx.scalars"] if op.scalars else [])))
    forward = [
        f"{', '.join(op.results)} = launch(plans, {', '.join(op.arguments)})",
        *_remembered(op),
        "ctx.plans = plans",
        *([f"ctx.scalars = {row(op.scalars)}"] if op.scalars else []),
        *(["ctx.set_materialize_grads(False)"] if op.absent else []),
        f"return {', '.join(op.shown)}",
    ]
    made = ", ".join(op.made)
    launched = [f"{made} = launch_backward(ctx.plans, ctx.needs_input_grad, {given})"]
    if op.backward is not None:
        launched = [*block("try:", launched), *_where_refused("BACKWARD", _counted_backward(op, given))]
    if op.absent:
        missing = " or ".join(f"{name} is None" for name in op.slopes)
        absent = [f"{made} = absent(ctx.needs_input_grad, {given})"]
        launched = [*block(f"if {missing}:", absent), *block("else:", launched)]
    gradients = ", ".join(op.gradients.get(name, "None") for name in op.arguments)
    backward = [*_recalled(op), *launched, f"return {gradients}, None"]
    lines = _method("forward", (*op.arguments, "plans"), forward)
    lines += ["", *_method("backward", op.slopes, backward, "@differentiable_once")]
    return "\n".join([f"class {op.title}(torch.autograd.Function):", *(f"    {x}".rstrip() for x in lines), ""])


def _method(name: str, arguments: tuple[str, ...], body: Lines, *decorators: str) -> Lines:
    return ["@staticmethod", *decorators, *function(name, ("ctx", *arguments), body).splitlines()]


def _unpacked(names: Sequence[str]) -> str:
    """Names on the left of an assignment from a tuple."""
    return ", ".join(names) if len(names) != 1 else f"({names[0]},)"


def _remembered(op: Declaration) -> Lines:
    return [f"ctx.save_for_backward({', '.join(op.saved)})"] if op.saved else []


def _recalled(op: Declaration) -> Lines:
    return [f"{_unpacked(op.saved)} = ctx.saved_tensors"] if op.saved else []


def fallback(op: Declaration) -> str:
    """``fallback(*arguments)``: the formula, counted, without autocast, like a kernel."""
    by_torch = block(f"with uncast({op.tensors[0]}.device.type):", [f"return formula({', '.join(op.arguments)})"])
    return function("fallback", op.arguments, ["count_fallback(FORWARD)", *by_torch])


def fallback_backward(op: Declaration) -> str:
    """``fallback_backward(*slopes, *saved, *scalars)``: the gradients of the formula."""
    if unsaved := [name for name in op.tensors if name not in op.saved]:
        raise TypeError(f"{op.name}: {unsaved[0]} is not saved; give fallback_backward, or name it in reads")
    if len(op.made) < len(op.gradients):
        raise TypeError(f"{op.name}: arguments share a gradient, so fallback_backward must be given")
    places = row([str(op.arguments.index(name)) for name in op.gradients])
    body = [
        f"{_unpacked(op.made)} = by_autograd(formula, {row(op.arguments)}, {places}, {row(op.slopes)})",
        f"return {', '.join(op.made)}",
    ]
    return function("fallback_backward", op.backward_arguments, body)


def fake(op: Declaration) -> str:
    """``fake(*arguments)``: the results without values."""
    made = [f"{name} = {_blank(op, array)}" for name, array in op.outputs.items()]
    return function("fake", op.arguments, [*made, f"return {', '.join(op.results)}"])


def _blank(op: Declaration, array: Array) -> str:
    """A result in the dtype that the formula gives it."""
    present = {name: given for name, given in op.inputs.items() if name not in op.optional}
    parts, said = array.dtype.split("*"), {given.dtype for given in present.values()}
    dtypes = [f"{name}.dtype" for name, given in present.items() if given.dtype in parts]
    dtypes += [op.flags.get(part, f"torch.{part}") for part in parts if part not in said]
    dtype = f"promoted({', '.join(dtypes)})" if len(dtypes) > 1 else dtypes[0]
    like = twin(array, present.values())
    if like is None:
        return f"{op.tensors[0]}.new_empty({_shape(op, array)}, dtype={dtype})"
    if op.strided:
        return f"empty_like({like.name}, dtype={dtype})"
    return f"{like.name}.new_empty({like.name}.shape, dtype={dtype})"


def _shape(op: Declaration, array: Array) -> str:
    """The shape of a result, by the axes of the arguments, if no argument has that shape."""
    if array.shape == ("rows",):
        return leading(op)
    known = axes(op)
    if unknown := [size for size in array.shape[leads(array) :] if size_of(size)[0] not in known]:
        raise TypeError(f"{op.name}: no argument says what {unknown[0]} of {array.name} is, so fake must be given")
    sizes = [sized(size, known) for size in array.shape[leads(array) :]]
    return row([*([f"*{leading(op)}"] if leads(array) else []), *sizes])


def fake_backward(op: Declaration) -> str:
    """``fake_backward(*slopes, *saved, *scalars)``: the gradients without values."""
    made: dict[str, str] = {}
    for name, gradient in _made(op):
        like = op.stand_ins[name]
        blank = f"empty_like({like})" if op.strided else f"{like}.new_empty({like}.shape)"
        made.setdefault(gradient, _present(op, name, blank))
    body = [f"{gradient} = {blank}" for gradient, blank in made.items()]
    return function("fake_backward", op.registered_backward_arguments, [*body, f"return {', '.join(op.made)}"])


def _made(op: Declaration) -> list[tuple[str, str]]:
    """The tensors whose gradients the backward makes, each with its gradient."""
    return [(name, gradient) for name, gradient in op.gradients.items() if gradient in op.made]


def _present(op: Declaration, name: str, gradient: str) -> str:
    """A gradient as the result of a registered op, which cannot be None: empty if it is missing or not needed."""
    absent = f"{op.slopes[0]}.new_empty(0)"
    if op.apart:
        return f"{gradient} if {_need(op, name)} else {absent}"
    return f"{absent} if {name} is None else {gradient}" if name in op.optional else gradient


def _gathered(op: Declaration, gradients: Iterable[str]) -> str:
    """Gradients, separated by commas; in brackets if they are long expressions, so that lines can be broken."""
    return row(list(gradients)) if op.apart else ", ".join(gradients)


def _need(op: Declaration, name: str) -> str:
    """Whether an argument needs a gradient, by ``needs``."""
    return f"needs[{op.arguments.index(name)}]"


def run(op: Declaration) -> str:
    """``run(*arguments)``: the registered op on real tensors."""
    given, shown = ", ".join(op.arguments), ", ".join(op.shown)
    found = shown if op.strided else ", ".join(f"{name}.contiguous()" for name in op.shown)
    rest = f", *rest({given})" if op.kept else ""
    by_torch = [f"{shown} = fallback({given})", f"return {found}{rest}"]
    launched = block("try:", [f"return launch(plans, {given})"])
    body = [
        f"plans = plans_of(False, {given})",
        *block("if plans is not None:", [*launched, *_where_refused("FORWARD", [])]),
        *by_torch,
    ]
    return function("run", op.arguments, body)


def run_backward(op: Declaration) -> str:
    """``run_backward(*slopes, *saved, *scalars)``: the registered backward on real tensors.

    It computes all gradients, or, if they are apart, those that the last argument requests. Results of a registered op
    are never None, and each has its own memory.
    """
    given, made = ", ".join(op.backward_arguments), ", ".join(op.made)
    like = ", ".join(op.stand_ins.get(name, name) for name in op.arguments)
    graded = row([_need(op, name) for name in op.apart]) if op.apart else "True"
    needs = "needs" if op.apart else row(["True"] * len(op.arguments))
    results: dict[str, str] = {}
    for name, gradient in _made(op):
        own = f"{gradient}.clone()" if name in op.sums and len(op.sums) > 1 else gradient
        results.setdefault(gradient, _present(op, name, own))
    launched = [f"{made} = launch_backward(plans, {needs}, {given})"]
    if op.backward is not None:
        launched = [*block("try:", launched), *_where_refused("BACKWARD", _counted_backward(op, given))]
    body = [
        f"plans = plans_of({graded}, {like})",
        *block("if plans is None:", _counted_backward(op, given)),
        *block("else:", launched),
        f"return {_gathered(op, results.values())}",
    ]
    return function("run_backward", op.registered_backward_arguments, body)


def _counted_backward(op: Declaration, given: str) -> Lines:
    """The gradients of the formula, counted as a fallback if the op has a backward kernel."""
    counted = ["count_fallback(BACKWARD)"] if op.backward is not None else []
    return [*counted, f"{', '.join(op.made)} = fallback_backward({given})"]


def save(op: Declaration) -> str:
    """``save(ctx, inputs, output)``: what the registered backward reads."""
    body = [
        f"{_unpacked(op.arguments)} = inputs",
        *([f"{', '.join(op.results)} = output"] if any(name in op.results for name in op.saved) else []),
        *_remembered(op),
        f"ctx.scalars = {row(op.scalars) if op.scalars else '()'}",
    ]
    return function("save", ("ctx", "inputs", "output"), body)


def derive(op: Declaration) -> str:
    """``derive(ctx, *slopes)``: the registered op's gradient; kept results have none."""
    given = ", ".join((*op.slopes, *op.saved, "*ctx.scalars", *(["needs"] if op.apart else [])))
    gradients = {**dict.fromkeys(op.arguments, "None"), **op.gradients}
    if op.apart:
        gradients |= {name: f"{made} if {_need(op, name)} else None" for name, made in op.gradients.items()}
    else:
        absent = op.optional & op.gradients.keys()
        gradients |= {name: f"None if {name} is None else {gradients[name]}" for name in absent}
    body = [
        *_recalled(op),
        *([f"needs = list(ctx.needs_input_grad[:{len(op.arguments)}])"] if op.apart else []),
        f"{', '.join(op.made)} = registered_backward({given})",
        f"return {_gathered(op, gradients.values())}",
    ]
    return function("derive", ("ctx", *(f"d{name}" for name in op.results)), body)
