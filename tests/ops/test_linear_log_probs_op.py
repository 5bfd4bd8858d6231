"""linear_log_probs as users call it: its options by float64, both slopes, chunks, autocast, graphs, errors."""

import importlib

import pytest
import torch
from contract import CASES, check
from op_samples import assert_near

import tilekern
from tilekern.kernels.composites import head
from tilekern.ops import linear_log_probs
from tilekern.runtime.dispatch import counters, plan_for

module = importlib.import_module("tilekern.ops.linear_log_probs")


def sample(leading=(7,), width=24, vocabulary=83, dtype=torch.float32, seed=0, bias=False):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 4).to(dtype).requires_grad_()
    ids = torch.randint(vocabulary, leading, generator=generator)
    shift = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, ids, shift


@pytest.fixture(autouse=True)
def no_logits_are_kept(monkeypatch):
    """One graph of a process keeps its logits; that of another test may still be alive."""
    monkeypatch.setattr(module.composite.Room, "_holding", None)


@pytest.fixture
def chunks_of_four(monkeypatch):
    for place in (module, module.composite):
        monkeypatch.setattr(
            place, "chunk_plans", lambda lookup, specs, _, *rest: head.chunk_plans(lookup, specs, 4, *rest)
        )


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_several_chunks_with_a_tail(rows):
    chunks = -(-rows // 4)
    before = {name: counters(name).launches for name in ("log_probs_forward", "log_probs_backward")}
    hidden, weight, ids, _ = sample((rows,))
    check(CASES["linear_log_probs"], {"hidden": hidden, "weight": weight, "ids": ids})
    assert {name: counters(name).launches - count for name, count in before.items()} == dict.fromkeys(before, chunks)


@pytest.fixture
def made(monkeypatch, chunks_of_four):
    """The rows whose logits products have made, in their order, in chunks of four."""
    found = []

    def logits(self, part):
        found.append((part.start, part.stop))
        return of_head(self, part)

    of_head = head.Head.logits
    monkeypatch.setattr(head.Head, "logits", logits)
    return found


def graded(rows=10):
    hidden, weight, ids, _ = sample((rows,))
    return linear_log_probs(hidden, weight, ids)[0].sum(), (hidden, weight)


def test_the_backward_finds_the_logits_of_the_last_chunk_once_and_has_the_same_bits_without_them(made):
    total, leaves = graded()
    assert made == [(0, 4), (4, 8), (8, 10)]
    made.clear()
    with_them = torch.autograd.grad(total, leaves, retain_graph=True)
    assert made == [(0, 4), (4, 8)]
    made.clear()
    without = torch.autograd.grad(total, leaves)
    assert made == [(8, 10), (0, 4), (4, 8)]
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True))


def test_of_several_forwards_one_keeps_logits_until_its_backward_or_its_end(made):
    (first, leaves), (second, others) = graded(4), graded(4)
    made.clear()
    torch.autograd.grad(second, others)
    assert made == [(0, 4)], "the first one holds its own"
    made.clear()
    torch.autograd.grad(first, leaves)
    assert not made
    graded(4)  # and is forgotten
    third, others = graded(4)
    made.clear()
    torch.autograd.grad(third, others)
    assert not made


def test_a_forward_without_gradients_keeps_no_logits(made):
    with torch.no_grad():
        linear_log_probs(*sample((4,))[:3])
    assert module.composite.Room._holding is None or module.composite.Room._holding() is None


def test_ids_that_are_none_give_nan_in_their_row_and_in_the_gradients():
    hidden, weight, ids, _ = sample()
    ids[2] = 83
    log_probs, entropy = linear_log_probs(hidden, weight, ids)
    assert log_probs.isnan().nonzero().tolist() == [[2]]
    assert bool(entropy.isfinite().all())
    dhidden, dweight = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    assert dhidden.isnan().any(-1).nonzero().tolist() == [[2]]
    assert bool(dweight.isnan().all())
    with pytest.raises(ValueError, match="linear_log_probs got the label 83 in"):
        tilekern.check_labels()


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_what_no_kernel_serves_runs_torch_s_own_operations_and_counts(monkeypatch):
    hidden, weight, ids, bias = sample(bias=True)
    ids[3] = -100
    name = "linear_log_probs_forward"
    same = linear_log_probs(hidden, weight, ids, bias=bias)
    launches, fallbacks = counters(name).launches, counters(name).fallbacks
    far = ids.where(ids >= 0, 2**40)
    found = [
        linear_log_probs(hidden.double(), weight.double(), ids, bias=bias.double()),
        linear_log_probs(hidden, weight, ids, bias=bias.double()),
        linear_log_probs(hidden, weight, far, bias=bias, ignore_index=2**40),
    ]
    monkeypatch.setattr(
        module, "plan_for", lambda spec, *sizes: None if spec.name == "log_probs_backward" else plan_for(spec, *sizes)
    )
    found.append(linear_log_probs(hidden, weight, ids, bias=bias))
    for results in found:
        for a, b in zip(results, same, strict=True):
            assert_near(a, b, 1e-5)
    assert found[0][0].dtype == torch.float64
    assert counters(name).launches == launches
    assert counters(name).fallbacks == fallbacks + 4
