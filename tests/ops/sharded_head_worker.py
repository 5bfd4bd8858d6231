"""One of two ranks that share a head's vocabulary unevenly, against the whole head in float64.

python sharded_head_worker.py MEET RANK COUNT
"""

import sys

import pytest
import torch
import torch.distributed as dist

import tilekern
from tilekern.ops import sharded_linear_log_probs
from tilekern.runtime.dispatch import counters

VOCABULARY = 83
OPTIONS = ({}, {"temperature": 0.7, "softcap": 4.0, "ignore_index": 3}, {"masked": True})


def expected(hidden, weight, ids, bias, temperature=1.0, softcap=None, ignore_index=-100):
    logits = hidden @ weight.t() + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    found = torch.distributions.Categorical(logits=logits / temperature)
    counted = ids != ignore_index
    return found.log_prob(ids.where(counted, 0)) * counted, found.entropy() * counted


def near(one, other):
    torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def compare(first, last, masked=False, **options):
    """This rank's results and gradients, with ids of either rank and some that do not count."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 5, 24), torch.randn(VOCABULARY, 24) / 4, torch.randn(VOCABULARY)
    ids = torch.tensor([[0, 30, 31, 82, 50], [3, 7, -100, 32, 60]])
    ids[1, 2] = options.get("ignore_index", -100)
    if masked:
        # A rank with no probability at all, and only ids of the other one.
        bias[:31], ids = -torch.inf, ids.where(ids > 30, 40)
    wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    reference = (
        expected(wide[0], wide[1], ids, wide[2], **options)
        if not masked
        else expected(wide[0], wide[1][31:], ids - 31, wide[2][31:], **options)
    )
    own = [x.clone().requires_grad_() for x in (hidden, weight[first:last], bias[first:last])]
    results = sharded_linear_log_probs(own[0], own[1], ids, first, bias=own[2], **options)
    slopes = [torch.rand(2, 5) for _ in results]
    gradients = torch.autograd.grad(results, own, slopes)
    wanted = torch.autograd.grad(reference, wide, [slope.double() for slope in slopes])
    for result, right in zip(results, reference, strict=True):
        near(result, right)
    near(gradients[0], wanted[0])
    for gradient, right in zip(gradients[1:], wanted[1:], strict=True):
        near(gradient, right[first:last])


def main():
    meet, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
    first, last = ((0, 31), (31, VOCABULARY))[rank]
    for options in OPTIONS:
        compare(first, last, **options)
    assert counters("linear_log_probs_backward").launches == len(OPTIONS)
    # An id that no rank has.
    table = torch.ones(last - first, 24)
    log_probs, entropy = sharded_linear_log_probs(torch.ones(2, 24), table, torch.tensor([1, VOCABULARY]), first)
    assert log_probs.isnan().tolist() == [False, True]
    torch.testing.assert_close(entropy, torch.full((2,), float(VOCABULARY)).log())
    with pytest.raises(ValueError, match=f"sharded_linear_log_probs got the label {VOCABULARY} in"):
        tilekern.check_labels()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
