"""Norms whose result a gate multiplies, as linear attention has them."""

import pytest
import torch
from tiny_families import IDS, make
from tiny_qwen3 import launched, launches, worst
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

import tilekern

pytestmark = pytest.mark.usefixtures("interpreted")
SERVED = {"rms_norm_forward": 1, "swiglu_forward": 1}


def run(norm, x, gate):
    leaves = [x.requires_grad_(), gate.requires_grad_(), norm.weight]
    y = norm(x, gate)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1))]


def given(dtype=torch.float32, gate_dtype=None, size=10):
    norm = Qwen3NextRMSNormGated(10).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5)
    return norm, torch.randn(7, 10).to(dtype), torch.randn(7, size).to(gate_dtype or dtype)


def held(norm, x, gate, served, tolerance=1e-5):
    """Hold what stands in to what was there; and the kernels of a forward."""
    expected, before = run(norm, x, gate), launches()
    assert "rms_norm" in tilekern.apply(model_type="qwen3_next")
    found = run(norm, x, gate)
    assert {name: n for name, n in launched(before).items() if name.endswith("_forward")} == served
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert worst(found, expected) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_and_its_gate_give_what_they_did(dtype):
    held(*given(dtype), SERVED, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("other", ["a gate of another dtype", "a gate for all columns", "sigmoid"])
def test_others_run_as_they_are(other):
    size, dtype = 1 if "all" in other else 10, torch.bfloat16 if "dtype" in other else None
    norm, x, gate = given(gate_dtype=dtype, size=size)
    if other == "sigmoid":
        norm.activation = other
    held(norm, x, gate, {})


@pytest.mark.parametrize("way", [lambda _: tilekern.apply(model_type="qwen3_5"), tilekern.apply_to_model])
def test_those_of_qwen3_5_are_served_and_put_back(way):
    model = make("qwen3_5")[0].eval()
    expected = model(input_ids=IDS).logits
    way(model)
    rows = [row for row in tilekern.report(model).rows if row.kind == "Qwen3_5RMSNormGated"]
    assert [(row.op, row.reason) for row in rows] == [("rms_norm", "")]
    before = launches()
    assert worst([model(input_ids=IDS).logits], [expected]) < 1e-5
    # Those of MLPs are two.
    assert launched(before)["swiglu_forward"] == 3
    tilekern.reset()
    assert torch.equal(model(input_ids=IDS).logits, expected)
