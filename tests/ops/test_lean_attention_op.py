"""Attention that keeps what q and k are made of: the same bits, less memory, and when it keeps q and k all the same."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilekern.ops.attention import attention
from tilekern.ops.qk_norm_rope import qk_norm_rope

TOKENS, HEADS, KV_HEADS, SIZE = 40, 4, 2, 16
OPTIONS = [{}, {"offset": 1.0, "casting_mode": "gemma"}, {"norm_last": True, "interleaved": True}]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")


def leaves():
    """q, k, v, the weights of the norms, and sinks."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_()

    q, k, v = (drawn(1, TOKENS, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [q, k, v, drawn(SIZE), drawn(SIZE), drawn(HEADS)]


def turned(q, k, q_weight, k_weight, options):
    return turned_as_given(q * 1, k * 1, q_weight, k_weight, options)


def turned_as_given(q, k, q_weight, k_weight, options=OPTIONS[0]):
    angles = torch.linspace(0, 3, TOKENS * SIZE // 2).view(1, TOKENS, SIZE // 2).bfloat16()
    if not options:
        angles = torch.cat((angles, angles), 2)
    return qk_norm_rope(q, k, q_weight, k_weight, angles.cos(), angles.sin(), **options)


def attended(lean, options=OPTIONS[0], change=lambda q, k: (q, k), **more):
    """The inputs, the result, and weak references to the memory of q and k as attention read them."""
    given = leaves()
    q, k, v, q_weight, k_weight, sinks = given
    q, k = turned(q, k, q_weight, k_weight, options)
    q, k = change(q, k)
    out = attention(q, k, v * 1, sinks=sinks, lean=lean, **more)
    return given, out, [weakref.ref(x.untyped_storage()) for x in (q, k)]


def are_kept(references):
    for _ in "12":
        gc.collect()  # the interpreter's own circles
    return [reference() is not None for reference in references]


def gradients(given, out):
    return torch.autograd.grad(out, given, torch.linspace(-1, 1, out.numel()).view(out.shape).bfloat16())


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "gemma", "norm_last"])
def test_gradients_have_the_bits_of_an_attention_that_keeps_q_and_k(options):
    given, out, kept = attended(True, options)
    assert are_kept(kept) == [False, False]
    wanted, plain, also = attended(False, options)
    assert are_kept(also) == [True, True]
    assert torch.equal(out, plain)
    found = gradients(given, out)
    assert all(map(torch.equal, found, gradients(wanted, plain)))
    assert all(x.any() for x in found)


def test_packed_sequences_and_windows_have_the_same_bits():
    starts = torch.tensor([0, 17, TOKENS], dtype=torch.int32)
    found, plain = (attended(lean, cu_seqlens=starts, window=9) for lean in (True, False))
    assert are_kept(found[2]) == [False, False]
    assert all(map(torch.equal, gradients(*found[:2]), gradients(*plain[:2])))


def written_in_place(q, k):
    with torch.no_grad():
        q.mul_(1.5)
    return q, k


@pytest.mark.parametrize(
    "change",
    [
        written_in_place,
        lambda q, k: (q, k.mul_(1.5)),
        lambda q, k: (q, k * 1.5),
        lambda q, k: (q.detach().requires_grad_(), k),
        lambda _, k: (torch.cat((k, k), 2), k),
        lambda q, k: (q, turned(q, k, q.new_ones(SIZE), q.new_ones(SIZE), {})[1]),
    ],
    ids=["in place, untold", "in place", "another", "cut off", "keys as queries", "of two calls"],
)
def test_queries_and_keys_that_are_others_since_are_kept(change):
    given, out, kept = attended(True, change=change)
    assert are_kept(kept) == [True, True]
    wanted, plain, _ = attended(False, change=change)
    slope = torch.ones_like(out)
    found, others = (torch.autograd.grad(y, x, slope, allow_unused=True) for x, y in ((given, out), (wanted, plain)))
    assert all(x is y if x is None else torch.equal(x, y) for x, y in zip(found, others, strict=True))


def test_hooks_on_what_is_kept_get_q_and_k():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert are_kept(attended(True)[2]) == [True, True]


def test_what_a_checkpoint_makes_again_is_not_asked_for_in_the_forward():
    runs = []

    def counted(*given):
        runs.append(given)
        return turned(*given, {})

    given = leaves()
    q, k = checkpoint(counted, *given[:2], *given[3:5], use_reentrant=False)
    out = attention(q, k, given[2] * 1, sinks=given[5], lean=True)
    assert len(runs) == 1
    wanted, plain, _ = attended(False)
    assert all(map(torch.equal, gradients(given, out), gradients(wanted, plain)))


def test_a_forward_of_what_no_backward_can_make_again_is_that_of_the_op():
    given = leaves()
    made_of = given[0] * 1, given[1] * 1
    for spoil in (lambda q, k: (q.sum() + k.sum()).backward(), lambda *_: made_of[0].detach().zero_()):
        q, k = turned_as_given(*made_of, *given[3:5])
        spoil(q, k)
        found, plain = (attention(q, k, given[2], lean=lean) for lean in (True, False))
        assert torch.equal(found, plain)
        assert torch.equal(*(torch.autograd.grad(x.sum(), given[2])[0] for x in (found, plain)))


def test_without_a_gradient_it_is_the_op():
    with torch.no_grad():
        assert torch.equal(attended(True)[1], attended(False)[1])


def test_a_backward_repeats_and_is_not_differentiated():
    given, out, _ = attended(True)
    first, again = (torch.autograd.grad(out.sum(), given, retain_graph=True) for _ in "12")
    assert all(map(torch.equal, first, again))
    (slope,) = torch.autograd.grad(out.float().square().sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


def test_frozen_values_and_norms_get_no_gradient():
    found = []
    for lean in (True, False):
        given = leaves()
        for x in given[2:]:
            x.requires_grad_(False)
        q, k = turned(*given[:2], *given[3:5], {})
        found.append(torch.autograd.grad(attention(q, k, given[2], lean=lean).sum(), given[:2]))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_a_graph_of_torch_compile_is_whole_and_the_same():
    def run(q, k, v, q_weight, k_weight, sinks, lean):
        return attention(*turned(q, k, q_weight, k_weight, {}), v, sinks=sinks, lean=lean)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    found, wanted = (function(*leaves(), True) for function in (compiled, run))
    assert torch.equal(found, wanted)
