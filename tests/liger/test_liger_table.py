"""Rows of the table: what Liger's functions compute, by tilekern's ops on the CPU. Liger need not be installed."""

import re
import sys
from pathlib import Path

import pytest
import torch
from liger_samples import CALLS, LIGERS_TOLERANCE, Sizes, in_float64, results_and_gradients
from op_samples import assert_near
from tolerances import TOLERANCE

from tilekern.integrations import liger
from tilekern.integrations.liger import binding
from tilekern.integrations.liger.__main__ import main
from tilekern.integrations.liger.table import TABLE, NotServed

X, WEIGHT = torch.randn(3, 8), torch.randn(8)
LABELS = torch.tensor([0, 2, 1])
Q, K = torch.randn(1, 2, 4, 8), torch.randn(1, 1, 4, 8)
ANGLES = torch.randn(1, 4, 8)
# Calls that ask for what an op does not have, and what the reason names.
NOT_SERVED = [
    ("LigerLlama4RopeFunction", (Q, K, ANGLES), "a real freqs_cis"),
    (
        "LigerFusedLinearCrossEntropyFunction",
        (X, X, LABELS, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float16),
        "accum_dtype",
    ),
    (
        "LigerFusedLinearScaledCrossEntropyFunction",
        (X, X, LABELS, 1.0, -100, 1, False, LABELS),
        "selected_token_ids",
    ),
    ("LigerFusedLinearJSDFunction", (X, X, X, X, None, 0.5, -100, 1.0, torch.float16), "accum_dtype"),
    ("LigerJSDFunction", (X, X, None, 0.5, -100, "nvidia-triton"), "jsd_impl"),
    ("LigerKLDivLossFunction", (X, X, "batchmean", False, 1e-2), "eps"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
@pytest.mark.parametrize("dtype", LIGERS_TOLERANCE, ids=str)
def test_a_row_computes_what_ligers_function_does(call, dtype):
    torch.manual_seed(0)
    arguments = call.arguments(Sizes(), dtype, "cpu")
    found = results_and_gradients(TABLE[call.name].call, arguments)
    reference = results_and_gradients(call.reference, in_float64(arguments))
    forward, backward = LIGERS_TOLERANCE[dtype]
    graded = sum(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)
    for number, (got, wide) in enumerate(zip(found, reference, strict=True)):
        assert_near(got, wide, TOLERANCE[dtype])
        atol, rtol = forward if number < len(found) - graded else backward
        torch.testing.assert_close(got.double(), wide, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", TABLE)
def test_every_row_is_called_here(name):
    assert name in {call.name for call in CALLS}


def test_the_page_has_every_row():
    rows = (Path(__file__).parents[2] / "docs" / "liger.md").read_text().split("## What is served")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in rows.splitlines() if line.startswith("| `")]
    said = [[re.findall(r"`(\w+)`", cell) for cell in pair] for pair in cells]
    assert {name for names, _ in said for name in names} == set(TABLE)
    for names, served_by in said:
        assert {TABLE[name].op for name in names} == set(served_by)


@pytest.mark.parametrize(("name", "arguments", "reason"), NOT_SERVED, ids=[f"{n}-{r}" for n, _, r in NOT_SERVED])
def test_what_an_op_does_not_have_is_named(name, arguments, reason):
    with pytest.raises(NotServed, match=reason):
        TABLE[name].call(*arguments)


def test_results_have_ligers_dtypes():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    assert TABLE["LigerRMSNormFunction"].call(x, weight, 1e-6).dtype == torch.bfloat16
    assert TABLE["LigerLayerNormFunction"].call(x, weight, weight, 1e-6).dtype == torch.bfloat16
    assert TABLE["LigerKLDivLossFunction"].call(x, x, "none").dtype == torch.float32
    assert TABLE["LigerCrossEntropyFunction"].call(x, torch.zeros(4, dtype=torch.int64), None)[0].dtype == x.dtype
    q, k, angles = Q.bfloat16(), K.bfloat16(), ANGLES
    assert {found.dtype for found in TABLE["LigerRopeFunction"].call(q, k, angles, angles)} == {torch.bfloat16}


def test_a_target_of_another_dtype_is_taken_as_it_is():
    x, y = torch.randn(3, 8).log_softmax(-1), torch.randn(3, 8).softmax(-1)
    for name in ("LigerJSDFunction", "LigerKLDivLossFunction", "LigerTVDLossFunction"):
        loss = TABLE[name].call(x.bfloat16(), y)
        torch.testing.assert_close(loss.float(), TABLE[name].call(x.bfloat16().float(), y), rtol=1e-2, atol=1e-2)


def test_casting_modes_go_by_name_and_by_number():
    x, weight = X.bfloat16(), WEIGHT.bfloat16()
    row = TABLE["LigerRMSNormFunction"]
    assert torch.equal(row.call(x, weight, 1e-6, 0.0, 0), row.call(x, weight, 1e-6, 0.0, "llama"))
    # In float32 there is nothing to cast.
    assert torch.equal(row.call(X, WEIGHT, 1e-6, 0.0, 1), row.call(X, WEIGHT, 1e-6, 0.0, "llama"))


def test_targets_and_class_weights_get_no_gradient():
    x, y = torch.randn(2, 3, 8).log_softmax(-1).requires_grad_().unbind()
    for name in ("LigerJSDFunction", "LigerKLDivLossFunction", "LigerTVDLossFunction"):
        loss = TABLE[name].call(x.detach().requires_grad_(), y)
        assert torch.autograd.grad(loss, y, allow_unused=True) == (None,)
    weight = torch.rand(8).requires_grad_()
    loss = TABLE["LigerCrossEntropyFunction"].call(x, LABELS, weight)[0]
    assert torch.autograd.grad(loss, weight, allow_unused=True) == (None,)


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(binding, "calls", type(binding.calls)())
    monkeypatch.setattr(binding, "kept", {})


def test_a_call_that_is_not_served_runs_ligers_own_is_counted_and_said_once(counted, recwarn):
    apply = binding._serving(TABLE["LigerLlama4RopeFunction"], lambda *arguments: arguments)
    for _ in range(2):
        assert apply(Q, K, ANGLES) == (Q, K, ANGLES)
    angles = torch.ones(1, Q.shape[1], Q.shape[3] // 2, dtype=torch.complex64)
    assert torch.equal(apply(Q, K.transpose(1, 2)[:, :2], angles)[0], Q)
    assert liger.calls() == {"LigerLlama4RopeFunction": {"served": 1, "left": {"a real freqs_cis": 2}}}
    assert [str(said.message) for said in recwarn if "Liger's own" in str(said.message)] == [
        "LigerLlama4RopeFunction runs Liger's own kernel where it is asked for a real freqs_cis, which tilekern's "
        "llama4_rope does not have; tilekern.integrations.liger.calls() counts such calls"
    ]


def test_the_command_says_that_liger_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("tilekern: Liger-Kernel cannot be imported: ")


def test_subclasses_of_tensors_go_to_liger(counted):
    class Own(torch.Tensor):
        pass

    apply = binding._serving(TABLE["LigerSoftmaxFunction"], lambda _: "Liger's")
    with pytest.warns(UserWarning, match="a subclass of Tensor"):
        assert apply(X.as_subclass(Own)) == "Liger's"


@pytest.mark.slow
def test_rows_compile_without_a_break(counted):
    apply = binding._serving(TABLE["LigerSiLUMulFunction"], None)
    compiled = torch.compile(lambda *given: apply(*given) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, X), torch.nn.functional.silu(X) * X + 1)
    other = binding._serving(TABLE["LigerKLDivLossFunction"], lambda x, *_: x * 2)
    compiled = torch.compile(lambda *given: other(*given) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X, X, "sum", False, 0.5), X * 2 + 1)
    assert liger.calls() == {}


def test_metrics_stand_beside_the_loss():
    logits, target = torch.eye(4) * 9, torch.tensor([0, 2, 2, -100])
    options = (None, -100, 0.0, 0.0, "mean", None, False, True, True)
    hidden = torch.eye(4)
    for _, z_loss, accuracy, predicted in (
        TABLE["LigerCrossEntropyFunction"].call(logits, target, *options),
        TABLE["LigerFusedLinearCrossEntropyFunction"].call(
            hidden, logits, target, None, None, *options[1:7], None, False, *options[7:]
        ),
    ):
        assert z_loss is None
        torch.testing.assert_close(accuracy, torch.tensor(2 / 3))
        assert torch.equal(predicted, torch.tensor([0, 1, 2, -100]).where(target >= 0, -1))
