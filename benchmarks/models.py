"""Make models of a known shape with random bf16 weights, on the device that trains them."""

from __future__ import annotations

import copy
from typing import Any

from tilekern.errors import InputError
from tilekern.patch.stepping import auto_class


def make_model(
    config: Any, layers: int = 0, attention: str = "sdpa", device: str = "cuda", dtype: str = "bfloat16"
) -> Any:
    """Make a language model of a configuration in training mode, without a cache of keys and values.

    Args:
        config: the configuration; it is not changed.
        layers: keep this number of first layers, and at most as many vision layers; 0 for all.
        attention: transformers' name of the attention implementation.
        device: the device on which the weights are made directly.
        dtype: of the weights.

    Raises:
        InputError: the model has fewer layers.
    """
    import torch

    made = copy.deepcopy(config)
    text = made.get_text_config()
    if layers > text.num_hidden_layers:
        raise InputError(f"the model has {text.num_hidden_layers} layers, and not {layers}")
    made.use_cache = text.use_cache = False
    if layers:
        _keep_first(text, layers)
        if vision := getattr(made, "vision_config", None):
            vision.depth = min(vision.depth, layers)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            return auto_class(made).from_config(made, attn_implementation=attention).train()
    finally:
        torch.set_default_dtype(before)


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model in order, without vision layers."""
    return list(next(part for name, part in model.get_decoder().named_children() if name in ("layers", "h")))


def _keep_first(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
