"""Models of a known shape with random bf16 weights, made where they are trained."""

from __future__ import annotations

import copy
from typing import Any

from tilekern.patch.stepping import auto_class


def make_model(config: Any, layers: int = 0, attention: str = "sdpa", device: str = "cuda") -> Any:
    """A language model of a configuration in training mode, which keeps no cache of keys and values.

    Args:
        config: the configuration, which stays as it is.
        layers: number of layers, the first ones, and at most as many that look at images; 0 for all.
        attention: transformers' name of the attention implementation.
        device: where the weights are made; none of them passes through another device.
    """
    import torch

    made = copy.deepcopy(config)
    text = made.get_text_config()
    made.use_cache = text.use_cache = False
    if layers:
        _keep_first(text, layers)
        if vision := getattr(made, "vision_config", None):
            vision.depth = min(vision.depth, layers)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return auto_class(made).from_config(made, attn_implementation=attention).train()
    finally:
        torch.set_default_dtype(before)


def layers_of(model: Any) -> list[Any]:
    """The layers of a model, in order, those that look at images left out."""
    return list(next(part for name, part in model.get_decoder().named_children() if name in ("layers", "h")))


def _keep_first(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
