"""fused_linear_jsd as users call it: Liger's arguments by float64, chunks, scaled losses, autocast, graphs, errors."""

import math

import contract
import pytest
import torch

from tilekern.kernels.composites import fused_linear_jsd as composite
from tilekern.kernels.composites import head
from tilekern.ops import fused_linear_jsd
from tilekern.runtime.dispatch import counters

NAMES = ("student_input", "student_weight", "teacher_input", "teacher_weight")


def sample(leading=(7,), vocabulary=83, dtype=torch.float32, seed=0):
    """Student's input and weight, teacher's input and weight, labels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    student, weight = (x.to(dtype).requires_grad_() for x in (normal(*leading, 24), normal(vocabulary, 24) / 4))
    teacher, other = normal(*leading, 40).to(dtype), (normal(vocabulary, 40) / 5).to(dtype)
    return student, weight, teacher, other, torch.randint(0, 3, leading, generator=generator)


def check(tensors, slope=1.0):
    """The loss and the student's gradients against float64."""
    given = dict(zip(NAMES, tensors, strict=True))
    contract.check(contract.CASES["fused_linear_jsd"], given, slopes=[torch.tensor(slope)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_several_chunks_with_a_tail(rows, dtype, monkeypatch):
    monkeypatch.setattr(composite, "split", lambda rows, _: head.split(rows, 4))
    before = counters("logits_jsd_forward").launches
    check(sample((rows,), dtype=dtype)[:4])
    # In float16 the logits are made once for the loss, and once more for the gradients.
    assert counters("logits_jsd_forward").launches - before == -(-rows // 4) * (2 if dtype == torch.float16 else 1)


def test_the_teacher_gets_no_gradient():
    student, weight, teacher, other, _ = sample()
    teacher.requires_grad_()
    other.requires_grad_()
    fused_linear_jsd(student, weight, teacher, other).backward()
    assert weight.grad is not None
    assert teacher.grad is None
    assert other.grad is None


def test_rows_that_do_not_count_may_hold_anything_in_the_teacher():
    student, weight, teacher, other, labels = sample()
    labels[2] = -100
    right = fused_linear_jsd(student, weight, teacher, other, labels)
    teacher[2] = math.nan
    loss = fused_linear_jsd(student, weight, teacher, other, labels)
    assert torch.equal(loss, right)
    dstudent, dweight = torch.autograd.grad(loss, (student, weight))
    assert not dstudent[2].any()
    assert bool(dweight.isfinite().all())


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_where_no_row_counts_the_loss_and_its_gradients_are_0(dtype):
    student, weight, teacher, other, labels = sample(dtype=dtype)
    loss = fused_linear_jsd(student, weight, teacher, other, torch.full_like(labels, -100))
    assert float(loss) == 0
    assert not any(x.any() for x in torch.autograd.grad(loss, (student, weight)))


def test_float16_under_a_loss_scale_keeps_gradients_that_would_vanish_without():
    """Of logits of many columns and rows they are below float16's smallest number until a scaler lifts them."""
    check(sample((6,), 2000, torch.float16)[:4], slope=2.0**12)


def test_a_second_backward_makes_the_gradients_once_more():
    given = sample()
    loss, launches = fused_linear_jsd(*given), counters("logits_jsd_forward").launches
    first = torch.autograd.grad(loss, given[:2], retain_graph=True)
    assert counters("logits_jsd_forward").launches == launches
    again = torch.autograd.grad(loss, given[:2], torch.tensor(2.0))
    assert counters("logits_jsd_forward").launches == launches + 1
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(other, 2 * one)


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_without_rows_and_in_other_dtypes_torch_s_own_operations_run_and_count():
    before = counters("fused_linear_jsd").fallbacks
    given = sample((0,))
    loss = fused_linear_jsd(*given)
    assert float(loss) == 0
    torch.autograd.grad(loss, given[:2])
    student, weight, teacher, other, labels = sample()
    same = fused_linear_jsd(student, weight, teacher, other, labels)
    mixed = fused_linear_jsd(student, weight, teacher.double(), other.double(), labels)
    wide = fused_linear_jsd(*(x.double() for x in (student, weight, teacher, other)), labels)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(mixed, same)
    torch.testing.assert_close(wide.float(), same)
    assert counters("fused_linear_jsd").fallbacks == before + 3
