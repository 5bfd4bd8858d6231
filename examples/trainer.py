"""Train a causal language model with transformers' Trainer, and print which kernels ran.

    python examples/trainer.py                                   Qwen3-0.6B from the hub, on random tokens
    python examples/trainer.py --text book.txt --tokens 4096     on a text of yours
    python examples/trainer.py --config config.json              random weights; nothing is downloaded

Needs `pip install 'tilekern[torch]' accelerate` and an NVIDIA GPU. Without a GPU, `TILEKERN_INTERPRET=1` runs the
kernels on the CPU, which is meant for models of a few thousand parameters.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import tilekern


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of a model to go on from")
    parser.add_argument("--config", help="a config.json, for a model with random weights in place of --model")
    parser.add_argument("--text", type=Path, help="train on this file; without it, on random tokens")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--output", default="trained", help="folder of the trained model")
    args = parser.parse_args()
    if args.text and args.config:
        parser.error("--text needs the tokenizer of a --model, which --config does not have")
    return args


def sequences(args: argparse.Namespace, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Return the rows of the data set: ids that are their own labels."""
    if args.text:
        ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text(), return_tensors="pt").input_ids[0]
        rows = ids[: len(ids) // args.tokens * args.tokens].view(-1, args.tokens)
        if not len(rows):
            raise SystemExit(f"{args.text} has {len(ids)} tokens; give a --tokens of at most as many")
    else:
        rows = torch.randint(vocabulary, (args.batch * args.steps, args.tokens))
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    args = arguments()
    tilekern.apply()  # patches models that are made from here on
    how = {"dtype": torch.bfloat16, "attn_implementation": "tilekern"}
    if args.config:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config), **how)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, **how)
    settings = TrainingArguments(
        args.output, max_steps=args.steps, per_device_train_batch_size=args.batch, logging_steps=5,
        save_strategy="no", report_to="none",
    )  # fmt: skip
    optimizer = tilekern.AdamW(model.parameters(), lr=args.lr)
    rows = sequences(args, model.config.vocab_size)
    trainer = Trainer(model, settings, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    trainer.save_model()

    print(tilekern.report(model))  # by module: which op serves it, or why none does
    for kernel, counts in tilekern.stats().items():
        if counts["launches"] or counts["fallbacks"]:
            print(f"{kernel}: {counts['launches']} launches, {counts['fallbacks']} calls ran the model's own code")


if __name__ == "__main__":
    main()
