"""One of two ranks: norms and swiglu on DTensors, by Liger's functions too, and a head that both ranks share.

python rank_worker.py MEET RANK COUNT
"""

import sys

import formulas
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from contract import CASES, Drawn, leaves
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tilekern
from tilekern.integrations.liger.binding import _serving
from tilekern.integrations.liger.table import TABLE
from tilekern.ops import projections, sharded_linear_log_probs
from tilekern.runtime.dispatch import counters

EPS = 1e-3
# The cases of the contract that take DTensors, and how many sets of their options.
TAKING_DTENSORS = {
    "rms_norm": 1, "rms_norm with options": 3, "fused_add_rms_norm": 1, "fused_add_rms_norm with options": 2,
    "fused_rms_norm_add": 2, "fused_rms_norm_add_rms_norm": 2, "layer_norm": 1, "layer_norm with options": 2,
    "group_norm": 1, "poly_norm": 1, "dyt with options": 2, "swiglu": 1, "swiglu with multipliers": 1,
}  # fmt: skip


def hold_case(mesh, case, variant, sharded):
    """Results and gradients are those of whole tensors; tensors of the first one's shape are sharded, or not."""
    given = case.given(Drawn(variant=variant))
    shape = next(iter(given.values())).shape
    placement = {"first": Shard(0), "last": Shard(len(shape) - 1), "none": Replicate()}[sharded]
    whole = leaves(given)

    def call(*tensors):
        return case.run(given | dict(zip(whole, tensors, strict=True)))

    placements = [placement if x.shape == shape else Replicate() for x in whole.values()]
    results = compare(mesh, call, call, placements, *whole.values())
    if case.name.startswith("swiglu"):
        assert [y.placements for y in results] == [(placement,)]


def compare(mesh, call, reference, placements, *whole):
    """Results and gradients of a call on DTensors of some placements, against a call on whole tensors."""
    given = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(whole, placements, strict=True)]
    whole = [x.detach().requires_grad_() for x in whole]
    results, references = call(*given), reference(*whole)
    for y, wanted in zip(results, references, strict=True):
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-4, atol=1e-5)
    sum(y.square().sum() for y in results).full_tensor().backward()
    sum(y.square().sum() for y in references).backward()
    for x, wanted in zip(given, whole, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-4)
    return results


def norm(x, weight):
    """In torch's own operations."""
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def normal(*shapes):
    """Tensors that all ranks draw alike."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def left(*_, **__):
    """The function of Liger's."""
    raise AssertionError("the call is one of tilekern's")


def liger(mesh):
    """Calls of Liger's functions: its norm gives whole rows, whose slope may be a DTensor, its others DTensors."""
    apply = {name: _serving(row, left) for name, row in TABLE.items()}
    shape, places = (3, 5, 16), (Shard(2), Replicate())
    compare(mesh, lambda x, w: (apply["LigerLayerNormFunction"](x, w, w, EPS),),
            lambda x, w: (F.layer_norm(x, (16,), w, w, EPS),), places, *normal(shape, (16,)))  # fmt: skip
    compare(mesh, lambda x, w: apply["LigerFusedAddRMSNormFunction"](x, x, w, EPS)[::-1],
            lambda x, w: (2 * x, norm(2 * x, w)), places, *normal(shape, (16,)))  # fmt: skip
    compare(mesh, lambda a, b: (apply["LigerSiLUMulFunction"](a, b),), lambda a, b: (F.silu(a) * b,),
            (Shard(2), Shard(2)), *normal(shape, shape))  # fmt: skip
    compare(mesh, lambda x: (apply["LigerFusedGateUpSiLUMulFunction"](x),),
            lambda x: (F.silu(x[..., :8]) * x[..., 8:],), (Shard(2),), *normal(shape))  # fmt: skip
    x, w, slope = (x.requires_grad_() for x in normal(shape, (16,), shape))
    expected, weight = norm(x, w), w.detach().clone().requires_grad_()
    wanted = torch.autograd.grad(expected, (x, w), slope.detach())
    for shared_slope in (False, True):
        shared = distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_()
        y = apply["LigerRMSNormFunction"](shared, weight, EPS)
        assert type(y) is torch.Tensor
        torch.testing.assert_close(y, expected)
        dy = distribute_tensor(slope.detach(), mesh, [Shard(2)]) if shared_slope else slope.detach()
        dx, dweight = torch.autograd.grad(y, (shared, weight), dy)
        torch.testing.assert_close(dx.full_tensor(), wanted[0])
        torch.testing.assert_close(dweight, wanted[1])


def projected(*given):
    """The results of layers that share their input, under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return projections(*given)


VOCABULARY = 83
HEAD_OPTIONS = ({}, {"temperature": 0.7, "softcap": 4.0, "ignore_index": 3}, {"masked": True})


def compare_heads(first, last, masked=False, **options):
    """This rank's results and gradients, with ids of either rank and some that do not count."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 5, 24), torch.randn(VOCABULARY, 24) / 4, torch.randn(VOCABULARY)
    ids = torch.tensor([[0, 30, 31, 82, 50], [3, 7, -100, 32, 60]])
    ids[1, 2] = options.get("ignore_index", -100)
    if masked:
        # A rank with no probability at all, and only ids of the other one.
        bias[:31], ids = -torch.inf, ids.where(ids > 30, 40)
    wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    left_out = 31 if masked else 0
    table, shift = wide[1][left_out:], wide[2][left_out:]
    reference = formulas.log_probs(wide[0], table, ids - left_out, bias=shift, **options)
    own = [x.clone().requires_grad_() for x in (hidden, weight[first:last], bias[first:last])]
    results = sharded_linear_log_probs(own[0], own[1], ids, first, bias=own[2], **options)
    slopes = [torch.rand(2, 5) for _ in results]
    gradients = torch.autograd.grad(results, own, slopes)
    wanted = torch.autograd.grad(reference, wide, [slope.double() for slope in slopes])
    for result, right in zip(results, reference, strict=True):
        torch.testing.assert_close(result.double(), right, rtol=1e-4, atol=1e-5)
    parts = wanted[0], wanted[1][first:last], wanted[2][first:last]
    for gradient, right in zip(gradients, parts, strict=True):
        torch.testing.assert_close(gradient.double(), right, rtol=1e-4, atol=1e-5)


def heads(rank):
    """The head's log-probabilities with its vocabulary spread unevenly over both ranks, against the whole head."""
    first, last = ((0, 31), (31, VOCABULARY))[rank]
    for options in HEAD_OPTIONS:
        compare_heads(first, last, **options)
    assert counters("linear_log_probs_backward").launches == len(HEAD_OPTIONS)
    # An id that no rank has.
    table = torch.ones(last - first, 24)
    log_probs, entropy = sharded_linear_log_probs(torch.ones(2, 24), table, torch.tensor([1, VOCABULARY]), first)
    assert log_probs.isnan().tolist() == [False, True]
    torch.testing.assert_close(entropy, torch.full((2,), float(VOCABULARY)).log())
    with pytest.raises(ValueError, match=f"sharded_linear_log_probs got the label {VOCABULARY} in"):
        tilekern.check_labels()


def main():
    """All ops in all placements."""
    meet, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
    mesh = dist.init_device_mesh("cpu", (count,))
    for name, variants in TAKING_DTENSORS.items():
        for variant in range(variants):
            for sharded in ("first", "last", "none"):
                hold_case(mesh, CASES[name], variant, sharded)
    liger(mesh)
    compare(mesh, projected, projected, (Replicate(), *2 * [Shard(0)]), *normal((6, 8), (8, 8), (4, 8)))
    heads(rank)
    for kernel in (
        "rms_norm_backward", "rms_norm_offset_backward", "fused_add_rms_norm_backward", "fused_rms_norm_add_forward",
        "fused_rms_norm_add_rms_norm_backward", "swiglu_backward", "layer_norm_backward", "group_norm_backward",
        "poly_norm_backward", "dyt_backward",
    ):  # fmt: skip
        assert counters(kernel).launches, kernel
        assert not counters(kernel).fallbacks, kernel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
