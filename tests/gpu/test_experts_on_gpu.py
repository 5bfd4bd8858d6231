"""A layer of experts on the GPU: gradients, bits, and no wait for the device."""

import pytest
import torch
from experts_samples import GATES, by_loop, layer, results, wide
from gpu_samples import nothing_waits

from tilekern import ops
from tilekern.ops.grouped_linear import grouped_linear
from tilekern.runtime import dispatch

LAYERS = {
    "gpt_oss": (300, 4, 32, 320, 352, {"biased": True, "transposed": True}),
    "silu": (300, 8, 128, 256, 96, {}),
}


def on_gpu(gate, dtype=torch.bfloat16):
    *sizes, more = LAYERS[gate]
    given = layer(*sizes, dtype=dtype, weight_dtype=torch.float32, **more)
    return {name: x.detach().cuda().requires_grad_(x.requires_grad) for name, x in given.items()}


@pytest.mark.parametrize("gate", LAYERS)
def test_results_and_gradients(gate):
    given = on_gpu(gate)
    slope = torch.randn(given["x"].shape)
    found = results(ops.experts, given, slope.cuda(), **GATES[gate])
    on_cpu = {name: x.detach().cpu().requires_grad_(x.requires_grad) for name, x in given.items()}
    expected = results(by_loop, wide(on_cpu), slope, **GATES[gate])
    # Where a gate is clamped, a rounding decides whether there is a gradient: torch's own is off by 4 %.
    torchs = results(by_loop, on_cpu, slope, **GATES[gate])
    for name, x in expected.items():
        error, least = ((y.cpu().double() - x).norm() / x.norm() for y in (found[name], torchs[name]))
        assert error < max(1.6e-2, 1.1 * least), name
    for kernel in ("route_place", "experts_gate", "experts_gate_backward", "experts_combine"):
        assert dispatch.counters(kernel).launches > 0
        assert dispatch.counters(kernel).fallbacks == 0


@pytest.mark.parametrize("gate", LAYERS)
def test_nothing_waits_for_the_gpu_and_two_runs_give_the_same_bits(gate):
    given = on_gpu(gate)
    slope = torch.randn(given["x"].shape, device="cuda", dtype=torch.bfloat16)
    first = results(ops.experts, given, slope, **GATES[gate])
    with nothing_waits():
        second = results(ops.experts, given, slope, **GATES[gate])
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_experts_without_rows_have_gradients_of_zeros():
    given = on_gpu("silu")
    given["ids"] = torch.randint(3, given["ids"].shape, device="cuda")
    found = results(ops.experts, given, torch.randn_like(given["x"]))
    for name in ("gate_up", "down"):
        assert found[name][:3].any()
        assert not found[name][3:].any()


@pytest.mark.parametrize("frozen", [False, True])
def test_torch_compile_gives_the_same_bits_with_the_same_launches(frozen):
    given = on_gpu("gpt_oss")
    if frozen:
        given |= {name: given[name].detach() for name in given if name not in ("x", "weights", "ids")}
    slope, taken = torch.randn_like(given["x"]), []
    for function in (ops.experts, torch.compile(ops.experts, fullgraph=True)):
        names = ("experts_gate_backward", "grouped_linear", "grouped_weight_gradient", "grouped_sum")
        before = [dispatch.counters(name).launches for name in names]
        found = results(function, given, slope, **GATES["gpt_oss"])
        taken.append((found, [dispatch.counters(name).launches - n for name, n in zip(names, before, strict=True)]))
    (expected, launched), (found, again) = taken
    assert again == launched
    assert launched[2:] == ([0, 0] if frozen else [2, 2])
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.parametrize("slots", [0, 4])
def test_a_step_waits_for_nothing_on_the_host(slots):
    """In bfloat16, whichever won: a wait would stall the queue once in each layer of a model."""
    rows, experts = 512, 4
    x = torch.randn(rows // slots if slots else rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(experts, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(experts, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([100, 100, 400, 500], dtype=torch.int32, device="cuda")
    order = torch.randperm(rows, device="cuda").int() if slots else None

    def step():
        y = grouped_linear(x, weight, offsets, bias, order, slots or 1)
        return torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))

    first = step()
    torch.cuda.synchronize()
    with nothing_waits():
        again = step()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
