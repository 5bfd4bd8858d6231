"""Bit classes as text: the digests of rows that candidates were given, each with the number of keys that it saw.

A class of kernels whose rows see nothing of each other is one digest: ``3f2a…``. That of a causal attention has one for
each number of keys that its sizes reach: ``16:3f2a… 128:09bc…``. Two classes agree if they have the same digest for
each number that both have. The empty text is no class: a row's bits depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def text_of(digests: Iterable[Mapping[int, str]]) -> str:
    """Return the class of several findings, each with digests by number of keys (0: none); empty if they differ."""
    joined: dict[int, str] = {}
    for found in digests:
        if any(joined.setdefault(keys, digest) != digest for keys, digest in found.items()):
            return ""
    return " ".join(f"{keys}:{digest}" if keys else digest for keys, digest in sorted(joined.items()))


def agree(one: str, other: str) -> bool:
    """Return whether two classes, neither of them empty, have the same digests where both have one."""
    first, second = _digests(one), _digests(other)
    return all(second.get(keys, digest) == digest for keys, digest in first.items())


def joined(one: str, other: str) -> str:
    """Return the class that has the digests of both of two classes that agree."""
    return text_of([_digests(one), _digests(other)])


def _digests(text: str) -> dict[int, str]:
    parts = (part.rpartition(":") for part in text.split())
    return {int(keys or 0): digest for keys, _, digest in parts}
