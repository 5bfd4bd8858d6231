"""fused_linear_jsd as users call it: Liger's arguments by float64, chunks, scaled losses, autocast, graphs, errors."""

import importlib
import math

import pytest
import torch
from divergence import divergence
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, TOLERANCE, assert_near

from tilekern.kernels.composites import fused_linear_jsd as composite
from tilekern.kernels.composites import head
from tilekern.ops import fused_linear_jsd
from tilekern.runtime.dispatch import counters

module = importlib.import_module("tilekern.ops.fused_linear_jsd")


def sample(leading=(7,), vocabulary=83, dtype=torch.float32, seed=0):
    """Student's input and weight, teacher's input and weight, labels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    student, weight = (x.to(dtype).requires_grad_() for x in (normal(*leading, 24), normal(vocabulary, 24) / 4))
    teacher, other = normal(*leading, 40).to(dtype), (normal(vocabulary, 40) / 5).to(dtype)
    return student, weight, teacher, other, torch.randint(0, 3, leading, generator=generator)


def expected(student, weight, teacher, other, labels=None, beta=0.5, ignored=-100, temperature=1.0):
    """In float64 by torch's kl_div."""
    x, y = (
        ((one.double() @ table.double().t()) / temperature).log_softmax(-1)
        for one, table in ((student, weight), (teacher, other))
    )
    counted = torch.ones(x.shape[:-1], dtype=torch.bool) if labels is None else labels != ignored
    return (divergence(x, y, beta) * counted).sum() / max(1, int(counted.sum()))


def check(given, *options, slope=1.0, accum_dtype=None, tolerance=None, wide_logits=False):
    """The loss and the student's gradients against :func:`expected`."""
    wide = [x.detach().double().requires_grad_() for x in given[:2]]
    reference = expected(*wide, *given[2:], *options)
    loss = fused_linear_jsd(*given, *options, accum_dtype=accum_dtype, wide_logits=wide_logits)
    assert (loss.dtype, loss.shape) == (torch.float32, ())
    tolerance = tolerance or 2 * TOLERANCE[given[0].dtype]
    assert abs(loss.item() - reference.item()) <= tolerance * abs(reference.item()) + 1e-7
    leaves = [number for number in range(2) if given[number].requires_grad]
    slope = torch.tensor(slope)
    got = torch.autograd.grad(loss, [given[number] for number in leaves], slope)
    wanted = torch.autograd.grad(reference, [wide[number] for number in leaves], slope.double())
    for gradient, right, number in zip(got, wanted, leaves, strict=True):
        assert gradient.dtype == given[number].dtype
        assert_near(gradient, right, tolerance)


@examples(40)
@given(data=st.data())
def test_any_options_shape_and_dtype(data):
    leading = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2), label="leading"))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    vocabulary = data.draw(st.one_of(st.integers(9, 40), st.sampled_from([63, 64, 65, 255])), label="vocabulary")
    *tensors, labels = sample(leading, vocabulary, dtype, data.draw(st.integers(0, 5), label="seed"))
    ignored = data.draw(st.sampled_from([-100, 1, 2]), label="ignore_index")
    if not bool((labels != ignored).any()):
        labels = labels + 1
    labels = labels if data.draw(st.booleans(), label="labelled") else None
    check(
        (*tensors, labels), data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), label="beta"), ignored,
        data.draw(st.sampled_from([1.0, 0.7, 3.0]), label="temperature"),
        slope=data.draw(st.sampled_from([1.0, 0.37, 8.0]), label="upstream"),
        accum_dtype=data.draw(st.sampled_from([None, torch.float32]), label="accum_dtype"),
        wide_logits=data.draw(st.booleans(), label="wide_logits"),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_several_chunks_with_a_tail(rows, dtype, monkeypatch):
    monkeypatch.setattr(composite, "split", lambda rows, _: head.split(rows, 4))
    before = counters("logits_jsd_forward").launches
    check(sample((rows,), dtype=dtype)[:4])
    # In float16 the logits are made once for the loss, and once more for the gradients.
    assert counters("logits_jsd_forward").launches - before == -(-rows // 4) * (2 if dtype == torch.float16 else 1)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_tensor_gets_no_gradient_and_the_other_the_same(frozen):
    given = list(sample())
    wanted = torch.autograd.grad(fused_linear_jsd(*given), given[1 - frozen])
    given[frozen] = given[frozen].detach()
    got = torch.autograd.grad(fused_linear_jsd(*given), given[1 - frozen])
    assert torch.equal(got[0], wanted[0])
    assert not fused_linear_jsd(*(x.detach() for x in given)).requires_grad


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_second_derivatives_are_refused_and_not_wrong(dtype):
    given = sample(dtype=dtype)
    for gradient in torch.autograd.grad(fused_linear_jsd(*given), given[:2], create_graph=True):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward(retain_graph=True)


def test_strided_inputs():
    student, weight, teacher, other, labels = (x.detach() for x in sample((8,)))
    check((
        student.t().contiguous().t().view(2, 4, 24).requires_grad_(),
        weight.repeat_interleave(2, 1)[:, ::2].requires_grad_(),
        teacher.repeat_interleave(2, 1)[:, ::2].view(2, 4, 40), other.t().contiguous().t(), labels.view(2, 4),
    ))  # fmt: skip
    check((student[:1].expand(8, 24).requires_grad_(), weight.requires_grad_(), teacher[:1].expand(8, 40), other))


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


def test_autocast_casts_as_a_linear_layer_does():
    given = sample()
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_linear_jsd(*given)
    got = torch.autograd.grad(loss, given[:2])
    wanted = torch.autograd.grad(expected(*given), given[:2])
    assert_near(loss, expected(*given), 3e-2)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.float32
        assert_near(one, other, 3e-2)


def test_torch_compile_traces_torch_s_own_operations():
    torch._dynamo.reset()
    given = sample()
    options = {"jsd_beta": 0.3, "ignore_index": 1, "temperature": 2.0}
    compiled = torch.compile(lambda *x: fused_linear_jsd(*x, **options), fullgraph=True, backend="aot_eager")
    loss, eager = compiled(*given), fused_linear_jsd(*given, **options)
    torch.testing.assert_close(loss, eager)
    got, wanted = (torch.autograd.grad(found, given[:2]) for found in (loss, eager))
    for one, other in zip(got, wanted, strict=True):
        assert_near(one, other, 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_input": torch.zeros(())}, "student_input must be"),
        ({"teacher_weight": torch.zeros(5, 7)}, r"teacher_input must be .*, got \[3, 6\] and \[5, 7\]"),
        ({"teacher_input": torch.zeros(4, 6)}, "student and teacher must have the same rows and vocabulary"),
        ({"teacher_weight": torch.zeros(4, 6)}, "student and teacher must have the same rows and vocabulary"),
        ({"shift_labels": torch.zeros(4)}, r"shift_labels must be \[3\] like the rows of student_input, got \[4\]"),
        ({"teacher_weight": torch.zeros(5, 6, device="meta")}, "teacher_weight is on meta, and must be on cpu"),
        ({"jsd_beta": 1.5}, "jsd_beta must be from 0 to 1, got 1.5"),
        ({"temperature": 0.0}, "temperature must be positive and finite"),
        ({"accum_dtype": torch.float16}, "accum_dtype must be torch.float32 or None, got torch.float16"),
    ],
)
def test_bad_input_is_refused(changes, message):
    given = {
        "student_input": torch.zeros(3, 8), "student_weight": torch.zeros(5, 8), "teacher_input": torch.zeros(3, 6),
        "teacher_weight": torch.zeros(5, 6),
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^fused_linear_jsd: {message}"):
        fused_linear_jsd(**given | changes)
