"""Which parameters tilekern.AdamW updates together, by torch's fused step, and that they have its bits."""

import pytest
import torch
from adamw_samples import DTYPES, KERNEL, FusedCalls, give_gradients, launches, parameters, twins

import tilekern
from tilekern.ops.adamw import MOST_TOGETHER, _goes_together
from tilekern.runtime.dispatch import counters
from tilekern.runtime.recorder import Trace, tracing
from tilekern.spec.targets import resolve


def four(x, *, grad=None, moment=None):
    return x, x if grad is None else grad, x, x if moment is None else moment


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (four(meta(MOST_TOGETHER)), True),
        (four(meta(2048, 2048)), True),
        (four(meta(MOST_TOGETHER + 1)), False),
        (four(meta()), True),
        (four(meta(0, 4)), False),
        (four(meta(4, dtype=torch.float16)), True),
        (four(meta(4, dtype=torch.float32)), True),
        (four(meta(4, dtype=torch.float64)), False),
        (four(meta(4, dtype=torch.complex64)), False),
        (four(torch.empty(4)), False),
        (four(meta(4, 3), grad=meta(4, 3, dtype=torch.float32)), False),
        (four(meta(4, 3), moment=meta(4, 3, dtype=torch.float32)), False),
        (four(meta(4, 3), moment=meta(3, 4)), False),
        (four(meta(4, 3).t()), True),
        (four(meta(2, 3, 4, 5).to(memory_format=torch.channels_last)), True),
        (four(meta(4, 3).t(), grad=meta(3, 4)), False),
        (four(meta(3, 4), moment=meta(4, 3).t()), False),
        (four(meta(4, 6)[:, :3]), False),
        (four(meta(4, 1).expand(4, 3)), False),
        (four(meta(1, 4), grad=meta(4, 1).t()), True),
    ],
)
def test_what_goes_together(tensors, expected):
    assert _goes_together(*tensors) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("maximize", [False, True])
def test_small_parameters_have_the_bits_of_torch_s_fused_step_and_large_ones_are_launched(on_cpu, dtype, maximize):
    shapes = [(4, 16), (3,), (5, 13), (0,), (), (65,)]
    ours = parameters(shapes, dtype)
    ours[0].data = ours[0].data.t().contiguous().t()
    theirs = twins(ours)
    options = {"lr": torch.tensor(0.05), "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "maximize": maximize}
    optimizer, expected = tilekern.AdamW(ours, **options), torch.optim.AdamW(theirs, **options, fused=True)
    fallbacks, before = counters(KERNEL).fallbacks, launches()
    calls = FusedCalls()
    for number in range(5):
        give_gradients(number, ours, theirs)
        for p in (ours[0], theirs[0]):
            p.grad = torch.empty_like(p).copy_(p.grad)
        with calls:
            optimizer.step()
        expected.step()
    assert calls.seen == [(dtype, [64, 3, 1], count) for count in (1, 2, 3, 4, 5)]
    assert (counters(KERNEL).fallbacks, launches()) == (fallbacks, before + 2 * 5)
    for one, other in zip(ours, theirs, strict=True):
        states = optimizer.state[one], expected.state[other]
        assert [float(state["step"]) for state in states] == [5, 5]
        both = (one, other), *((states[0][name], states[1][name]) for name in ("exp_avg", "exp_avg_sq"))
        if one.numel() <= 64:
            assert all(torch.equal(*pair) for pair in both)
        else:
            for mine, its in both:
                torch.testing.assert_close(mine, its, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def test_one_call_for_each_group_dtype_and_count(on_cpu):
    first, second = parameters([(3,), (4,), (5,)]), parameters([(6,), (7,)], torch.bfloat16)
    optimizer = tilekern.AdamW([{"params": first + second, "lr": 0.1}, {"params": (late := parameters([(8,)]))}])
    give_gradients(0, first, first)
    give_gradients(0, second, second)
    first[1].grad = None
    optimizer.step()
    assert not torch.equal(first[0], parameters([(3,)])[0])
    give_gradients(1, first, first)
    give_gradients(1, late, late)
    with FusedCalls() as calls:
        optimizer.step()
    assert sorted(calls.seen, key=str) == [
        (torch.bfloat16, [6, 7], 2), (torch.float32, [3, 5], 2), (torch.float32, [4], 1), (torch.float32, [8], 1),
    ]  # fmt: skip
    assert [float(optimizer.state[p]["step"]) for p in (*first, *second, *late)] == [2, 1, 2, 2, 2, 1]


def test_autograd_sees_that_small_parameters_were_changed(on_cpu):
    (p,) = parameters([(4,)])
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    tilekern.AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_trace_notes_only_what_is_launched():
    params = [torch.nn.Parameter(meta(*shape)) for shape in ((4096, 1024), (128,), (4097, 1024), (0,))]
    for p in params:
        p.grad = torch.empty_like(p)
    with tracing(Trace(resolve("H200"))) as found:
        tilekern.AdamW(params).step()
    assert [(problem["rows"], problem["columns"]) for _, problem in found.problems] == [(32768, 256)]
    assert sum(found.launches.values()) == 1
    assert not found.fallbacks
