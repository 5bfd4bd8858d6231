"""What the cross entropies give beside the loss, and the options of the head: bias, token scaling, wide sums."""

import dataclasses
import importlib

import formulas
import pytest
import torch
from op_samples import assert_near
from tolerances import TOLERANCE

from tilekern.kernels.composites import fused_linear_cross_entropy as composite
from tilekern.ops import cross_entropy, fused_linear_cross_entropy
from tilekern.ops.cross_entropy import CrossEntropyOutput
from tilekern.runtime import dispatch

ROWS, WIDTH, VOCABULARY = 7, 16, 83
ALL = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}


def labels():
    target = torch.randint(VOCABULARY, (ROWS,))
    target[2] = -100
    return target


def class_weights():
    return torch.rand(VOCABULARY) + 0.1


def expected(logits, target, class_weight=None, label_smoothing=0.0, z_loss_by_rows=False, use_token_scaling=False,
             **how):  # fmt: skip
    """The output in float64."""
    loss, z = formulas.cross_entropy(
        logits,
        target,
        class_weight,
        smoothing=label_smoothing,
        z_by_rows=z_loss_by_rows,
        scaled=use_token_scaling,
        **how,
    )
    counts = target != -100
    right, predicted = (logits.argmax(-1) == target) & counts, logits.argmax(-1).masked_fill(~counts, -1)
    accuracy = right.double() if how.get("reduction") == "none" else right.sum() / counts.sum()
    return CrossEntropyOutput(loss, z, accuracy, predicted)


def compare(got, wanted, leaves, wide, tolerance):
    """An output and the gradients of its loss."""
    slope = torch.rand_like(got.loss) + 0.5
    found = torch.autograd.grad(got.loss, leaves, slope)
    reference = torch.autograd.grad(wanted.loss, wide, slope.double())
    assert_near(got.loss, wanted.loss, tolerance)
    assert_near(got.z_loss, wanted.z_loss, tolerance)
    torch.testing.assert_close(got.token_accuracy.double(), wanted.token_accuracy.double())
    assert torch.equal(got.predicted_tokens, wanted.predicted_tokens)
    for gradient, right in zip(found, reference, strict=True):
        assert_near(gradient, right, tolerance)
    assert not any(x.requires_grad for x in (got.z_loss, got.token_accuracy, got.predicted_tokens))


OPTIONS = {
    "mean": {},
    "sum": {"reduction": "sum", "softcap": 3.0},
    "none": {"reduction": "none", "label_smoothing": 0.1},
    "weighted": {"class_weight": True, "label_smoothing": 0.1},
    "weighted by rows": {"class_weight": True, "label_smoothing": 0.1, "z_loss_by_rows": True},
    "by rows, added up": {"class_weight": True, "reduction": "sum", "z_loss_by_rows": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def made(options):
    return options | ({"class_weight": class_weights()} if "class_weight" in options else {}) | {"z_loss": 0.1}


@every_option
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)], ids=str
)
def test_cross_entropy_gives_what_is_asked_for(options, dtype, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    logits, target, options = torch.randn(ROWS, VOCABULARY).to(dtype).requires_grad_(), labels(), made(options)
    target[0] = logits[0].argmax()
    wide = logits.detach().double().requires_grad_()
    given = {("weight" if name == "class_weight" else name): value for name, value in options.items()}
    got = cross_entropy(logits, target, **given, **ALL)
    compare(got, expected(wide, target, **options), (logits,), (wide,), 2 * TOLERANCE[dtype])
    torch.testing.assert_close(cross_entropy(logits, target, **given), got.loss)


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_asked_for_is_none(name):
    logits, target = torch.randn(ROWS, VOCABULARY), labels()
    hidden, weight = torch.randn(ROWS, WIDTH), torch.randn(VOCABULARY, WIDTH)
    fields = {key.removeprefix("return_") for key in ALL}
    for got in (
        cross_entropy(logits, target, **{name: True}),
        fused_linear_cross_entropy(hidden, weight, target, **{name: True}),
    ):
        found = {key for key in fields if getattr(got, key) is not None}
        assert found == {name.removeprefix("return_")}


@pytest.fixture
def chunked(products, monkeypatch):
    """Chunks of a few rows, multiplied by cuBLAS or by kernels."""
    module, plans = importlib.import_module("tilekern.ops.fused_linear_cross_entropy"), composite.chunk_plans
    spec = dataclasses.replace(
        composite.SPEC, default=lambda *given: composite.SPEC.default(*given).but(products=products)
    )
    monkeypatch.setattr(module, "_SPEC", spec)
    monkeypatch.setattr(composite, "chunk_plans", lambda plan_for, which, _, *rest: plans(plan_for, which, 4, *rest))
    dispatch.forget()
    yield
    dispatch.forget()


def rounded(x, dtype):
    """Values of a dtype, through which gradients flow as through ``x``."""
    return x + (x.to(dtype).double() - x).detach()


def head(dtype):
    torch.manual_seed(5)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH) / 3).to(dtype).requires_grad_()
    return hidden, weight, torch.randn(VOCABULARY).to(dtype).requires_grad_()


HEADS = [
    *(("cublas", torch.float32, name, scaled) for name in OPTIONS for scaled in (False, True)),
    ("tuned", torch.float32, "weighted by rows", True),
    ("tuned", torch.bfloat16, "mean", True),
    ("cublas", torch.bfloat16, "weighted", False),
    ("cublas", torch.bfloat16, "none", True),
    ("cublas", torch.float16, "mean", True),
]


@pytest.mark.parametrize(("products", "dtype", "name", "scaled"), HEADS)
def test_the_head_with_a_bias_gives_what_is_asked_for(products, dtype, name, scaled, chunked):
    options = OPTIONS[name]
    leaves, target, options = head(dtype), labels(), made(options) | {"use_token_scaling": scaled}
    wide = [x.detach().double().requires_grad_() for x in leaves]
    # The op holds its logits in their dtype, before and after the bias.
    logits = rounded(rounded(wide[0] @ wide[1].T, dtype) + wide[2], dtype)
    target[0] = logits[0].argmax()
    got = fused_linear_cross_entropy(*leaves[:2], target, bias=leaves[2], accum_dtype=torch.float32, **options, **ALL)
    compare(got, expected(logits, target, **options), leaves, wide, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "traced"])
def test_the_head_without_a_kernel(compiled, monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    leaves, target = head(torch.float32), labels()
    options = {"softcap": 5.0, "z_loss": 0.1, "use_token_scaling": True}

    def call(hidden, weight, bias):
        return fused_linear_cross_entropy(hidden, weight, target, bias=bias, **options, **ALL)

    torch._dynamo.reset()
    got = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(*leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    compare(got, expected(wide[0] @ wide[1].T + wide[2], target, **options), leaves, wide, 1e-5)


def test_cross_entropy_can_be_traced_with_what_is_beside_it():
    logits, target = torch.randn(ROWS, VOCABULARY, requires_grad=True), labels()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: cross_entropy(x, target, z_loss=0.1, **ALL), fullgraph=True, backend="aot_eager")
    wide = logits.detach().double().requires_grad_()
    compare(compiled(logits), expected(wide, target, z_loss=0.1), (logits,), (wide,), 1e-5)
