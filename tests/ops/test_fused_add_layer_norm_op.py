"""fused_add_layer_norm without a weight or a bias, and of two shapes."""

import pytest
import torch

from tilekern.ops import fused_add_layer_norm


def test_a_norm_without_weight_or_bias_is_made_by_itself():
    residual, x, weight = torch.randn(3, 33), torch.randn(3, 33), torch.randn(33)
    total, y = fused_add_layer_norm(residual, x, weight, None)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(total, (33,), weight))


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="residual and x must have one shape"):
        fused_add_layer_norm(torch.ones(1, 8), torch.ones(2, 8), torch.ones(8), torch.ones(8))
