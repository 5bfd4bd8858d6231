"""One of several ranks that share the sequences of tiny models by context parallelism, against one process.

    python context_worker.py MEET RANK COUNT DEVICE

Exit status 0 where all agree.
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from tiny_qwen3 import worst
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import tilekern
from tilekern.errors import InputError
from tilekern.patch import attention
from tilekern.patch.context_parallel import shards_here
from tilekern.patch.told import ToldMask
from tilekern.runtime import dispatch

MEET, RANK, COUNT, KIND = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
DEVICE = torch.device(KIND if KIND == "cpu" else f"cuda:{RANK}")
# Sums over ranks are in another order than over tokens; products on a GPU are TF32.
TOLERANCE = 1e-5 if KIND == "cpu" else 5e-3
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96,
    "vocab_size": 331, "num_hidden_layers": 2, "max_position_embeddings": 256, "attn_implementation": "tilekern",
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {
    "qwen3": {}, "shared keys": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], **EXPERTS},
    "windows": {"sliding_window": 5, "layer_types": ["sliding_attention"] * 2, **EXPERTS},
}  # fmt: skip


def made(family):
    torch.manual_seed(0)
    kind = {"windows": "gpt_oss"}.get(family, family if family in transformers.CONFIG_MAPPING else "qwen3")
    config = transformers.AutoConfig.for_model(kind, **SIZES | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tilekern")
    return model.to(DEVICE).train()


def batch(rows, tokens, starts=(0,), padding=0):
    """Ids, labels, positions that begin again at ``starts``, and a mask of padding behind, all [rows, tokens]."""
    ids = torch.randint(3, 331, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
    places = torch.arange(tokens)
    for start in starts:
        places[start:] = torch.arange(tokens - start)
        labels[:, start - 1 if start else tokens - 1] = -100
    given = {"input_ids": ids, "labels": labels, "shift_labels": labels.clone()}
    given["position_ids"] = places.expand(rows, -1).contiguous()
    if padding:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][-1, -padding:] = 0
        given["labels"][-1, -padding - 1 :] = given["shift_labels"][-1, -padding - 1 :] = -100
    return {name: x.to(DEVICE) for name, x in given.items()}


def step(model, given, counted):
    """The loss and each gradient."""
    model.zero_grad()
    loss = model(**given, num_items_in_batch=counted, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def counted(given):
    return int((given["labels"] != -100).sum())


def shared_step(mesh, model, given, **more):
    """The same of sequences that the ranks share: the sums of their losses and gradients."""
    number, own = counted(given), {name: x.clone() for name, x in given.items()}
    with context_parallel(mesh, buffers=list(own.values()), buffer_seq_dims=[1] * len(own)):
        assert own["input_ids"].shape[1] == given["input_ids"].shape[1] // COUNT
        found = step(model, own | more, number)
    for x in found:
        dist.all_reduce(x)
    return found


def compare(mesh, family, given, what, change=lambda _: None):
    model = made(family)
    before = dispatch.counters("attention_forward").launches
    wanted = step(model, given, counted(given))
    change(model)
    found = shared_step(mesh, model, given)
    assert len(found) == len(wanted), what
    error = worst(found, wanted)
    assert error < TOLERANCE, f"{what}: relative error {error}"
    assert dispatch.counters("attention_forward").launches >= before + 4, f"{what}: attention ran no kernel"


def takes_odd_rows(mesh):
    """Whether this torch shares rows that it cannot cut into two pieces a rank; 2.11 asserts that it can."""
    try:
        with context_parallel(mesh, buffers=[torch.zeros(1, 7 * COUNT)], buffer_seq_dims=[1]):
            return True
    except AssertionError:
        return False


def checkpoint(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})


def keep_attention(model):
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": tilekern.keep_attention})


def drop_masks(model):
    """As ``Accelerator.prepare`` does."""
    _attach_context_parallel_hooks(model)


def train(mesh):
    plain, odd, packed = batch(1, 8 * COUNT), batch(2, 7 * COUNT), batch(1, 8 * COUNT, (0, 3, 9))
    compare(mesh, "qwen3", plain, "qwen3")
    compare(mesh, "windows", packed, "packed sequences")
    if KIND == "cuda":  # where each kind of layer compiles kernels of its own
        return
    for family in ("shared keys", "gemma2", "gpt_oss"):
        compare(mesh, family, plain, family)
    compare(mesh, "gpt_oss", packed, "packed sequences, with layers of full attention")
    if takes_odd_rows(mesh):
        compare(mesh, "gemma2", odd, "rows in one piece")
    compare(mesh, "qwen3", batch(2, 8 * COUNT, padding=3), "padding")
    compare(mesh, "qwen3", plain, "checkpoints", checkpoint)
    compare(mesh, "qwen3", plain, "checkpoints that keep attention", keep_attention)
    compare(mesh, "qwen3", plain, "dropped masks", drop_masks)


class Layer(torch.nn.Module):
    is_causal = True


def compare_bits(mesh):
    """Attention itself has the bits of one process, forward and backward: heads are only moved.

    On a GPU their number may choose other tiles.
    """
    tokens = 16 * COUNT
    whole = [torch.randn(2, 4, tokens, 16, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    *leaves, slope = (x.to(DEVICE).requires_grad_() for x in whole)
    slope = slope.detach().transpose(1, 2)
    out, _ = attention.attend(True, Layer(), *leaves, None)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, slope)]
    own = [x.detach().clone() for x in leaves] + [slope.clone()]
    with context_parallel(mesh, buffers=own, buffer_seq_dims=[2, 2, 2, 1]):
        shards = shards_here()
        mask = ToldMask(torch.empty(0, dtype=torch.int32, device=DEVICE), tokens, None, tokens, tokens, 2)
        leaves = [x.clone().requires_grad_() for x in own[:3]]
        out, _ = attention.attend(True, Layer(), *leaves, mask)
        found = [out.detach(), *torch.autograd.grad(out, leaves, own[3].clone())]
    for mine, other in zip(found, wanted, strict=True):
        is_out = mine.shape[2] == 4
        own = mine if is_out else mine.transpose(1, 2)
        whole, other_way = shards.joined(shards.gathered(own)), other if is_out else other.transpose(1, 2)
        assert torch.equal(whole, other_way)


def refused(mesh, words, given, family="qwen3", change=lambda _: None, **more):
    model = made(family)
    change(model)
    with pytest.raises(InputError, match=words):
        shared_step(mesh, model, given, **more)


def refuse(mesh):
    plain = batch(1, 8 * COUNT)
    without = {name: {k: x for k, x in plain.items() if k != name} for name in plain}
    refused(mesh, "give position_ids", without["position_ids"])
    refused(mesh, "shift_labels", without["shift_labels"])
    own = torch.arange(8, device=DEVICE)[None]
    refused(mesh, "position_ids must be sharded", without["position_ids"], position_ids=own)
    padded = batch(1, 8 * COUNT, padding=3)
    padded["attention_mask"] = padded["attention_mask"].flip(1)
    refused(mesh, "padding must be behind", padded)
    refused(mesh, "no mask of your own", plain, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool, device=DEVICE))
    refused(mesh, "packed sequences need a batch of one", batch(2, 8 * COUNT, (0, 3)))
    refused(mesh, "packed sequences need the mask", batch(1, 8 * COUNT, (0, 3)), change=drop_masks)
    refused(mesh, "does not serve dropout", plain, change=dropping)
    FAMILIES["odd heads"] = {"num_attention_heads": COUNT + 1, "num_key_value_heads": COUNT + 1}
    refused(mesh, "cannot be shared by", plain, "odd heads")


def accelerated():
    """A step of accelerate's own, with FSDP2, whose gradients are means over the ranks."""
    given = batch(1, 8 * COUNT)
    model = made("qwen3")
    number, wanted = counted(given), step(model, given, counted(given))
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(COUNT), "LOCAL_RANK": str(RANK), "FSDP_VERSION": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if KIND == "cpu":
        # accelerate wants GPUs for this, of which nothing here needs one.
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Qwen3DecoderLayer"]
    )
    accelerator = Accelerator(
        cpu=KIND == "cpu", parallelism_config=ParallelismConfig(cp_size=COUNT), fsdp_plugin=plugin
    )
    model, optimizer = accelerator.prepare(model, tilekern.AdamW(model.parameters(), lr=1e-4))
    optimizer.zero_grad()
    with accelerator.maybe_context_parallel(list(given.values()), [1] * len(given), set(given.values())):
        loss = model(**given, num_items_in_batch=number, use_cache=False).loss
        accelerator.backward(loss)
    loss = loss.detach()
    dist.all_reduce(loss)
    found = [loss, *(x.grad.full_tensor() * COUNT for x in model.parameters())]
    assert worst(found, wanted) < TOLERANCE, "accelerate"
    optimizer.step()


def dropping(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5


def main():
    if KIND == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo" if KIND == "cpu" else "nccl", init_method=MEET, rank=RANK, world_size=COUNT)
    mesh = init_device_mesh(KIND, (COUNT,))
    tilekern.apply()
    if KIND == "cpu":
        compare_bits(mesh)
    train(mesh)
    accelerated()
    refuse(mesh)  # the last, since torch 2.11 does not leave a context that an error ends
    tilekern.reset()
    dist.barrier()
    dist.destroy_process_group()


main()
