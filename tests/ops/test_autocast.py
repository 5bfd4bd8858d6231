"""Ops under autocast: results in the dtypes that they have without it, from kernels and from torch's operations."""

import pytest
import torch
from op_samples import TOLERANCE, assert_near, leaves_of

from tilekern import interpreter, ops

ROWS = ((3, 5, 16),)
LABELS = torch.tensor([[0, 3, -100, 9, 15], [1, 2, 3, 4, 5], [0, 0, -100, 1, 1]])
HEADS, TOKENS_FIRST = ((2, 4, 9, 16), (2, 2, 9, 16)), ((2, 9, 4, 16), (2, 9, 2, 16))
ANGLES = torch.rand(3, 2, 9, 8, generator=torch.Generator().manual_seed(1))
TURNS, TWICE = torch.polar(torch.ones(1, 9, 8), ANGLES[0, :1]), torch.cat((ANGLES, ANGLES), -1)


def log_softmax(*rows):
    return [x.log_softmax(-1) for x in rows]


def softmax(*rows):
    return [x.softmax(-1) for x in rows]


def of_logs(x, y):
    """Two distributions, the second one without a gradient, as the divergences take them."""
    return (*log_softmax(x), *log_softmax(y.detach()))


# A call, the shapes of what it is called with, and whether its loss is float32 whatever it is called with.
CALLS = {
    "layer_norm": (ops.layer_norm, (*ROWS, (16,), (16,)), False),
    "group_norm": (lambda x, w, b: ops.group_norm(x, w, b, 4, 2), ((3, 4, 5), (4,), (4,)), False),
    "poly_norm": (ops.poly_norm, (*ROWS, (3,), (1,)), False),
    "dyt": (ops.dyt, (*ROWS, (1,), (16,), (16,)), False),
    "softmax": (ops.softmax, ROWS, False),
    "sparsemax": (ops.sparsemax, ROWS, False),
    "geglu": (ops.geglu, ROWS * 2, False),
    "kl_div": (lambda x, y: ops.kl_div(*log_softmax(x), *softmax(y.detach())), ROWS * 2, True),
    "kl_div of elements": (
        lambda x, y: ops.kl_div(*log_softmax(x), *softmax(y.detach()), reduction="none"), ROWS * 2, False,
    ),
    "jsd": (lambda x, y: ops.jsd(*of_logs(x, y)), ROWS * 2, False),
    "tvd": (lambda x, y: ops.tvd(*softmax(x), *softmax(y.detach())), ROWS * 2, True),
    "cross_entropy": (lambda x: ops.cross_entropy(x, LABELS), ROWS, True),
    "rope": (lambda q, k: ops.rope(q, k, TWICE[0].cos().to(q.dtype), TWICE[0].sin().to(q.dtype)), HEADS, False),
    "llama4_rope": (lambda q, k: ops.llama4_rope(q, k, TURNS), TOKENS_FIRST, False),
    "qwen2vl_mrope": (
        lambda q, k: ops.qwen2vl_mrope(q, k, TWICE.cos().to(q.dtype), TWICE.sin().to(q.dtype), [2, 3, 3]), HEADS, False,
    ),
    "fused_neighborhood_attention": (
        lambda q, k: ops.fused_neighborhood_attention(q, k, k.flip(2), 5, 2), HEADS, False,
    ),
}  # fmt: skip


def results_of(call, leaves):
    found = call(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator().manual_seed(2)
    slopes = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in found]
    return found, torch.autograd.grad(found, leaves, slopes, allow_unused=True)


def check(name, dtype):
    call, shapes, wide = CALLS[name]
    leaves = leaves_of(shapes, [dtype] * len(shapes))
    with torch.autocast("cpu", torch.bfloat16):
        found = results_of(call, leaves)
    plain = results_of(call, leaves)
    right = results_of(call, [x.detach().double().requires_grad_() for x in leaves])
    for y in found[0]:
        assert y.dtype == (torch.float32 if wide else dtype)
    for some, same, references in zip(found, plain, right, strict=True):
        for y, other, reference in zip(some, same, references, strict=True):
            if y is None:
                assert reference is None
                continue
            assert torch.equal(y, other)
            assert_near(y, reference, 3 * TOLERANCE[dtype])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The interpreter's products are torch's, which autocast would round; a kernel's own are out of its reach."""
    launch = interpreter.launch

    def uncast(*arguments, **options):
        with torch.autocast("cpu", enabled=False):
            launch(*arguments, **options)

    monkeypatch.setattr(interpreter, "launch", uncast)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_no_dtype_and_no_number(name, dtype):
    check(name, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("without_interpreter")
def test_nor_where_torch_s_operations_run_in_a_kernel_s_place(name, dtype):
    check(name, dtype)
