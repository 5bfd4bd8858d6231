"""A user's settings of torch change neither what an op computes nor what it keeps for later calls."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch
from op_samples import SHIPPED, public, tensors_of

import tilekern


def tensors(results):
    return [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]


FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor",
    "zeros",
}  # fmt: skip
# Rooms whose code runs in a job. Kernels and composites draw the tuner's inputs by defaults; the calls above run them.
# The parameters of a module class are those of its user's defaults, as torch's are.
ROOMS = ("interpreter", "ops", "patch", "runtime", "integrations")


def made_by_defaults():
    """Return the calls of torch's factories without a dtype or a device, as file:line."""
    root = Path(tilekern.__file__).parent
    for room in ROOMS:
        for path in (root / room).rglob("*.py"):
            if path.parent.name == "forms":  # quoted from transformers, and never run
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if not name.startswith("torch.") or name.removeprefix("torch.") not in FACTORIES:
                    continue
                if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}:
                    yield f"{path.relative_to(root)}:{node.lineno}"


def test_no_tensor_is_made_by_a_default():
    found = list(made_by_defaults())
    wrong = [place for place in found if not place.startswith("ops/modules.py")]
    assert not wrong, f"name dtype and device: {', '.join(wrong)}"
    assert len(found) > 4, "those of the module classes are found"


NUMBERS = [(op, name) for op in SHIPPED.values() for name in op.scalars if op.kinds[name].startswith("float")]


@pytest.mark.parametrize(("op", "name"), NUMBERS, ids=[f"{op.name} {name}" for op, name in NUMBERS])
def test_an_integer_is_accepted_for_a_float(op, name):
    """Configurations contain 30 for 30.0."""
    function = public(op)
    if name not in inspect.signature(function).parameters:
        pytest.skip("not an argument of the function")
    given = {name: x.requires_grad_(name in op.gradients) for name, x in tensors_of(op).items()}
    found = [tensors(function(**given, **{name: value})) for value in (1, 1.0)]
    slopes = [sum(y.float().sum() for y in some if y.requires_grad) for some in found]
    leaves = [given[name] for name in op.gradients]
    if leaves:
        found = [[*some, *torch.autograd.grad(slope, leaves)] for some, slope in zip(found, slopes, strict=True)]
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
