"""``tilekern.report(model)``: which op serves each module of a model, why others do not, and what ran."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from tilekern.patch import adapters, experts, fp8, layers, loss, parallel, patcher, replacements, whole_layers
from tilekern.patch.bound_method import Bound, place_of
from tilekern.patch.checkpointing import wraps_around
from tilekern.patch.families import family_of, is_of_transformers, may_have_forms
from tilekern.patch.graphs import graphs_of
from tilekern.patch.guards import has_hooks, is_from, is_ordinary, require_module
from tilekern.patch.installed import Found, examine
from tilekern.patch.instances import code_of
from tilekern.patch.ledger import Ledger, is_inside
from tilekern.patch.registry import registered
from tilekern.patch.table import Patch, ops_in
from tilekern.runtime import dispatch
from tilekern.runtime.switches import ATTENTION, EXPERTS, FP8, LORA

if TYPE_CHECKING:
    import torch

# Ops of modules that hold no other modules with ops.
_LEAVES = ("rms_norm", "layer_norm", "swiglu", "mlp")
# The kernels that a call of each op may launch forward. Those of rotations are launched backward as well.
KERNELS: dict[str, tuple[str, ...]] = {
    "rms_norm": ("rms_norm_forward", "rms_norm_offset_forward", "rms_norm_to_forward", "rms_norm_offset_to_forward"),
    "layer_norm": ("layer_norm_forward", "fused_add_layer_norm_forward"),
    "swiglu": ("swiglu_forward", "swiglu_scaled_forward", "geglu_forward", "fp8_gated_forward"),
    "mlp": ("activation_forward",),
    "qk_norm_rope": (
        "qk_norm_rope_forward", "qk_norm_rope_general_forward", "qk_norm_rope_to_forward",
        "qk_norm_rope_general_to_forward",
    ),
    "rope": ("rope", "rope_to", "llama4_rope", "qwen2vl_mrope"),
    "fused_add_rms_norm": (
        "fused_add_rms_norm_forward", "fused_add_rms_norm_offset_forward", "fused_rms_norm_add_forward",
        "fused_rms_norm_add_rms_norm_forward", "fused_add_rms_norm_to_forward", "fused_add_rms_norm_offset_to_forward",
    ),
    "fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
    EXPERTS: (
        "experts_gate", "fp8_experts_gate", "router_softmax_forward", "router_sigmoid_forward", "router_losses_forward",
    ),
    ATTENTION: ("attention_forward",),
    LORA: (adapters.KERNEL,),
    FP8: fp8.KERNELS,
}  # fmt: skip
_BOTH_WAYS = {"rope"}

_OWN = "its {} is its own, a hook's or another patch's"
_HELD = "transformers' parallelism holds its forward of before; patch before the model is made"


@dataclass(frozen=True)
class Row:
    """One module and one op.

    Attributes:
        module: the module's path in the model; empty for the model itself.
        kind: the name of the module's class; of a layer of 8-bit floats with the format.
        op: the op.
        reason: why the op does not serve the module; empty if it does.
    """

    module: str
    kind: str
    op: str
    reason: str = ""


@dataclass(frozen=True)
class Calls:
    """The calls of an op in this process so far, for all models.

    Attributes:
        launches: launches of its kernels.
        fallbacks: calls that ran the model's own op.
        reasons: how many calls fell back for each reason.
    """

    launches: int = 0
    fallbacks: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The ops that serve a model, and the calls of these ops.

    ``str()`` gives a heading for each op, with its calls, and a line for each group of similar modules.

    Attributes:
        rows: in the order of the model's modules.
        calls: calls of this process by op, including those of other models and direct calls of the ops.
        fallbacks: by kernel, how often calls in this process ran torch's own operations instead.
        reasons: by kernel, the reasons of these fallbacks, with their counts.
        graphs: by module, how many steps were replayed from CUDA graphs and why others were not.
        varying: by kernel, why its rows may depend on others although :func:`tilekern.invariant` was on. Gradients and
            losses, which are sums over rows, are not judged.
        substitutes: by kernel, what runs in place of a record that no cache holds, or of a composite's own choice of
            kernels.
        whole: by path, how many calls of a decoder layer ran as one op, since one of its parts changed.
        apart: by path, why a decoder layer that may be one op ran its parts, in its last call that trained.
    """

    rows: tuple[Row, ...]
    calls: dict[str, Calls]
    fallbacks: dict[str, int]
    reasons: dict[str, dict[str, int]]
    graphs: dict[str, str] = field(default_factory=dict)
    varying: dict[str, str] = field(default_factory=dict)
    substitutes: dict[str, str] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return, for each op, whether its modules are patched, its calls, and the modules."""
        lines = []
        for op in dict.fromkeys(row.op for row in self.rows):
            rows = [row for row in self.rows if row.op == op]
            patched = sum(not row.reason for row in rows)
            lines.append(f"{op}: {_heading(op, patched, len(rows), self.calls.get(op, Calls()))}")
            lines += _modules(rows)
        shown = {kernel for op in {row.op for row in self.rows if not row.reason} for kernel in KERNELS.get(op, ())}
        lines += [
            f"{kernel} fell back to torch {_times(number)}{because(self.reasons.get(kernel, {}))}"
            for kernel, number in self.fallbacks.items()
            if kernel not in shown
        ]
        lines += [f"{kernel} runs {what}" for kernel, what in self.substitutes.items()]
        if self.whole:
            lines.append(f"layers as one op: {len(self.whole)}, {_times(sum(self.whole.values()))} in all")
        lines += [f"layers by their parts: {n} ({why})" for why, n in Counter(self.apart.values()).items()]
        lines += [f"graphs of {name or 'the model'}: {said}" for name, said in self.graphs.items()]
        lines += [f"rows of {kernel} may depend on others: {reason}" for kernel, reason in self.varying.items()]
        return "\n".join(lines)


def _heading(op: str, patched: int, modules: int, calls: Calls) -> str:
    if not patched:
        return "not patched"
    state = "patched" if patched == modules else f"patched in {patched} of {modules} modules"
    if not calls.launches and not calls.fallbacks:
        # Products of torch are not counted.
        return f"{state}; {'no call fell back' if op == LORA else 'not called yet in this process'}"
    if not calls.fallbacks:
        return f"{state}; no call fell back, {calls.launches} launches"
    why = because(calls.reasons)
    if calls.launches and op in _BOTH_WAYS:
        return f"{state}; {calls.fallbacks} calls fell back{why}, {calls.launches} launches, backward ones among them"
    among = "" if op == LORA else f" of {calls.launches + calls.fallbacks}"
    return f"{state}; {calls.fallbacks}{among} calls fell back{why}"


def because(reasons: dict[str, int]) -> str:
    """Return the reasons in brackets, with counts if there are several; empty if there are none."""
    said = [f"{number} x {reason}" if len(reasons) > 1 else reason for reason, number in reasons.items()]
    return f" ({', '.join(said)})" if said else ""


def _modules(rows: list[Row]) -> Iterator[str]:
    """Yield lines for the rows of one op; modules of one class whose paths differ only in numbers share a line."""
    groups: Counter[tuple[str, str, str]] = Counter(
        (re.sub(r"\d+", "*", row.module) or "(the model)", row.kind, row.reason) for row in rows
    )
    for (where, kind, reason), number in groups.items():
        yield f"  {'no ' if reason else 'yes'} {number:4} x {where} ({kind}){': ' * bool(reason)}{reason}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def report(model: torch.nn.Module) -> Report:
    """List for each module of a model which of tilekern's ops serves it, and which does not and why.

    The rows describe a call made now: patches of classes and of this model, modules' own methods, hooks and subclasses.
    Some fallbacks depend on a call's arguments (a mask, dropout, a subclass of Tensor, a device, a missing record).
    They are counted when they happen and reported by op, with reasons. Counts are of the process, not of the model. A
    CUDA graph is counted when it is captured, and code compiled by ``torch.compile`` when it is traced.

    Args:
        model: any module; for wrappers (PEFT, torch.compile, DistributedDataParallel) the modules inside are reported.

    Raises:
        InputError: ``model`` is not a module.
    """
    require_module("report", model)
    shards = any(base.__name__ == "FSDPModule" for module in model.modules() for base in type(module).__mro__)
    with patcher.held() as ledger:
        judged = [(patch, examine(patch, ledger)) for patch in patcher.patches_of_model(model, "any")]
        rows = [row for name, module in model.named_modules() for row in _rows(name, module, judged, ledger, shards)]
        rows += [Row(name, fp8.named(layer), FP8, reason) for name, layer, reason in fp8.judged(model, shards)]
    counted, why = dispatch.stats(), dispatch.reasons()
    fallbacks = {kernel: counts["fallbacks"] for kernel, counts in counted.items() if counts["fallbacks"]}
    calls = {op: _calls_of(names, counted, why) for op, names in KERNELS.items()}
    graphs = {name: str(found) for name, found in graphs_of(model).items()}
    whole, apart = whole_layers.calls_of(model), whole_layers.why_apart(model)
    return Report(tuple(rows), calls, fallbacks, why, graphs, dispatch.varying(), dispatch.substitutes(), whole, apart)


def _calls_of(
    kernels: tuple[str, ...], counted: dict[str, dict[str, int]], why: dict[str, dict[str, int]]
) -> Calls:  # fmt: skip
    known = [counted[kernel] for kernel in kernels if kernel in counted]
    reasons: Counter[str] = Counter()
    for kernel in kernels:
        reasons.update(why.get(kernel, {}))
    launches, fallbacks = (sum(counts[name] for counts in known) for name in ("launches", "fallbacks"))
    return Calls(launches, fallbacks, dict(reasons.most_common()))


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
    if may_have_forms(kind.__module__):
        op = _op_by_its_name(module)
        if not is_of_transformers(kind.__module__) and op not in _LEAVES:
            op = ""  # what wraps a model, as an adapter does, may be called like one
        inside = any(_path(patch, child) for child in module.children() for patch, _ in judged if patch.op == op)
        if op and not inside and op not in told and not _FUSED_IN.get(op, set()).intersection(told):
            told[op] = _unknown(kind)
        if kind.__name__.endswith("Attention") and hasattr(module, "config"):
            chosen = str(getattr(module.config, "_attn_implementation", None))
            own = chosen.startswith("tilekern")
            told[ATTENTION] = "" if own else f'attn_implementation is {chosen!r}; "tilekern" chooses the op'
        if hasattr(kind, "_apply_gate"):
            told[EXPERTS] = experts.reason_of(module, shards)
    yield from (Row(name, kind.__name__, op, reason) for op, reason in told.items())


# By suffix of class names, longer suffixes first.
_CALLED = {
    "LayerNorm": "layer_norm",
    "Norm": "rms_norm",
    "MLP": "swiglu",
    "Attention": "rope",
    "DecoderLayer": "fused_add_rms_norm",
    "ForCausalLM": "fused_linear_cross_entropy",
    "Router": EXPERTS,
}
# Ops that include the work of the key.
_FUSED_IN = {"rope": {"qk_norm_rope"}, "swiglu": {"mlp"}, "mlp": {"swiglu"}}


def _op_by_its_name(module: Any) -> str:
    """Return the op that a module of unknown form would have, by its class's name and its children.

    Empty if no op computes a part of it: an attention without a rotation, a layer without an RMS norm.
    """
    name = type(module).__name__
    part = next((part for part in _CALLED if name.endswith(part)), "")
    children = [(attribute, type(child).__name__) for attribute, child in module.named_children()]
    if part == "MLP":
        return "swiglu" if any("gate" in attribute for attribute, _ in children) else "mlp"
    has_it = {
        "Attention": _turns(type(module)),
        "DecoderLayer": any(kind.endswith("Norm") and not kind.endswith("LayerNorm") for _, kind in children),
    }
    return _CALLED[part] if part and has_it.get(part, True) else ""


def _turns(kind: type) -> bool:
    """Return whether the code of a class names a rotation."""
    codes = [method.__code__ for base in kind.__mro__ for method in vars(base).values() if type(method) is FunctionType]
    return any("rotary" in name or "rope" in name for code in codes for name in (*code.co_names, *code.co_freevars))


def _path(patch: Patch, module: Any) -> str:
    """Return the path of the module's method that a patch replaces or whose function it replaces; empty if none."""
    home = sys.modules.get(patch.module)
    for path in patch.callers or ((patch.attribute,) if "." in patch.attribute else ()):
        owner = getattr(home, path.partition(".")[0], None)
        if isinstance(owner, type) and isinstance(module, owner):
            return path
    return ""


def _reason(patch: Patch, found: Found, module: Any, path: str, ledger: Ledger, shards: bool) -> str:
    """Return why a patch does not serve a module; empty if it does."""
    kind, method = path.split(".")
    owner, own = getattr(sys.modules[patch.module], kind), _own(module, method)
    op, function = _given(own, module, method, ledger)
    if op:
        # Where qk_norm_rope does not fuse, it runs the norms and the op rope.
        apart = (patch.op, op) == ("rope", "qk_norm_rope")
        runs = patch.op in ops_in(op) or apart or (patch.callers and _calls(function, found))
        return _of_the_call(patch, module, shards) if runs else f"{op} has its {method}"
    if own is not None and not _is_the_class_s(own, module, method):
        return _HELD if method == "forward" and parallel.around(module) else _OWN.format(method)
    inherited, current = getattr(type(module), method), getattr(owner, method)
    if inherited is not current and not wraps_around(inherited, current):
        return f"{type(module).__name__} has a {method} of its own"
    return _of_the_call(patch, module, shards) if found.status == "applied" else found.reason or _unpatched(patch)


def _calls(function: Any, found: Found) -> bool:
    """Return whether another op's stand-in calls the replacement of a plain function: its own, or the global one."""
    code, name = code_of(function), found.patch.attribute
    return name in code.co_freevars or (found.status == "applied" and name in code.co_names)


def _by_touches(module: Any, ledger: Ledger) -> Iterator[tuple[str, str]]:
    """Yield the op whose patch has a module's forward, wherever its class is now, and why it does not run."""
    own = _own(module, "forward")
    op, _ = _given(own, module, "forward", ledger)
    base = next(base for base in type(module).__mro__ if "forward" in vars(base))
    touch = ledger.held(base, "forward")
    if op:
        yield op, ""
    elif touch is not None and touch.still_runs:
        yield touch.op, "" if own is None or _is_the_class_s(own, module, "forward") else _OWN.format("forward")


def _own(module: Any, method: str) -> Any:
    """Return an instance's own method; for a forward, the one inside the wrappers of transformers' parallelism."""
    return (method == "forward" and parallel.inside(module)) or vars(module).get(place_of(module, method))


def _unknown(kind: type) -> str:
    """Return why no patch is of a class."""
    if getattr(sys.modules.get(kind.__module__), kind.__name__, kind) is not kind:
        return f"its module has another {kind.__name__} by now, another library's"
    return "its code has no form that is known"


def _given(own: Any, module: Any, method: str, ledger: Ledger) -> tuple[str, Any]:
    """Return the op and the function of a module's own stand-in, recorded or not (a copy's is not); else empty."""
    if isinstance(own, Bound) and own.stand_in is not None:
        return own.stand_in.op, own.stand_in.function
    touch = ledger.held(module, method)
    if touch is not None and touch.still_runs:
        return touch.op, touch.replacement
    function = own.__func__ if isinstance(own, MethodType) else None
    return next((touch.op for touch in ledger if touch.is_bound and touch.replacement is function), ""), function


def _unpatched(patch: Patch) -> str:
    if family_of(patch.module) is None and patch not in (adapters.PATCH, *registered()):
        who = (
            f'{patch.model_type} is not among the families that are tested; forms="any" patches it'
            if is_of_transformers(patch.module)
            else f'{patch.module} is not of transformers; tilekern.apply_to_model(model, forms="any") patches it'
        )
        return f"it is not patched: {who}"
    return f"it is not patched; tilekern.apply({patch.op}=True) does so"


def _is_the_class_s(own: Any, module: Any, name: str) -> bool:
    """Return whether an instance's own method calls its class's: bound, unpickled, or in accelerate's casts."""
    if isinstance(own, Bound):
        return True
    return isinstance(own, MethodType) and is_inside(getattr(type(module), name), own.__func__)


def _of_the_call(patch: Patch, module: Any, shards: bool) -> str:
    """Return why a patched module still runs its steps one by one; ``shards``: FSDP shards parts of the model."""
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


def _of_the_norm(patch: Patch, module: Any, _: bool) -> str:
    own = getattr(type(module), "_norm", None)
    overrides = patch.relies_on and not is_from(own, patch.module)
    return f"{type(module).__name__} has a _norm of its own" if overrides else ""


def _of_the_gate(patch: Patch, module: Any, _: bool) -> str:
    named = getattr(patch.replacement, "keywords", {}).get("activation", "act_fn")
    activation = getattr(module, named, getattr(module, "activation_fn", None)) if named else None
    if activation is None:
        return ""
    if type(activation) not in replacements.gates():
        return f"no op has its activation, {type(activation).__name__}"
    if has_hooks(activation):
        return "hooks on its activation have the steps run one by one"
    return "" if is_ordinary(activation) else "its activation has another forward than its class's"


# By op: why a patched module still runs its steps one by one; the bool says whether FSDP shards the model.
_JUDGES: dict[str, Callable[[Patch, Any, bool], str]] = {
    # Llama 4's layer; otherwise the module is a router.
    EXPERTS: lambda _patch, module, _shards: experts.unserved_layer(module) if hasattr(module, "experts") else "",
    "fused_linear_cross_entropy": _of_the_head,
    "mlp": _of_the_mlp,
    "rms_norm": _of_the_norm,
    "swiglu": _of_the_gate,
}


def _norms_of(patch: Patch, module: Any) -> list[tuple[str, Any]]:
    """Return the norms of a module that an op fuses, with their names."""
    named = getattr(patch.replacement, "keywords", {}).get("norms", ())
    names = ("q_norm", "k_norm") if patch.op == "qk_norm_rope" else named
    return [(name, norm) for name in names if (norm := getattr(module, name, None)) is not None]


def _is_known(norm: Any, patch: Patch) -> bool:
    kinds = getattr(patch.replacement, "keywords", {}).get("kinds", ())
    return layers.is_layer_norm(norm) if patch.op == "layer_norm" else layers.is_known(norm, patch.module, kinds)


def _is_sharded_once(head: Any) -> bool:
    """Return whether a head's weight is sharded over one dimension of ranks, as by FSDP alone."""
    placements = getattr(getattr(head, "weight", None), "placements", ())
    return sum(not placement.is_replicate() for placement in placements) == 1
