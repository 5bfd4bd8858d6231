"""Programs as users write them, in their default environment: each trains a model patched, or as it is.

``python programs.py NAME patched|captured|plain`` prints the losses as its last line, ``torchrun`` runs those of two
GPUs. The model has the widths of Qwen3-8B and two layers, so that the shipped records serve and no compiler is needed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_processes import counts_of_graphs

TEXT = Path(__file__).parent / "data" / "harbour.txt"
SIZES = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
STEPS, TOKENS = 6, 512


@dataclass(frozen=True)
class Program:
    """A program: it takes whether the model is patched, and gives the losses of its steps."""

    run: Callable[[bool], list[float]]
    gpus: int = 1
    # Whether each of the GPUs has a process.
    ranks: int = 1
    # Whether its losses depend on what it draws from its own outputs, so that rounding changes them.
    draws: bool = False
    # The kernels whose calls may fall back: attention where batches are padded, what is fused across modules where each
    # of these has hooks.
    may_fall_back: tuple[str, ...] = ()


PROGRAMS: dict[str, Program] = {}
PADDED = ("attention_forward",)
HOOKED = ("fused_add_rms_norm_forward", "fused_linear_cross_entropy", "qk_norm_rope_forward")


def program(gpus: int = 1, ranks: int = 1, **more: Any) -> Callable[[Callable[[bool], list[float]]], None]:
    def known(run: Callable[[bool], list[float]]) -> None:
        PROGRAMS[run.__name__] = Program(run, gpus, ranks, **more)

    return known


def make(patched: bool, device: str | None = "cuda", **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    import tilekern

    if patched:
        tilekern.apply(graphs=sys.argv[2] == "captured")
    attention = "tilekern" if patched else "sdpa"
    config = Qwen3Config(**SIZES, **more, attn_implementation=attention)
    torch.manual_seed(0)
    with torch.device(f"cuda:{torch.cuda.current_device()}"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if patched and sys.argv[2] == "captured":
        tilekern.graphed(model, lengths=(TOKENS, 2 * TOKENS, 4 * TOKENS, 8 * TOKENS))
    return model if device == "cuda" else model.to(device)


def loaded(patched: bool, device_map: Any = "cuda:0", **more: Any) -> Any:
    """The model as ``from_pretrained`` gives it, which knows the folder that it came from."""
    from transformers import AutoModelForCausalLM

    folder, attention = tempfile.mkdtemp(), "tilekern" if patched else "sdpa"
    make(patched).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, attn_implementation=attention, dtype=torch.bfloat16, **more
    )


def tokenizer() -> Any:
    """A token for each byte of the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = {letter: number for number, letter in enumerate([*sorted(alphabet), "<pad>", "<eos>"])}
    of_bytes = Tokenizer(models.BPE(vocab=words, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=of_bytes, pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def passages(count: int, length: int = 400) -> list[str]:
    """Passages of the text of different lengths."""
    text = TEXT.read_text()
    return [text[at * 97 % 4000 :][: length - 23 * (at % 11)] for at in range(count)]


def arguments(kind: Any, **more: Any) -> Any:
    return kind(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, logging_steps=1, report_to=[], bf16=True, save_strategy="no",
        disable_tqdm=True, seed=0, learning_rate=1e-5, **more,
    )  # fmt: skip


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def datasets(**columns: list[Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


def blocks() -> Any:
    """Return whole rows of tokens for Trainer."""
    ids = tokenizer()(TEXT.read_text())["input_ids"]
    rows = [ids[at : at + TOKENS] for at in range(0, 64 * 61, 61)]
    return datasets(input_ids=rows, labels=rows)


@program()
def trainer(patched: bool) -> list[float]:
    """Trainer in bfloat16 with checkpointing and accumulation."""
    from transformers import Trainer, TrainingArguments

    how = arguments(
        TrainingArguments, per_device_train_batch_size=4, gradient_accumulation_steps=2, gradient_checkpointing=True
    )
    return losses_of(Trainer(make(patched), how, train_dataset=blocks()))


@program()
def flattened(patched: bool) -> list[float]:
    """Trainer with the collator that lays sequences end to end in one row."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    ids = [tokenizer()(text)["input_ids"] for text in passages(64)]
    how = arguments(TrainingArguments, per_device_train_batch_size=4)
    # SDPA mixes the sequences of a row that position ids alone tell apart, unless there is no cache and no mask.
    made = make(patched) if patched else make(False, use_cache=False)
    collator = DataCollatorWithFlattening()
    return losses_of(Trainer(made, how, train_dataset=datasets(input_ids=ids), data_collator=collator))


@program()
def sft_packed(patched: bool) -> list[float]:
    """TRL's SFT with packing."""
    from trl import SFTConfig, SFTTrainer

    how = arguments(SFTConfig, per_device_train_batch_size=2, packing=True, max_length=TOKENS)
    data = datasets(text=passages(200))
    return losses_of(SFTTrainer(make(patched), how, train_dataset=data, processing_class=tokenizer()))


def _register(patched: bool) -> None:
    if patched:
        import tilekern.integrations.trl

        tilekern.integrations.trl.register()


@program(may_fall_back=PADDED)
def dpo(patched: bool) -> list[float]:
    """TRL's DPO with a reference model."""
    from trl import DPOConfig, DPOTrainer

    _register(patched)
    texts = passages(120)
    data = datasets(
        prompt=[t[:60] for t in texts], chosen=[t[60:200] for t in texts], rejected=[t[90:260] for t in texts]
    )
    how = arguments(DPOConfig, per_device_train_batch_size=4, max_length=TOKENS)
    return losses_of(
        DPOTrainer(loaded(patched), loaded(patched), args=how, train_dataset=data, processing_class=tokenizer())
    )


@program(draws=True, may_fall_back=PADDED)
def grpo(patched: bool) -> list[float]:
    """TRL's GRPO: generation, rewards, training."""
    from trl import GRPOConfig, GRPOTrainer

    _register(patched)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(letter in "aeiou" for letter in text)) for text in completions]

    how = arguments(
        GRPOConfig,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=48,
        temperature=1.0,
        beta=0.04,
    )
    data = datasets(prompt=[text[:60] for text in passages(64)])
    trained = GRPOTrainer(loaded(patched), reward, args=how, train_dataset=data, processing_class=tokenizer())
    return losses_of(trained)


@program()
def adapter_on_four_bits(patched: bool) -> list[float]:
    """LoRA on a base of four bits."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig, Trainer, TrainingArguments

    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = loaded(patched, quantization_config=bits)
    model = prepare_model_for_kbit_training(model)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    how = arguments(TrainingArguments, per_device_train_batch_size=4)
    return losses_of(Trainer(model, how, train_dataset=blocks()))


@program(may_fall_back=PADDED)
def adapter(patched: bool) -> list[float]:
    """LoRA of TRL's SFT."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    how = arguments(SFTConfig, per_device_train_batch_size=2, max_length=TOKENS)
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    data = datasets(text=passages(64))
    return losses_of(
        SFTTrainer(make(patched), how, train_dataset=data, processing_class=tokenizer(), peft_config=adapters)
    )


def stepped(model: Any, optimizer: Any, first: int = 0, apart: int = 1) -> list[float]:
    """A loop of one's own over the rows of this rank."""
    rows = torch.tensor(blocks()["input_ids"])
    losses = []
    for number in range(STEPS):
        ids = rows[first + number * 2 * apart :][:2].cuda()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@program(gpus=2, may_fall_back=HOOKED)
def device_map(patched: bool) -> list[float]:
    """accelerate spreads the layers over two GPUs."""
    places = {
        "model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0, "model.layers.1": 1, "model.norm": 1,
        "lm_head": 1,
    }  # fmt: skip
    model = loaded(patched, places).train()
    return stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-5))


def joined() -> int:
    """This process's place among the ranks."""
    import torch.distributed as dist

    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", device_id=torch.device("cuda", number))
    return number


def stepped_by_ranks(wrap: Callable[[Any, int], Any], patched: bool) -> list[float]:
    """The same loop in each rank of a model that is wrapped for them."""
    number = joined()
    model = wrap(make(patched), number)
    return stepped(model, torch.optim.AdamW(model.parameters(), lr=1e-5), first=2 * number, apart=2)


@program(gpus=2, ranks=2)
def ddp(patched: bool) -> list[float]:
    from torch.nn.parallel import DistributedDataParallel

    return stepped_by_ranks(lambda model, number: DistributedDataParallel(model, device_ids=[number]), patched)


@program(gpus=2, ranks=2)
def fsdp2(patched: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    def shard(model: Any, _: int) -> Any:
        for part in (*model.model.layers, model):
            fully_shard(part)
        return model

    return stepped_by_ranks(shard, patched)


@program(gpus=2, ranks=2)
def trainer_of_ranks(patched: bool) -> list[float]:
    """Trainer under torchrun."""
    from transformers import Trainer, TrainingArguments

    how = arguments(TrainingArguments, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    return losses_of(Trainer(make(patched), how, train_dataset=blocks()))


def main() -> None:
    name, how = sys.argv[1:]
    losses = PROGRAMS[name].run(how != "plain")
    counted: dict[str, Any] = {}
    graphs: list[str] = []
    if how != "plain":
        import tilekern

        graphs = counts_of_graphs()
        counted = {
            kernel: {"launches": n["launches"], "fallbacks": n["fallbacks"]} for kernel, n in tilekern.stats().items()
        }
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps({"losses": losses, "counted": counted, "graphs": graphs}) + "\n")
    if PROGRAMS[name].ranks > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    main()
