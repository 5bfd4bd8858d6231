"""The table of all patches: tilekern's own, then those that people register; and choosing from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilekern.errors import InputError
from tilekern.patch import qwen3
from tilekern.patch.table import Patch

_BUILT_IN: tuple[Patch, ...] = qwen3.PATCHES
_registered: list[Patch] = []


def patches() -> tuple[Patch, ...]:
    """Every patch, in the order in which they are applied."""
    return (*_BUILT_IN, *_registered)


def register_patch(patch: Patch) -> None:
    """Add a patch of one's own to the table; ``apply`` and ``apply_to_model`` use it from then on.

    Registering the same patch again does nothing. Its digests come from :func:`tilekern.patch.digest_of`, or from
    ``python -m tilekern.patch``::

        from transformers.models.llama import modeling_llama

        tilekern.register_patch(
            Patch(
                op="rms_norm",
                model_type="llama",
                module="transformers.models.llama.modeling_llama",
                attribute="LlamaRMSNorm.forward",
                replacement=replacements.rms_norm,
                digests=(digest_of(modeling_llama.LlamaRMSNorm.forward),),
            )
        )

    Raises:
        InputError: the op's name cannot be a keyword argument, no digest is given, or another patch of the same family
            has the same target.
    """
    if not patch.op.isidentifier():
        raise InputError(f"register_patch: op must be a name such as rms_norm, got {patch.op!r}")
    if not patch.digests:
        raise InputError(f"register_patch: {patch.target} needs at least one digest; tilekern.patch.digest_of gives it")
    if patch in patches():
        return
    for other in patches():
        if (other.model_type, other.target) == (patch.model_type, patch.target):
            raise InputError(f"register_patch: {patch.target} already has a patch, of the op {other.op}")
    _registered.append(patch)


def known_ops() -> list[str]:
    """The ops of the table, each once, in its order."""
    return list(dict.fromkeys(patch.op for patch in patches()))


def check_ops(names: Iterable[str]) -> None:
    """Raise unless every name is an op of the table.

    Raises:
        InputError: one is not.
    """
    for name in names:
        if name not in known_ops():
            raise InputError(f"unknown op {name!r}; known: {', '.join(known_ops())}")


def chosen(switches: Mapping[str, bool], model_type: str | None) -> list[Patch]:
    """The patches whose op is not switched off, of one family or of all.

    Raises:
        InputError: a switch names an unknown op, or the family is unknown.
    """
    check_ops(switches)
    families = list(dict.fromkeys(patch.model_type for patch in patches()))
    if model_type is not None and model_type not in families:
        raise InputError(f"unknown model type {model_type!r}; known: {', '.join(families)}")
    return [p for p in patches() if switches.get(p.op, True) and model_type in (None, p.model_type)]
