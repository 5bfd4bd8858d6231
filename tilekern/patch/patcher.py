"""Apply patches, undo them, and list what is patched."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from tilekern.errors import InputError
from tilekern.ops import invariance
from tilekern.patch import adapters, batching, defaults, generating, replaced, static_caches
from tilekern.patch import attention as attention_door
from tilekern.patch import comparing as ranks
from tilekern.patch import experts as experts_door
from tilekern.patch import fp8 as fp8_door
from tilekern.patch import graphs as graphs_door
from tilekern.patch.families import FAMILIES, imported, is_of_transformers, may_have_forms
from tilekern.patch.guards import require_module
from tilekern.patch.installed import Found, as_read, examine, version_of
from tilekern.patch.instances import patch_modules
from tilekern.patch.ledger import Ledger, Touch
from tilekern.patch.masking import refusal_of
from tilekern.patch.registry import (
    check_choice,
    check_ops,
    check_switches,
    home_of,
    known_families,
    known_ops,
    patches,
    patches_for,
    registered,
)
from tilekern.patch.table import Patch, chosen
from tilekern.runtime import dispatch
from tilekern.runtime.awaiting import Arrivals, is_imported
from tilekern.runtime.locks import ForkLock
from tilekern.runtime.settings import check_settings
from tilekern.runtime.switches import (
    ADAMW,
    ATTENTION,
    ATTENTIONS,
    EXPERTS,
    EXTRAS,
    FORMS,
    FP8,
    GRAPHS,
    OPS,
    format_of,
)
from tilekern.warning import warn

if TYPE_CHECKING:
    import torch

    from tilekern.spec.targets import Target

_lock = ForkLock()
_ledger = Ledger()


class _Wish(NamedTuple):
    """A request for families: the ops that are on, and whether untested families are patched too."""

    ops: frozenset[str] = frozenset()
    forms: str = "tested"


# By module of a family; None is the key for all other modules.
_wishes: dict[str | None, _Wish] = {None: _Wish()}


def apply(
    rms_norm: bool = True,
    swiglu: bool = True,
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    *,
    layer_norm: bool = True,
    mlp: bool = True,
    fused_add_rms_norm: bool = True,
    qk_norm_rope: bool = True,
    lora: bool = True,
    experts: bool = False,
    attention: bool = False,
    adamw: bool = False,
    graphs: bool = False,
    fp8: bool | str = False,
    model_type: str | None = None,
    forms: str = "tested",
    on_miss: str | None = None,
    invariant: bool | str = False,
    **ops: bool,
) -> list[str]:
    """Patch the supported model families, so that all their models, old and new, run tilekern's kernels.

    A family's code is patched when it is imported, which making a model does; unused families cost nothing. ``apply``
    also registers ``attn_implementation="tilekern"`` with transformers; the configuration of each model still chooses
    its attention. Call it before the model is made. It works on existing models as well, unless a hook (accelerate's,
    for example) already holds their old methods. Applying twice is harmless; a second call with fewer ops undoes the
    others. A target whose code is not known to its patch is left alone, with a warning.

    In a job of several ranks every rank must call it. The ranks agree on the records that all of them run, now or when
    torch.distributed comes up later (:mod:`tilekern.patch.comparing`).

    Args:
        rms_norm, swiglu, rope, fused_linear_cross_entropy, layer_norm, mlp, fused_add_rms_norm, qk_norm_rope: which
            ops to patch. ``swiglu`` is for MLPs with a gate, including gelu gates; ``mlp`` for those without one. With
            the fused loss a model in training returns a loss and no logits.
        lora: whether linear layers of PEFT and their LoRA adapters are one op.
        experts: whether models of all families that use transformers' default, grouped products, run
            ``experts_implementation="tilekern"`` instead; includes routers of known forms and their auxiliary loss (ops
            ``router`` and ``router_losses``).
        attention: whether "tilekern" becomes the default ``attn_implementation`` of models created from now on, in
            tested families whose code calls attention functions with supported arguments.
        adamw: whether ``torch.optim.AdamW(...)`` makes :class:`tilekern.AdamW` from now on; a call with ``amsgrad``,
            ``capturable`` or ``differentiable`` makes torch's, with a warning.
        graphs: whether models of transformers and PEFT replay their training steps from CUDA graphs, as after
            :func:`tilekern.graphed`.
        fp8: ``"rowwise"``, True for it, ``"blockwise"`` or ``"mxfp8"``: linear layers of the decoders of models that
            transformers makes from now on run products of 8-bit floats, as after :func:`tilekern.fp8.convert`.
        model_type: patch one family only, for example ``qwen3``, and not PEFT's layers; None means all. Attention,
            experts, the optimizer, graphs and 8-bit floats always apply to all families.
        forms: ``tested`` patches the families whose tests pass here (``python -m tilekern.patch`` lists them), ``any``
            patches all families of transformers whose code has a known form.
        on_miss: handling of problems without a record from now on: ``compile``, ``fallback`` or ``error``.
        invariant: whether the process runs kernels of one bit class from now on, as inside
            :func:`tilekern.invariant`; ``"strict"`` raises where a row may depend on others.
        ops: further ops by name, from :func:`register_patch`; they too are on unless given as False.
    Returns:
        The ops that are now patched in imported families, in the table's order. If none of the families is imported,
        those that will be patched.

    Raises:
        InputError: an op, model type, kind of forms or miss policy is unknown, a switch is neither True nor False,
            ``invariant`` has another value, or one of tilekern's environment variables has an unknown value.
        RanksDiffer: the ranks of the job could not agree.
    """
    switches = _switches(locals())
    check_settings()
    fp8 = format_of(fp8, "apply")
    switches[FP8] = bool(fp8)
    check_switches({name: switches.pop(name) for name in _DOORS})
    wish = _wish(switches, model_type, forms)
    invariance.check_choice(invariant)
    if on_miss is not None:
        dispatch.set_miss_policy(on_miss)
    families = [family for family in FAMILIES.values() if model_type in (None, family.model_type)]
    with _lock:
        # Also for families that are imported later.
        if model_type is None:
            _wishes[None] = wish
        _wishes.update({family.module: wish for family in families})
        _arrivals.watch()
    attention_door.register()
    batching.stand_in(True)
    experts_door.register()
    experts_door.stand_in(experts)
    defaults.attention_stand_in(attention)
    defaults.adamw_stand_in(adamw)
    graphs_door.stand_in(graphs)
    fp8_door.stand_in(fp8)
    invariance.choose(invariant)
    with _lock:
        mine = {family.module for family in families}
        homes = [name for name in imported() if model_type is None or name in mine]
        homes += [adapters.HOME] if model_type is None and is_imported(adapters.HOME) else []
        rows = [patch for name in homes for patch in _wanted(name)]
        later = [] if mine.intersection(homes) else [family for family in families if family.is_here]
    own = registered(model_type)
    for patch in own:
        # Our lock must not be held here: another thread may wait for it while it imports the module.
        with contextlib.suppress(ImportError):
            importlib.import_module(patch.module)
    rows += [patch for patch in own if patch.op in wish.ops]
    done = _put(rows, {*homes, *(patch.module for patch in own)})
    _stand_in_generation(any(True for _ in _ledger))
    replaced.look_at_step(_touches)
    dispatch.foresee_by(_foresee)
    ranks.agree_when_up()
    done |= {op for family in later for op in family.ops if op in wish.ops} | ({EXPERTS} & wish.ops)
    done |= {op for op, is_on in ((ATTENTION, attention), (ADAMW, adamw), (GRAPHS, graphs), (FP8, fp8)) if is_on}
    return _in_order(done)


def apply_first(**options: Any) -> None:
    """Call :func:`apply` with some options unless this process has called it."""
    if _arrivals not in sys.meta_path:
        apply(**options)


def _stand_in_generation(is_on: bool) -> None:
    """Let models generate by kernels beside those of their patches, or take that back."""
    generating.stand_in(is_on)
    static_caches.stand_in(is_on)


def _switches(arguments: Mapping[str, Any]) -> dict[str, bool]:
    """Return the switches among the arguments of :func:`apply` or :func:`apply_to_model`."""
    return {name: arguments[name] for name in (*OPS, *EXTRAS) if name in arguments} | arguments["ops"]


def _wish(switches: Mapping[str, bool], model_type: str | None, forms: str) -> _Wish:
    check_ops(switches)
    check_switches(switches)
    check_choice(model_type, forms)
    return _Wish(frozenset(op for op in known_ops() if switches.get(op, True)), forms)


def _awaits(name: str) -> bool:
    if name in _wishes or name == adapters.HOME or graphs_door.awaits(name):
        return True
    return _wishes[None].forms == "any" and is_of_transformers(name)


def _wanted(name: str) -> list[Patch]:
    """Return the requested patches of a module's classes."""
    wish = _wishes.get(name, _wishes[None])
    return chosen(list(patches_for(name, wish.forms)), wish.ops)


def _arrived(name: str) -> None:
    if graphs_door.awaits(name):
        graphs_door.stand_in(True)
    rows = _wanted(name)
    if rows:
        _stand_in_generation(True)
    with _lock:
        _put(rows, {name})


_arrivals = Arrivals(_awaits, _arrived)


def _put(rows: Iterable[Patch], homes: Collection[str]) -> set[str]:
    """Apply patches, undo other patches of the same modules, and return the ops that are patched now."""
    rows = list(rows)
    kept = {patch.target: patch.op for patch in rows}
    done: set[str] = set()
    with _lock:
        for touch in list(_ledger):
            if not touch.is_bound and kept.get(touch.where) != touch.op and touch.module in homes:
                _ledger.undo_one(touch)
        for patch in rows:
            found = _apply(patch)
            if found.usable:
                done.update(patch.ops)
            else:
                _warn(found)
    return done


def _apply(patch: Patch) -> Found:
    """Apply a patch if its target is known and not patched yet; return the target's state before.

    If a patch of another op has the target, that one stays.
    """
    found = examine(patch, _ledger)
    if found.status == "available" and _ledger.held(found.owner, found.name) is not None:
        return replace(found, status="applied")
    if found.status == "available":
        own = patch not in registered()
        _ledger.put(patch.op, patch.target, found.owner, found.name, patch.replacement(found.original), retires=own)
    return found


@contextlib.contextmanager
def applied(model: torch.nn.Module, ops: Collection[str]) -> Iterator[None]:
    """Patch the families of a model's modules with some ops for a while; earlier patches stay.

    Other ranks need not take part.

    Raises:
        InputError: an unknown op.
    """
    check_ops(ops)
    with _lock:
        tried = [_apply(patch) for patch in chosen(patches_of_model(model), ops)]
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
    layer_norm: bool = True,
    mlp: bool = True,
    fused_add_rms_norm: bool = True,
    qk_norm_rope: bool = True,
    lora: bool = True,
    experts: bool = False,
    model_type: str | None = None,
    forms: str = "tested",
    on_miss: str | None = None,
    **ops: bool,
) -> list[str]:
    """Patch one existing model and no other; for arguments, result and warnings see :func:`apply`.

    The model's modules get methods of their own. Modules inside wrappers (PEFT, torch.compile, DistributedDataParallel)
    are patched too; accelerate's hooks and casts stay around the patched methods. A module that already has another
    method of its own is left alone with a warning. ``rope`` is not patched in models whose attention is patched by
    ``qk_norm_rope``, which runs the op ``rope`` after norms that it cannot fuse.

    A deep copy made afterwards is patched too, until :func:`reset`. A pickle is not patched, but needs tilekern when it
    is loaded. A shallow copy shares the methods, which work on the modules of the original model. So do the replicas of
    ``torch.nn.DataParallel``; use :func:`apply` for these.

    The attention of a model is chosen by ``model.set_attn_implementation("tilekern")``.

    Raises:
        InputError: as :func:`apply`; or nothing in the model is of a supported family, or the model has attention
            "tilekern", which cannot serve it.
    """
    switches = _switches(locals())
    check_settings()
    require_module("apply_to_model", model)
    wish = _wish(switches, model_type, forms)
    if getattr(getattr(model, "config", None), "_attn_implementation", None) in ATTENTIONS and (
        why := refusal_of(model)
    ):
        raise InputError(f'attn_implementation="tilekern": {why}; use "eager"')
    rows = [patch for patch in patches_of_model(model, forms) if model_type in (None, patch.model_type)]
    if not rows:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        known = model_type or ", ".join(known_families())
        raise InputError(
            f"{type(model).__name__} (model type {kind}) has no module of a supported family ({known})"
            + ("" if forms == "any" else '; forms="any" patches what it can of others')
        )
    if on_miss is not None:
        dispatch.set_miss_policy(on_miss)
    attention_door.register()
    batching.stand_in(True)
    experts_door.register()
    done = {EXPERTS} if experts_door.choose(model, experts) else set()
    with _lock:
        _take_back(model, {op for patch in rows for op in patch.ops} - wish.ops)
        judged = [examine(patch, _ledger) for patch in chosen(rows, wish.ops)]
        for found in judged:
            op = found.patch.op
            if not found.usable:
                _warn(found)
                continue
            named = (op, *found.patch.takes_in)
            beside = [x for x in judged if x.usable and x.patch.op in named and x is not found]
            number, left = patch_modules(found, model, _ledger, beside)
            if number:
                done.update(found.patch.ops)
            if left:
                warn(f"{op} is not patched everywhere: {left}")
    replaced.look_at_step(_touches)
    dispatch.foresee_by(_foresee)
    ranks.agree_when_up()
    return _in_order(done)


def _foresee(target: Target) -> dispatch.Foreseen | None:
    from tilekern.patch.foresight import foresee  # which only a job with a miss needs

    return foresee(target)


def _take_back(model: torch.nn.Module, ops: Set[str]) -> None:
    """Undo patches of some ops on a model's modules."""
    owners = set(map(id, model.modules()))
    _ledger.undo_all([x for x in _ledger if x.is_bound and not ops.isdisjoint(x.ops) and id(x.owner()) in owners])


def patches_of_model(model: torch.nn.Module, forms: str = "tested") -> list[Patch]:
    """Return the patches of the families that a model's modules belong to."""
    homes = dict.fromkeys(kind.__module__ for module in model.modules() for kind in type(module).__mro__)
    own = [patch for home in homes for patch in patches_for(home, forms if may_have_forms(home) else "tested")]
    return [*own, *(patch for patch in registered() if patch.module in homes)]


def reset(names: str | Iterable[str] | None = None) -> list[str]:
    """Undo the patches of the named ops (None means all), including those of single models.

    Wrappers that others have put around a patch meanwhile (accelerate's hooks and casts) stay and run the original.
    Experts that :func:`apply` chose are undone with the op ``experts``. The auxiliary loss of a single patched model
    stays if its ``fused_linear_cross_entropy`` stays. The miss policy does not change; all names also end what
    ``apply(invariant=...)`` turned on.

    Returns:
        The ops that had been patched, in the table's order.

    Raises:
        InputError: an unknown op.
    """
    if names is None:
        _stand_in_generation(False)
        invariance.choose(False)
        ranks.unarm()
        dispatch.foresee_by(None)
    wanted = _all_ops() if names is None else [names] if isinstance(names, str) else list(names)
    check_ops(op for op in wanted if op not in _DOORS)
    doors = {op for op in _doors_on() if op in wanted}
    if EXPERTS in wanted:
        experts_door.put_back()
    if ATTENTION in wanted:
        defaults.attention_stand_in(False)
        batching.stand_in(False)
    if ADAMW in wanted:
        defaults.adamw_stand_in(False)
    if GRAPHS in wanted:
        graphs_door.put_back()
    if FP8 in wanted:
        fp8_door.stand_in("")
    with _lock:
        for home, wish in _wishes.items():
            _wishes[home] = wish._replace(ops=wish.ops.difference(wanted))
        shared = [(x.owner(), x) for x in _ledger if 0 < len({*x.ops}.difference(wanted)) < len(x.ops)]
        done = _ledger.undo(wanted)
        for owner, touch in shared:
            _put_the_rest(owner, touch, {*touch.ops}.difference(wanted))
        return _in_order({*done, *doors})


def _put_the_rest(owner: Any, touch: Touch, ops: set[str]) -> None:
    """Patch an owner, whose stand-in for several ops was removed, with the ops that stay."""
    home, _, _ = touch.where.rsplit(".", 2)
    for patch in chosen([patch for patch in patches_for(home, "any") if patch.target == touch.where], ops):
        if touch.is_bound:
            patch_modules(examine(patch, _ledger), owner, _ledger)
        else:
            _apply(patch)


@contextlib.contextmanager
def held() -> Iterator[Ledger]:
    """Hold the lock and return the ledger, which nobody changes meanwhile."""
    with _lock:
        yield _ledger


def _touches() -> list[Touch]:
    with _lock:
        return list(_ledger)


def get_patched_ops() -> dict[str, list[str]]:
    """Return the paths at which each op is patched now, with the number of modules if single models are patched.

    Patches that something else has replaced since are left out. A class that was replaced in its module is listed as
    the class of older models. Modules with a forward of their own do not run a patch of their class;
    :func:`tilekern.report` shows these.
    """
    with _lock:
        runs = [touch for touch in _ledger if touch.still_runs]
        places = Counter((op, x.where, x.is_bound, x.has_its_name) for x in runs for op in x.ops)
    found: dict[str, list[str]] = {op: [] for op in _in_order({place[0] for place in places})} | _doors_on()
    for (op, where, is_bound, has_its_name), number in places.items():
        modules = f" of {number} module{'s' if number > 1 else ''}" if is_bound else ""
        found[op].append(f"{where}{modules}" if has_its_name else f"{where} of models made before it was replaced")
    return found


def codes() -> dict[CodeType, str]:
    """Return the code of every active replacement, with its op."""
    with _lock:
        functions = [(inspect.unwrap(touch.replacement), touch.op) for touch in _ledger]
    doors = [(attention_door.attend, ATTENTION), (experts_door.run_experts, EXPERTS)]
    return {function.__code__: op for function, op in functions + doors if hasattr(function, "__code__")}


def list_patches(model_type: str | None = None) -> list[Found]:
    """Return every row of the table, or those of one family, with its status on the installed transformers.

    Families' code is read, not imported.

    Args:
        model_type: a family of transformers, or the name of a module with other models; if it is not tested here, the
            result is what ``forms="any"`` patches.

    Raises:
        InputError: an unknown model type.
    """
    if model_type is None or not home_of(model_type):
        check_choice(model_type, FORMS[0])
    own = (*registered(), adapters.PATCH)
    with _lock:
        return [
            examine(patch, _ledger) if patch in own or patch.module in sys.modules else as_read(patch)
            for patch in patches(model_type)
            if len(patch.asked) == 1
        ]


# Ops that replace choices of other libraries instead of model code.
_DOORS = (ATTENTION, ADAMW, GRAPHS, FP8)


def _doors_on() -> dict[str, list[str]]:
    """Return the :data:`_DOORS` that are in force, with the attributes that they change."""
    on = {
        ATTENTION: [defaults.CHOICE] if defaults.is_attention_on() else [],
        ADAMW: ["torch.optim.AdamW.__new__"] if defaults.is_adamw_on() else [],
        GRAPHS: graphs_door.places(),
        FP8: [fp8_door.CHOICE] if fp8_door.format_on() else [],
    }
    return {op: places for op, places in on.items() if places}


def _all_ops() -> list[str]:
    return [*known_ops(), *_DOORS]


def _in_order(ops: set[str]) -> list[str]:
    return [op for op in _all_ops() if op in ops]


def _warn(found: Found) -> None:
    library = "peft" if found.patch is adapters.PATCH else "transformers"
    known = f" ({found.patch.releases})" if found.patch.releases else ""
    remedy = (
        "Compare the code with the one that the patch replaces, and register the patch with its new digest"
        if found.patch in registered()
        else f"Install a {library} release that this tilekern knows{known} or a newer tilekern, or undo what else "
        "replaced it"
    )
    warn(
        f"{found.patch.op} is not patched: {found.reason}, in {library} {version_of(library)}; the model's own "
        f"code runs. {remedy}"
    )
