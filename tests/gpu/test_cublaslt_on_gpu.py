"""Products of cuBLASLt that is asked once: the bits of ``torch._scaled_mm``, in all settings of a training step."""

import threading

import pytest
import torch

from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.ops import cublaslt

pytestmark = pytest.mark.gpu

SIZES = [(1024, 3072, 3072), (4096, 4096, 1024), (300, 512, 1024), (16, 64, 32), (8192, 2048, 12288), (1, 256, 128)]


@pytest.fixture(autouse=True)
def _hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch's products with scales of rows are cuBLASLt's on Hopper")


def made(rows, columns, device="cuda", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return scaled_rows(torch.randn(rows, columns, device=device, generator=generator).bfloat16())


def by_torch(a, b, bias=None):
    (x, down), (y, across) = a, b
    return torch._scaled_mm(
        x, y.t(), scale_a=down[:, None], scale_b=across[None], bias=bias, out_dtype=torch.bfloat16, use_fast_accum=False
    )


def ours(a, b, bias=None, addend=None):
    return cublaslt.scaled_product(a[0], b[0], a[1], b[1], bias, addend)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_the_bits_are_torchs(m, n, k, biased):
    a, b = made(m, k), made(n, k, seed=1)
    bias = torch.randn(n, device="cuda").bfloat16() if biased else None
    for _ in range(2):
        c = ours(a, b, bias)
        assert c is not None
        assert torch.equal(c, by_torch(a, b, bias))


def test_rows_may_lie_apart():
    x, down = made(512, 1040)
    # As turned matrices do, whose rows are padded to whole 16 bytes.
    (left, right), scale = x.split([528, 512], 1), down
    assert left.stride(0) > left.shape[1]
    assert torch.equal(ours((left, scale), (left, scale)), by_torch((left, scale), (left, scale)))
    assert ours((right, scale), (left[:, :512], scale)) is None  # half of a line behind an aligned address


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_an_addend_is_added_in_the_same_launch(m, n, k):
    a, b = made(m, k), made(n, k, seed=1)
    before = torch.randn(m, n, device="cuda").bfloat16()
    left, right = (numbers.double() * scale.double()[:, None] for numbers, scale in (a, b))
    product = left @ right.T
    exact, twice = product + before.double(), before + by_torch(a, b)
    c = ours(a, b, addend=before)
    assert c is before
    # Of the result, of the product, which the library may round before it adds, as torch's addition behind it has to,
    # and of the tensor cores' sums, which keep some 14 bits and lose up to one at each step.
    bound = (exact.abs() + product.abs()) * 2.0**-8 + left.abs() @ right.abs().T * 2.0**-11
    wrong = (c.double() - exact).abs()
    assert bool((wrong <= bound).all())
    assert wrong.mean() <= 1.01 * (twice.double() - exact).abs().mean()


def test_addresses_that_the_library_does_not_take_are_torchs():
    (x, down), b = made(64, 256), made(64, 256, seed=1)
    moved = torch.empty(x.numel() + 16, dtype=torch.uint8, device="cuda")[16:].view(x.dtype).view(x.shape)
    moved.copy_(x)
    assert ours((moved, down), b) is None


def test_threads_do_not_share_addresses():
    pairs = [(made(512, 1024, seed=n), made(768, 1024, seed=n + 50)) for n in range(4)]
    wanted, wrong = [by_torch(*pair) for pair in pairs], []
    torch.cuda.synchronize()

    def work(n):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(300):
                c = ours(*pairs[n])
            torch.cuda.current_stream().synchronize()
        if not torch.equal(c, wanted[n]):
            wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_are_captured():
    a, b = made(256, 512), made(384, 512, seed=1)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours(a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = ours(a, b)
    other = made(256, 512, seed=9)
    a[0].copy_(other[0])
    a[1].copy_(other[1])
    graph.replay()
    assert torch.equal(c, by_torch(other, b))


def test_a_second_device_is_served_when_it_is_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    a, b = made(256, 512, "cuda:1"), made(384, 512, "cuda:1", seed=1)
    assert ours(a, b) is None
    with torch.cuda.device(1):
        assert torch.equal(ours(a, b), by_torch(a, b))


def test_a_thread_keeps_no_end_of_sizes(monkeypatch):
    monkeypatch.setattr(cublaslt, "_MOST_SIZES", 3)
    b = made(64, 256, seed=1)
    for rows in range(1, 9):
        a = made(rows, 256)
        assert torch.equal(ours(a, b), by_torch(a, b))
        assert len(cublaslt._thread.products) <= 3
