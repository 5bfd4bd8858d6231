"""Checkpoints that keep attention's results: the same gradients, and attention computed once a step."""

import functools
import threading

import pytest
import tiny_qwen3
import torch
from tiny_qwen3 import launched, launches, same, step
from torch.utils.checkpoint import checkpoint

import tilekern
from tilekern import keep_attention
from tilekern.ops import checkpoints
from tilekern.ops.attention import attention

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]
KEEP = {"use_reentrant": False, "context_fn": keep_attention}
PACKED = torch.tensor([0, 3, 7], dtype=torch.int32)


def forwards(run):
    before = launches()
    found = run()
    return found, launched(before).get("attention_forward", 0)


@pytest.fixture
def model():
    tilekern.apply(model_type="qwen3")
    yield tiny_qwen3.make(attention="tilekern").train()
    tilekern.reset()


def test_gradients_are_those_without_checkpoints_and_attention_runs_once(model):
    wanted, once = forwards(lambda: step(model))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, twice = forwards(lambda: step(model))
    model.gradient_checkpointing_enable(KEEP)
    for _ in range(2):
        found, number = forwards(lambda: step(model))
        assert same(found, wanted)
        assert (once, twice, number) == (2, 4, 2)


def test_other_attentions_are_told_of_once(model):
    model.set_attn_implementation("sdpa")
    model.gradient_checkpointing_enable(KEEP)
    checkpoints._Again.is_of_use = False
    with pytest.warns(tilekern.errors.TilekernWarning, match='use attn_implementation="tilekern"'):
        step(model)


def leaves(dtype=torch.float32):
    shapes = [(1, 7, 4, 16), (1, 7, 2, 16), (1, 7, 2, 16)]
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype).requires_grad_()
        for n, shape in enumerate(shapes)
    ]


def layer(q, k, v, more=lambda out: out * 1):
    """Two attentions, so that their order matters."""
    first = more(attention(q * 1.0, k, v))
    return attention(first, k, v * 2.0, window=3, cu_seqlens=PACKED, sinks=torch.zeros(4)).sin()


def gradients(run, given, times=1):
    out = run(*given).square().sum()
    for n in range(times):
        found = torch.autograd.grad(out, given, retain_graph=n + 1 < times)
    return [out.detach(), *found]


def kept(*given, run=layer):
    return checkpoint(run, *given, use_reentrant=False, context_fn=keep_attention)


def test_several_attentions_in_a_layer_take_their_own_results():
    given = leaves()
    wanted = gradients(layer, given)
    found, number = forwards(lambda: gradients(kept, given))
    assert same(found, wanted)
    assert number == 2


def test_a_graph_that_is_kept_runs_back_twice():
    given = leaves()
    wanted = gradients(layer, given)
    found, number = forwards(lambda: gradients(kept, given, times=2))
    assert same(found, wanted)
    assert number == 2


def test_a_result_that_was_written_over_is_computed_again():
    def doubled(q, k, v):
        with torch.no_grad():
            out = attention(q, k, v)
            out.mul_(2)
        return out * q + attention(q, k, v)

    given = leaves()
    wanted = gradients(doubled, given)
    found, number = forwards(lambda: gradients(functools.partial(kept, run=doubled), given))
    assert same(found, wanted)
    assert number == 3


@pytest.mark.parametrize("times", [1, 2])
def test_results_on_the_host(monkeypatch, times):
    """Copies, as of a GPU's; a write over the result does not reach them."""
    copied = []

    def on_host(x):
        copied.append(x.detach().clone().to(memory_format=torch.contiguous_format))
        return copied[-1]

    def doubled(q, k, v):
        with torch.no_grad():
            out = attention(q, k, v)
            out.mul_(2)
        return out * q + attention(q, k, v)

    monkeypatch.setattr(checkpoints, "_on_host", on_host)
    monkeypatch.setattr(checkpoints, "_is_elsewhere", lambda _: True)
    given = leaves()
    wanted = gradients(doubled, given)

    def offloaded(*given):
        context = functools.partial(keep_attention, offload=True)
        return checkpoint(doubled, *given, use_reentrant=False, context_fn=context)

    found, number = forwards(lambda: gradients(offloaded, given, times))
    assert same(found, wanted)
    assert number == 2
    assert len(copied) == 4


def test_memory_is_free_once_the_backward_has_used_it():
    q, k, v = leaves()
    before = keep_attention()
    forward, again = before
    with forward:
        attention(q, k, v)
    assert forward.kept[0].results()[0].shape == (1, 7, 4, 16)

    def back(slope):
        with again:
            attention(q, k, v)
        return slope

    q.register_hook(back)
    (q * 2).sum().backward()
    assert forward.kept == [None]


def test_a_forward_that_differs_is_refused():
    sizes = iter((7, 6))

    def changing(q, k, v):
        tokens = next(sizes)
        return attention(q[:, :tokens], k[:, :tokens], v[:, :tokens])

    with pytest.raises(RuntimeError, match="other shapes or options"):
        gradients(functools.partial(kept, run=changing), leaves())


def test_checkpoints_in_checkpoints_and_threads():
    given = leaves()
    wanted = gradients(lambda *x: layer(*x).cos(), given)
    found = gradients(lambda *x: checkpoint(lambda *y: kept(*y).cos(), *x, use_reentrant=False), given)
    assert same(found, wanted)
    results = []
    forward, _ = keep_attention()
    with forward:
        thread = threading.Thread(target=lambda: results.append(attention(*given)))
        thread.start()
        thread.join()
    assert not forward.kept


def test_selective_checkpoints_of_torch_s_own_see_the_op_too():
    """They name ops, and run a layer under a dispatch mode."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    given = leaves()
    wanted = gradients(layer, given)
    op = torch.ops.tilekern.attention.default
    contexts = functools.partial(create_selective_checkpoint_contexts, [op])
    found, number = forwards(
        lambda: gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False, context_fn=contexts), given)
    )
    assert same(found, wanted)
    assert number == 2
