"""What a user has set in torch changes nothing that an op computes, nor what later calls find kept."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from op_samples import SHIPPED, public, tensors_of

import tilekern
from tilekern import ops
from tilekern.ops import labels, registration

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR)


TARGET, IDS = torch.tensor([0, 3, -100, 7, 1, 2]), torch.tensor([[0, 2], [1, 0], [2, 1], [1, 2], [0, 1], [2, 0]])
JSD = ("student", "teacher")
HEAD = {"hidden": normal(6, 16), "weight": normal(8, 16)}
# Functions that are written by hand, or give what they take to several ops.
BY_HAND = {
    "fused_linear_cross_entropy": (ops.fused_linear_cross_entropy, {**HEAD, "target": TARGET}, {}),
    "fused_linear_cross_entropy by rows": (
        ops.fused_linear_cross_entropy, {**HEAD, "target": TARGET, "bias": normal(8)}, {"reduction": "none"},
    ),
    "fused_linear_cross_entropy, weighted": (
        ops.fused_linear_cross_entropy, {**HEAD, "target": TARGET},
        {"num_items": 3, "use_token_scaling": True, "return_z_loss": True, "z_loss": 0.1},
    ),
    "fused_linear_jsd": (
        ops.fused_linear_jsd,
        {f"{who}_{what}": normal(rows, 16) for who in JSD for what, rows in (("input", 6), ("weight", 8))}, {},
    ),
    "linear_log_probs": (ops.linear_log_probs, {**HEAD, "ids": TARGET.clamp(min=0)}, {}),
    "router": (ops.router, {"logits": normal(6, 8)}, {"choices": 2, "scores": "sigmoid"}),
    "router by softmax": (ops.router, {"logits": normal(6, 8)}, {"choices": 2}),
    "router_losses": (ops.router_losses, {"logits": normal(6, 8), "ids": IDS}, {}),
    "route": (ops.route, {"ids": IDS}, {"experts": 3}),
    "gated_mlp": (
        ops.gated_mlp,
        {"x": normal(4, 16), "down_weight": normal(16, 8)} | {f"{x}_weight": normal(8, 16) for x in ("gate", "up")}, {},
    ),
    "rms_norm without a weight": (ops.rms_norm, {"x": normal(6, 16), "weight": None}, {}),
    "layer_norm without a weight": (ops.layer_norm, {"x": normal(6, 16), "weight": None, "bias": None}, {}),
    "jsd": (ops.jsd, {"_input": normal(6, 16).log_softmax(-1), "target": normal(6, 16).log_softmax(-1)}, {}),
}  # fmt: skip
CALLS = BY_HAND | {
    name: (public(op), tensors_of(op, optional=is_whole), {})
    for op in SHIPPED.values()
    for name, is_whole in ((op.name, True), (f"{op.name} with what it must have", False))
    if is_whole or op.optional
}
# Which tensors get no gradient.
UNGRADED = {function: () for function, _, _ in CALLS.values()} | {public(op): op.ungraded for op in SHIPPED.values()}
for function in (ops.kl_div, ops.jsd, ops.tvd):
    UNGRADED[function] = ("y_true", "target", "q")
UNGRADED[ops.fused_linear_jsd] = ("teacher_input", "teacher_weight")
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@contextlib.contextmanager
def set_by_a_user():
    """All defaults that another tensor than the one that was meant may come from."""
    warns = torch.is_warn_always_enabled()
    torch.set_default_dtype(torch.bfloat16)
    torch._C._set_deterministic_algorithms(True)  # what torch has around it imports its compiler, for seconds
    torch.set_warn_always(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_warn_always(warns)
        torch._C._set_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def tensors(results):
    if dataclasses.is_dataclass(results):
        results = tuple(getattr(results, field.name) for field in dataclasses.fields(results))
    return [y for y in (results if isinstance(results, tuple) else (results,)) if y is not None]


def step(call, *, graded):
    """The results, and the gradients by all that can have one."""
    function, given, options = call
    given = {name: x if x is None else x.detach() for name, x in given.items()}
    if not graded:
        return tensors(function(**given, **options))
    leaves = [
        x.requires_grad_()
        for name, x in given.items()
        if x is not None and x.is_floating_point() and name not in UNGRADED[function]
    ]
    found = tensors(function(**given, **options))
    shown = [y for y in found if y.requires_grad]
    grads = torch.autograd.grad([y.sum() for y in shown], leaves, allow_unused=True) if shown else ()
    return [*(y.detach() for y in found), *(x for x in grads if x is not None)]


@pytest.fixture
def nothing_kept(monkeypatch):
    """As in a process whose first call is the test's."""
    monkeypatch.setattr(registration, "_rows", {})
    monkeypatch.setattr(labels, "_seen", {})


def assert_same(found, right):
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other) or torch.equal(one.isnan(), other.isnan())


@every_call
@pytest.mark.usefixtures("nothing_kept")
def test_defaults_of_a_user_change_no_result(call):
    with set_by_a_user():
        found = step(call, graded=True)
    assert_same(found, step(call, graded=True))


@every_call
@pytest.mark.usefixtures("nothing_kept", "without_interpreter")
def test_nor_where_torch_s_operations_run_in_a_kernel_s_place(call):
    with set_by_a_user():
        found = step(call, graded=True)
    assert_same(found, step(call, graded=True))


@every_call
@pytest.mark.usefixtures("nothing_kept")
def test_a_training_step_goes_on_from_what_inference_mode_left(call):
    with torch.inference_mode():
        found = step(call, graded=False)
    assert_same(found, step(call, graded=True)[: len(found)])


FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "scalar_tensor", "tensor",
    "zeros",
}  # fmt: skip
# Rooms whose code runs in a job. Kernels and composites draw the tuner's inputs by defaults; the calls above run them.
# The parameters of a module class are those of its user's defaults, as torch's are.
ROOMS = ("interpreter", "liger", "ops", "patch", "runtime", "tracing", "losses.py", "trl.py", "layers.py")


def made_by_defaults():
    """Where a factory of torch's is called without a dtype or a device, as file:line."""
    root = Path(tilekern.__file__).parent
    for room in ROOMS:
        for path in [root / room] if room.endswith(".py") else (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if not name.startswith("torch.") or name.removeprefix("torch.") not in FACTORIES:
                    continue
                if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}:
                    yield f"{path.relative_to(root)}:{node.lineno}"


def test_no_tensor_is_made_by_a_default():
    found = [place for place in made_by_defaults() if not place.startswith("ops/modules.py")]
    assert not found, f"name dtype and device: {', '.join(found)}"
    assert len(list(made_by_defaults())) > 4, "those of the module classes are found"


NUMBERS = [(op, name) for op in SHIPPED.values() for name in op.scalars if op.kinds[name].startswith("float")]


@pytest.mark.parametrize(("op", "name"), NUMBERS, ids=[f"{op.name} {name}" for op, name in NUMBERS])
def test_a_whole_number_stands_for_a_float(op, name):
    """As a configuration has it: 30 for 30.0."""
    function = public(op)
    if name not in inspect.signature(function).parameters:
        pytest.skip("not an argument of the function")
    given = {name: x.requires_grad_(name in op.gradients) for name, x in tensors_of(op).items()}
    found = [tensors(function(**given, **{name: value})) for value in (1, 1.0)]
    slopes = [sum(y.float().sum() for y in some if y.requires_grad) for some in found]
    leaves = [given[name] for name in op.gradients]
    found = [[*some, *torch.autograd.grad(slope, leaves)] for some, slope in zip(found, slopes, strict=True)]
    assert_same(*found)
