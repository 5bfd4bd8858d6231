"""Torch's linear layers and strict modules inside :func:`tilekern.invariant`, without a patched model."""

import os
import subprocess
import sys

import pytest
import torch

import tilekern
from tilekern import ops
from tilekern.errors import RowsVary
from tilekern.ops.linear_layers import linear
from tilekern.runtime import dispatch

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_layers_run_the_kernel_of_the_class(transposed, biased):
    """Rows of three axes, a weight as torch keeps it or transposed, and the formula in float64."""
    x, weight = torch.randn(2, 3, 40, requires_grad=True), torch.randn(24, 40)
    weight = (weight.t().contiguous().t() if transposed else weight).requires_grad_()
    bias = torch.randn(24, requires_grad=True) if biased else None
    with tilekern.invariant():
        before = tilekern.stats()["matmul"]["launches"]
        assert torch.nn.functional.linear is linear
        y = torch.nn.functional.linear(x, weight, bias)
        assert tilekern.stats()["matmul"]["launches"] == before + 1
        given = [x, weight, *([bias] if biased else [])]
        slope = torch.randn_like(y)
        mine = torch.autograd.grad(y, given, slope)
    right = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-4)
    for one, other in zip(mine, torch.autograd.grad(right, given, slope.double()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_torch_gets_its_products_back():
    own = torch.nn.functional.linear
    with pytest.raises(RuntimeError, match="inside"), tilekern.invariant(), tilekern.invariant():
        raise RuntimeError("inside")
    assert torch.nn.functional.linear is own
    assert not dispatch.is_invariant()


def test_what_another_library_has_put_in_its_place_comes_back_and_is_called(monkeypatch):
    own, seen = torch.nn.functional.linear, []
    other = lambda *given: seen.append(given) or own(*given)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "linear", other)
    with tilekern.invariant():
        torch.nn.functional.linear(torch.randn(0, 8), torch.randn(4, 8))
    assert torch.nn.functional.linear is other
    assert len(seen) == 1


def test_what_no_kernel_takes_stays_torch_s():
    """Numbers of other dtypes, in an autocast region too, a subclass, no rows."""

    class Other(torch.Tensor):
        pass

    weight = torch.randn(4, 8)
    with tilekern.invariant():
        before = tilekern.stats()["matmul"]["launches"]
        torch.nn.functional.linear(torch.randn(3, 8, dtype=torch.float64), weight.double())
        torch.nn.functional.linear(torch.randn(3, 8).as_subclass(Other), weight)
        assert torch.nn.functional.linear(torch.randn(0, 8), weight).shape == (0, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.nn.functional.linear(torch.randn(3, 8, dtype=torch.float64), weight.double())
        assert tilekern.stats()["matmul"]["launches"] == before


def test_an_autocast_region_casts_and_runs_the_kernel_of_the_class():
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (4, 8), (4,)))
    with tilekern.invariant():
        before = tilekern.stats()["matmul"]["launches"]
        plain = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = torch.nn.functional.linear(x, weight, bias)
        assert torch.equal(cast, plain)
        assert tilekern.stats()["matmul"]["launches"] == before + 2
    slope = torch.randn(3, 4).bfloat16()
    for mine, other in zip(*(torch.autograd.grad(y, (x, weight, bias), slope) for y in (cast, plain)), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, other)


def test_a_job_may_be_in_the_mode_from_the_start():
    code = "import torch, tilekern.ops.invariance; print(torch.nn.functional.linear.__module__)"
    environment = {**os.environ, "TILEKERN_INVARIANT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tilekern.ops.linear_layers"


class Summing(torch.nn.Module):
    """Calls a function in its forward."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("matmul", lambda x: torch.matmul(x, x)),
        ("matmul", lambda x: x @ x),
        ("einsum", lambda x: torch.einsum("ij,kj->ik", x, x)),
        ("scaled_dot_product_attention", lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x)),
        ("mean", lambda x: x * x.pow(2).mean(-1, keepdim=True)),
        ("sum", lambda x: x.sum(dim=(1,))),
        ("norm", lambda x: torch.norm(x, 2, -1)),
        ("conv1d", lambda x: torch.nn.functional.conv1d(x, x[..., None])),
    ],
)
def test_strict_refuses_what_torch_sums_inside_a_module(name, call):
    x = torch.randn(3, 3)
    with pytest.raises(RowsVary, match=rf"torch\.{name} runs inside"), tilekern.invariant(strict=True):
        Summing(call)(x)
    Summing(call)(x)
    with tilekern.invariant(strict=True):
        call(x)  # outside of a module


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, :1] @ x[:1],  # one term, as in rotary angles
        lambda x: x.sum(0) + x.mean() + x.norm(),
        lambda x: x.long().sum(-1),
        lambda x: torch.softmax(x, -1),
    ],
)
def test_strict_leaves_what_sums_no_row(call):
    with tilekern.invariant(strict=True):
        Summing(call)(torch.randn(3, 3))


def test_strict_refuses_a_linear_layer_that_no_kernel_takes():
    with pytest.raises(RowsVary, match="rows of matmul"), tilekern.invariant(strict=True):
        torch.nn.functional.linear(torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))


def test_the_head_without_logits_has_their_bits():
    """Log-probabilities are those of the linear layer's logits, alone and among others."""
    hidden, weight = torch.randn(9, 40).bfloat16(), torch.randn(61, 40).bfloat16()
    ids = torch.arange(9)
    with tilekern.invariant():
        whole = ops.linear_log_probs(hidden, weight, ids)
        alone = [ops.linear_log_probs(hidden[row : row + 1], weight, ids[row : row + 1]) for row in range(9)]
        assert all(map(torch.equal, whole, map(torch.cat, zip(*alone, strict=True))))
        logits = torch.nn.functional.linear(hidden, weight)
        assert all(map(torch.equal, whole, ops.log_probs(logits, ids)))
    right = logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(whole[0], right, rtol=1e-6, atol=1e-6)
