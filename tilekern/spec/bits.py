"""Bit classes as text: the digests of rows that candidates were given, each with what it saw.

A class of kernels whose rows see nothing of each other is one digest: ``3f2a…``. That of a causal attention has one for
each number of keys that its sizes reach: ``16:3f2a… 128:09bc… 1024w:77d0…``, with a ``w`` where a window hides some of
them. Two classes agree if they have the same digest for each sight that both have. The empty text is no class: a row's
bits depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilekern.spec.kernel_spec import KernelSpec
from tilekern.spec.points import Problem

# Flags that say where rows lie and which keys they see, and do not make another row of it.
_SIGHT = ("packed", "windowed")


def sizes_of_class(spec: KernelSpec, problem: Problem) -> tuple[Any, ...]:
    """Return what problems have in common whose kernels should be of one class."""
    return (spec.name, *(problem[d.name] for d in spec.dimensions if d.kind != "bucketed" and d.name not in _SIGHT))


def text_of(digests: Iterable[Mapping[str, str]]) -> str:
    """Return the class of several findings, each with digests by sight ("": none); empty if they differ."""
    joined: dict[str, str] = {}
    for found in digests:
        if any(joined.setdefault(sight, digest) != digest for sight, digest in found.items()):
            return ""
    return " ".join(f"{sight}:{joined[sight]}" if sight else joined[sight] for sight in sorted(joined, key=_order))


def _order(sight: str) -> tuple[int, str]:
    return int(sight.rstrip("w") or 0), sight


def agree(one: str, other: str) -> bool:
    """Return whether two classes, neither of them empty, have the same digests where both have one."""
    first, second = _digests(one), _digests(other)
    return all(second.get(sight, digest) == digest for sight, digest in first.items())


def joined(one: str, other: str) -> str:
    """Return the class that has the digests of both of two classes that agree."""
    return text_of([_digests(one), _digests(other)])


def _digests(text: str) -> dict[str, str]:
    parts = (part.rpartition(":") for part in text.split())
    return {sight: digest for sight, _, digest in parts}
