"""An op from one declaration: the specs of its directions, and a function whose body is the op in torch's own steps.

The function's signature gives the schema. Its body runs where no kernel does, and on the CPU. The arrays of the specs
give the checks, the sizes that plans are found by, the launches, the results and what is saved for the backward.
All of it is written out as a person would for this op alone, since each call of a helper and each loop over arguments
would show in the host's time. It stands in ``_generated/``, where tracebacks and break points find it, and
``python -m tilekern.ops.writing`` makes it from the declarations.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from tilekern.ops import registration
from tilekern.ops.declaration import Declaration, Parts
from tilekern.ops.names import names_of
from tilekern.spec import Array, KernelSpec

F = TypeVar("F", bound=Callable[..., Any])
# Every op that was declared, by its name.
DECLARED: dict[str, Declaration] = {}
GENERATED = Path(__file__).with_name("_generated")


def operation(
    forward: KernelSpec, backward: KernelSpec | None = None, *, name: str | None = None, sums: tuple[str, ...] = (),
    ungraded: tuple[str, ...] = (), gradients: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None, backward_flags: Mapping[str, str] | None = None,
    key: tuple[str, ...] = (), apart: tuple[str, ...] = (), strided: bool = False, arrays: tuple[Array, ...] = (),
    kept: tuple[str, ...] = (), reads: tuple[str, ...] = (), options: tuple[str, ...] = (), unless: str = "",
    constants: Mapping[str, float] | None = None, gathered: int | None = None,
    **parts: Callable[..., Any],
) -> Callable[[F], F]:  # fmt: skip
    """Make the op of a function, which gives its signature, its documentation and its formula.

    Each array that the forward reads, and each of its scalars, is an argument of that name; its outputs are the
    results. The backward reads arguments, results, and the results' gradients under the names ``d<result>``; it writes
    ``d<argument>``. Where an array's shape begins with ``rows``, that stands for all leading dimensions.

    Args:
        forward, backward: the specs, with their arrays unless the launches are given. Without a backward the gradients
            are torch's.
        name: of the op; the function's, where None.
        sums: the arguments, vectors, whose gradients the backward leaves as ``partial`` [blocks, ...], one after the
            other, for ``column_sum`` to add up. Nothing is added up where none of them needs a gradient.
        ungraded: the tensors that get no gradient; where one needs it, the formula runs.
        gradients: names of gradients that are not ``d<argument>``, as where two arguments have one, or where that of a
            result is one as it is.
        flags: the values of the specs' flags, as expressions of the scalars and of which optional tensors are None;
            ``backward_flags`` has those that differ in the backward.
        key: further expressions that plans depend on.
        apart: the arguments whose gradients have plans of their own; ``graded`` says for each whether it needs one.
            The registered backward of such an op makes no gradient that nobody asks for.
        strided: results have the strides of the tensors of their shape, where others are contiguous.
        arrays: the tensors and the results, where the forward's arrays are others.
        kept: the last results, if they are for the backward alone. The formula does not give them.
        reads: the arguments and results that the backward reads, where its arrays do not say.
        options: the last arguments of the function, with defaults, that the op itself does not have.
        unless: an expression of the arguments and options; where it holds, ``otherwise`` is called in the op's place.
            A tensor that it asks for (``weight is None``) is one that the op itself always has.
        constants: the number in each element of the row that stands for a vector, by the vectors that may be None.
        gathered: makes the op take DTensors, of which those of the first one's shape may be sharded: how many of the
            last dimensions each rank must have whole, as :func:`tilekern.ops.dtensors.by_shards` has it.
        parts: functions in the place of those that would be written (:class:`tilekern.ops.declaration.Parts`).

    Raises:
        TypeError: the declaration does not fit together.
    """

    def declared(formula: F) -> F:
        op = Declaration(
            formula=formula, name=name or formula.__name__, forward=forward, backward=backward, sums=sums,
            ungraded=ungraded, named_gradients=dict(gradients or {}), flags=dict(flags or {}),
            backward_flags=dict(backward_flags or {}), key=key, apart=apart, strided=strided, arrays=arrays,
            kept=kept, reads=reads, options=options, unless=unless, constants=dict(constants or {}), gathered=gathered,
            parts=Parts(**parts),
        )  # fmt: skip
        public: F = _written(op)
        DECLARED[op.name] = op
        return public

    return declared


def _written(op: Declaration) -> Any:
    """The op's public function, registered with torch."""
    names = names_of(op)
    exec(_code_of(op), names)
    names["apply"] = names[op.title].apply
    names["registered"] = registration.register(op.schema, names["run"], names["fake"])
    backward = registration.register(op.backward_schema, names["run_backward"], names["fake_backward"])
    names["registered_backward"] = backward
    registration.register_gradient(names["registered"], names["derive"], names["save"])
    return _dressed(names[op.name], op, names)


def generated_file(op: Declaration) -> Path | None:
    """Where the code of one of tilekern's own ops is checked in; None for an op of somebody else."""
    folder = op.formula.__module__.rpartition(".")[0]
    return GENERATED / f"{op.name}.py" if folder == __package__ else None


def _code_of(op: Declaration) -> CodeType:
    path = generated_file(op)
    if path is not None and path.exists():
        name = f"{__package__}.{GENERATED.name}.{op.name}"
        code = SourceFileLoader(name, str(path)).get_code(name)  # which keeps bytecode as an import does
        assert code is not None
        return code
    from tilekern.ops.writing import text_of

    text, place = text_of(op), f"<tilekern op {op.name}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    return compile(text, place, "exec")


def _dressed(public: Any, op: Declaration, names: Mapping[str, Any]) -> Any:
    """A function with the defaults, the documentation and the name of the formula, and with what it is made of."""
    defaults = [p.default for p in op.signature.parameters.values() if p.default is not inspect.Parameter.empty]
    public.__defaults__ = tuple(defaults) or None
    public.__annotations__, public.__doc__ = op.formula.__annotations__, op.formula.__doc__
    public.__module__, public.__qualname__ = op.formula.__module__, op.formula.__qualname__
    public.functions = names
    return public
