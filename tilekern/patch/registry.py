"""All patches: those of families, found by their forms, then registered ones; and checks of a choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tilekern.errors import InputError, did_you_mean
from tilekern.patch import adapters
from tilekern.patch.families import FAMILIES, family_of, module_of
from tilekern.patch.matching import patches_in, path_of
from tilekern.patch.table import Patch
from tilekern.runtime.switches import ADAMW, ATTENTION, EXPERTS, FORMS, FP8, GRAPHS, OPS

_registered: list[Patch] = []


def patches(model_type: str | None = None) -> tuple[Patch, ...]:
    """Return every patch of a tested family or of all, in the order of application; modules are only read.

    For another ``model_type``, or the name of a module, return what ``forms="any"`` patches in it.
    """
    families = [x for x in FAMILIES.values() if model_type in (None, x.model_type) and x.is_here]
    other = home_of(model_type) if model_type and not families else ""
    found = (*(patch for family in families for patch in family.patches()), *patches_for(other, "any"))
    return (*found, *registered(model_type))


def home_of(name: str) -> str:
    """Return the installed module of a family of transformers, or the module of this name; empty without either."""
    return next((module for module in (module_of(name), name) if path_of(module)), "")


def patches_for(module: str, forms: str = "tested") -> tuple[Patch, ...]:
    """Return the patches of the classes in a module; untested families only with ``forms="any"``.

    The module of PEFT's layers has its own.
    """
    family = family_of(module)
    if family is not None:
        return family.patches()
    if module == adapters.HOME:
        return (adapters.PATCH,)
    # The folder of a transformers model is named after the family; other code goes by its module name.
    return patches_in(module, module.split(".")[-2 if "." in module else -1]) if forms == "any" else ()


def registered(model_type: str | None = None) -> tuple[Patch, ...]:
    """Return the patches that users registered, of a family or of all."""
    return tuple(patch for patch in _registered if model_type in (None, patch.model_type))


def register_patch(patch: Patch) -> None:
    """Add your own patch to the table; ``apply`` and ``apply_to_model`` use it from then on.

    Registering the same patch again does nothing. Its digests come from :func:`tilekern.patch.digest_of`, or from
    ``python -m tilekern.patch --json``::

        from mine import modeling_mine

        tilekern.register_patch(
            Patch(
                op="rms_norm",
                model_type="mine",
                module="mine.modeling_mine",
                attribute="MyRMSNorm.forward",
                replacement=replacements.rms_norm,
                digests=(digest_of(modeling_mine.MyRMSNorm.forward),),
            )
        )

    Raises:
        InputError: the op's name cannot be a keyword argument, the patch has no digest, or another patch of the same
            family has the same target.
    """
    if not patch.op.isidentifier():
        raise InputError(f"register_patch: op must be a name such as rms_norm, got {patch.op!r}")
    if not patch.digests:
        raise InputError(f"register_patch: {patch.target} needs at least one digest; tilekern.patch.digest_of gives it")
    if patch in _registered:
        return
    for other in (*_registered, *patches_for(patch.module)):
        if (other.model_type, other.target) == (patch.model_type, patch.target):
            raise InputError(f"register_patch: {patch.target} already has a patch, of the op {other.op}")
    _registered.append(patch)


def known_ops() -> list[str]:
    """Return the ops of the table, each once, in its order."""
    return list(dict.fromkeys((*OPS, EXPERTS, *(patch.op for patch in _registered))))


def known_families() -> list[str]:
    """Return the model types that have patches: tested families, and families with registered patches."""
    return list(dict.fromkeys((*FAMILIES, *(patch.model_type for patch in _registered))))


def check_ops(names: Iterable[str]) -> None:
    """Raise unless every name is an op of the table.

    Raises:
        InputError: one is not.
    """
    for name in names:
        if name not in known_ops():
            hint = _ELSEWHERE.get(name, "")
            raise InputError(f"unknown op {name!r}{hint}; known: {', '.join(known_ops())}")


# Ops that only `apply` switches, and the alternative for one model.
_ELSEWHERE = {
    ATTENTION: ' of one model, which model.set_attn_implementation("tilekern") chooses',
    ADAMW: " of one model, for which tilekern.AdamW is made",
    GRAPHS: " of one model, which tilekern.graphed(model) captures",
    FP8: " of one model, which tilekern.fp8.convert(model) switches",
}


def check_switches(switches: Mapping[str, object]) -> None:
    """Raise unless every switch is True or False.

    Raises:
        InputError: a value is neither; if it is the name of an op, the message says how to switch that op.
    """
    for name, value in switches.items():
        if isinstance(value, bool):
            continue
        hint = ""
        if isinstance(value, str) and value in known_ops():
            hint = (
                f"; all ops are on unless they are given as False, {value}=False for example; for {value} alone: "
                f'tilekern.apply(**tilekern.runtime.switches.switches_of("{value}"))'
            )
        elif hasattr(value, "modules"):
            hint = "; for one model there is tilekern.apply_to_model(model)"
        raise InputError(f"the switch {name} must be True or False, got {value!r:.60}{hint}")


def check_choice(model_type: str | None, forms: str) -> None:
    """Raise unless the family (if any is named) and the kind of forms are known.

    Raises:
        InputError: one is not.
    """
    if model_type is not None and model_type not in known_families():
        meant = did_you_mean(model_type, known_families())
        raise InputError(f"unknown model type {model_type!r}; known: {', '.join(known_families())}{meant}")
    if forms not in FORMS:
        raise InputError(f"forms must be one of {', '.join(FORMS)}, got {forms!r}")
