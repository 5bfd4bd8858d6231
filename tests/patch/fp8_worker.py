"""One of two ranks that train a small model of 8-bit floats under DDP, FSDP2 and tensor parallelism.

    python fp8_worker.py MEET RANK COUNT DEVICE FOLDER

On ``cuda`` only FSDP2 that gathers 8 bits is tried; all layers have one size, so that few kernels are compiled.

Exit status: 0 where all agree, 77 where this torch cannot shard, which the last line of output explains.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import tilekern
import tilekern.fp8
from tilekern.errors import InputError
from tilekern.ops.rounded_weight import RoundedWeight
from tilekern.patch.fp8 import converted_layers
from tilekern.runtime import dispatch

DEVICE = sys.argv[4]
IDS = ((torch.arange(2)[:, None] * 17 + 5 * torch.arange(80)) % 256).to(
    DEVICE if DEVICE == "cpu" else f"cuda:{sys.argv[2]}"
)
SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256, "tie_word_embeddings": False,
    "attn_implementation": "eager",
}  # fmt: skip
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYERS = 14
# Older releases of torch have another name.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def made(dtype=torch.float32, *, converted=True, config=None):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config or transformers.Qwen3Config(**SIZES)).to(dtype)
    model = model.to(IDS.device).train()
    if converted:
        tilekern.fp8.convert(model, all_layers)
    return model


def all_layers(*_):
    """Experts too."""
    return True


def sharded(model, *, gathered=False, singly=False, **settings):
    """Shard each layer and the root, or each linear layer too, and gather 8 bits."""
    for layer in model.model.layers:
        for module in layer.modules() if singly else ():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module, **settings)
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if gathered:
        assert len(tilekern.fp8.gather(model)) == LAYERS
    return model


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def step(model, ids, **options):
    """The loss and each gradient."""
    for x in model.parameters():
        x.grad = None
    loss = model(input_ids=ids, labels=ids, use_cache=False, **options).loss
    loss.backward()
    return [loss.detach(), *(whole(x.grad).clone() for x in model.parameters() if x.grad is not None)]


def assert_same(found, wanted, what):
    assert len(found) == len(wanted), what
    differing = [n for n, (one, other) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(one, other)]
    assert not differing, f"{what}: results {differing} of {len(found)} have other bits"


def counted():
    return dispatch.reasons().get("fp8_matmul", {})


def mean_of_rows(rank, ids, config=None):
    """What a rank gets that trains on one row: its loss, and the mean of the gradients of all."""
    rows = [step(made(config=config), row) for row in ids.split(1)]
    return [rows[rank][0], *(sum(parts) / len(rows) for parts in zip(*(row[1:] for row in rows), strict=True))]


def train_by_ddp(row, wanted):
    parallel = torch.nn.parallel.DistributedDataParallel
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        assert_same(step(parallel(made(), **options), row), wanted, f"DDP {options}")
    late = parallel(made(converted=False))
    assert len(tilekern.fp8.convert(late)) == LAYERS
    assert_same(step(late, row), wanted, "DDP, converted later")
    model = parallel(made(), gradient_as_bucket_view=True)
    for n in range(2):
        with model.no_sync() if n == 0 else contextlib.nullcontext():
            model(input_ids=row, labels=row, use_cache=False).loss.backward()
    assert_same([x.grad / 2 for x in model.parameters()], wanted[1:], "DDP, accumulated")


def train_by_fsdp2(row, wanted):
    for options in ({}, {"reshard_after_forward": False}, {"singly": True}):
        model = sharded(made(), **options)
        for _ in range(2):
            assert_same(step(model, row), wanted, f"FSDP2 {options}")
    late = sharded(made(converted=False))
    assert len(tilekern.fp8.convert(late)) == LAYERS
    assert_same(step(late, row), wanted, "FSDP2, converted later")
    for reentrant in (False, True):
        model = sharded(made())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same(step(model, row), wanted, f"FSDP2, checkpoints, reentrant {reentrant}")
    flat = FullyShardedDataParallel(made(), device_id=IDS.device)
    assert torch.equal(flat(input_ids=row, labels=row).loss, wanted[0])
    mixed = step(sharded(made(), mp_policy=MIXED), row)
    plain = step(sharded(made(converted=False), mp_policy=MIXED), row)
    assert abs(mixed[0] - plain[0]) / plain[0] < 1e-2
    for one, other in zip(mixed[1:], plain[1:], strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.97
    try:
        tilekern.fp8.convert(sharded(made(converted=False), singly=True))
    except InputError as error:
        assert "has no linear layer for 8-bit floats" in str(error)  # noqa: PT017
    else:
        raise AssertionError("layers of FSDP2's classes were converted")


def train_experts_by_fsdp2(row, rank):
    """Experts are gathered in their dtype, whether they were converted before or after."""
    tilekern.apply(experts=True)
    sizes = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**SIZES, **sizes)
    wanted = mean_of_rows(rank, IDS, config)
    assert_same(step(sharded(made(config=config)), row), wanted, "FSDP2, experts")
    late = sharded(made(config=config, converted=False))
    assert sum(name.endswith("experts") for name in tilekern.fp8.convert(late, all_layers)) == 2
    assert_same(step(late, row), wanted, "FSDP2, experts, converted later")
    assert sum("experts, rowwise" in row.kind.lower() for row in tilekern.report(late).rows if not row.reason) == 2
    tilekern.reset()


def compare_gathering(row):
    """Steps with weights gathered in 8 bits have the bits of those without, and so does all that is kept of them."""
    ways = {
        "float32": {},
        "mixed": {"mp_policy": MIXED},
        "whole": {"mp_policy": MIXED, "reshard_after_forward": False},
        "singly": {"mp_policy": MIXED, "singly": True},
        "patched": {"mp_policy": MIXED, "patched": True},
        "layers as one op": {"mp_policy": MIXED, "patched": True, "attention": "tilekern"},
        "hybrid": {"mp_policy": MIXED, "mesh": of_copies(1, 2)},
    }
    for name, settings in ways.items() if DEVICE == "cpu" else [("mixed", ways["mixed"])]:
        plain, found = (trained(row, gathered, settings) for gathered in (False, True))
        assert_same(found[0], plain[0], f"gathered, {name}")
        # A byte in place of 2 or 4, and 4 bytes of a scale for each row.
        linear = sum(x.numel() for key, x in found[1].items() if "proj" in key)
        rows = sum(x.shape[0] for key, x in found[1].items() if "proj" in key)
        saved = (plain[2] - found[2]) / found[3]
        assert saved == linear * ((2 if "mp_policy" in settings else 4) - 1) - 4 * rows, f"{name}: {saved} bytes less"
        assert plain[3] == found[3]


def trained(row, gathered, settings):
    """Results of two steps and an evaluation, the model's state, the bytes gathered, and how often all weights were."""
    if settings.get("patched"):
        # Layers that share their input are one op.
        tilekern.apply()
    settings = {name: setting for name, setting in settings.items() if name != "patched"}
    is_whole, attention = "attention" in settings, settings.pop("attention", "eager")
    os.environ["TILEKERN_INTERPRET"] = str(int(is_whole))
    dispatch.forget()
    config = transformers.Qwen3Config(**SIZES | {"attn_implementation": attention})
    model, total = sharded(made(config=config), gathered=gathered, **settings), [0, 0]
    original = getattr(dist, ALL_GATHER)

    def counting(output_tensor, input_tensor, *arguments, **options):
        total[0] += output_tensor.nbytes
        return original(output_tensor, input_tensor, *arguments, **options)

    setattr(dist, ALL_GATHER, counting)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=row, labels=row, use_cache=False).loss
        loss.backward()
        kinds = {type(x.grad._local_tensor) for x in model.parameters()} | {
            type(x._local_tensor) for x in model.parameters()
        }
        assert kinds == {torch.Tensor}, kinds
        found += [loss.detach(), *(whole(x.grad) for x in model.parameters())]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total[1] += 1 if "reshard_after_forward" in settings else 2
    assert len(tilekern.report(model).whole) == (2 if is_whole else 0)
    setattr(dist, ALL_GATHER, original)
    with torch.no_grad():
        found.append(model(input_ids=row).logits)
    # While its weights are gathered too, a model's state is of the shards.
    state = model.state_dict()
    assert all(not vars(x._local_tensor) for x in state.values())
    state = {name: whole(x) for name, x in state.items()}
    tilekern.reset()
    moments = [whole(x) for slot in optimizer.state.values() for x in slot.values()]
    return [*found, *state.values(), *moments], state, *total


def load_and_move(row, folder):
    import torch.distributed.checkpoint as checkpoints

    wanted = step(sharded(made(), mp_policy=MIXED), row)
    model = sharded(made(), mp_policy=MIXED, gathered=True)
    assert_same(step(model, row), wanted, "gathered")
    checkpoints.save({"model": model.state_dict()}, checkpoint_id=folder / "saved")
    other = sharded(made(), mp_policy=MIXED, gathered=True)
    with torch.no_grad():
        for x in other.parameters():
            x.zero_()
    state = {"model": other.state_dict()}
    checkpoints.load(state, checkpoint_id=folder / "saved")
    other.load_state_dict(state["model"])
    assert_same(step(other, row), wanted, "loaded")
    # These give weights new shards.
    model.to(torch.float64).to(torch.float32)
    assert_same(step(model, row), wanted, "moved")
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    assert_same(step(model, row), wanted, "assigned")
    layer = model.model.layers[0]
    layer.unshard()
    weight = layer.mlp.up_proj.weight
    assert (type(weight), weight.dtype) == (RoundedWeight, torch.bfloat16)
    master = whole(other.state_dict()["model.layers.0.mlp.up_proj.weight"])
    assert ((weight + 0).float() - master).norm() / master.norm() < 0.04
    layer.reshard()
    for n in range(2):
        model.set_requires_gradient_sync(n == 1)
        model(input_ids=row, labels=row, use_cache=False).loss.backward()


def refuse():
    late = sharded(made())
    step(late, IDS[:1])
    cases = {
        "before the first step": lambda: tilekern.fp8.gather(late),
        "no layer of 8-bit floats": lambda: tilekern.fp8.gather(made()),
        "over 2 ranks or more": lambda: tilekern.fp8.gather(sharded(made(), mesh=of_copies(2, 1))),
        "gathered in 8 bits": lambda: tilekern.fp8.restore(sharded(made(), gathered=True)),
    }
    for text, run in cases.items():
        try:
            run()
        except InputError as error:
            assert text in str(error), error  # noqa: PT017
        else:
            raise AssertionError(text)


def of_copies(copies, shards):
    return dist.init_device_mesh(DEVICE, (copies, shards), mesh_dim_names=("copies", "shards"))


def share_tensors():
    """Layers whose tensors are DTensors run in their dtype, and each call is counted once."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = made(), dist.init_device_mesh(DEVICE, (2,))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, plan)
    before = counted().get("a subclass of Tensor", 0)
    loss = step(model, IDS)[0]
    assert counted()["a subclass of Tensor"] - before == 3 * len(model.model.layers)
    assert "a subclass of Tensor" in str(tilekern.report(model))
    assert abs(loss - step(made(converted=False), IDS)[0]) < 1e-2
    assert len(converted_layers(model)) == LAYERS


def main():
    """Go through all ways of sharing."""
    meet, rank, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[5])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    try:
        backend = "gloo"
        if DEVICE == "cuda":
            torch.cuda.set_device(rank)
            os.environ["CUBLAS_WORKSPACE_CONFIG"], backend = ":4096:8", "cpu:gloo,cuda:nccl"
            torch.use_deterministic_algorithms(True, warn_only=True)
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=count)
        linear, mesh = torch.nn.Linear(4, 4).to(IDS.device), dist.init_device_mesh(DEVICE, (count,))
        fully_shard(linear, mesh=mesh)(torch.ones(1, 4, device=IDS.device)).sum().backward()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"this torch cannot run FSDP2 here: {str(error).splitlines()[0]}")  # noqa: T201
        sys.exit(77)
    row = IDS[rank : rank + 1]
    if DEVICE == "cpu":
        wanted = mean_of_rows(rank, IDS)
        train_by_ddp(row, wanted)
        train_by_fsdp2(row, wanted)
        train_experts_by_fsdp2(row, rank)
        refuse()
        share_tensors()
    compare_gathering(row)
    load_and_move(row, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
