"""Ops on the GPU: gradients, views, streams, graphs, large tensors, host time."""

import time

import pytest
import torch
from gpu_tolerances import OF_OPS
from op_samples import OPS, assert_near, expected, inputs_of, laid_out

from tilekern.ops import attention, fused_linear_cross_entropy, rms_norm, swiglu
from tilekern.runtime import dispatch

EPS = 1e-6
SHAPES = {"rms_norm": (3, 61, 80), "swiglu": (3, 61, 208), "rope": (2, 4, 61, 64)}
every_op = pytest.mark.parametrize("op", [OPS[name] for name in SHAPES], ids=SHAPES)


def on_gpu(inputs):
    """Leaves with the same strides on the GPU."""
    found = []
    for x in inputs:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x.detach())
        found.append(copy.requires_grad_(x.requires_grad))
    return found


def large(*shape):
    """Random bfloat16 in pieces, since a large float32 intermediate would not fit."""
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for piece in out.split(1 << 14):
        piece.normal_()
    return out


def needs_memory(gigabytes):
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


@every_op
@pytest.mark.parametrize("dtype", OF_OPS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_results_and_gradients(op, dtype, layout):
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [dtype], [layout]))
    leaves = [x for x in inputs if x.requires_grad]
    results = op.run(*inputs)
    slopes = [laid_out(torch.randn_like(y), layout) for y in results]
    gradients = torch.autograd.grad(results, leaves, slopes)
    references, wide = expected(op, inputs, slopes)
    for got, reference in zip((*results, *gradients), (*references, *wide), strict=True):
        assert_near(got, reference, OF_OPS[dtype])
    assert dispatch.counters(op.kernel).launches > 0
    assert dispatch.counters(op.kernel).fallbacks == 0


def test_a_view_that_starts_one_element_late_uses_the_generic_cubin(variants):
    x = torch.randn(61, 4097, device="cuda", dtype=torch.bfloat16)[:, 1:]
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    reference = OPS["rms_norm"].reference
    y = rms_norm(x, weight, 1e-3)
    assert variants == ["generic"]
    assert_near(y, reference(x, weight)[0], 1e-2)
    assert_near(rms_norm(x.contiguous(), weight, 1e-3), reference(x, weight)[0], 1e-2)
    assert variants == ["generic", "aligned"]


def expanded_and_plain(*inputs):
    """Each given as ``(tensor, shape)``: leaves expanded to their shapes, and leaves that hold the same in memory."""
    views = [x.expand(shape) for x, shape in inputs]
    return [view.detach().requires_grad_() for view in views], [view.clone().requires_grad_() for view in views]


def assert_equal_results_and_gradients(run, counted, expanded, plain):
    """``run`` gives the same bits for the tensors ``expanded`` as for ``plain``, all by kernels."""
    found = []
    for leaves in (expanded, plain):
        result = run(*leaves)
        found.append([result, *torch.autograd.grad(result.sum(), leaves)])
    assert all(map(torch.equal, *found))
    for kernel in counted:
        assert dispatch.counters(kernel).launches > 0
        assert dispatch.counters(kernel).fallbacks == 0


def test_attention_takes_expanded_inputs_and_slopes():
    q, kv = (torch.randn(2, 300, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 1))
    inputs = expanded_and_plain((q[:, :1], (2, 300, 4, 128)), (kv, (2, 300, 2, 128)), (kv + 1, (2, 300, 2, 128)))
    kernels = ("attention_forward", "attention_backward")
    assert_equal_results_and_gradients(lambda q, k, v: attention(q, k, v).sum(2), kernels, *inputs)


def test_fused_linear_cross_entropy_takes_expanded_inputs():
    x = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1000, 1, device="cuda", dtype=torch.bfloat16)
    target = torch.tensor([3], device="cuda").expand(64)
    inputs = expanded_and_plain((x, (64, 256)), (weight, (1000, 256)))
    assert_equal_results_and_gradients(
        lambda x, weight: fused_linear_cross_entropy(x, weight, target), ("cross_entropy_fused",), *inputs
    )


def test_rms_norm_of_more_than_two_to_the_31_elements():
    needs_memory(14)
    x = large(300_000, 8192)
    assert x.numel() > 1 << 31
    weight = torch.randn(8192, device="cuda").bfloat16()
    with torch.no_grad():
        y = rms_norm(x, weight, 1e-3)
    for first in (0, 131_071, (1 << 31) // 8192 - 2, 299_992):
        rows = slice(first, first + 8)
        assert_near(y[rows], OPS["rms_norm"].reference(x[rows], weight)[0], 1e-2)
    assert not any(bool(piece.isnan().any()) for piece in y.split(1 << 14))


@pytest.mark.slow
def test_swiglu_of_more_than_two_to_the_31_elements():
    needs_memory(20)
    gate, up = large(300_000, 8192), large(300_000, 8192)
    with torch.no_grad():
        y = swiglu(gate, up)
    for first in (0, 131_071, (1 << 31) // 8192 - 2, 299_992):
        rows = slice(first, first + 8)
        assert_near(y[rows], OPS["swiglu"].reference(gate[rows], up[rows])[0], 1e-2)
    assert not any(bool(piece.isnan().any()) for piece in y.split(1 << 14))


@every_op
def test_the_same_bits_each_time(op):
    """Weight gradients are summed in a fixed order."""
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [torch.bfloat16], ["contiguous"]))
    leaves = [x for x in inputs if x.requires_grad]

    def once():
        results = op.run(*inputs)
        return [*results, *torch.autograd.grad(sum(y.float().square().sum() for y in results), leaves)]

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@every_op
def test_the_current_stream_is_used(op):
    """The input is written late on another stream: a launch anywhere else would read what was there before."""
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [torch.bfloat16], ["contiguous"]))
    inputs = [x.detach() for x in inputs]
    reference = [y.clone() for y in op.run(*inputs)]
    value = inputs[0].clone()
    inputs[0].zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        inputs[0].copy_(value)
        results = op.run(*inputs)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, reference, strict=True))


@every_op
def test_forward_and_backward_in_a_cuda_graph(op):
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [torch.bfloat16], ["contiguous"]))
    leaves = [x for x in inputs if x.requires_grad]
    slopes = [torch.randn_like(y) for y in op.run(*inputs)]

    def step():
        results = op.run(*inputs)
        return [*results, *torch.autograd.grad(results, leaves, slopes)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@every_op
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(op, backend):
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [torch.bfloat16], ["contiguous"]))
    leaves = [x for x in inputs if x.requires_grad]
    torch._dynamo.reset()

    def step(call):
        results = call(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return [*results, *torch.autograd.grad(sum(y.sum() for y in results), leaves)]

    compiled = step(torch.compile(op.call, fullgraph=True, backend=backend))
    for got, reference in zip(compiled, step(op.call), strict=True):
        assert_near(got, reference, 1e-5)


@every_op
@pytest.mark.parametrize("graded", [False, True])
def test_a_call_costs_the_host_little(op, graded):
    """A bound that only a slip breaks (a lookup on the disk, a synchronisation); benchmarks/ measures the rest."""
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [torch.bfloat16], ["contiguous"]))
    best = float("inf")
    with torch.set_grad_enabled(graded):
        for _ in range(10):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(100):
                op.run(*inputs)
            best = min(best, (time.perf_counter() - started) / 100)
    assert best < 100e-6, f"{best * 1e6:.0f} us a call"


@every_op
def test_a_tensor_on_the_host_is_refused_where_the_plan_is_known(op):
    inputs = on_gpu(inputs_of(op, SHAPES[op.name], [torch.bfloat16], ["contiguous"]))
    op.run(*inputs)
    with pytest.raises(ValueError, match="is on cpu, and must be on cuda:0"):
        op.run(*inputs[:-1], inputs[-1].detach().cpu().requires_grad_(inputs[-1].requires_grad))


def test_a_call_does_not_wait_for_the_gpu():
    x = torch.randn(61, 80, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(80, device="cuda", dtype=torch.bfloat16)
    rms_norm(x, weight, EPS)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    done = torch.cuda.Event()
    rms_norm(x, weight, EPS)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
