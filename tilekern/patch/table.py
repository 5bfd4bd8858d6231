"""A patch: a row that names a function of a model family and its replacement."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Norm:
    """The form of a norm.

    Attributes:
        eps: the attribute that holds what is added to the mean square.
        offset, casting_mode: as those of :func:`tilekern.ops.rms_norm`.
        scaled: whether it multiplies by its ``weight``: always, never, or where its attribute of this name is true.
    """

    eps: str = "variance_epsilon"
    offset: float = 0.0
    casting_mode: str = "llama"
    scaled: bool | str = True

    def weight_of(self, module: Any) -> Any:
        """Return the weight by which a module that is written so multiplies, or None."""
        scaled = getattr(module, self.scaled) if isinstance(self.scaled, str) else self.scaled
        return module.weight if scaled else None


PLAIN = Norm()


@dataclass(frozen=True)
class Patch:
    """A function of a model family, and its replacement.

    Attributes:
        op: the name by which people switch it on and off, for example ``rms_norm``. A stand-in that serves several, for
            where all of them are on, has their names with a ``+`` between them.
        model_type: the family, as a configuration's ``model_type`` names it.
        module: dotted name of the module that holds the function.
        attribute: the function's path inside the module: ``Class.method``, or the name of a plain function; empty where
            the module has no code of a form that is known.
        replacement: called with the function that is replaced; returns the one that stands in, of the same signature.
        digests: digests (:func:`tilekern.patch.digest_of`) of every version of the function that the replacement
            equals; the installed one must be among them.
        relies_on: paths in the module of further functions that must be as they were, each with its digests.
        callers: for a plain function, the ``Class.method`` paths that call it by its global name; they are what
            ``apply_to_model`` exchanges, so that other models keep the function. Empty: all models or none.
        covers: ops whose stand-ins give way to this one where both want the same method of one model.
        takes_in: ops whose stand-ins for plain functions that the method calls its replacement is given by name.
        releases: the transformers releases whose sources were compared, for people.
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
    releases: str = ""

    @property
    def ops(self) -> tuple[str, ...]:
        """The op, or those of a stand-in that serves several."""
        return ops_in(self.op)

    @property
    def target(self) -> str:
        """The full dotted path of what is replaced."""
        return f"{self.module}.{self.attribute}" if self.attribute else self.module


def ops_in(text: str) -> tuple[str, ...]:
    """Return the ops that the op of a patch names."""
    return tuple(text.split("+"))


def chosen(rows: list[Patch], ops: Collection[str]) -> list[Patch]:
    """Return the patches whose ops are all among some; of those that have one target that which serves most."""
    on = [patch for patch in rows if set(patch.ops).issubset(ops)]
    most: dict[str, int] = {}
    for patch in on:
        most[patch.target] = max(len(patch.ops), most.get(patch.target, 0))
    return [patch for patch in on if len(patch.ops) == most[patch.target]]
