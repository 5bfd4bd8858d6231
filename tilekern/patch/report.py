"""``tilekern.report(model)``: for each module of a model which op serves it, and which does not and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

from tilekern.patch import loss, patcher, replacements
from tilekern.patch.bound import Bound
from tilekern.patch.families import family_of, is_of_transformers
from tilekern.patch.installed import Found, examine
from tilekern.patch.plain import has_hooks
from tilekern.patch.table import Patch
from tilekern.runtime import dispatch

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
}


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
    """What runs in a model; printed, it has a line for all modules that are alike.

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
    with patcher.held() as ledger:
        judged = [(patch, examine(patch, ledger)) for patch in patcher.patches_of_model(model, "any")]
        rows = [row for name, module in model.named_modules() for row in _rows(name, module, judged)]
    counted = dispatch.stats()
    return Report(tuple(rows), {k: counts["fallbacks"] for k, counts in counted.items() if counts["fallbacks"]})


def _rows(name: str, module: Any, judged: list[tuple[Patch, Found]]) -> Iterator[Row]:
    kind = type(module)
    told: dict[str, str] = {}
    for patch, found in judged:
        path = _path(patch, module)
        if path:
            told[patch.op] = _reason(patch, found, module, path)
    if told.get("qk_norm_rope") == "":
        told.pop("rope", None)
    if is_of_transformers(kind.__module__):
        for part, op in _CALLED.items():
            fused = op == "rope" and "qk_norm_rope" in told
            if kind.__name__.endswith(part) and not fused and not (part == "Norm" and "Layer" in kind.__name__):
                told.setdefault(op, "its code has no form that is known")
        if kind.__name__.endswith("Attention") and hasattr(module, "config"):
            chosen = str(getattr(module.config, "_attn_implementation", None))
            own = chosen.startswith("tilekern")
            told["attention"] = "" if own else f'attn_implementation is {chosen!r}; "tilekern" chooses the op'
    yield from (Row(name, kind.__name__, op, reason) for op, reason in told.items())


def _path(patch: Patch, module: Any) -> str:
    """The path of the method of a module that a patch exchanges, or whose function it does; empty where none is."""
    home = sys.modules.get(patch.module)
    for path in patch.callers or ((patch.attribute,) if "." in patch.attribute else ()):
        owner = getattr(home, path.partition(".")[0], None)
        if isinstance(owner, type) and isinstance(module, owner):
            return path
    return ""


def _reason(patch: Patch, found: Found, module: Any, path: str) -> str:
    """Why a patch does not serve a module; empty where it does."""
    kind, method = path.split(".")
    owner, own = getattr(sys.modules[patch.module], kind), vars(module).get(method)
    stand_in = own.stand_in if isinstance(own, Bound) else None
    if stand_in is not None:
        return _of_the_call(patch, module) if stand_in.op == patch.op else f"{stand_in.op} has its {method}"
    if own is not None and not _is_the_class_s(own, module, method):
        return f"its {method} is its own, a hook's or another patch's"
    if getattr(type(module), method) is not getattr(owner, method):
        return f"{type(module).__name__} has a {method} of its own"
    return _of_the_call(patch, module) if found.status == "applied" else found.reason or _unpatched(patch)


def _unpatched(patch: Patch) -> str:
    if family_of(patch.module) is None and is_of_transformers(patch.module):
        return (
            f'it is not patched: {patch.model_type} is not among the families that are tested; forms="any" patches it'
        )
    return f"it is not patched; tilekern.apply({patch.op}=True) does so"


def _is_the_class_s(own: Any, module: Any, name: str) -> bool:
    """Whether what an instance has of its own calls its class's method: bound, unpickled, or in accelerate's hook."""
    old = vars(module).get("_old_forward") if hasattr(module, "_hf_hook") else None
    bound = own if old is None else old
    if isinstance(bound, Bound):
        return True
    return isinstance(bound, MethodType) and bound.__func__ is getattr(type(module), name)


def _of_the_call(patch: Patch, module: Any) -> str:
    """Why a patched module runs its steps one by one all the same."""
    norms = getattr(patch.replacement, "keywords", {}).get("norms", {})
    hooked = [name for name in norms if (norm := getattr(module, name, None)) is not None and has_hooks(norm)]
    if hooked:
        return f"hooks on {', '.join(hooked)} have the steps run one by one"
    if patch.op == "fused_linear_cross_entropy" and hasattr(module, "get_output_embeddings"):
        from transformers.loss.loss_utils import ForCausalLMLoss

        return loss.unserved(module, module.get_output_embeddings(), ForCausalLMLoss)
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    if patch.op == "swiglu" and type(activation) not in replacements.gates():
        return f"no op has its activation, {type(activation).__name__}"
    return ""
