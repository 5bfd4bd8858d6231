"""``tilekern.report(model)``: for each module of a model which op serves it, and which does not and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from tilekern.patch import experts, layers, loss, parallel, patcher, replacements
from tilekern.patch.bound import Bound
from tilekern.patch.checkpointing import wraps_around
from tilekern.patch.families import family_of, is_of_transformers
from tilekern.patch.installed import Found, examine
from tilekern.patch.instances import code_of
from tilekern.patch.ledger import Ledger
from tilekern.patch.plain import has_hooks
from tilekern.patch.table import Patch, ops_in
from tilekern.patch.wrapped import is_inside, place_of
from tilekern.runtime import dispatch
from tilekern.switches import EXPERTS

if TYPE_CHECKING:
    import torch

# Which op a module would have, by what its class is called, in families whose code has no form that is known.
_CALLED = {
    "Norm": "rms_norm",
    "LayerNorm": "layer_norm",
    "MLP": "swiglu",
    "Attention": "rope",
    "DecoderLayer": "fused_add_rms_norm",
    "ForCausalLM": "fused_linear_cross_entropy",
    "Router": EXPERTS,
}

_OWN = "its {} is its own, a hook's or another patch's"
_HELD = "transformers' parallelism holds its forward of before; patch before the model is made"


@dataclass(frozen=True)
class Row:
    """One module and one op.

    Attributes:
        module: the module's path in the model; empty for the model itself.
        kind: the name of its class.
        op: the op.
        reason: why the op does not serve the module; empty where it does.
    """

    module: str
    kind: str
    op: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The code that runs in a model; printed, it has a line for all modules that are alike.

    Attributes:
        rows: in the order of the model's modules.
        fallbacks: by kernel, how often calls in this process have run torch's own operations in its place.
    """

    rows: tuple[Row, ...]
    fallbacks: dict[str, int]

    def __str__(self) -> str:
        """The rows, modules of one class that differ in numbers alone on one line."""
        groups: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            key = (row.op, re.sub(r"\d+", "*", row.module) or "(the model)", row.kind, row.reason)
            groups[key] = groups.get(key, 0) + 1
        lines = [
            f"{op:26} {'no ' if reason else 'yes'} {number:4} x {where} ({kind}){': ' * bool(reason)}{reason}"
            for (op, where, kind, reason), number in groups.items()
        ]
        return "\n".join([*lines, *(f"{kernel} fell back to torch {n} times" for kernel, n in self.fallbacks.items())])


def report(model: torch.nn.Module) -> Report:
    """Say for each module of a model which of tilekern's ops serves it, and which does not and why.

    It looks at what would run if the model was called now: patches of classes and of this model, methods that modules
    have of their own, hooks and subclasses. What a call's own arguments decide (a mask, a subclass of Tensor, a dtype)
    is counted when it happens (:func:`tilekern.stats`).

    Args:
        model: any module; of wrappers (PEFT, torch.compile, DistributedDataParallel) the modules in them are told of.
    """
    shards = any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__)
    with patcher.held() as ledger:
        judged = [(patch, examine(patch, ledger)) for patch in patcher.patches_of_model(model, "any")]
        rows = [row for name, module in model.named_modules() for row in _rows(name, module, judged, ledger, shards)]
    counted = dispatch.stats()
    return Report(tuple(rows), {k: counts["fallbacks"] for k, counts in counted.items() if counts["fallbacks"]})


def _rows(name: str, module: Any, judged: list[tuple[Patch, Found]], ledger: Ledger, shards: bool) -> Iterator[Row]:
    kind = type(module)
    told: dict[str, str] = {}
    for patch, found in judged:
        path = _path(patch, module)
        if path and len(patch.ops) == 1:
            told[patch.op] = _reason(patch, found, module, path, ledger, shards)
    for text, reason in _by_touches(module, ledger):
        for op in ops_in(text):
            told.setdefault(op, reason)
    if told.get("qk_norm_rope") == "":
        told.pop("rope", None)
    if is_of_transformers(kind.__module__):
        for part, op in _CALLED.items():
            fused = (op == "rope" and "qk_norm_rope" in told) or (op == "swiglu" and "mlp" in told)
            if kind.__name__.endswith(part) and not fused and not (part == "Norm" and "Layer" in kind.__name__):
                told.setdefault(op, _unknown(kind))
        if kind.__name__.endswith("Attention") and hasattr(module, "config"):
            chosen = str(getattr(module.config, "_attn_implementation", None))
            own = chosen.startswith("tilekern")
            told["attention"] = "" if own else f'attn_implementation is {chosen!r}; "tilekern" chooses the op'
        if hasattr(kind, "_apply_gate"):
            told[EXPERTS] = experts.reason_of(module, shards)
    yield from (Row(name, kind.__name__, op, reason) for op, reason in told.items())


def _path(patch: Patch, module: Any) -> str:
    """The path of the method of a module that a patch exchanges, or whose function it does; empty where none is."""
    home = sys.modules.get(patch.module)
    for path in patch.callers or ((patch.attribute,) if "." in patch.attribute else ()):
        owner = getattr(home, path.partition(".")[0], None)
        if isinstance(owner, type) and isinstance(module, owner):
            return path
    return ""


def _reason(patch: Patch, found: Found, module: Any, path: str, ledger: Ledger, shards: bool) -> str:
    """Why a patch does not serve a module; empty where it does."""
    kind, method = path.split(".")
    owner, own = getattr(sys.modules[patch.module], kind), _own(module, method)
    op, function = _given(own, module, method, ledger)
    if op:
        runs = patch.op in ops_in(op) or (patch.callers and _calls(function, found))
        return _of_the_call(patch, module, shards) if runs else f"{op} has its {method}"
    if own is not None and not _is_the_class_s(own, module, method):
        return _HELD if method == "forward" and parallel.around(module) else _OWN.format(method)
    inherited, current = getattr(type(module), method), getattr(owner, method)
    if inherited is not current and not wraps_around(inherited, current):
        return f"{type(module).__name__} has a {method} of its own"
    return _of_the_call(patch, module, shards) if found.status == "applied" else found.reason or _unpatched(patch)


def _calls(function: Any, found: Found) -> bool:
    """Whether another op's stand-in calls what stands in for a plain function: its own, or that of all models."""
    code, name = code_of(function), found.patch.attribute
    return name in code.co_freevars or (found.status == "applied" and name in code.co_names)


def _by_touches(module: Any, ledger: Ledger) -> Iterator[tuple[str, str]]:
    """The op that has a module's forward, wherever its class is by now, and why it does not run."""
    own = _own(module, "forward")
    op, _ = _given(own, module, "forward", ledger)
    base = next(base for base in type(module).__mro__ if "forward" in vars(base))
    touch = ledger.held(base, "forward")
    if op:
        yield op, ""
    elif touch is not None and touch.still_runs:
        yield touch.op, "" if own is None or _is_the_class_s(own, module, "forward") else _OWN.format("forward")


def _own(module: Any, method: str) -> Any:
    """The method that an instance has of its own; a forward's is the one inside of transformers' parallelism."""
    return (method == "forward" and parallel.inside(module)) or vars(module).get(place_of(module, method))


def _unknown(kind: type) -> str:
    """Why no patch is of a class."""
    if getattr(sys.modules.get(kind.__module__), kind.__name__, kind) is not kind:
        return f"its module has another {kind.__name__} by now, another library's"
    return "its code has no form that is known"


def _given(own: Any, module: Any, method: str, ledger: Ledger) -> tuple[str, Any]:
    """The op whose stand-in a module has of its own, noted or not, as a copy's is not, and that; empty without one."""
    if isinstance(own, Bound) and own.stand_in is not None:
        return own.stand_in.op, own.stand_in.function
    touch = ledger.held(module, method)
    if touch is not None and touch.still_runs:
        return touch.op, touch.replacement
    function = own.__func__ if isinstance(own, MethodType) else None
    return next((touch.op for touch in ledger if touch.is_bound and touch.replacement is function), ""), function


def _unpatched(patch: Patch) -> str:
    if family_of(patch.module) is None and is_of_transformers(patch.module):
        return (
            f'it is not patched: {patch.model_type} is not among the families that are tested; forms="any" patches it'
        )
    return f"it is not patched; tilekern.apply({patch.op}=True) does so"


def _is_the_class_s(own: Any, module: Any, name: str) -> bool:
    """Whether what an instance has of its own calls its class's method: bound, unpickled, or in accelerate's casts."""
    if isinstance(own, Bound):
        return True
    return isinstance(own, MethodType) and is_inside(getattr(type(module), name), own.__func__)


def _of_the_call(patch: Patch, module: Any, shards: bool) -> str:
    """Why a patched module runs its steps one by one all the same; ``shards``: parts of the model are FSDP's."""
    others = [(name, norm) for name, norm in _norms_of(patch, module) if not _is_known(norm, patch)]
    if others:
        names = ", ".join(name for name, _ in others)
        hooked = any(has_hooks(norm) for _, norm in others)
        return f"hooks on {names} have the steps run one by one" if hooked else f"the op does not know its {names}"
    judge = _JUDGES.get(patch.op)
    return judge(patch, module, shards) if judge else ""


def _of_the_head(_: Patch, module: Any, shards: bool) -> str:
    if not hasattr(module, "get_output_embeddings"):
        return ""
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = module.get_output_embeddings()
    return loss.unserved(module, head, ForCausalLMLoss, is_gathered=shards and _is_sharded_once(head))


def _of_the_mlp(patch: Patch, module: Any, _: bool) -> str:
    names, known = getattr(patch.replacement, "keywords", {}).get("activations", ()), replacements.kinds()
    other = [act for name in names if replacements.kind_of(act := getattr(module, name), known) is None]
    return f"no op has its activation, {type(other[0]).__name__}" if other else ""


def _of_the_gate(patch: Patch, module: Any, _: bool) -> str:
    named = getattr(patch.replacement, "keywords", {}).get("activation", "act_fn")
    activation = getattr(module, named, getattr(module, "activation_fn", None)) if named else None
    if activation is None:
        return ""
    if type(activation) not in replacements.gates():
        return f"no op has its activation, {type(activation).__name__}"
    return "hooks on its activation have the steps run one by one" if has_hooks(activation) else ""


# By op: why a patched module runs its steps one by one, from the patch, the module and whether parts are FSDP's.
_JUDGES: dict[str, Callable[[Patch, Any, bool], str]] = {
    # Llama 4's layer; else a router.
    EXPERTS: lambda _patch, module, _shards: experts.unserved_layer(module) if hasattr(module, "experts") else "",
    "fused_linear_cross_entropy": _of_the_head,
    "mlp": _of_the_mlp,
    "swiglu": _of_the_gate,
}


def _norms_of(patch: Patch, module: Any) -> list[tuple[str, Any]]:
    """The norms of a module that an op fuses, by their names."""
    named = getattr(patch.replacement, "keywords", {}).get("norms", ())
    names = ("q_norm", "k_norm") if patch.op == "qk_norm_rope" else named
    return [(name, norm) for name in names if (norm := getattr(module, name, None)) is not None]


def _is_known(norm: Any, patch: Patch) -> bool:
    kinds = getattr(patch.replacement, "keywords", {}).get("kinds", ())
    return layers.is_layer_norm(norm) if patch.op == "layer_norm" else layers.is_known(norm, patch.module, kinds)


def _is_sharded_once(head: Any) -> bool:
    """Whether a head's weight is spread over one dimension of ranks, as FSDP alone does it."""
    placements = getattr(getattr(head, "weight", None), "placements", ())
    return sum(not placement.is_replicate() for placement in placements) == 1
