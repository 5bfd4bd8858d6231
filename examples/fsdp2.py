"""Train a causal language model whose weights, gradients and optimizer's state are shared among GPUs by FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py                         on random tokens
    torchrun --standalone --nproc-per-node 8 examples/fsdp2.py --model Qwen/Qwen3-8B --tokens 8192
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py --config config.json    nothing is downloaded

Needs `pip install 'tilekern[torch]'` and an NVIDIA GPU for each process. Without GPUs, `TILEKERN_INTERPRET=1` runs the
kernels on the CPU, which is meant for models of a few thousand parameters.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of a model to go on from")
    parser.add_argument("--config", help="a config.json, for a model with random weights in place of --model")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step on each GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--output", default="trained", help="folder of the trained model, which one process writes")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank = dist.get_rank()

    tilekern.apply()  # on every rank: ranks compare their caches, so that all run the same kernels
    torch.manual_seed(0)  # random weights are the same on every rank
    how = {"dtype": torch.bfloat16, "attn_implementation": "tilekern"}
    if args.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config), **how)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, **how)
    model.config.use_cache = False  # or transformers copies keys and values in each step
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.train(), mesh=mesh)
    optimizer = tilekern.AdamW(model.parameters(), lr=args.lr)  # on the shards of this rank

    torch.manual_seed(rank)  # tokens of its own for each rank: put batches of yours here
    for step in range(args.steps):
        ids = torch.randint(model.config.vocab_size, (args.batch, args.tokens), device=device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(f"step {step}: loss {loss.item():.4f} on the first rank", flush=True)

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(args.output, state_dict=whole)
        print(tilekern.report(model))  # by module: which op serves it, or why none does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
