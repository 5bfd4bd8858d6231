"""One of two processes that train small networks by FSDP2 and tensor parallelism on the CPU, against whole ones.

    python adamw_fsdp_worker.py MEET RANK COUNT

Exit status: 0 where all agree, 77 where this torch cannot shard on the CPU, which the last line of output explains.
"""

import sys

import torch
import torch.distributed as dist

import tilekern
from tilekern.runtime.dispatch import counters

RANKS, STEPS = 2, 4


def network():
    """Sizes that two processes cannot share evenly: one of them has no part of the last layer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 7), torch.nn.GELU(), torch.nn.Linear(7, 1))


def train(model, optimizer, rows):
    for number in range(STEPS):
        x = torch.randn(RANKS, 3, 16, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x[rows]).square().mean().backward()
        optimizer.step()


def compare(mesh, rank):
    """Parameters and moments of the sharded network against those of one that torch trains."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    whole, sharded = network(), network()
    expected = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    train(whole, expected, slice(None))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    found = tilekern.AdamW(sharded.parameters(), lr=1e-2)
    train(sharded, found, rank)
    parts = [p.to_local().numel() for p in sharded.parameters()]
    assert (0 in parts) == (rank == 1), parts
    assert counters("adamw").launches == STEPS * sum(part > 0 for part in parts)
    assert counters("adamw").fallbacks == 0
    for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert isinstance(other, DTensor)
        torch.testing.assert_close(other.full_tensor(), one, rtol=1e-5, atol=1e-6)
        state = found.state[other]
        assert state["step"] == STEPS
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name].full_tensor(), expected.state[one][name], rtol=1e-4, atol=1e-7)
        assert other._version >= STEPS
        assert other.to_local()._version >= STEPS


def embedded(mesh, style):
    """An embedding by tensor parallelism, whose gradient lies otherwise than its weight, against one in one piece."""
    from torch.distributed.tensor.parallel import parallelize_module

    torch.manual_seed(1)
    whole, shared = torch.nn.Embedding(13, 8), torch.nn.Embedding(13, 8)
    shared.load_state_dict(whole.state_dict())
    parallelize_module(shared, mesh, style)
    ids, before = torch.tensor([[0, 3, 5, 12, 7]]), counters("adamw").fallbacks
    found, expected = tilekern.AdamW(shared.parameters(), lr=1e-2), torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for _ in range(STEPS):
        for model, optimizer in ((whole, expected), (shared, found)):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    assert counters("adamw").fallbacks == before
    torch.testing.assert_close(shared.weight.full_tensor(), whole.weight, rtol=1e-5, atol=1e-6)


def main():
    """Train, or say why that is not possible."""
    meet, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        mesh = dist.init_device_mesh("cpu", (count,))
        fully_shard(torch.nn.Linear(4, 4), mesh=mesh)(torch.ones(1, 4)).sum().backward()
    except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"this torch cannot run FSDP2 on the CPU: {str(error).splitlines()[0]}")  # noqa: T201
        sys.exit(77)
    compare(mesh, rank)
    embedded(mesh, RowwiseParallel(input_layouts=Replicate()))
    embedded(mesh, ColwiseParallel(output_layouts=Replicate()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
