"""The model that start-up is timed on: Qwen3-8B's sizes with few layers."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step import make_model, patch


def test_the_model_has_qwen3_8bs_sizes():
    before = torch.get_default_dtype()
    try:
        model = make_model(2, device="meta")
    finally:
        torch.set_default_dtype(before)
    layer = model.model.layers[0]
    assert (len(model.model.layers), layer.mlp.up_proj.weight.shape) == (2, (12288, 4096))
    assert (layer.self_attn.q_proj.weight.shape, layer.self_attn.k_proj.weight.shape) == ((4096, 4096), (1024, 4096))
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_an_unknown_provider_is_refused():
    with pytest.raises(SystemExit, match="nobody"):
        patch("nobody")
