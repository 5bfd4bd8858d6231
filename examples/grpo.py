"""Train a causal language model by reinforcement with TRL's GRPOTrainer, sampled by transformers' generate.

    python examples/grpo.py                                      Qwen3-0.6B from the hub, on sums
    python examples/grpo.py --model Qwen/Qwen3-4B --steps 200

Training runs inside `tilekern.invariant()`: the trainer's log-probabilities are the sampler's bit by bit, so the first
importance ratios are exactly 1 (docs/same-bits.md). Needs `pip install 'tilekern[torch]' trl` and an NVIDIA GPU.
Without a GPU, `TILEKERN_INTERPRET=1` runs the kernels on the CPU, which is meant for models of a few thousand
parameters.
"""

import argparse
import re

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tilekern
import tilekern.integrations.trl


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of a model and its tokenizer")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt, which are compared")
    parser.add_argument("--batch", type=int, default=16, help="completions of a step, a multiple of --group")
    parser.add_argument("--new", type=int, default=32, help="the most tokens of a completion")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--output", default="reinforced", help="folder of the trained model")
    return parser.parse_args()


def reward(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """Return 1 for a completion whose first number is the answer, 0.1 for another number, 0 without one."""
    numbers = [re.search(r"\d+", text) for text in completions]
    return [
        (1.0 if int(found[0]) == right else 0.1) if found else 0.0 for found, right in zip(numbers, answer, strict=True)
    ]


def main() -> None:
    args = arguments()
    has_gpu = torch.cuda.is_available()
    tilekern.apply()  # patches models that are made from here on
    tilekern.integrations.trl.register()  # TRL's trainers compute log-probabilities by tilekern's kernels
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="tilekern")
    settings = GRPOConfig(
        args.output, max_steps=args.steps, per_device_train_batch_size=args.batch, num_generations=args.group,
        max_completion_length=args.new, learning_rate=args.lr, logging_steps=1, save_strategy="no", report_to="none",
        bf16=has_gpu, use_cpu=not has_gpu,
    )  # fmt: skip
    rows = [{"prompt": f"{a} + {b} =", "answer": a + b} for a in range(50) for b in range(50)]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    with tilekern.invariant():
        trainer = GRPOTrainer(
            model, reward, args=settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.train()
        print(tilekern.report(model))  # by module: which op serves it, or why none does
    trainer.save_model()
    print(f"TRL's log-probabilities: {tilekern.integrations.trl.calls()}")
    products = tilekern.stats()["matmul"]
    print(f"products of the mode: {products['launches']} launches, {products['fallbacks']} by torch")


if __name__ == "__main__":
    main()
