"""Fine-tune a causal language model on prompts and completions with TRL's SFTTrainer.

    python examples/sft.py                                       Qwen3-0.6B from the hub, on sums
    python examples/sft.py --model Qwen/Qwen3-4B --data rows.jsonl

A line of --data is {"prompt": ..., "completion": ...} or what else TRL takes. Needs `pip install 'tilekern[torch]' trl`
and an NVIDIA GPU. Without a GPU, `TILEKERN_INTERPRET=1` runs the kernels on the CPU, which is meant for models of a few
thousand parameters.
"""

import argparse

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import tilekern
import tilekern.integrations.trl


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of a model and its tokenizer")
    parser.add_argument("--data", help="a file of JSON lines; without it, sums such as 12 + 7 = 19")
    parser.add_argument("--tokens", type=int, default=1024, help="the most tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--output", default="fine-tuned", help="folder of the trained model")
    return parser.parse_args()


def sums() -> Dataset:
    """Return prompts and completions that need no download."""
    pairs = [(a, b) for a in range(50) for b in range(50)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in pairs])


def main() -> None:
    args = arguments()
    has_gpu = torch.cuda.is_available()
    tilekern.apply()  # patches models that are made from here on
    tilekern.integrations.trl.register()  # TRL's trainers compute their losses without logits
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, attn_implementation="tilekern")
    settings = SFTConfig(
        args.output, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=args.lr,
        max_length=args.tokens, logging_steps=5, save_strategy="no", report_to="none", bf16=has_gpu,
        use_cpu=not has_gpu,
    )  # fmt: skip
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=load_dataset("json", data_files=args.data, split="train") if args.data else sums(),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        optimizers=(tilekern.AdamW(model.parameters(), lr=args.lr), None),
    )
    trainer.train()
    trainer.save_model()

    print(tilekern.report(model))  # by module: which op serves it, or why none does
    print(f"TRL's losses: {tilekern.integrations.trl.calls()}")


if __name__ == "__main__":
    main()
