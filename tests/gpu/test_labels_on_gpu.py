"""Labels outside the vocabulary: the GPU tells the host, which does not wait for it."""

import time

import pytest
import torch

import tilekern
from tilekern.ops import cross_entropy, fused_linear_cross_entropy, labels, linear_log_probs

ROWS, HIDDEN, VOCABULARY = 300, 64, 1000
OPS = {
    "cross_entropy": lambda hidden, weight, ids: cross_entropy(hidden @ weight.t(), ids),
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "linear_log_probs": lambda hidden, weight, ids: linear_log_probs(hidden, weight, ids)[0].mean(),
}
every_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    monkeypatch.setattr(labels, "_seen", {})


def tensors(device="cuda"):
    def normal(*shape):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    ids = torch.arange(ROWS, device=device)
    ids[::5] = -100
    return normal(ROWS, HIDDEN).requires_grad_(), normal(VOCABULARY, HIDDEN).requires_grad_(), ids


def wrong(ids, label=VOCABULARY):
    changed = ids.clone()
    changed[7] = label
    return changed


@every_op
@pytest.mark.parametrize("label", [VOCABULARY, -1, 2**31 + 5])
def test_the_next_call_raises_and_the_one_after_it_does_not(op, label):
    hidden, weight, ids = tensors()
    loss = OPS[op](hidden, weight, wrong(ids, label))
    assert bool(loss.isnan())
    with pytest.raises(ValueError, match=f"{op} got the label {label} in an earlier call on cuda:0"):
        OPS[op](hidden, weight, ids)
    assert bool(OPS[op](hidden, weight, ids).isfinite())
    tilekern.check_labels()


def test_nobody_has_to_wait():
    hidden, weight, ids = tensors()
    OPS["cross_entropy"](hidden, weight, ids)
    OPS["cross_entropy"](hidden, weight, wrong(ids))
    end = time.monotonic() + 10
    while not labels._seen[0].word.value:
        assert time.monotonic() < end
    with pytest.raises(ValueError, match="cross_entropy got the label"):
        tilekern.check_labels(wait=False)


@every_op
def test_a_replay_of_a_graph_is_seen_by_who_asks(op):
    hidden, weight, ids = tensors()
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            OPS[op](hidden, weight, ids)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = OPS[op](hidden, weight, ids)
    graph.replay()
    tilekern.check_labels()
    assert bool(loss.isfinite())
    kept = ids.clone()
    ids.copy_(wrong(ids))
    graph.replay()
    with pytest.raises(ValueError, match=f"{op} got the label {VOCABULARY}"):
        tilekern.check_labels()
    assert bool(loss.isnan())
    ids.copy_(kept)
    graph.replay()
    tilekern.check_labels()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs here")
def test_each_gpu_has_a_word_of_its_own():
    given = [tensors(f"cuda:{number}") for number in range(2)]
    for hidden, weight, ids in given:
        OPS["cross_entropy"](hidden, weight, ids)
    hidden, weight, ids = given[1]
    OPS["cross_entropy"](hidden, weight, wrong(ids))
    torch.cuda.synchronize(1)
    OPS["cross_entropy"](*given[0])
    with pytest.raises(ValueError, match="an earlier call on cuda:1"):
        OPS["cross_entropy"](hidden, weight, ids)
