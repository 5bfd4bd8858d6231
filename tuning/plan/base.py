"""Plans the base: what the presets ask for, and layers of sizes that are frequent in public configurations.

A model that nobody tuned finds most of its kernels there, because a kernel of a layer depends on one of its sizes: a
norm on that of the hidden states, an activation on the MLP's, attention on its heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilekern.errors import InputError
from tilekern.runtime.switches import ATTENTION
from tilekern.spec.targets import Target
from tilekern.tuning.plan.configs import BASE
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.plan.sizes import LAYERS, MODELS, VOCABULARIES, Layer
from tilekern.tuning.plan.steps import Planned, Steps

_LOSS = "fused_linear_cross_entropy"
# Layers in which each kind of any preset's occurs; Gemma 3 has one in six of full attention.
_ENOUGH = 8
# Ops of a layer of most families.
_OF_LAYERS = ("rms_norm", "fused_add_rms_norm", "swiglu", "mlp", "rope", ATTENTION)
# Ops of layers that normalize queries and keys, and the size of their heads in most families.
_OF_HEADS, _NORMED = ("qk_norm_rope",), 128


def plan_of_base(steps: Steps, target: Target) -> Planned:
    """Plan the problems of the presets' steps, and of steps of frequent sizes.

    A model that cannot take such steps is left out, with a note. Of the optimizer's problems, which any model's
    parameters share, those of the presets are planned.

    Raises:
        InputError: the steps are the engine's, or no model can take them.
    """
    if steps.engine:
        raise InputError(f"{BASE} plans steps of transformers' models; with --engine name the models")
    plans, notes = [], []
    for name, model, ops in _models(steps.ops):
        try:
            plans.append(plan_of_model(model, replace(steps, ops=ops), target))
        except InputError as error:
            notes.append(f"{name} is left out: {error}")
    if not plans:
        raise InputError(notes[0])
    # Notes on what a model has no kernel for are its own plan's.
    return Planned(
        BASE if steps.tp == 1 else f"{BASE}-tp{steps.tp}",
        tuple(dict.fromkeys(problem for plan in plans for problem in plan.problems)),
        tuple(notes),
        launches=sum((Counter(plan.launches) for plan in plans), Counter()),
        invariant=frozenset().union(*(plan.invariant for plan in plans)),
    )


def _models(ops: Sequence[str] | None) -> Iterator[tuple[str, Any, Sequence[str] | None]]:
    """Yield names for people, models, and the ops that are planned of each."""
    for name in MODELS:
        yield name, _shortened(PRESETS[name]), ops
    for layer in LAYERS:
        kinds = {"mistral": _OF_LAYERS} | ({"qwen3": _OF_HEADS} if layer.head_dim == _NORMED else {})
        for kind, asked in kinds.items():
            if chosen := _both(asked, ops):
                yield f"{kind} of {layer}", config_of_layer(kind, layer), chosen
    for hidden, vocabulary in VOCABULARIES:
        if chosen := _both((_LOSS,), ops):
            layer = next(layer for layer in LAYERS if layer.hidden == hidden)
            yield f"a loss of {hidden} by {vocabulary}", config_of_layer("mistral", layer, vocabulary), chosen


def _shortened(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration with few layers, among which each kind of the model's occurs."""
    fewer = {name: min(value, _ENOUGH) for name, value in config.items() if name == "num_hidden_layers"}
    text = {name: _shortened(value) for name, value in config.items() if name == "text_config"}
    return {**config, **fewer, **text}


def _both(asked: Sequence[str], ops: Sequence[str] | None) -> list[str]:
    return [op for op in asked if ops is None or op in ops]


def config_of_layer(kind: str, layer: Layer, vocabulary: int = 32000) -> Mapping[str, Any]:
    """Return the configuration of a model of one layer.

    Args:
        kind: its ``model_type``: ``mistral``, whose layers are Llama's with any number of heads, or ``qwen3``.
        layer: the sizes.
        vocabulary: of its embeddings and logits.
    """
    return {
        "model_type": kind,
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "vocab_size": vocabulary,
        "sliding_window": None,
    }
