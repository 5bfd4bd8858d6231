"""The backward of ops as others call it: twice, under hooks and autocast, and after somebody has changed an input."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilekern import ops
from tilekern.ops import made_ahead
from tilekern.runtime import dispatch

GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(6, 16, generator=GENERATOR), torch.randn(8, 16, generator=GENERATOR)
TARGET, CLASSES = torch.tensor([0, 3, -100, 7, 1, 2]), 0.5 + torch.rand(8, generator=GENERATOR)
LOG, OTHER = (torch.randn(6, 16, generator=GENERATOR).log_softmax(-1) for _ in range(2))


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


def head(hidden, weight, **options):
    return ops.fused_linear_cross_entropy(hidden, weight, TARGET, **options)


LOSSES = {
    "fused_linear_cross_entropy": (head, (HIDDEN, WEIGHT)),
    "with a bias": (lambda h, w, b: head(h, w, bias=b), (HIDDEN, WEIGHT, CLASSES)),
    "by rows": (lambda h, w: head(h, w, reduction="none").sum(), (HIDDEN, WEIGHT)),
    "fused_linear_jsd": (lambda h, w: ops.fused_linear_jsd(h, w, HIDDEN.flip(0), WEIGHT.flip(0)), (HIDDEN, WEIGHT)),
    "jsd": (lambda x: ops.jsd(x, OTHER), (LOG,)),
    "tvd": (lambda x: ops.tvd(x, OTHER.exp()), (LOG.exp(),)),
    "kl_div": (lambda x: ops.kl_div(x, OTHER.exp()), (LOG,)),
    "cross_entropy in place": (lambda x: ops.cross_entropy(x * 1, TARGET, in_place=True), (LOG,)),
    "linear_log_probs": (lambda h, w: ops.linear_log_probs(h, w, TARGET.clamp(min=0))[0].sum(), (HIDDEN, WEIGHT)),
}
every_loss = pytest.mark.parametrize(("loss", "tensors"), LOSSES.values(), ids=LOSSES)


@every_loss
def test_a_graph_that_is_kept_gives_the_same_gradients_each_time(loss, tensors):
    given = leaves(*tensors)
    once = torch.autograd.grad(loss(*given), given)
    value = loss(*given)
    for _ in range(2):
        again = torch.autograd.grad(value, given, torch.tensor(2.0), retain_graph=True)
        for one, other in zip(again, once, strict=True):
            torch.testing.assert_close(one, 2 * other, rtol=1e-5, atol=1e-6)
            one.add_(1)  # it belongs to whoever asked
    last = torch.autograd.grad(value, given)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(last, once, strict=True))


@every_loss
def test_gradients_are_accumulated_without_a_copy_of_them(loss, tensors):
    """What was made for one backward becomes the leaf's gradient."""
    given = leaves(*tensors)
    made = []
    hooks = [x.register_hook(lambda grad: made.append(grad.data_ptr())) for x in given]
    loss(*given).backward()
    assert len(hooks) == len(made)
    assert {x.grad.data_ptr() for x in given if x.dim() > 1} <= set(made)


@every_loss
def test_what_is_saved_may_be_kept_elsewhere(loss, tensors):
    given = leaves(*tensors)
    expected = torch.autograd.grad(loss(*given), given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        value = loss(*given)
    for _ in range(2):
        found = torch.autograd.grad(value, given, retain_graph=True)
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))


def test_hooks_on_what_is_saved_see_the_gradients_that_were_made_ahead():
    given, seen = leaves(HIDDEN, WEIGHT), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(tuple(x.shape)) or x, lambda x: x):
        head(*given)
    assert seen.count(tuple(HIDDEN.shape)) == 2
    assert seen.count(tuple(WEIGHT.shape)) == 2


@every_loss
def test_a_checkpoint_around_a_loss_holds_nothing_of_it(loss, tensors):
    given = leaves(*tensors)
    expected = torch.autograd.grad(loss(*given), given)
    value = checkpoint(loss, *given, use_reentrant=False)
    found = torch.autograd.grad(value, given)
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected, strict=True))


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


MLP = (torch.randn(4, 16, generator=GENERATOR), *(torch.randn(8, 16, generator=GENERATOR) for _ in range(2)))
CALLS = LOSSES | {
    "gated_mlp": (lambda x, g, u, d: ops.gated_mlp(x, g, u, d).square().sum(), (*MLP, MLP[1].t().contiguous())),
    "mlp": (lambda x, u, d: ops.mlp(x, u, None, d, None).square().sum(), (*MLP[:2], MLP[1].t().contiguous())),
    "projections": (lambda x, *w: sum(y.square().sum() for y in ops.projections(x, *w)), MLP),
    "linear": (lambda x, w: ops.linear(x, w).square().sum(), MLP[:2]),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w[0]).square().sum(), MLP[:2]),
    "grouped_linear": (
        lambda x, w: ops.grouped_linear(x, w, torch.tensor([1, 4], dtype=torch.int32)).square().sum(),
        (MLP[0], torch.stack(MLP[1:])),
    ),
    "attention": (lambda q: ops.attention(q, q, q).square().sum(), (MLP[0].view(1, 4, 2, 8),)),
    "experts": (
        lambda x, up, down: ops.experts(x, torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1), up, down).sum(),
        (MLP[0], torch.stack(MLP[1:]), torch.stack([w[:4].t().contiguous() for w in MLP[1:]])),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "tensors"), CALLS.values(), ids=CALLS)
def test_a_backward_inside_of_autocast_has_the_dtypes_of_its_forward(call, tensors):
    given = leaves(*tensors)
    expected = torch.autograd.grad(call(*given), given)
    fallbacks = sum(counted["fallbacks"] for counted in dispatch.stats().values())
    value = call(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(value, given)
    assert sum(counted["fallbacks"] for counted in dispatch.stats().values()) == fallbacks
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


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
