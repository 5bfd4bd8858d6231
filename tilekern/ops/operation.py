"""Make an op from one declaration: the specs of both directions, and a function that is the op in torch's own steps.

The function's signature gives the schema. Its body runs on the CPU and if there is no kernel. The arrays of the specs
determine the checks, the sizes for finding plans, the launches, the results and the tensors saved for the backward. The
code of each op is generated without helpers or loops over arguments, which would cost host time. It is checked in
(``_generated/``), so tracebacks and break points find it; ``python -m tilekern.ops.writing`` writes it.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

from tilekern.ops import registration
from tilekern.ops.declaration import Declaration, names_of
from tilekern.spec import KernelSpec

F = TypeVar("F", bound=Callable[..., Any])
# Every declared op, by name.
DECLARED: dict[str, Declaration] = {}
# The generated code of each, by name.
FUNCTIONS: dict[str, dict[str, Any]] = {}
GENERATED = Path(__file__).with_name("_generated")


def operation(forward: KernelSpec, backward: KernelSpec | None = None, **declared: Any) -> Callable[[F], F]:
    """Make an op of a function, which provides its signature, its documentation and its formula.

    Each array that the forward reads, and each of its scalars, is an argument of that name; its outputs are the
    results. The backward reads arguments, results, and the results' gradients under the names ``d<result>``; it writes
    ``d<argument>``. If an array's shape begins with ``rows``, that stands for all leading dimensions.

    Args:
        forward, backward: the specs; without a backward the gradients are the formula's.
        declared: further fields of :class:`tilekern.ops.declaration.Declaration`, which describes them.

    Raises:
        TypeError: the declaration is inconsistent.
    """

    def declare(formula: F) -> F:
        op = Declaration(formula=formula, forward=forward, backward=backward, **declared)
        public: F = _written(op)
        DECLARED[op.name] = op
        FUNCTIONS[op.name] = public.functions  # type: ignore[attr-defined]
        return public

    return declare


def _written(op: Declaration) -> Any:
    """Register the op with torch and return its public function."""
    names = names_of(op)
    exec(_code_of(op), names)
    names["registered"] = registration.register(op.schema, names["run"], names["fake"])
    if op.is_differentiable:
        names["apply"] = registration.applied(names[op.title])
        backward = registration.register(op.backward_schema, names["run_backward"], names["fake_backward"])
        registration.refuse_gradient(backward)
        names["registered_backward"] = backward
        registration.register_gradient(names["registered"], names["derive"], names["save"])
    elif op.no_gradient:
        registration.refuse_graded(names["registered"], names["refuse"])
    # The public function has the defaults, the documentation and the name of the formula.
    public = names[op.name]
    defaults = [p.default for p in op.signature.parameters.values() if p.default is not inspect.Parameter.empty]
    public.__defaults__ = tuple(defaults) or None
    public.__annotations__, public.__doc__ = op.formula.__annotations__, op.formula.__doc__
    public.__module__, public.__qualname__ = op.formula.__module__, op.formula.__qualname__
    public.functions = names
    return public


def generated_file(op: Declaration) -> Path | None:
    """Return the file with the code of one of tilekern's own ops; None for a user's op."""
    folder = op.formula.__module__.rpartition(".")[0]
    return GENERATED / f"{op.name}.py" if folder == __package__ else None


def _code_of(op: Declaration) -> CodeType:
    path = generated_file(op)
    if path is not None and path.exists():
        name = f"{__package__}.{GENERATED.name}.{op.name}"
        code = SourceFileLoader(name, str(path)).get_code(name)  # keeps bytecode, as an import does
        assert code is not None
        return code
    from tilekern.ops.writing import text_of

    text, place = text_of(op), f"<tilekern op {op.name}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    return compile(text, place, "exec")
