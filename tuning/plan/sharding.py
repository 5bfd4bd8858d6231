"""Makes the configuration of one rank of a tensor-parallel model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilekern.errors import InputError

# Sizes that are divided, and what errors call them.
_DIVIDED = {
    "num_attention_heads": "heads",
    "intermediate_size": "columns of the MLP",
    "moe_intermediate_size": "columns of an expert",
    "shared_expert_intermediate_size": "columns of the shared expert",
}
_VOCABULARY = {"vocab_size": "tokens in the vocabulary"}


def share_of(config: Any, tp: int, name: str, *, vocabulary: bool) -> Any:
    """Return the configuration of the share that one of ``tp`` ranks has.

    Heads, the MLP's columns and, if asked, the vocabulary are divided; hidden states are not. If there are fewer
    key-value heads than ranks, several ranks hold the same head.

    Raises:
        InputError: the ranks cannot share one of these evenly, or what they would share is not in the configuration.
    """
    fields = config.to_dict()
    names = {size: config.attribute_map.get(size, size) for size in (*_DIVIDED, *_VOCABULARY, "num_key_value_heads")}
    if not fields.get("head_dim") or fields.get("per_layer_config"):
        raise InputError(
            f"--tp {tp}: {name} cannot be divided by its configuration, which has no head_dim, or layers of several "
            "sizes; trace a rank's own step by tilekern.trace()"
        )
    heads = fields[names["num_attention_heads"]]
    key_heads = fields.get(names["num_key_value_heads"]) or heads
    if key_heads % tp and tp % key_heads:
        raise _undivided(name, "key-value heads", key_heads, tp)
    changes = {names["num_key_value_heads"]: max(1, key_heads // tp)}
    for size, what in (_DIVIDED | (_VOCABULARY if vocabulary else {})).items():
        count = fields.get(names[size])
        if isinstance(count, int):
            if count % tp:
                raise _undivided(name, what, count, tp)
            changes[names[size]] = count // tp
    return type(config).from_dict({**fields, **changes})


def _undivided(name: str, what: str, count: int, tp: int) -> InputError:
    return InputError(f"--tp {tp}: {name} has {count} {what}, which {tp} ranks cannot share evenly")


def give_own_forwards(model: Any) -> None:
    """Wrap the forward of each module that transformers' tensor-parallel plan names, as applying the plan does.

    A fused op falls back for such a module, as for one with a hook.
    """
    patterns = [re.escape(name).replace(r"\*", r"\d+") for name in getattr(model, "_tp_plan", None) or {}]
    for name, module in model.named_modules():
        if any(re.fullmatch(pattern, name) for pattern in patterns):
            module.forward = OwnForward(module.forward)


@dataclass(frozen=True)
class OwnForward:
    """A module's own forward around its former one."""

    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the former forward."""
        return self.forward(*args, **kwargs)
