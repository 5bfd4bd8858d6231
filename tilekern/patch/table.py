"""A patch: a row that names a function of a model family and its replacement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Norm:
    """The form of a norm.

    Attributes:
        eps: attribute of the number added to the mean square.
        offset, casting_mode: as in :func:`tilekern.ops.rms_norm`.
        scaled: whether it multiplies by its ``weight``: True, False, or the name of an attribute with this flag;
            a missing one is True.
    """

    eps: str = "variance_epsilon"
    offset: float = 0.0
    casting_mode: str = "llama"
    scaled: bool | str = True


PLAIN = Norm()


@dataclass(frozen=True)
class Patch:
    """A function of a model family, and its replacement.

    Attributes:
        op: the name by which users switch it on and off, for example ``rms_norm``. A stand-in for several ops, used if
            all of them are on, has their names joined by ``+``.
        model_type: the family's ``model_type``, as in a configuration.
        module: dotted name of the module that holds the function.
        attribute: the function's path inside the module: ``Class.method``, or the name of a plain function; empty if
            no code of the module has a known form.
        replacement: called with the original function; returns the stand-in, with the same signature.
        digests: digests (:func:`tilekern.patch.digest_of`) of every version of the function that the replacement
            equals; the installed one must be among them.
        relies_on: paths of further functions in the module that must be unchanged, each with its digests.
        callers: for a plain function, the ``Class.method`` paths that call it by its global name. ``apply_to_model``
            replaces these, so that other models keep the function. Empty: only all models can be patched.
        covers: ops whose stand-ins are dropped if they and this patch want the same method of one model.
        takes_in: ops whose stand-ins, for plain functions that the method calls, are passed to the replacement by name.
        besides: further ops that must be on, and whose own stand-ins it needs not, as it does their work.
        releases: the transformers releases whose sources were compared, for messages.
    """

    op: str
    model_type: str
    module: str
    attribute: str
    replacement: Callable[..., Callable[..., Any]]
    digests: tuple[str, ...]
    relies_on: tuple[tuple[str, tuple[str, ...]], ...] = ()
    callers: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    takes_in: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()
    releases: str = ""

    @property
    def ops(self) -> tuple[str, ...]:
        """The op, or the ops of a stand-in that serves several."""
        return ops_in(self.op)

    @property
    def asked(self) -> frozenset[str]:
        """The ops that must be on."""
        return frozenset((*self.ops, *self.besides))

    @property
    def target(self) -> str:
        """The full dotted path of the replaced function."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module


def ops_in(text: str) -> tuple[str, ...]:
    """Return the op names in the op of a patch."""
    return tuple(text.split("+"))


def chosen(rows: list[Patch], ops: Collection[str]) -> list[Patch]:
    """Return the patches whose ops are all wanted; per target, the one that serves most."""
    on = [patch for patch in rows if patch.asked.issubset(ops)]
    most: dict[str, int] = {}
    for patch in on:
        most[patch.target] = max(len(patch.asked), most.get(patch.target, 0))
    return [patch for patch in on if len(patch.asked) == most[patch.target]]
