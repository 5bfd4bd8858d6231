"""One of two ranks that train tiny models as trainers wrap them, patched and as they are.

    python trainer_worker.py MEET RANK COUNT

Exit status 0 where losses and weights of each way agree, and each layer ran as one op.
"""

import functools
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny_families import SIZES
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern

MEET, RANK, COUNT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
STEPS, LAYERS = 2, SIZES["num_hidden_layers"]


def made(family, attention, how):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | {"attn_implementation": attention, "use_cache": False})
    model = AutoModelForCausalLM.from_config(config).train()
    if "checkpoints" in how:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in how})
    if "adapters" in how:
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
    return model


def flat(model, **options):
    """One flat parameter for each layer, of which each rank has a part."""
    kind = next(type(module) for module in model.modules() if type(module).__name__.endswith("DecoderLayer"))
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    return wrap(model, auto_wrap_policy=ModuleWrapPolicy({kind}), **options)


def trained(model):
    """Losses, and norms of the weights that came of them."""
    optimizer = torch.optim.SGD((x for x in model.parameters() if x.requires_grad), lr=0.1)
    generator, found = torch.Generator().manual_seed(RANK), []
    for _ in range(STEPS):
        ids = torch.randint(3, 55, (2, 9), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return torch.stack([*found, *(x.detach().norm() for x in model.parameters())])


def compare(family, options, *how):
    where = f"{family}, {options}, {how}"
    expected = trained(flat(made(family, "eager", how), **options))
    tilekern.apply()
    model = made(family, "tilekern", how)
    found = trained(flat(model, **options))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")
    report = tilekern.report(model)
    assert sum(report.whole.values()) == STEPS * LAYERS, f"{where}: {report}"
    tilekern.reset()


def main():
    dist.init_process_group("gloo", init_method=MEET, rank=RANK, world_size=COUNT)
    # Views of flat parameters are attributes, and are parameters or not.
    originals = {"use_orig_params": True}
    compare("qwen3", {})
    compare("qwen3", originals, "checkpoints")
    compare("qwen2", {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, "checkpoints", "reentrant")  # has biases
    compare("qwen2", originals)
    compare("llama", originals, "adapters")
    dist.barrier()
    dist.destroy_process_group()


main()
