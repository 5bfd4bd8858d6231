"""Applying patches, putting everything back, and saying what is patched."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from tilekern.errors import InputError
from tilekern.patch import attention
from tilekern.patch.installed import Found, examine, transformers_version
from tilekern.patch.instances import patch_modules
from tilekern.patch.ledger import Ledger
from tilekern.patch.registry import check_ops, chosen, known_ops, patches
from tilekern.patch.table import Patch
from tilekern.runtime import dispatch
from tilekern.runtime.ranks import comparing as ranks
from tilekern.warning import warn

if TYPE_CHECKING:
    import torch

_lock = threading.RLock()
_ledger = Ledger()


def apply(
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    *,
    fused_add_rms_norm: bool = True,
    qk_norm_rope: bool = True,
    model_type: str | None = None,
    on_miss: str | None = None,
    **ops: bool,
) -> list[str]:
    """Patch the supported model families, so that all their models, old and new, run tilekern's kernels.

    It makes ``attn_implementation="tilekern"`` known to transformers as well; which attention a model runs stays its
    configuration's choice. Call it before the model is made; it works on models that exist as well, except where a
    hook (accelerate's, for example) already holds their old methods. Applying twice does no harm. A target that is
    not the code that its patch was made for is left alone, with a warning.

    In a job of several ranks every rank must call it: they agree here on the records that all of them run, or when
    torch.distributed comes up later (:mod:`tilekern.runtime.ranks.comparing`).

    Args:
        rms_norm, swiglu, rope, fused_linear_cross_entropy, fused_add_rms_norm, qk_norm_rope: which ops to patch.
            With the fused loss a model in training gives a loss and no logits.
        model_type: one family only, for example ``qwen3``; None means all.
        on_miss: what a problem that no cache holds does from now on: ``compile``, ``fallback`` or ``error``.
        ops: further ops by name, from :func:`register_patch`; they too are on unless given as False.

    Returns:
        The ops that are patched now, in the table's order.

    Raises:
        InputError: an op, model type or miss policy that is not known.
        RanksDiffer: the ranks of the job could not agree.
    """
    rows = chosen(
        {"rms_norm": rms_norm, "swiglu": swiglu, "rope": rope, "fused_add_rms_norm": fused_add_rms_norm}
        | {"qk_norm_rope": qk_norm_rope, "fused_linear_cross_entropy": fused_linear_cross_entropy, **ops},
        model_type,
    )
    if on_miss is not None:
        dispatch.set_miss_policy(on_miss)
    attention.register()
    done = set()
    with _lock:
        for patch in rows:
            found = _apply(patch)
            if found.usable:
                done.add(patch.op)
            else:
                _warn(found)
    ranks.agree_when_up()
    return _in_order(done)


def _apply(patch: Patch) -> Found:
    """Apply a patch unless it is, or its target is another code than it knows; what the target was like before."""
    found = examine(patch, _ledger)
    if found.status == "available":
        _ledger.put(patch.op, patch.target, found.owner, found.name, patch.replacement(found.original))
    return found


@contextlib.contextmanager
def applied(model: torch.nn.Module, ops: Collection[str]) -> Iterator[None]:
    """Patch the families that a model's modules are of with some ops, for a while; what was patched before stays so.

    Other ranks have nothing to agree on.

    Raises:
        InputError: an unknown op.
    """
    check_ops(ops)
    homes = {type(module).__module__ for module in model.modules()}
    with _lock:
        tried = [_apply(patch) for patch in patches() if patch.op in ops and patch.module in homes]
    try:
        for found in tried:
            if not found.usable:
                _warn(found)
        yield
    finally:
        with _lock:
            for found in reversed(tried):
                touch = _ledger.held(found.owner, found.name) if found.status == "available" else None
                if touch is not None:
                    _ledger.undo_one(touch)


def apply_to_model(
    model: torch.nn.Module,
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    *,
    fused_add_rms_norm: bool = True,
    qk_norm_rope: bool = True,
    model_type: str | None = None,
    on_miss: str | None = None,
    **ops: bool,
) -> list[str]:
    """Patch one model that exists and no other; arguments, result and warnings as of :func:`apply`.

    The model's modules get methods of their own. Wrappers (PEFT, torch.compile, DistributedDataParallel) are looked
    through, since their modules contain the model's. A module that has its own method already, from a hook or from
    another patch, is left alone with a warning. ``rope`` is left out of models whose attention ``qk_norm_rope``
    serves.

    A deep copy made afterwards is patched too; :func:`reset` knows of it once it was given here as well. A pickle is
    not patched, and needs tilekern where it is loaded. A shallow copy shares the methods, and they work on the modules
    of the model it was copied from: so do the replicas of ``torch.nn.DataParallel``, for which there is :func:`apply`.

    Raises:
        InputError: as :func:`apply`, and where nothing in the model is of a supported family.
    """
    rows = chosen(
        {"rms_norm": rms_norm, "swiglu": swiglu, "rope": rope, "fused_add_rms_norm": fused_add_rms_norm}
        | {"qk_norm_rope": qk_norm_rope, "fused_linear_cross_entropy": fused_linear_cross_entropy, **ops},
        model_type,
    )
    homes = {type(module).__module__ for module in model.modules()}
    if not any(patch.module in homes for patch in patches() if model_type in (None, patch.model_type)):
        kind = getattr(getattr(model, "config", None), "model_type", None)
        known = model_type or ", ".join(dict.fromkeys(patch.model_type for patch in patches()))
        raise InputError(f"{type(model).__name__} (model type {kind}) has no module of a supported family ({known})")
    if on_miss is not None:
        dispatch.set_miss_policy(on_miss)
    attention.register()
    done = set()
    with _lock:
        for module in model.modules():
            _ledger.adopt(module)
        for patch in rows:
            if patch.module not in homes:
                continue
            found = examine(patch, _ledger)
            if not found.usable:
                _warn(found)
                continue
            number, left = patch_modules(found, model, _ledger)
            if number:
                done.add(patch.op)
            if left:
                warn(f"{patch.op} is not patched everywhere: {left}")
    ranks.agree_when_up()
    return _in_order(done)


def reset(names: str | Iterable[str] | None = None) -> list[str]:
    """Put back every attribute that patches of the named ops (None: of all) have touched, models' own included.

    The miss policy stays as it is.

    Returns:
        The ops that had been patched, in the table's order.

    Raises:
        InputError: an unknown op.
    """
    if names is None:
        ranks.unarm()
    wanted = known_ops() if names is None else [names] if isinstance(names, str) else list(names)
    check_ops(wanted)
    with _lock:
        return _in_order(_ledger.undo(wanted))


def get_patched_ops() -> dict[str, list[str]]:
    """Where each op is patched now: paths, with the number of modules where single models are patched."""
    with _lock:
        places = Counter((touch.op, touch.where, touch.is_bound) for touch in _ledger)
    found: dict[str, list[str]] = {op: [] for op in _in_order({op for op, _, _ in places})}
    for (op, where, is_bound), number in places.items():
        found[op].append(f"{where} of {number} module{'s' if number > 1 else ''}" if is_bound else where)
    return found


def list_patches() -> list[Found]:
    """Every row of the table with its status on the installed transformers, which this imports."""
    with _lock:
        return [examine(patch, _ledger) for patch in patches()]


def _in_order(ops: set[str]) -> list[str]:
    return [op for op in known_ops() if op in ops]


def _warn(found: Found) -> None:
    known = f" ({found.patch.releases})" if found.patch.releases else ""
    warn(
        f"{found.patch.op} is not patched: {found.reason}, in transformers {transformers_version()}; the model's own "
        f"code runs. Install a transformers release that this tilekern knows{known} or a newer tilekern, or undo what "
        "else replaced it"
    )
