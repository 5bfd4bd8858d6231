"""tilekern.AdamW on the GPU with parameters of all sizes, of which small ones go together, by torch's fused step."""

import copy
import time

import pytest
import torch
from adamw_samples import KERNEL, FusedCalls, give_gradients, launches, parameters, train, twins
from gpu_samples import nothing_waits

import tilekern
from tilekern.ops.adamw import MOST_TOGETHER
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import counters

LARGE, SMALL = (MOST_TOGETHER // 4096 + 1, 4096), ((96, 4096), (128,), (33, 257), (1,), (), (0,))
# Of values and of zeros: a rounding or two of bfloat16; in float32 both are a few ulps off.
TOLERANCES = {torch.bfloat16: (1.6e-2, 4e-3), torch.float32: (1e-5, 1e-5)}


def on_gpu(shapes, dtype=torch.bfloat16, seed=0):
    return [torch.nn.Parameter(p.detach().cuda()) for p in parameters(shapes, dtype, seed)]


def groups(params):
    """One group of each third, with options of its own."""
    return [
        {"params": params[0::3], "lr": 3e-2, "betas": (0.8, 0.95)},
        {"params": params[1::3], "lr": 1e-2, "weight_decay": 0.1, "maximize": True},
        {"params": params[2::3], "lr": 2e-2, "weight_decay": 0.0, "eps": 1e-4},
    ]


def test_small_ones_have_the_bits_of_torch_s_fused_step_and_large_ones_are_a_rounding_off():
    shapes = [LARGE, *SMALL]
    ours = on_gpu(shapes) + on_gpu(shapes, torch.float32, seed=1)
    theirs = twins(ours)
    optimizer, expected = tilekern.AdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    for number in range(5):
        give_gradients(number, ours, theirs)
        for params in (ours, theirs):
            # Steps of these differ from those of others.
            params[1].grad = params[1].grad if number else None
            params[9].grad = params[9].grad if number != 3 else None
        optimizer.step()
        expected.step()
    assert (launches(), counters(KERNEL).fallbacks) == (2 * 5, 0)
    for p, q in zip(ours, theirs, strict=True):
        mine, its = optimizer.state[p], expected.state[q]
        assert mine["step"].device.type == "cpu"
        assert float(mine["step"]) == float(its["step"])
        if p.numel() <= MOST_TOGETHER:
            assert torch.equal(p, q)
            assert torch.equal(mine["exp_avg"], its["exp_avg"])
            assert torch.equal(mine["exp_avg_sq"], its["exp_avg_sq"])
        else:
            rtol, atol = TOLERANCES[p.dtype]
            torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


def test_one_call_for_each_group_dtype_and_count():
    ours = on_gpu([LARGE, (128,), (64, 64), (7,)]) + on_gpu([(128,), (64, 64)], torch.float32)
    optimizer = tilekern.AdamW(ours)
    give_gradients(0, ours)
    ours[2].grad = None
    optimizer.step()
    give_gradients(1, ours)
    with FusedCalls() as calls:
        optimizer.step()
    assert sorted(calls.seen, key=str) == [
        (torch.bfloat16, [128, 7], 2), (torch.bfloat16, [4096], 1), (torch.float32, [128, 4096], 2),
    ]  # fmt: skip
    assert launches() == 2


@pytest.mark.parametrize("layout", ["transposed", "channels last", "one element late"])
def test_layouts_that_torch_s_fused_step_takes(layout):
    x = torch.randn(64, 16, 3, 4, device="cuda").bfloat16()
    lay = {
        "transposed": lambda: x.view(64, 192).t().contiguous().t(),
        "channels last": lambda: x.to(memory_format=torch.channels_last),
        "one element late": lambda: torch.cat((x.new_zeros(1), x.flatten()))[1:],
    }[layout]
    ours, theirs = ([torch.nn.Parameter(lay())] for _ in range(2))
    optimizer, expected = tilekern.AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    for number in range(3):
        give_gradients(number, ours, theirs)
        for p in (*ours, *theirs):
            p.grad = torch.empty_like(p).copy_(p.grad)
        optimizer.step()
        expected.step()
    assert torch.equal(ours[0], theirs[0])
    assert launches() == 0


def test_gradients_in_another_layout_are_launched_and_those_of_others_still_go_together():
    ours = [torch.nn.Parameter(torch.randn(64, 192, device="cuda").t()), *on_gpu([(33, 7)], torch.float32)]
    exact = twins(ours, torch.float64)
    with FusedCalls() as calls:
        train(3, (tilekern.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(exact, lr=0.1), exact))
    # Torch refuses the first call of each step, which has changed nothing.
    assert [(numbers, count) for _, numbers, count in calls.seen] == [
        (numbers, count) for count in (1, 2, 3) for numbers in ([64 * 192, 33 * 7], [33 * 7])
    ]
    for p, q in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-5)
    assert launches() == 3


def test_a_step_does_not_wait_for_the_gpu_and_states_go_on_in_torch_s_optimizer():
    ours = on_gpu([LARGE, *SMALL])
    optimizer = tilekern.AdamW(ours, lr=0.05)
    train(2, (optimizer, ours))
    give_gradients(2, ours)
    with nothing_waits():
        optimizer.step()
    theirs = twins(ours)
    other = torch.optim.AdamW(theirs, fused=True)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(1, (optimizer, ours), (other, theirs), first=3)
    assert all(float(other.state[p]["step"]) == 4 for p in theirs)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1.6e-2, atol=4e-3)


def test_a_cuda_graph_cannot_capture_a_step():
    ours = on_gpu(SMALL)
    optimizer = tilekern.AdamW(ours)
    train(1, (optimizer, ours))
    with (
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_small_parameters_need_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TILEKERN_CACHE_PATH", raising=False)
    monkeypatch.setattr("tilekern.cache.default_layers", list)
    dispatch.set_miss_policy("fallback")
    dispatch.forget()
    ours = on_gpu(SMALL)
    train(1, (tilekern.AdamW(ours), ours))
    assert (launches(), counters(KERNEL).fallbacks, counters(KERNEL).misses) == (0, 0, 0)


def test_a_step_of_many_costs_the_host_little():
    """A bound that only a slip breaks (a launch for each, a synchronisation); benchmarks/ measures the rest."""
    ours = on_gpu([(128,)] * 300)
    optimizer = tilekern.AdamW(ours)
    train(2, (optimizer, ours))
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        optimizer.step()
        best = min(best, (time.perf_counter() - started) / len(ours))
    assert best < 20e-6, f"{best * 1e6:.0f} us a parameter"
