"""The signatures in reference.md, made from the code.

``python docs/signatures.py`` writes them into the page; with ``--check`` it compares, and fails if they differ.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tilekern
from tilekern import ops

PAGE = Path(__file__).with_name("reference.md")
# Between these lines of the page stand the signatures of a group.
_PLACE = "<!-- signatures of {}: `python docs/signatures.py` writes them -->\n"
_END = "<!-- signatures end -->\n"
_BLOCK = "\n<!-- test: not here, signatures -->\n```python\n{}\n```\n\n"
_WIDTH = 100
_QUOTES = str.maketrans("'", '"')


def signature(name: str, called: Callable[..., Any]) -> str:
    """Return the line or lines of a function's or a class's signature, in the form of its definition."""
    kind = "class" if inspect.isclass(called) else "def"
    if inspect.isclass(called) and called.__init__.__module__.startswith("torch."):
        return f"class {name}(...)  # the arguments of torch.nn.{called.__bases__[0].__name__}"
    found = inspect.signature(called)
    parts, is_keyword_only = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            parts.append("*")
        # What follows *names is given by name alone, without another star.
        is_keyword_only |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(_parameter(parameter))
    result = "" if kind == "class" else f" -> {_type(found.return_annotation)}"
    line = f"{kind} {name}({', '.join(parts)}){result}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{kind} {name}(", *_filled(parts), f"){result}"])


def _filled(parts: Iterable[str]) -> list[str]:
    """Lines of parameters, none of which is broken in two."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) + 6 > _WIDTH:
            lines.append("")
        lines[-1] += f" {part}," if lines[-1] else f"{part},"
    return [f"    {line}" for line in lines]


def _parameter(parameter: inspect.Parameter) -> str:
    text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    return f"{text} = {repr(parameter.default).translate(_QUOTES)}"


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\btorch\.Tensor\b", "Tensor", text)


def groups() -> dict[str, str]:
    """Return the signatures of each group of public names, by its name in the page."""
    public = [name for name in tilekern.__all__ if callable(getattr(tilekern, name))]
    classes = [name for name in ops.__all__ if inspect.isclass(getattr(ops, name))]
    functions = [name for name in ops.__all__ if name not in classes]
    return {
        "tilekern": _signatures(tilekern, public),
        "tilekern.ops": _signatures(ops, functions),
        "module classes": _signatures(ops, classes),
    }


def _signatures(module: Any, names: Iterable[str]) -> str:
    return "\n".join(signature(name, getattr(module, name)) for name in sorted(names))


def with_signatures(text: str) -> str:
    """Return the page with the signatures of today.

    Raises:
        ValueError: the lines between which a group belongs are missing.
    """
    for name, signatures in groups().items():
        begin = _PLACE.format(name)
        head, begins, rest = text.partition(begin)
        _, ends, tail = rest.partition(_END)
        if not (begins and ends):
            raise ValueError(f"{PAGE.name} has no place for the signatures of {name}; add the line {begin}and {_END}")
        text = head + begin + _BLOCK.format(signatures) + _END + tail
    return text


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    new = with_signatures(old)
    if sys.argv[1:] == ["--check"]:
        sys.exit("reference.md has other signatures than the code; run python docs/signatures.py" if new != old else 0)
    PAGE.write_text(new, encoding="utf-8")
