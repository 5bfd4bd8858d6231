"""A training program as axolotl and LLaMA-Factory are made: transformers is imported in a function, after arguments.

It says which attention its model has, as theirs do. ``python late_trainer.py launch COMMAND ...`` is their command
line, which starts processes that run this file or module anew, by torchrun or ``accelerate launch``.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ATTENTION = "sdpa"


def launch(command):
    """Start a command, which finds what this process's environment says."""
    import transformers  # noqa: F401

    return subprocess.run(command, check=False).returncode


def train(folder, lr, callback=False):
    """Train a small model for two steps, on rows that are alike, and say what it lost and what is patched."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61, hidden_size=24, intermediate_size=36, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    model = AutoModelForCausalLM.from_config(config)
    before = _asked()
    options = TrainingArguments(
        str(folder), max_steps=2, learning_rate=lr, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": list(range(3, 10)), "labels": list(range(3, 10))}] * 8
    trainer = Trainer(model, options, train_dataset=rows, callbacks=_callbacks() if callback else [])
    loss = trainer.train().training_loss
    attention = model.config._attn_implementation
    return {"loss": loss, "attention": attention, "ranks": options.world_size, **_patched(before)}


def _callbacks():
    import tilekern

    tilekern.reset()
    return [tilekern.TrainerCallback()]


def _asked():
    """How often each kernel was asked for, where something has imported tilekern."""
    tilekern = sys.modules.get("tilekern")
    return {name: counted["fallbacks"] for name, counted in tilekern.stats().items()} if tilekern else {}


def _patched(before):
    """The ops that are patched here, and the kernels that were asked for since then."""
    tilekern = sys.modules.get("tilekern")
    asked = sorted(name for name, number in _asked().items() if number > before.get(name, 0))
    return {"ops": list(tilekern.get_patched_ops()) if tilekern else [], "asked": asked}


def main():
    early = sorted({"torch", "transformers"}.intersection(sys.modules))
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--callback", action="store_true", help="train anew, unpatched but for what a callback does")
    given = parser.parse_args()
    rank = os.environ.get("RANK", "0")
    for name, callback in [("program", False), ("callback", True)][: 1 + given.callback]:
        told = train(given.folder, given.lr, callback) | {"early": early}
        (given.folder / f"{name}-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(launch(sys.argv[2:]))
    main()
