"""The backward of ops as others call it: twice, under hooks and autocast, and after somebody has changed an input."""

import pytest
import torch

from tilekern import ops
from tilekern.ops import made_ahead

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(6, 16, generator=GENERATOR), torch.randn(8, 16, generator=GENERATOR)
TARGET, CLASSES = torch.tensor([0, 3, -100, 7, 1, 2]), 0.5 + torch.rand(8, generator=GENERATOR)
LOG, OTHER = (torch.randn(6, 16, generator=GENERATOR).log_softmax(-1) for _ in range(2))


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def head(hidden, weight, **options):
    return ops.fused_linear_cross_entropy(hidden, weight, TARGET, **options)


def test_hooks_on_what_is_saved_see_the_gradients_that_were_made_ahead():
    given, seen = leaves(HIDDEN, WEIGHT), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(tuple(x.shape)) or x, lambda x: x):
        head(*given)
    assert seen.count(tuple(HIDDEN.shape)) == 2
    assert seen.count(tuple(WEIGHT.shape)) == 2


@pytest.mark.parametrize("options", [{"reduction": "none"}, {}], ids=["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_class_weights_that_change_before_the_backward_are_noticed(options, dtype):
    classes, given = CLASSES.clone(), leaves(HIDDEN.to(dtype), WEIGHT.to(dtype))
    loss = head(*given, class_weight=classes, **options)
    classes.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_class_weights_that_change_after_a_cast_are_those_of_the_call():
    classes, given = CLASSES.half(), leaves(HIDDEN, WEIGHT)
    expected = torch.autograd.grad(head(*given, class_weight=classes, reduction="none").sum(), given)
    loss = head(*given, class_weight=classes, reduction="none")
    classes.mul_(5)
    found = torch.autograd.grad(loss.sum(), given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_taken_gradient_is_made_again_and_the_first_is_not():
    made = []

    def make(x):
        made.append(1)
        return x.square().sum(), (2 * x.detach(),)

    (x,) = leaves(HIDDEN)
    loss = made_ahead.total(make, 1, x)
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], 2 * x)
    assert len(made) == 3


@pytest.mark.usefixtures("interpreted")
def test_a_tensor_that_a_transform_left_behind_is_taken():
    """torch unwraps it for autograd functions; its memory cannot be asked for before."""
    left = []

    def leaving(x):
        left.append(x * 2)
        return x.sum()

    x, weight = torch.randn(4, 64), torch.rand(64, requires_grad=True)
    torch.func.grad(leaving)(x)
    ops.rms_norm(left[0], weight, 1e-6).sum().backward()
    other = weight.detach().requires_grad_()
    ops.rms_norm(2 * x, other, 1e-6).sum().backward()
    assert torch.equal(weight.grad, other.grad)


@pytest.mark.usefixtures("interpreted")
def test_second_derivatives_of_an_mlp_are_refused_under_autocast_too():
    given = leaves(HIDDEN, WEIGHT, WEIGHT, WEIGHT.t().contiguous())
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.gated_mlp(*given)
    slopes = torch.autograd.grad(y.sum(), given, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(slope.square().sum() for slope in slopes).backward()


@pytest.mark.usefixtures("interpreted")
def test_inputs_of_inference_mode_are_taken_as_torch_takes_them():
    """A norm of torch's operations does not keep its input for its weight's gradient."""
    (weight,) = leaves(HIDDEN[0])
    with torch.inference_mode():
        x = HIDDEN.clone()
    found, expected = (torch.autograd.grad(ops.rms_norm(rows, weight, 1e-6).sum(), weight)[0] for rows in (x, HIDDEN))
    assert torch.equal(found, expected)
    with torch.inference_mode():
        parameter = torch.nn.Parameter(HIDDEN[0].clone())
    with pytest.raises(RuntimeError, match="Inference tensors"):
        ops.rms_norm(HIDDEN, parameter, 1e-6)


@pytest.mark.usefixtures("interpreted")
def test_several_gradients_at_once_are_refused_in_plain_words():
    (x,) = leaves(HIDDEN)
    y = ops.rms_norm(x, WEIGHT[0], 1e-6)
    with pytest.raises(RuntimeError, match="one gradient at a time; pass is_grads_batched=False"):
        torch.autograd.grad(y, x, torch.stack([HIDDEN, HIDDEN]), is_grads_batched=True)
