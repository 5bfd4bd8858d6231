"""fused_linear_cross_entropy as users call it: its options, alone and together, by float64; chunks, graphs, errors."""

import dataclasses
import importlib

import contract
import pytest
import torch
from contract import CASES
from contract import head_loss as expected
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, assert_near

from tilekern.kernels.composites import fused_linear_cross_entropy as composite
from tilekern.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import counters

NAME = "fused_linear_cross_entropy"
CHUNK = 4
module = importlib.import_module("tilekern.ops.fused_linear_cross_entropy")


@pytest.fixture(params=["cublas", "tuned"])
def products(request, monkeypatch):
    """Multiply with cuBLAS, or with the kernels."""

    def default(problem, target):
        return composite.SPEC.default(problem, target).but(products=request.param)

    monkeypatch.setattr(module, "_SPEC", dataclasses.replace(composite.SPEC, default=default))
    dispatch.forget()
    yield request.param
    dispatch.forget()


@pytest.fixture
def chunked(monkeypatch):
    """Chunks of a few rows, so that a small problem has several and a tail."""

    def small(plan_for, spec, chunk, *rest):
        return chunk_plans(plan_for, spec, CHUNK, *rest)

    chunk_plans = composite.chunk_plans
    monkeypatch.setattr(composite, "chunk_plans", small)


def sample(rows=7, width=16, vocabulary=83, dtype=torch.float32, ignored=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 3).to(dtype).requires_grad_()
    target = torch.randint(vocabulary, (rows,), generator=generator)
    target[1 : 1 + ignored] = -100
    return hidden, weight, target


def check(hidden, weight, target, slope=None, **options):
    """Loss and gradients against float64."""
    given, tolerance = {"hidden": hidden, "weight": weight, "target": target}, options.pop("tolerance", None)
    slopes = None if slope is None else [slope]
    contract.check(CASES["fused_linear_cross_entropy"], given | options, slopes=slopes, tolerance=tolerance)


def counted():
    return counters(NAME).launches, counters(NAME).fallbacks


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"wide_sums": True}], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 12])
@pytest.mark.usefixtures("chunked")
def test_several_chunks_with_a_tail(rows, options, products):
    before, multiplied = counters("cross_entropy_fused").launches, counters("matmul").launches
    check(*sample(rows, ignored=rows // 3), **options)
    chunks = -(-rows // CHUNK)
    assert counters("cross_entropy_fused").launches == before + chunks
    # Without a reduction the logits are made twice.
    each = 3 + (options.get("reduction") == "none")
    assert counters("matmul").launches == multiplied + (each * chunks if products == "tuned" else 0)


@examples(20)
@given(data=st.data())
def test_any_shape_over_any_chunks_with_any_upstream(data):
    """Gradients of leaves that are wanted, added up over chunks, times what the backward is given."""
    rows, chunk = data.draw(st.integers(1, 30), label="rows"), data.draw(st.integers(1, 12), label="chunk")
    width, vocabulary = (
        data.draw(st.integers(16, 80), label="width"),
        data.draw(st.integers(2, 150), label="vocabulary"),
    )
    inputs = sample(rows, width, vocabulary, ignored=data.draw(st.integers(0, rows - 1), label="ignored"))
    frozen = data.draw(st.sampled_from([None, 0, 1]), label="frozen")
    if frozen is not None:
        inputs[frozen].requires_grad_(False)
    chunk_plans = composite.chunk_plans
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composite, "chunk_plans", lambda lookup, spec, _, *rest: chunk_plans(lookup, spec, chunk, *rest))
        check(*inputs, slope=torch.tensor(data.draw(st.sampled_from([1.0, 0.37, -2.5]), label="upstream")))


@pytest.mark.usefixtures("chunked", "products")
def test_a_weight_that_is_the_embedding_too_gets_both_gradients():
    _, weight, target = sample(11, 24, 40)
    wide = weight.detach().double().requires_grad_()

    def total(table, loss):
        return 1.7 * loss(torch.tanh(table[target.clamp(0)]), table, target)

    loss = total(weight, fused_linear_cross_entropy)
    reference = total(wide, expected)
    assert_near(loss, reference, 1e-5)
    (got,), (wanted,) = torch.autograd.grad(loss, weight), torch.autograd.grad(reference, wide)
    assert_near(got, wanted, 1e-5)


@pytest.mark.usefixtures("chunked")
def test_chunks_in_which_no_row_counts():
    hidden, weight, target = sample(11)
    target[:] = -100
    target[5] = 3
    check(hidden, weight, target)


@pytest.mark.parametrize("wide_sums", [False, True])
@pytest.mark.usefixtures("chunked")
def test_wide_sums_lose_less_over_many_chunks(wide_sums):
    check(*sample(200, dtype=torch.bfloat16), wide_sums=wide_sums, tolerance=8e-3 if wide_sums else 4e-2)


def test_more_rows_than_the_default_chunk_holds():
    hidden, weight, target = sample(700, 8, 19)
    before = counters("cross_entropy_fused").launches
    check(hidden, weight, target)
    assert counters("cross_entropy_fused").launches > before


@pytest.mark.parametrize("vocabulary", [17, 4097])
@pytest.mark.parametrize("dtype", DTYPES)
def test_vocabularies_that_no_tile_divides(vocabulary, dtype):
    check(*sample(5, 24, vocabulary, dtype))


def test_float16_under_a_loss_scale_keeps_gradients_that_would_vanish_without():
    """A mean over many tokens makes gradients below float16's smallest number; a scaler lifts them in the backward."""
    hidden, weight, target = sample(6, 16, 500, torch.float16)
    check(hidden, weight, target, slope=torch.tensor(2.0**14), num_items=2**20)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "torch"])
def test_where_no_row_counts_the_mean_is_nan_and_gradients_are_zero_like_torch_s(dtype, reduction):
    hidden, weight, target = sample(dtype=dtype)
    target[:] = -100
    loss = fused_linear_cross_entropy(hidden, weight, target, reduction=reduction, z_loss=0.1)
    assert bool(loss.isnan()) == (reduction == "mean")
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert not gradient.any()


def test_no_logits_are_made_for_a_bias_in_a_graph():
    torch._dynamo.reset()
    found = []

    def keep(graph, _):
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    inputs = *sample(), torch.randn(83, requires_grad=True)
    torch.compile(lambda *given: fused_linear_cross_entropy(*given[:3], bias=given[3]), backend=keep)(*inputs)
    assert torch.nn.functional.linear not in found
    assert torch.ops.tilekern.linear_cross_entropy_total.default in found


@pytest.mark.parametrize("name", ["by_row", "gradients", "total"])
@pytest.mark.parametrize(
    ("wanted", "beside"),
    [((True, True, False), (False, False)), ((True, False, True), (True, False)), ((False, True, True), (False, True)),
     ((False, False, True), (True, True))],
)  # fmt: skip
def test_what_is_registered_with_torch_is_as_it_says(name, wanted, beside):
    hidden, weight, target = (x.detach() for x in sample())
    bias = torch.randn(83).requires_grad_() if wanted[2] else None
    given = (hidden.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1]), target, None, -100, 0.1, None, 0.0)
    first = {"gradients": (torch.rand(7),), "total": (torch.tensor(0.3),)}.get(name, ())
    tests = ("test_schema", "test_faketensor") + (() if name == "gradients" else ("test_autograd_registration",))
    op = getattr(torch.ops.tilekern, f"linear_cross_entropy_{name}").default
    torch.library.opcheck(op, (*first, *given, *wanted[:2], False, bias, wanted[2], *beside), test_utils=tests)


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_what_no_kernel_serves_runs_torch_s_own_operations_and_counts(monkeypatch):
    hidden, weight, target = sample()
    same = fused_linear_cross_entropy(hidden, weight, target)
    launches, fallbacks = counted()
    wide = fused_linear_cross_entropy(hidden.double(), weight.double(), target)
    assert wide.dtype == torch.float64
    assert_near(wide, same, 1e-6)
    options = {"class_weight": torch.linspace(1, 2, 83, dtype=torch.float64)}
    for more in (options, {"num_items": 7}, options | {"num_items": torch.tensor(3)}):
        exact = expected(hidden.double(), weight.double(), target, **more)
        assert_near(fused_linear_cross_entropy(hidden.double(), weight.double(), target, **more), exact, 1e-12)
    far = target.where(target >= 0, 2**40)
    assert_near(fused_linear_cross_entropy(hidden, weight, far, ignore_index=2**40), same, 1e-6)
    empty = hidden[:0].detach().requires_grad_()
    assert fused_linear_cross_entropy(empty, weight, target[:0]).isnan()
    fused_linear_cross_entropy(empty, weight, target[:0], reduction="sum").backward()
    assert counted() == (launches, fallbacks + 7)
    monkeypatch.setattr(module, "plan_for", lambda *_: None)
    check(hidden, weight, target, label_smoothing=0.1, softcap=3.0, z_loss=0.1, class_weight=torch.rand(83) + 0.1)
    assert counted() == (launches, fallbacks + 8)


def test_a_gradient_kernel_without_a_plan_falls_back_as_a_whole(monkeypatch):
    inputs = sample()
    launches, fallbacks = counted()
    monkeypatch.setattr(
        module,
        "plan_for",
        lambda spec, *sizes: None if spec.name == "cross_entropy_fused" else dispatch.plan_for(spec, *sizes),
    )
    check(*inputs)
    assert counted() == (launches, fallbacks + 1)
