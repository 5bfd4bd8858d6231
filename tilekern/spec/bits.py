"""Bit classes as text: the digests of rows that candidates were given, each with what it saw.

A class of kernels whose rows see nothing of each other is one digest: ``3f2a…``. That of a causal attention has one for
each number of keys that its sizes reach: ``16:3f2a… 128:09bc… 1024w:77d0…``, with a ``w`` where a window hides some of
them, others of many numbers of a bucket, ``128+:…``, and of the log-sum-exps that only training needs, ``16lse:…``. Two
classes agree if they have the same digest for each sight that both have. The empty text is no class: a row's bits
depend on the rows around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilekern.spec.kernel_spec import KernelSpec
from tilekern.spec.points import Problem

# Flags that say where rows lie and which keys they see, and do not make another row of it.
_SIGHT = ("packed", "windowed")
# What may stand after a number of keys.
_MARKS = "+wlse"
# That of training serves where no kernel for decoding has its bits, and that of many rows where none for few rows has.
_ATTENTION, _DECODING = "attention_forward", "decode_attention"
_PRODUCT, _FEW_ROWS = "matmul", "skinny_linear"
_FLAGS_OF_PRODUCTS = ("a_transposed", "b_transposed", "biased", "gelu_tanh", "silu", "accumulated")


def sizes_of_class(spec: KernelSpec, problem: Problem) -> tuple[Any, ...]:
    """Return what problems have in common whose kernels should be of one class; first the name of the spec that serves
    all of them.
    """
    if spec.name in (_ATTENTION, _DECODING):
        # The query heads that share a key head are rows of one matrix; how many key heads there are changes none.
        heads, groups = (problem["group"], 1) if spec.name == _DECODING else (problem["heads"], problem["kv_heads"])
        shared = heads // groups if heads % groups == 0 else (heads, groups)
        kind = (problem[name] for name in ("head_dim", "capped", "sinks", "dtype"))
        return _ATTENTION, shared, problem.get("causal", True), *kind
    if spec.name == _FEW_ROWS and is_of_a_layer(problem):
        on = {"b_transposed"} | ({"biased"} if problem["biased"] else set())
        flags = (name in on for name in _FLAGS_OF_PRODUCTS)
        return _PRODUCT, problem["inner"], problem["columns"], *flags, problem["dtype"]
    return (spec.name, *(problem[d.name] for d in spec.dimensions if d.kind != "bucketed" and d.name not in _SIGHT))


def is_of_a_layer(problem: Problem) -> bool:
    """Return whether a problem of few rows rounds a linear layer's product before all else, or two of a gate."""
    if problem["gated"]:
        return bool(problem["rounded"] and not (problem["biased"] or problem["accumulated"]))
    return not any(problem[name] for name in ("gelu_tanh", "silu", "accumulated"))


def text_of(digests: Iterable[Mapping[str, str]]) -> str:
    """Return the class of several findings, each with digests by sight ("": none); empty if they differ, or one is."""
    joined: dict[str, str] = {}
    for found in digests:
        if any(not digest or joined.setdefault(sight, digest) != digest for sight, digest in found.items()):
            return ""
    return " ".join(f"{sight}:{joined[sight]}" if sight else joined[sight] for sight in sorted(joined, key=_order))


def _order(sight: str) -> tuple[int, str]:
    return int(sight.rstrip(_MARKS) or 0), sight


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
