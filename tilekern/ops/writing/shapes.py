"""Expressions for shapes and dtypes of an op's tensors, and building blocks of the text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from tilekern.ops.declaration import Declaration
from tilekern.spec import Array, size_of

Lines = list[str]
_WIDTH = 112
# A line of names that are returned or assigned to, without brackets.
_BARE = re.compile(r"^(\s*(?:return )?)([\w, ]+?)( = [\w.]+)?$")


def function(name: str, arguments: Iterable[str], body: Lines) -> str:
    """The text of a function."""
    lines = [f"def {name}({', '.join(arguments)}):", *(f"    {line}" for line in body)]
    return "\n".join(short for line in lines for short in _broken(line)) + "\n"


def _broken(line: str) -> Lines:
    """Break a line that is too long inside its last bracket; bare names get brackets, lines with quotes are kept."""
    if len(line) <= _WIDTH or '"' in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    line = _BARE.sub(r"\1(\2)\3", line)
    end = line.rindex(")") if not line.startswith(f"{indent}if ") else len(line) - 1
    start = _opening(line, end) if line[end] == ")" else len(indent) + 2
    head, inside, tail = line[: start + 1], line[start + 1 : end], line[end:]
    if line[end] != ")":
        head, tail = f"{head}(", f"){tail}"
    packed = textwrap.wrap(inside, _WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return [head, *(f"{indent}    {part}" for part in packed), f"{indent}{tail}"]


def _opening(line: str, end: int) -> int:
    """Return the position of the bracket that closes at ``end``."""
    depth = 0
    for place in range(end, -1, -1):
        depth += (line[place] == ")") - (line[place] == "(")
        if not depth:
            return place
    raise ValueError(line)


def block(head: str, body: Lines) -> Lines:
    """A compound statement."""
    return [head, *(f"    {line}" for line in body)]


def either(conditions: Sequence[str]) -> str:
    """The disjunction of conditions, as an operand."""
    return conditions[0] if len(conditions) == 1 else f"({' or '.join(conditions)})"


def row(names: Sequence[str]) -> str:
    """Names as a tuple."""
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def leads(array: Array) -> bool:
    """Whether the array's rows are all leading dimensions of a tensor."""
    return array.shape[:1] == ("rows",)


def leader(op: Declaration) -> Array:
    """The first tensor with rows."""
    return next(array for array in op.inputs.values() if leads(array))


def leading(op: Declaration) -> str:
    """The leading dimensions of the first tensor with rows."""
    return f"{leader(op).name}.shape[:{1 - len(leader(op).shape)}]"


def axis(array: Array, number: int) -> str:
    """The size of an axis, counted from the end if leading dimensions are rows."""
    return f"{array.name}.shape[{number - len(array.shape) if leads(array) else number}]"


def is_plain(size: str) -> bool:
    """Whether a size of an array is a plain dimension, which equals an axis."""
    return size != "rows" and size_of(size) == (size, 1, 1)


def sized(size: str, values: Mapping[str, str]) -> str:
    """A size of an array as an expression, for expressions of dimensions."""
    name, times, by = size_of(size)
    return f"{f'{times} * ' if times > 1 else ''}{values[name]}{f' // {by}' if by > 1 else ''}"


def present(op: Declaration) -> tuple[Array, ...]:
    """The tensors that are never None."""
    return tuple(array for name, array in op.inputs.items() if name not in op.optional)


def axes(op: Declaration) -> dict[str, str]:
    """For each dimension the axis of a tensor with that size."""
    found: dict[str, str] = {}
    for array in present(op):
        for number, size in enumerate(array.shape):
            if is_plain(size):
                found.setdefault(size, axis(array, number))
    return found


def values(op: Declaration) -> dict[str, str]:
    """Each dimension's value as an expression; an axis is a variable with the dimension's name."""
    found = dict(op.flags) | {name: name for name in axes(op)}
    for array in present(op):
        found.setdefault(array.dtype, f"{array.name}.dtype")
        if leads(array):
            divided = "".join(f" // {sized(size, found)}" for size in array.shape[1:])
            found.setdefault("rows", f"{array.name}.numel(){divided}")
    return found


def dtype_of(op: Declaration, array: Array) -> str:
    """The dtype of an array as an expression of the tensors' dtypes."""
    said = dict(op.flags) | {tensor.dtype: f"{tensor.name}.dtype" for tensor in reversed(present(op))}
    parts = [said.get(part, f"torch.{part}") for part in array.dtype.split("*")]
    return parts[0] if len(parts) == 1 else f"promoted({', '.join(parts)})"


def twin(array: Array, others: Iterable[Array]) -> Array | None:
    """The first of some tensors with an array's shape, preferably with its dtype."""
    alike = [other for other in others if other.shape == array.shape]
    return next((other for other in alike if other.dtype == array.dtype), alike[0] if alike else None)
