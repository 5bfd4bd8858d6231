import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import ONCE, assert_differentiable_once, launched_by

import tilekern
from tilekern import ops

KERNELS = {"router_losses_forward": 1, "router_losses_backward": 1}


def by_loop(logits, ids, shares):
    """Both losses, one row after the other."""
    experts, rows = logits.shape[1], float(shares.sum())
    chosen, probable, square = [0.0] * experts, [0.0] * experts, 0.0
    for row, choice, share in zip(logits, ids.tolist(), shares.tolist(), strict=True):
        if share:
            p = row.softmax(0)
            square = square + share * row.logsumexp(0) ** 2
            for e in range(experts):
                probable[e] = probable[e] + share * p[e]
            for e in choice:
                chosen[e] += share
    balance = experts * sum(one / rows * (other / rows) for one, other in zip(chosen, probable, strict=True))
    return balance, square / rows


@examples(12)
@given(
    rows=st.integers(1, 9),
    experts=st.integers(1, 20),
    choices=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    masked=st.booleans(),
    wide=st.booleans(),
    data=st.data(),
)
def test_losses_and_gradient_are_those_of_a_loop_in_float64(rows, experts, choices, dtype, masked, wide, data):
    choices = min(choices, experts)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 3)))
    logits = torch.randn(rows, experts + 3 * wide, generator=generator).to(dtype)[:, :experts].requires_grad_()
    shares = torch.rand(rows, generator=generator).round() if masked else torch.ones(rows)
    shares[0] = 1
    found = {}

    def step():
        ids, _ = ops.router(logits.detach(), choices)
        losses = ops.router_losses(logits, ids, shares if masked else None)
        found.update(ids=ids, losses=losses, slope=torch.autograd.grad(losses.balance * 0.7 + losses.z, logits)[0])

    launched = launched_by(step)
    assert {name: count for name, count in launched.items() if name in KERNELS} == KERNELS
    exact = logits.detach().double().requires_grad_()
    balance, z = by_loop(exact, found["ids"], shares)
    torch.testing.assert_close(found["losses"].balance.double(), balance.detach(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(found["losses"].z.double(), z.detach(), rtol=4e-6, atol=1e-7)
    (expected,) = torch.autograd.grad(balance * 0.7 + z, exact)
    assert found["slope"].dtype == dtype
    assert (found["slope"].double() - expected).norm() <= ONCE[dtype] * expected.norm() + 1e-6


def test_an_even_router_has_the_number_of_choices_as_its_balance():
    logits, ids = torch.zeros(8, 4), torch.arange(16).view(8, 2) % 4
    balance, z = ops.router_losses(logits, ids)
    assert balance == pytest.approx(2.0)
    assert z == pytest.approx(torch.tensor(4.0).log().item() ** 2)
    one = torch.full_like(logits, -50.0).index_fill(1, torch.tensor([3]), 0.0)
    assert ops.router_losses(one, torch.full((8, 1), 3)).balance == pytest.approx(4.0)


def test_one_loss_alone_has_a_gradient():
    logits = torch.randn(7, 5, requires_grad=True)
    ids = ops.router(logits.detach(), 2).ids
    slopes = [torch.autograd.grad(ops.router_losses(logits, ids)[n], logits)[0] for n in range(2)]
    both = torch.autograd.grad(sum(ops.router_losses(logits, ids)), logits)[0]
    torch.testing.assert_close(slopes[0] + slopes[1], both)
    assert all(slope.abs().sum() > 0 for slope in slopes)


def test_what_no_kernel_takes_runs_in_torch():
    logits = torch.randn(4, 300, requires_grad=True)
    ids = ops.router(logits.detach(), 3).ids
    before = tilekern.stats()["router_losses_forward"]["fallbacks"]
    assert launched_by(lambda: sum(ops.router_losses(logits, ids)).backward()) == {}
    assert tilekern.stats()["router_losses_forward"]["fallbacks"] == before + 1
    wide = ops.router_losses(logits.detach().double(), ids, torch.ones(4))
    torch.testing.assert_close(
        torch.stack(ops.router_losses(logits, ids)).double(), torch.stack(wide), rtol=1e-6, atol=0
    )


def test_a_gradient_of_the_gradient_is_refused():
    ids = torch.arange(8).view(4, 2)
    assert_differentiable_once(lambda x: ops.router_losses(x, ids).z, [torch.randn(4, 9, requires_grad=True)])


def test_it_is_traced_in_one_graph():
    logits, ids = torch.randn(4, 9), torch.arange(8).view(4, 2)
    compiled = torch.compile(ops.router_losses, backend="eager", fullgraph=True)(logits, ids)
    torch.testing.assert_close(list(compiled), list(ops.router_losses(logits, ids)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logits": torch.zeros(6)}, r"logits must be \[rows, experts\] of floats"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, r"ids must be int64 \[2, choices\] of at most 6 choices"),
        ({"ids": torch.zeros(2, 7, dtype=torch.int64)}, "ids must be int64"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, "got torch.int32"),
        ({"shares": torch.ones(3)}, r"shares must have the shape \[2\], got \[3\]"),
    ],
)
def test_what_does_not_fit_is_refused(given, said):
    right = {"logits": torch.zeros(2, 6), "ids": torch.zeros(2, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=said):
        ops.router_losses(**(right | given))
