"""No op hands a kernel a tensor that lies on another device than its first."""

from __future__ import annotations

import pytest
import torch
from op_samples import SHIPPED, public, tensors_of

from tilekern import ops
from tilekern.ops import fused_linear_cross_entropy, gated_mlp, linear, rms_norm

# Tensors of each op by their names.
GIVEN = {public(op): tensors_of(op) for op in SHIPPED.values()} | {
    gated_mlp: {
        "x": torch.randn(4, 16), "gate_weight": torch.randn(8, 16), "up_weight": torch.randn(8, 16),
        "down_weight": torch.randn(16, 8),
    },
    fused_linear_cross_entropy: {
        "hidden": torch.randn(4, 16), "weight": torch.randn(8, 16), "target": torch.zeros(4, dtype=torch.long),
        "class_weight": torch.rand(8),
    },
}  # fmt: skip
# Without a gradient torch's own layers take the weights of a gated_mlp.
CASES = [
    pytest.param(op, name, graded, id=f"{op.__name__}-{name}-{'graded' if graded else 'plain'}")
    for op, given in GIVEN.items()
    for name in list(given)[1:]
    for graded in ((True,) if op is gated_mlp else (False, True))
]


def made(op, away=None, graded=False):
    found = {name: x.clone() for name, x in GIVEN[op].items()}
    if away is not None:
        found[away] = found[away].to("meta")
    next(iter(found.values())).requires_grad_(graded)
    return found


@pytest.mark.parametrize(("op", "name", "graded"), CASES)
def test_a_tensor_on_another_device_is_refused_by_its_name(op, name, graded):
    op(**made(op, graded=graded))
    first = next(iter(GIVEN[op]))
    with pytest.raises(ValueError, match=rf"^{op.__name__}: {name} is on meta, and must be on cpu as {first} is$"):
        op(**made(op, name, graded))


@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
@pytest.mark.parametrize("op", GIVEN, ids=lambda op: op.__name__)
def test_on_meta_an_op_has_the_shapes_of_its_results(op, graded):
    given = made(op, graded=graded)
    if op is ops.attention:
        del given["cu_seqlens"]  # whose starts are numbers, which meta has none of
    away = {name: x.detach().to("meta").requires_grad_(x.requires_grad) for name, x in given.items()}
    here, there = (y if isinstance(y, tuple) else (y,) for y in (op(**given), op(**away)))
    assert [(y.shape, y.dtype) for y in there] == [(y.shape, y.dtype) for y in here]
    assert all(y.is_meta for y in there)
    if graded:
        leaf = next(iter(away.values()))
        (gradient,) = torch.autograd.grad(sum(y.sum() for y in there), leaf)
        assert gradient.shape == leaf.shape


@pytest.mark.parametrize("op", [rms_norm, linear], ids=lambda op: op.__name__)
def test_a_traced_call_is_refused_too(op):
    traced = torch.compile(lambda given: op(**given), backend="eager", fullgraph=True)
    traced(made(op))
    with pytest.raises(Exception, match="weight is on meta, and must be on cpu as x is"):
        traced(made(op, "weight"))
