"""One of two processes that train the tiny model under FSDP2 on the CPU, against the same model in one piece.

    python fsdp_worker.py STORE RANK

Exit status: 0 where all agree, 77 where this torch cannot shard on the CPU, which the last line of output explains.
"""

import sys

import torch
import torch.distributed as dist
from tiny_qwen3 import IDS, make, worst

import tilekern
from tilekern.runtime.dispatch import counters

RANKS = 2
NAME = "fused_linear_cross_entropy"


def shards(kind, model, mesh):
    """Shard every layer and the root, and the head as ``kind`` says."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {"mesh": mesh}
    if kind == "mixed":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    if kind in ("head", "mixed"):
        fully_shard(model.lm_head, **settings)
    elif kind == "group":
        fully_shard([model.model.norm, model.lm_head], **settings)
    fully_shard(model, **settings)


def step(model, ids, whole=lambda x: x):
    """The loss and each gradient, twice in a row, so that weights are gathered again."""
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=6).loss
        (loss * 0.37).backward()
    return [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]


def compare(kind, mesh, rank):
    """Losses and gradients of a sharded model, each process with its own row, against those of one model."""
    tied = kind == "tied"
    single = make(layers=1, tie_word_embeddings=tied).train()
    rows = [step(single, IDS[n : n + 1]) for n in range(RANKS)]
    # FSDP averages over the processes.
    expected = [rows[rank][0], *(sum(parts) / RANKS for parts in zip(*(row[1:] for row in rows), strict=True))]
    tilekern.apply()
    model = make(layers=1, tie_word_embeddings=tied).train()
    shards(kind, model, mesh)
    before = counters(NAME).launches
    found = step(model, IDS[rank : rank + 1], lambda x: x.full_tensor())
    assert counters(NAME).launches == before + 2, f"{kind}: the fused loss did not run"
    error, allowed = worst(found, expected), 5e-2 if kind == "mixed" else 1e-5
    assert error < allowed, f"{kind}: relative error {error}"
    model.eval()
    assert model(input_ids=IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).logits.shape == (1, 7, 331)
    tilekern.reset()


def main():
    """Run every way of sharding."""
    store, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (RANKS,))
        fully_shard(torch.nn.Linear(4, 4), mesh=mesh)(torch.ones(1, 4)).sum().backward()
    except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"this torch cannot run FSDP2 on the CPU: {str(error).splitlines()[0]}")  # noqa: T201
        sys.exit(77)
    for kind in ("root", "head", "group", "tied", "mixed"):
        compare(kind, mesh, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
