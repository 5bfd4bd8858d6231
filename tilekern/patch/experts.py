"""``experts_implementation="tilekern"``, registered with transformers; Llama 4's layers of experts need a patch.

Attributes of a module of experts describe the layout of its weights. Its gate is a method, recognised by its shape
(:mod:`tilekern.patch.digests`). Transformers' own grouped products run for modules with:

- another gate
- an activation without an op, or with hooks
- a norm after the experts
- tensors that are not plain
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tilekern import ops
from tilekern.kernels.experts.gate import FORWARD
from tilekern.kernels.fp8.grouped import SPEC as PRODUCT
from tilekern.ops.fp8_experts import fp8_experts
from tilekern.patch import parallel
from tilekern.patch.digests import Table, definition_of
from tilekern.patch.guards import (
    COMPILED,
    SUBCLASS,
    constant_in_graphs,
    count_own,
    forward_of,
    has_hooks,
    is_from,
    is_ordinary,
    is_plain,
)
from tilekern.patch.rewriting import named_as
from tilekern.runtime import implementation
from tilekern.runtime.dispatch import count_fallback
from tilekern.runtime.switches import IMPLEMENTATION
from tilekern.warning import warn_once

# transformers' default, and the attribute in which a configuration stores the choice. The name without the suffix is a
# property whose setter would also change nested configurations.
_DEFAULT, _NAME = "grouped_mm", "_experts_implementation_internal"
# The attribute of a module of experts that runs products of 8-bit floats; its value is the format.
FORMAT = "tilekern_fp8"
# Models whose experts were chosen here.
_chosen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GateForm(NamedTuple):
    """How a gate is written; attributes are the module's, and empty if it has none.

    Attributes:
        activation: attribute of the activation; empty for silu, or for ``x * sigmoid(alpha * x)`` if alpha is set.
        limit: attribute of the limit of both halves.
        alpha: attribute of the factor inside the sigmoid.
        shift: number added to the up half.
        interleaved: whether gate and up alternate.
    """

    activation: str = "act_fn"
    limit: str = ""
    alpha: str = ""
    shift: float = 0.0
    interleaved: bool = False


_GATES = Table(
    "experts",
    {
        "default_apply_gate": GateForm(),
        "BeamExperts._apply_gate": GateForm(),
        "DeepseekV4Experts._apply_gate": GateForm(limit="limit"),
        "Glm5NextTextExperts._apply_gate": GateForm("", "swiglu_limit"),
        "GptOssExperts._apply_gate": GateForm("", "limit", "alpha", 1.0, interleaved=True),
        "MiniMaxM3VLExperts._apply_gate": GateForm("", "swiglu_limit", "swiglu_alpha", 1.0),
        "OpenAIPrivacyFilterExperts._apply_gate": GateForm("", "limit", "alpha", 1.0),
    },
)


@constant_in_graphs
def form_of(method: FunctionType) -> GateForm | None:
    """Return the form of a gate's method, or None if it is unknown."""
    return _form_of(method)


@functools.cache
def _form_of(method: FunctionType) -> GateForm | None:
    try:
        form: GateForm | None = _GATES.get(definition_of(method))
    except ValueError:
        return None
    return form


def unserved(module: torch.nn.Module, is_gathered: bool = False) -> str:
    """Return why the op does not serve a module of experts; empty if it does.

    ``is_gathered`` says that its weights are plain tensors whenever it runs.
    """
    return _unserved(module, weights_of(module), is_gathered)


def _unserved(module: torch.nn.Module, weights: tuple[Any, ...], is_gathered: bool = False) -> str:
    form = _form(module)
    if not getattr(module, "has_gate", True):
        return "its experts have no gate"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm follows its experts"
    return "its gate has no form that is known" if form is None else _unserved_by(module, form, weights, is_gathered)


def _unserved_by(
    module: torch.nn.Module, form: GateForm, weights: tuple[Any, ...], is_gathered: bool = False
) -> str:  # fmt: skip
    if _activation(module, form) is None:
        return f"no op has its activation, {type(getattr(module, form.activation, None)).__name__}, or it has hooks"
    plain = all(isinstance(x, torch.Tensor) for x in weights) and (is_gathered or is_plain(*weights))
    same = plain and len({x.dtype for x in weights}) == 1 and weights[0].dtype in _DTYPES
    return "" if same else "its weights are not plain tensors of one dtype that are called as usual"


def reason_of(module: torch.nn.Module, shards: bool = False) -> str:
    """Return why the op does not run for a module of experts as it is now; empty if it does.

    ``shards`` says that FSDP shards parts of the model; it gathers weights before running them. The forwards of
    transformers' parallelism pass this rank's part.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    chosen = str(getattr(getattr(module, "config", None), _NAME, None))
    is_ours = chosen == IMPLEMENTATION or ALL_EXPERTS_FUNCTIONS.get(chosen) is run_experts
    if is_ours:
        return unserved(module, is_gathered=shards or parallel.around(module) is not None)
    return f'experts_implementation is {chosen!r}; "tilekern" chooses the op'


def _form(module: torch.nn.Module) -> GateForm | None:
    method = getattr(type(module), "_apply_gate", None)
    if "_apply_gate" in vars(module) or not isinstance(method, FunctionType):
        return None
    return form_of(method)


def _activation(module: torch.nn.Module, form: GateForm) -> str | None:
    """Return the op's name for a module's activation."""
    if not form.activation:
        return "silu"
    function = getattr(module, form.activation, None)
    if isinstance(function, torch.nn.Module) and not is_ordinary(function):
        return None
    return None if function is None else _activation_of(_kind(function))


def _kind(function: Any) -> Any:
    """Return the class of an activation, or a plain function itself."""
    return type(function) if isinstance(function, torch.nn.Module) else function


@constant_in_graphs
def _activation_of(kind: Any) -> str | None:
    return _activations().get(kind)


@functools.cache
def _activations() -> dict[Any, str]:
    from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation

    return {
        **dict.fromkeys((SiLUActivation, torch.nn.SiLU, torch.nn.functional.silu), "silu"),
        **dict.fromkeys((GELUTanh, NewGELUActivation), "gelu_tanh"),
    }


def weights_of(module: Any) -> tuple[Any, ...]:
    """Return the weights of both products, then their biases if it has any."""
    names = ("gate_up_proj", "down_proj")
    biases = tuple(f"{name}_bias" for name in names) if getattr(module, "has_bias", False) else ()
    return tuple(getattr(module, name, None) for name in (*names, *biases))


def run_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run experts, with the arguments that transformers passes.

    A call that runs no kernel counts among the ``fallbacks`` of ``experts_gate``, unless it was compiled.

    Args:
        module: the experts, with their weights; ``is_transposed`` gives the layout.
        hidden_states: [tokens, hidden].
        top_k_index: [tokens, choices]; an id not below the number of experts adds nothing (expert parallelism uses such
            ids for other ranks' experts).
        top_k_weights: [tokens, choices].

    Returns:
        [tokens, hidden].
    """
    weights = weights_of(module)
    reason = _unserved(module, weights)
    if not reason and not is_plain(hidden_states, top_k_index, top_k_weights):
        reason = "its inputs are not plain tensors"
    if reason and not torch.compiler.is_compiling():
        warn_once(f"{type(module).__name__}: {reason}; transformers' own grouped products run")
        count_fallback(FORWARD, reason)
    if reason:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    if top_k_weights.shape != top_k_index.shape:
        # In older releases of transformers, routers of some families return a weight for every expert.
        top_k_weights = top_k_weights.gather(1, top_k_index)
    form = _form(module)
    assert form is not None
    gate_up, down, *biases = weights
    if getattr(module, "is_transposed", False):
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return _op_of(module)(
        hidden_states, top_k_index, top_k_weights, gate_up, down, *biases, activation=_activation(module, form) or "",
        alpha=getattr(module, form.alpha) if form.alpha else 1.0,
        limit=getattr(module, form.limit) if form.limit else None, shift=form.shift, interleaved=form.interleaved,
    )  # fmt: skip


def _op_of(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return the op of a module of experts: that of 8-bit floats if it was converted, but in compiled code."""
    if FORMAT not in vars(module):
        return ops.experts
    if torch.compiler.is_compiling():
        count_own(PRODUCT.name, COMPILED)
        return ops.experts
    return fp8_experts


def unserved_layer(module: Any) -> str:
    """Return why a layer's own code runs instead of :func:`scaled_layer`; empty if it does not."""
    experts, homes = module.experts, {kind.__module__ for kind in type(module).__mro__}
    if has_hooks(experts) or not is_from(forward_of(experts), *homes):
        return "its experts are called by hooks or by another forward than their own"
    return _unserved_by(experts, GateForm(), weights_of(experts))


def scaled_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``forward(self, hidden_states)`` of a layer whose router scales the experts' inputs (Llama 4).

    The original code computes every token in every expert, mostly on zeros, because the other scores are zero.
    """

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if reason := unserved_layer(self) if is_plain(hidden_states) else SUBCLASS:
            count_own(FORWARD.name, reason)
            return original(self, hidden_states)
        x, experts = hidden_states.reshape(-1, self.hidden_dim), self.experts
        scores, logits = self.router(x)
        chosen, ids = scores.topk(self.top_k, dim=1)
        slots = (x[:, None] * chosen[..., None]).flatten(0, 1)
        gate_up, down = (weight.transpose(1, 2) for weight in weights_of(experts))
        ones, activation = slots.new_ones(len(slots), 1), _activation(experts, GateForm()) or ""
        y = ops.experts(slots, ids.view(-1, 1), ones, gate_up, down, activation=activation)
        return self.shared_expert(x).add_(y.view(*ids.shape, -1).sum(1)), logits

    return named_as(forward, original)


def register() -> None:
    """Register the function itself with transformers."""
    implementation.register_experts(run_experts)


def stand_in(is_on: bool) -> None:
    """Make all models that use transformers' default, grouped products, run the op instead, or undo this."""
    if is_on:
        from transformers.integrations import moe

        moe.ALL_EXPERTS_FUNCTIONS.register(_DEFAULT, run_experts)
        return
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is not None and moe.ALL_EXPERTS_FUNCTIONS.get(_DEFAULT) is run_experts:
        moe.ALL_EXPERTS_FUNCTIONS.register(_DEFAULT, moe.grouped_mm_experts_forward)


def choose(model: torch.nn.Module, is_on: bool) -> bool:
    """Make the models inside a model run the op instead of transformers' grouped products, or undo this.

    Returns:
        Whether at least one of them now runs the op by this choice.
    """
    for module in model.modules():
        config = getattr(module, "config", None) if hasattr(module, "set_experts_implementation") else None
        if is_on and getattr(config, _NAME, None) == _DEFAULT:
            setattr(config, _NAME, IMPLEMENTATION)
            _chosen.add(module)
        elif not is_on and module in _chosen:
            _put_back(module)
    return any(module in _chosen for module in model.modules())


@contextlib.contextmanager
def chosen(model: torch.nn.Module, is_on: bool) -> Iterator[None]:
    """Make the models inside a model run the op for a while, if ``is_on``."""
    if is_on:
        choose(model, True)
    try:
        yield
    finally:
        if is_on:
            choose(model, False)


def put_back() -> None:
    """Undo :func:`stand_in` and :func:`choose`."""
    stand_in(False)
    for module in list(_chosen):
        _put_back(module)


def _put_back(module: Any) -> None:
    _chosen.discard(module)
    if getattr(module.config, _NAME) == IMPLEMENTATION:
        setattr(module.config, _NAME, _DEFAULT)
