"""Train by TRL's GRPO and keep what the sampler and the trainer computed, as tests of bits do here and on a GPU.

TRL is imported by the functions, since its import takes seconds.
"""

from dataclasses import dataclass, field

import torch

from tilekern import ops

# The shorter one is padded on the left.
PROMPTS = ("w1 w2 w3 w4 w5", "w6 w7")


def tokenizer(words=29):
    """A tokenizer of words ``w0``, ``w1`` and so on, which pads on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(words))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


@dataclass
class Training:
    """What a training computed.

    Attributes:
        losses: of each step.
        differing: of each step, by name, how many of the completions' log-probabilities differ from those of the loss;
            those that continuous batching gives are torch's, and may differ by roundings of float32.
        tokens: of each step, how many there are.
        parameters: in the end.
    """

    losses: list[float] = field(default_factory=list)
    differing: list[dict[str, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)


def saved(folder, config, dtype=torch.bfloat16):
    """Store a model with random weights, from which a policy and its reference are loaded; return the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return str(folder)


def train(folder, steps, *, prompts=PROMPTS, **options):
    """Train a saved model by GRPO; every second step generates, and compares with its sampler and its reference.

    A step gets half of the rows that are generated at once, shuffled, so that each of the log-probabilities that are
    compared was computed in another batch.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    found, sampled = Training(), []

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            made, taken = super()._generate_and_score_completions(inputs), sampled.pop()
            if self.use_transformers_continuous_batching:
                made["sampler_logps"] = torch.nn.utils.rnn.pad_sequence(taken, batch_first=True).to(self.model.device)
                return made
            sequences, logits = taken
            ids = sequences[:, -logits.shape[1] :]
            made["sampler_logps"], _ = ops.log_probs(logits.bfloat16(), ids, temperature=self.temperature)
            return made

        def _get_per_token_logps_and_entropies(self, *given, **more):
            self.scored = super()._get_per_token_logps_and_entropies(*given, **more)
            return self.scored

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            shown, mine = inputs["completion_mask"].bool(), self.scored[0].detach()
            found.losses.append(loss.item())
            found.tokens.append(int(shown.sum()))
            others = {"old": "old_per_token_logps", "ref": "ref_per_token_logps", "sampler": "sampler_logps"}
            differences = {kind: (inputs[name] - mine)[shown].abs() for kind, name in others.items()}
            slack = {"sampler": 1e-6 if self.use_transformers_continuous_batching else 0.0}
            found.differing.append({kind: int((x > slack.get(kind, 0.0)).sum()) for kind, x in differences.items()})
            return loss

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tilekern")
    generate, generate_batch = model.generate, model.generate_batch

    def watched(**given):
        config = given["generation_config"]
        config.return_dict_in_generate = config.output_logits = True
        made = generate(**given)
        sampled.append((made.sequences, torch.stack(made.logits, 1)))
        return made.sequences

    def batched(*given, **more):
        made = generate_batch(*given, **more)
        sampled.append([torch.tensor(output.logprobs) for output in made.values()])
        return made

    model.generate, model.generate_batch = watched, batched
    known = {
        "max_steps": steps, "per_device_train_batch_size": 2, "steps_per_generation": 2, "num_generations": 2,
        "gradient_accumulation_steps": 1, "max_completion_length": 3, "learning_rate": 1e-2, "beta": 0.1,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    trainer = Watched(
        model,
        lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
        args=GRPOConfig(output_dir=f"{folder}/out", **known | options),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer(model.config.vocab_size - 3),
    )
    trainer.train()
    found.parameters = [x.detach().clone() for x in model.parameters()]
    return found
