"""The kernel of tilekern.AdamW on the GPU: beside torch's fused one, on any memory, with no wait for the GPU."""

import copy
import time

import pytest
import torch
from adamw_samples import KERNEL, error, give_gradients, launches, parameters, train, twins
from gpu_samples import nothing_waits

import tilekern
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import counters

DTYPES = (torch.bfloat16, torch.float32)
# Two of each width of rows, several blocks and one; an odd number of elements; none.
SHAPES = ((96, 4096), (4096,), (33, 256), (256,), (128,), (16,), (4097,), (1,), (0,))


@pytest.fixture(autouse=True)
def every_parameter_is_launched(monkeypatch):
    """Not only large ones (``test_adamw_together_on_gpu.py``)."""
    monkeypatch.setattr("tilekern.ops.adamw.MOST_TOGETHER", 0)


def on_gpu(shapes, dtype):
    return [torch.nn.Parameter(p.detach().cuda()) for p in parameters(shapes, dtype)]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_steps_are_as_near_to_float64_as_torch_s_fused_ones(dtype, maximize):
    ours = on_gpu(SHAPES, dtype)
    theirs, exact = twins(ours), twins(ours, torch.float64)
    options = {"lr": 3e-2, "weight_decay": 0.1, "maximize": maximize}
    train(
        50,
        (tilekern.AdamW(ours, **options), ours),
        (torch.optim.AdamW(theirs, **options, fused=True), theirs),
        (torch.optim.AdamW(exact, **options), exact),
    )
    assert launches() == 50 * sum(p.numel() > 0 for p in ours)
    assert counters(KERNEL).fallbacks == 0
    own, other = error(ours, exact), error(theirs, exact)
    # In float32 both are a few ulps off: the kernel's betas are float32, torch's float64.
    scale = error(exact, [torch.zeros_like(p) for p in exact])
    assert own <= 1.05 * other + 1e-5 * scale * (dtype == torch.float32), (own, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_rows_run_the_aligned_cubin(dtype, variants):
    train(1, *((tilekern.AdamW([p]), [p]) for p in on_gpu([(96, 4096)], dtype)))
    assert variants == ["aligned"]
    for shape in ((33, 256), (7, 16)):
        train(1, *((tilekern.AdamW([p]), [p]) for p in on_gpu([shape], dtype)))
    assert set(variants) == {"aligned"}


def test_memory_that_is_not_aligned_runs_the_generic_cubin(variants):
    memory = torch.randn(4097, device="cuda").bfloat16()
    ours = [torch.nn.Parameter(memory[1:])]
    exact = twins(ours, torch.float64)
    train(3, (tilekern.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(exact, lr=0.1), exact))
    assert set(variants) == {"generic"}
    assert error(ours, exact) < 1e-2 * error(exact, [torch.zeros_like(p) for p in exact])


@pytest.mark.parametrize("layout", ["transposed", "channels last", "gaps"])
def test_any_layout(layout):
    x = torch.randn(64, 16, 3, 4, device="cuda")
    laid = {
        "transposed": lambda: x.view(64, 192).t().contiguous().t(),
        "channels last": lambda: x.to(memory_format=torch.channels_last),
        "gaps": lambda: torch.zeros(64, 500, device="cuda")[:, 3:195].copy_(x.view(64, 192)),
    }[layout]()
    ours = [torch.nn.Parameter(laid)]
    exact = twins(ours, torch.float64)
    train(3, (tilekern.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(exact, lr=0.1), exact))
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-5)
    assert launches() == 3
    if layout == "gaps":
        assert not laid._base[:, :3].any()
        assert not laid._base[:, 195:].any()


def test_a_state_of_torch_s_fused_optimizer_goes_on_and_no_step_waits_for_the_gpu():
    theirs = on_gpu(SHAPES, torch.bfloat16)
    saved = torch.optim.AdamW(theirs, lr=0.05, fused=True)
    train(3, (saved, theirs))
    assert saved.state[theirs[0]]["step"].is_cuda
    ours = twins(theirs)
    optimizer = tilekern.AdamW(ours)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert all(optimizer.state[p]["step"].device.type == "cpu" for p in ours)
    train(1, (optimizer, ours), (saved, theirs), first=3)
    give_gradients(4, ours, theirs)
    with nothing_waits():
        optimizer.step()
    saved.step()
    assert optimizer.state[ours[0]]["step"] == 5
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1.6e-2, atol=1e-3)


def test_a_step_does_not_wait_for_the_gpu():
    ours = on_gpu(SHAPES, torch.bfloat16)
    optimizer = tilekern.AdamW(ours)
    train(2, (optimizer, ours))
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    done = torch.cuda.Event()
    optimizer.step()
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_each_step_sees_what_the_one_before_has_written():
    """Launches overlap the ends of their predecessors, and must not read what those have yet to write."""
    shapes = [(2048, 4096), (128,)]
    ours = on_gpu(shapes, torch.bfloat16)
    others = twins(ours)
    one, other = tilekern.AdamW(ours, lr=0.1), tilekern.AdamW(others, lr=0.1)
    give_gradients(0, ours, others)
    for _ in range(20):
        # The gradient is written by the kernel right before the step.
        for p in (*ours, *others):
            p.grad.mul_(-1.01)
        one.step()
        torch.cuda.synchronize()
        other.step()
        other.step()
        one.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, others, strict=True))


def test_the_current_stream_is_used():
    ours = on_gpu([(96, 4096)], torch.bfloat16)
    others = twins(ours)
    one, other = tilekern.AdamW(ours, lr=0.1), tilekern.AdamW(others, lr=0.1)
    train(2, (one, ours), (other, others))
    value = ours[0].grad.clone()
    ours[0].grad.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ours[0].grad.copy_(value)
        one.step()
    torch.cuda.synchronize()
    other.step()
    assert torch.equal(ours[0], others[0])


def test_a_cuda_graph_cannot_capture_a_step():
    ours = on_gpu([(4, 16)], torch.bfloat16)
    optimizer = tilekern.AdamW(ours)
    train(1, (optimizer, ours))
    with (
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


def test_a_rate_on_the_gpu_is_refused_and_one_that_a_state_dict_brings_is_fetched_once():
    lr = torch.tensor(0.1, device="cuda")
    ours = on_gpu([(4, 16)], torch.bfloat16)
    with pytest.raises(ValueError, match="lr is a tensor on cuda"):
        tilekern.AdamW(ours, lr=lr)
    saved = torch.optim.AdamW(ours, lr=lr, fused=True)
    train(1, (saved, ours))
    optimizer = tilekern.AdamW(ours)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"].device.type == "cpu"
    train(1, (optimizer, ours), first=1)
    assert launches() == 1


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_without_a_record_torch_does_the_work(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TILEKERN_CACHE_PATH", raising=False)
    monkeypatch.setattr("tilekern.cache.default_layers", list)
    dispatch.set_miss_policy("fallback")
    dispatch.forget()
    ours = on_gpu([(96, 4096), (33, 256)], torch.bfloat16)
    theirs = twins(ours)
    train(3, (tilekern.AdamW(ours, lr=0.1), ours), (torch.optim.AdamW(theirs, lr=0.1), theirs))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert (counters(KERNEL).fallbacks, launches()) == (6, 0)


def test_a_scaler_leaves_out_a_step_whose_gradient_is_not_finite():
    ours = on_gpu([(4, 16)], torch.float32)
    optimizer, scaler = tilekern.AdamW(ours, lr=0.1), torch.amp.GradScaler("cuda", init_scale=8.0)
    before = ours[0].detach().clone()
    for bad in (True, False):
        scaler.scale(torch.ones((), device="cuda"))
        ours[0].grad = torch.full((4, 16), torch.inf if bad else scaler.get_scale(), device="cuda")
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(ours[0], before) == bad
    torch.testing.assert_close(optimizer.state[ours[0]]["exp_avg"], torch.full((4, 16), 0.1, device="cuda"))


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    if free < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    rows = (1 << 19) + 3
    p = torch.nn.Parameter(torch.ones(rows, 4096, device="cuda", dtype=torch.bfloat16))
    assert p.numel() > 1 << 31
    p.grad = torch.full_like(p, 0.5)
    p.grad[-1] = -0.5
    tilekern.AdamW([p], lr=0.25, weight_decay=0.0).step()
    assert launches() == 1
    # The first step is lr times the gradient's sign.
    assert (p[:-1].amin().item(), p[:-1].amax().item()) == (0.75, 0.75)
    assert (p[-1] == 1.25).all()


def test_a_step_costs_the_host_little():
    """A bound that only a slip breaks (a lookup on the disk, a synchronisation); benchmarks/ measures the rest."""
    ours = on_gpu([(128,)] * 100, torch.bfloat16)
    optimizer = tilekern.AdamW(ours)
    train(2, (optimizer, ours))
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        optimizer.step()
        best = min(best, (time.perf_counter() - started) / len(ours))
    assert best < 60e-6, f"{best * 1e6:.0f} us a parameter"
