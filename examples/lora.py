"""Train LoRA adapters of a causal language model with PEFT in a loop of one's own, and store the adapters.

    python examples/lora.py                                      Qwen3-0.6B from the hub, on random tokens
    python examples/lora.py --model Qwen/Qwen3-8B --graphs       steps replayed from CUDA graphs
    python examples/lora.py --config config.json                 random weights; nothing is downloaded

Needs `pip install 'tilekern[torch]' peft` and an NVIDIA GPU. Without a GPU, `TILEKERN_INTERPRET=1` runs the kernels on
the CPU, which is meant for models of a few thousand parameters.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of a model to adapt")
    parser.add_argument("--config", help="a config.json, for a model with random weights in place of --model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--graphs", action="store_true", help="replay steps from CUDA graphs: faster below some 8B")
    parser.add_argument("--output", default="adapters", help="folder of the trained adapters")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tilekern.apply()  # patches models that are made from here on; adapters of PEFT take effect as before
    how = {"dtype": torch.bfloat16, "attn_implementation": "tilekern"}
    if args.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config), **how)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, **how)
    model.config.use_cache = False  # or transformers copies keys and values in each step
    adapters = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model.to(device), adapters).train()
    if args.graphs:
        tilekern.graphed(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    print(f"{sum(weight.numel() for weight in trained):,} trained numbers")
    optimizer = tilekern.AdamW(trained, lr=args.lr)

    # The same tokens at each step, so that the loss falls: put batches of yours here.
    ids = torch.randint(model.config.vocab_size, (args.batch, args.tokens), device=device)
    for step in range(args.steps):
        with torch.autocast(device, torch.bfloat16):  # adapters of float32, as PEFT makes them, multiply in bfloat16
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.output)

    print(tilekern.report(model))  # by module: which op serves it, or why none does
    print(f"{sum(counts['launches'] for counts in tilekern.stats().values())} launches")


if __name__ == "__main__":
    main()
