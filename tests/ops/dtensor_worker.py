"""One of two processes that run norms and swiglu on DTensors, by Liger's functions too, against torch's operations.

python dtensor_worker.py MEET RANK COUNT
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tilekern.integrations.liger.binding import _serving
from tilekern.integrations.liger.table import TABLE
from tilekern.ops import dyt, fused_add_rms_norm, group_norm, layer_norm, poly_norm, rms_norm, swiglu
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm
from tilekern.runtime.dispatch import counters

EPS = 1e-3


def norm(x, weight, offset=0.0):
    """In torch's own operations."""
    return (weight + offset) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def gemma(x, weight):
    """The norm of Gemma."""
    return (rms_norm(x, weight, EPS, 1.0, "gemma"),)


def added(residual, x, weight):
    """The norm of Gemma and the sum of it and a residual."""
    return (fused_rms_norm_add(residual, x, weight, EPS, 1.0, "gemma"),)


def around(residual, x, weight, following):
    """The same with the norm of the sum."""
    return fused_rms_norm_add_rms_norm(residual, x, weight, following, EPS, 1.0, "gemma")


def powers(x, weight, bias):
    """PolyNorm in torch's own operations."""
    norms = (x**power * torch.rsqrt((x**power).square().mean(-1, keepdim=True) + EPS) for power in (3, 2, 1))
    return (sum(w * u for w, u in zip(weight, norms, strict=True)) + bias,)


def compare(mesh, call, reference, placements, *shapes):
    """Results and gradients of a call on DTensors of some placements, the last ones weights that all ranks have."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    given = [distribute_tensor(x.detach(), mesh, [p]).requires_grad_() for x, p in zip(whole, placements, strict=True)]
    results, references = call(*given), reference(*whole)
    for y, wanted in zip(results, references, strict=True):
        assert isinstance(y, DTensor)
        torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-4, atol=1e-5)
    sum(y.square().sum() for y in results).full_tensor().backward()
    sum(y.square().sum() for y in references).backward()
    for x, wanted in zip(given, whole, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), wanted.grad, rtol=1e-4, atol=1e-4)
    return results


def left(*_, **__):
    """The function of Liger's."""
    raise AssertionError("the call is one of tilekern's")


def liger(mesh):
    """Calls of Liger's functions: its norm gives whole rows, whose slope may be a DTensor, its others DTensors."""
    apply = {name: _serving(row, left) for name, row in TABLE.items()}
    shape, places = (3, 5, 16), (Shard(2), Replicate())
    compare(mesh, lambda x, w: (apply["LigerLayerNormFunction"](x, w, w, EPS),),
            lambda x, w: (F.layer_norm(x, (16,), w, w, EPS),), places, shape, (16,))  # fmt: skip
    compare(mesh, lambda x, w: apply["LigerFusedAddRMSNormFunction"](x, x, w, EPS)[::-1],
            lambda x, w: (2 * x, norm(2 * x, w)), places, shape, (16,))  # fmt: skip
    compare(mesh, lambda a, b: (apply["LigerSiLUMulFunction"](a, b),), lambda a, b: (F.silu(a) * b,),
            (Shard(2), Shard(2)), shape, shape)  # fmt: skip
    compare(mesh, lambda x: (apply["LigerFusedGateUpSiLUMulFunction"](x),),
            lambda x: (F.silu(x[..., :8]) * x[..., 8:],), (Shard(2),), shape)  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    x, w, slope = (torch.randn(size, generator=generator).requires_grad_() for size in (shape, (16,), shape))
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


def main():
    """All ops in all placements."""
    meet, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
    mesh = dist.init_device_mesh("cpu", (count,))
    shape, sums = (3, 5, 16), (lambda r, x, w: fused_add_rms_norm(r, x, w, EPS))
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        places = (placement, Replicate())
        compare(mesh, lambda x, w: (rms_norm(x, w, EPS),), lambda x, w: (norm(x, w),), places, shape, (16,))
        compare(mesh, gemma, lambda x, w: (norm(x, w, 1.0),), places, shape, (16,))
        compare(mesh, sums, lambda r, x, w: (r + x, norm(r + x, w)), (placement, *places), shape, shape, (16,))
        compare(mesh, added, lambda r, x, w: (r + norm(x, w, 1.0),), (placement, *places), shape, shape, (16,))
        compare(
            mesh, around, lambda r, x, w, v: (r + norm(x, w, 1.0), norm(r + norm(x, w, 1.0), v, 1.0)),
            (placement, *places, Replicate()), shape, shape, (16,), (16,),
        )  # fmt: skip
        weighted = (placement, Replicate(), Replicate())
        compare(
            mesh, lambda x, w, b: (layer_norm(x, w, b, EPS),),
            lambda x, w, b: (F.layer_norm(x, (16,), w, b, EPS),), weighted, shape, (16,), (16,),
        )  # fmt: skip
        compare(
            mesh, lambda x, w: (layer_norm(x, w, None, EPS),), lambda x, w: (F.layer_norm(x, (16,), w, None, EPS),),
            places, shape, (16,),
        )  # fmt: skip
        compare(
            mesh, lambda x, w, b: (group_norm(x, w, b, 6, 2, EPS),),
            lambda x, w, b: (F.group_norm(x, 2, w, b, EPS),), weighted, (3, 6, 5), (6,), (6,),
        )  # fmt: skip
        compare(mesh, lambda x, w, b: (poly_norm(x, w, b, EPS),), powers, weighted, shape, (3,), ())
        compare(
            mesh, lambda x, a, g, b: (dyt(x, a, g, b),), lambda x, a, g, b: (g * torch.tanh(a * x) + b,),
            (*weighted, Replicate()), shape, (1,), (16,), (16,),
        )  # fmt: skip
        for factors in ((1.0, 1.0), (0.5, 2.0)):
            (y,) = compare(
                mesh,
                lambda gate, up, factors=factors: (swiglu(gate, up, *factors),),
                lambda gate, up, f=factors: (F.silu(gate * f[0]) * up * f[1],),
                (placement, placement), shape, shape,
            )  # fmt: skip
            assert y.placements == (placement,)
    liger(mesh)
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
