"""Losses against those of TRL's trainers, and its trainers with tilekern's log-probabilities.

TRL is imported by the tests that need it and not with this file, which every worker reads.
"""

import importlib
import types
from collections import defaultdict

import pytest
import torch
from grpo_training import tokenizer

import tilekern
from tilekern.errors import TilekernWarning
from tilekern.integrations import losses
from tilekern.integrations import trl as door

TOKENS = 6


class Batch:
    """Log-probabilities of four completions, of a policy and of a reference, in float64."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.mask = torch.arange(TOKENS) < torch.tensor([4, 6, 1, 5])[:, None]
        random = lambda: -torch.rand(4, TOKENS, generator=generator, dtype=torch.float64) * 2 * self.mask  # noqa: E731
        self.log_probs, self.ref, self.old = random().requires_grad_(), random(), random()
        self.advantages = torch.tensor([1.0, -0.5, 0.3, -1.2], dtype=torch.float64)


def accelerator():
    same = lambda x, *_, **__: x  # noqa: E731
    return types.SimpleNamespace(
        device="cpu", gather=same, gather_for_metrics=same, reduce=same, num_processes=1, sync_gradients=True
    )


class Scored(torch.nn.Module):
    """A model that gives these log-probabilities to whoever asks for its fused head."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs):
        super().__init__()
        some = torch.zeros_like(log_probs.detach())
        self.outputs = types.SimpleNamespace(log_probs=log_probs, entropy=some, mean_logits=some, is_top1=some.bool())

    def forward(self, **_):
        return self.outputs


def trainer(kind, batch, **options):
    """Stand in for a trainer: only the attributes that its methods read."""
    shared = {
        "accelerator": accelerator(), "_metrics": {"train": defaultdict(list)}, "aux_loss_enabled": False,
        "_total_train_tokens": 0, "_tp_size": 1, "model": Scored(batch.log_probs), "ref_model": Scored(batch.ref),
    }  # fmt: skip
    return types.SimpleNamespace(**shared | options)


def completions(batch):
    """The batch as a collator gives it: one token before those that are scored."""
    mask = torch.cat((torch.zeros(4, 1, dtype=torch.bool), batch.mask), 1).long()
    return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def same(batch, ours, theirs):
    torch.testing.assert_close(ours, theirs.to(ours.dtype))
    # Tokens that do not count are zeros of the head, whose gradients go nowhere.
    gradients = [torch.autograd.grad(loss, batch.log_probs, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*(x * batch.mask for x in gradients))


@pytest.mark.parametrize(
    ("loss_type", "ours"),
    [
        ("sigmoid", lambda b: losses.dpo(b.log_probs, b.ref, beta=0.3)),
        ("ipo", lambda b: losses.ipo(b.log_probs, b.ref, b.mask, beta=0.3)),
    ],
)
def test_dpo_and_ipo_are_trl_s(loss_type, ours):
    from trl import DPOTrainer

    b = Batch()
    options = {
        "ld_alpha": None, "precompute_ref_logps": False, "f_divergence_type": "reverse_kl", "loss_types": [loss_type],
        "loss_weights": [1.0], "beta": 0.3, "label_smoothing": 0.0, "use_weighting": False,
        "args": types.SimpleNamespace(gradient_checkpointing_kwargs=None),
    }  # fmt: skip
    stub = trainer(DPOTrainer, b, **options)
    same(b, ours(b), DPOTrainer._compute_loss(stub, stub.model, completions(b), False))


def test_kto_is_trl_s():
    from trl import KTOTrainer

    b, good = Batch(), torch.tensor([True, False, True, False])
    other = Batch().old
    options = {
        "precompute_ref_logps": False, "calculate_KL": True, "loss_type": "kto", "beta": 0.3, "desirable_weight": 1.2,
        "undesirable_weight": 0.8, "args": types.SimpleNamespace(gradient_checkpointing_kwargs=None),
        "_compute_kl_logps": lambda model, _: (other if model is stub.model else b.ref).sum(-1),
    }  # fmt: skip
    stub = trainer(KTOTrainer, b, **options)
    theirs = KTOTrainer._compute_loss(stub, stub.model, completions(b) | {"label": good}, False)
    baseline = losses.kto_baseline(other, b.ref)
    ours = losses.kto(b.log_probs, b.ref, good, baseline, beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    same(b, ours, theirs)


@pytest.mark.filterwarnings("ignore")
def test_cpo_simpo_and_orpo_are_trl_s():
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    b = Batch()
    chosen, rejected = b.log_probs.sum(-1).chunk(2)
    nll = -b.log_probs[:2][b.mask[:2]].mean()
    stub = types.SimpleNamespace(
        accelerator=accelerator(), alpha=0.0, beta=0.4, loss_type="sigmoid", label_smoothing=0.1, simpo_gamma=0.6
    )
    theirs = CPOTrainer.cpo_loss(stub, chosen, rejected)[0].mean() + 0.5 * nll
    same(b, losses.cpo(b.log_probs, b.mask, beta=0.4, alpha=0.5, label_smoothing=0.1), theirs)
    means = (b.log_probs.sum(-1) / b.mask.sum(-1)).chunk(2)
    stub.loss_type = "simpo"
    theirs = CPOTrainer.cpo_loss(stub, *means)[0].mean()
    same(b, losses.simpo(b.log_probs, b.mask, beta=0.4, gamma=0.6, label_smoothing=0.1), theirs)
    # It computes this one in float32.
    theirs = nll - ORPOTrainer.odds_ratio_loss(stub, *means)[0].mean()
    ours = losses.orpo(b.log_probs, b.mask, beta=0.4, chosen_nll=nll)
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo", "beta": 0.2, "delta": 1.3},
        {"loss_type": "dr_grpo", "level": "sequence"},
        {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "kl_weighted": True},
        {"loss_type": "cispo", "epsilon_high": 1.05},
        {"loss_type": "sapo"},
        {"loss_type": "sapo", "level": "sequence", "beta": 0.2, "sapo_temperatures": (0.8, 1.4)},
        {"loss_type": "luspo", "level": "sequence"},
        {"loss_type": "vespo"},
        {"loss_type": "vespo", "beta": 0.2, "vespo_gammas": ((1.5, 2.5), (2.0, 1.0)), "sampling_ratio": True},
    ],
    ids=str,
)
def test_grpo_is_trl_s(options):
    from trl import GRPOTrainer

    b = Batch()
    known = {"epsilon": 0.2, "epsilon_high": None, "delta": None, "beta": 0.0, "kl_weighted": False, "level": "token"}
    known |= {"sapo_temperatures": (1.0, 1.05), "vespo_gammas": ((2.0, 3.0), (3.0, 2.0)), "sampling_ratio": None}
    if "sampling_ratio" in options:
        # As TRL has it: 1 where nothing counts.
        options = options | {"sampling_ratio": torch.exp(0.3 * (b.old - b.ref) * b.mask)}
    given = known | options
    (k, decay), (k_negative, decay_negative) = given["vespo_gammas"]
    high = given["epsilon"] if given["epsilon_high"] is None else given["epsilon_high"]
    stub = trainer(
        GRPOTrainer, b, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=given["beta"],
        importance_sampling_level=given["level"], loss_type=given["loss_type"], epsilon_low=given["epsilon"],
        epsilon_high=high, use_vllm=False, _entropy_bonus_enabled=False, max_completion_length=9,
        current_gradient_accumulation_steps=1,
        args=types.SimpleNamespace(
            delta=given["delta"], use_bias_correction_kl=given["kl_weighted"], steps_per_generation=1,
            sapo_temperature_pos=given["sapo_temperatures"][0], sapo_temperature_neg=given["sapo_temperatures"][1],
            vespo_k_pos=k, vespo_lambda_pos=decay, vespo_k_neg=k_negative, vespo_lambda_neg=decay_negative,
        ),
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (b.log_probs, torch.zeros_like(b.log_probs), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.ones(4, 2), "prompt_mask": torch.ones(4, 2), "completion_ids": torch.ones(4, TOKENS),
        "completion_mask": b.mask.double(), "advantages": b.advantages, "old_per_token_logps": b.old,
        "ref_per_token_logps": b.ref, "num_items_in_batch": torch.tensor(13.0),
        "importance_sampling_ratio": given["sampling_ratio"],
    }  # fmt: skip
    ours = losses.grpo(
        b.log_probs, b.advantages, b.mask, old_log_probs=b.old, ref_log_probs=b.ref, max_completion_length=9,
        num_items=13, **options,
    )  # fmt: skip
    same(b, ours, GRPOTrainer._compute_loss(stub, stub.model, inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_the_divergence_of_distributions_is_trl_s(beta):
    from trl.experimental.gkd import GKDTrainer

    x, weight, other, other_weight = (torch.randn(*size).double() for size in ((2, 5, 8), (11, 8), (2, 5, 7), (11, 7)))
    labels = torch.tensor([[1, 2, -100, 4, 5], [-100, -100, 3, 1, 0]])
    theirs = GKDTrainer.generalized_jsd_loss(x @ weight.T, other @ other_weight.T, labels, beta, 1.4)
    ours = losses.jsd(x, weight, other, other_weight, labels != -100, beta=beta, temperature=1.4)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tail", [False, True])
def test_the_likeliest_ids_divergence_is_trl_s(tail):
    from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer as Theirs

    student, teacher = (torch.randn(2, 5, 11).log_softmax(-1) for _ in range(2))
    labels = torch.tensor([[1, 2, -100, 4, 5], [-100, -100, 3, 1, 0]])
    likeliest, ids = teacher.topk(3)
    likeliest[0, 0, 2] = -torch.inf
    stub = types.SimpleNamespace(loss_add_tail=tail, _reduce_divergence_loss=Theirs._reduce_divergence_loss)
    found = {"topk_logprobs": likeliest, "topk_token_ids": ids}
    theirs = Theirs._compute_server_forward_kl_loss(stub, found, student, labels)
    ours = losses.top_k_distillation(student.gather(-1, ids), likeliest, labels != -100, tail=tail)
    torch.testing.assert_close(ours, theirs)


@pytest.fixture
def bound():
    """TRL's module with the function in its place, and TRL as it was afterwards."""
    yield importlib.import_module("trl.trainer.utils")
    door.unregister()
    door._served.clear()
    door._left.clear()


SCORES = "_get_per_token_logps_and_entropies"


def test_register_and_unregister_change_these_functions_and_nothing_else(bound):
    before, trainers = dict(vars(bound)), door._trainers()
    methods = [dict(vars(trainer)) for trainer in trainers]
    names = [
        "trl.trainer.utils._ChunkedLogProbFunction",
        *(f"trl.trainer.{kind}_trainer.{kind.upper()}Trainer.{SCORES}" for kind in ("grpo", "rloo")),
    ]
    assert door.register() == names
    ours = bound._ChunkedLogProbFunction
    assert door.register() == names
    assert {name for name, value in vars(bound).items() if value is not before[name]} == {"_ChunkedLogProbFunction"}
    assert bound._ChunkedLogProbFunction is ours
    for trainer, theirs in zip(trainers, methods, strict=True):
        assert {name for name, value in vars(trainer).items() if value is not theirs[name]} == {SCORES}
    assert door.unregister() == names
    assert door.unregister() == []
    assert all(value is before[name] for name, value in vars(bound).items())
    assert [dict(vars(trainer)) for trainer in trainers] == methods


class Scorer(torch.nn.Module):
    """Inside of a wrapper, as trainers hand it over, a model that keeps what it is called with."""

    def __init__(self, config):
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, **given):
        self.given = given


@pytest.mark.parametrize(
    ("kind", "positions"),
    [("Llama", [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]), ("Bloom", None), ("Gemma3", None)],
)
def test_positions_are_counted_from_the_first_token_of_a_row(bound, kind, positions):
    """A model that takes none, and one that sees images and counts by itself, get none."""
    import transformers

    sizes = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**({} if kind == "Gemma3" else sizes))
    if kind == "Gemma3":
        config = transformers.Gemma3Config(text_config=sizes, vision_config=sizes | {"image_size": 8, "patch_size": 4})
    scorer = Scorer(config)
    ids, mask = torch.ones(2, 5, dtype=torch.long), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    door._call_counted(scorer, input_ids=ids, attention_mask=mask)
    found = scorer.given.pop("position_ids", None)
    assert (found if found is None else found.tolist()) == positions
    assert list(scorer.given) == ["input_ids", "attention_mask"]
    door._call_counted(scorer, input_ids=ids, attention_mask=mask.flip(0)[:1])
    assert "position_ids" not in scorer.given, "no padding stands before the tokens"


class Other:
    """The function of another version."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        return ctx, hidden, weight, targets


@pytest.mark.parametrize(
    ("function", "problem"),
    [(Other, r"takes \(ctx, hidden, weight, targets\), expected \(ctx, hidden, weight, bias,"), (None, "is missing")],
)
def test_a_version_that_does_not_fit_is_left_alone_and_named(bound, monkeypatch, function, problem):
    import trl

    monkeypatch.setattr(bound, "_ChunkedLogProbFunction", function)
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    with pytest.warns(TilekernWarning, match=f"trl 1.99.0 does not fit and runs its own function: .* {problem}"):
        assert door.register() == []
    assert bound._ChunkedLogProbFunction is function


def test_a_trainer_that_scores_by_other_arguments_is_left_alone_and_named(bound, monkeypatch):
    own = bound._ChunkedLogProbFunction
    monkeypatch.setattr(door._trainers()[1], SCORES, Other.forward)
    problem = rf"RLOOTrainer\.{SCORES} takes \(ctx, hidden, weight, targets\), expected \(self, model,"
    with pytest.warns(TilekernWarning, match=problem):
        assert door.register() == []
    assert bound._ChunkedLogProbFunction is own


EVERY = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
SCALED = {"logit_scale": 0.7, "final_logit_softcapping": 3.0, "temperature": 1.3}


@pytest.mark.parametrize("outputs", [EVERY, ("log_probs",)], ids=["all outputs", "one"])
@pytest.mark.parametrize(
    "options", [{}, {"logit_scale": 0.7, "temperature": 1.3}, SCALED], ids=["plain", "scaled", "capped"]
)
def test_results_and_gradients_are_those_of_the_function(bound, outputs, options):
    if "final_logit_softcapping" in options:
        outputs = tuple(name for name in outputs if name != "mean_logits")
    default = {"temperature": 1.0, "chunk_size": 8, "final_logit_softcapping": None, "logit_scale": 1.0}
    options = [*(default | options).values(), outputs]
    theirs, generator = bound._ChunkedLogProbFunction, torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator).requires_grad_()  # noqa: E731
    hidden, weight, bias = random(40, 8), random(21, 8), random(21)
    targets = torch.randint(21, (40,), generator=generator)
    door.register()
    slopes = torch.randn(2, 40, generator=generator)
    found = []
    for function in (bound._ChunkedLogProbFunction, theirs):
        results = function.apply(hidden, weight, bias, targets, *options)
        graded = [x for x in results[:2] if x is not None]
        gradients = torch.autograd.grad(graded, (hidden, weight, bias), list(slopes[: len(graded)]))
        found.append((results, gradients))
    (ours, our_gradients), (wanted, their_gradients) = found
    assert [x is None for x in ours] == [x is None for x in wanted]
    for got, expected in zip((*ours, *our_gradients), (*wanted, *their_gradients), strict=True):
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    if len(outputs) > 1:
        assert 0 < int(ours[4].sum()) < 40
        assert not any(x.requires_grad for x in ours[2:] if x is not None)
    assert door.calls() == {"served": 1, "left": {}}


@pytest.mark.parametrize(
    ("options", "weight", "reason"),
    [
        ((1.0, 8, 3.0, 1.0, EVERY), torch.ones(21, 8), "the mean of capped logits"),
        ((1.0, 8, None, -1.0, EVERY), torch.ones(21, 8), "a scale of the logits that is not positive"),
        (
            (1.0, 8, None, 1.0, EVERY), torch.ones(21, 8, dtype=torch.bfloat16),
            "a head of another dtype than the hidden states",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served_runs_trl_s_own_and_is_counted(bound, options, weight, reason):
    hidden, targets = torch.randn(5, 8), torch.arange(5)
    wanted = bound._ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)
    door.register()
    found = bound._ChunkedLogProbFunction.apply(hidden, weight, None, targets, *options)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    assert door.calls() == {"served": 0, "left": {reason: 1}}


def tiny_model(folder):
    """A model that was loaded from a folder, out of which trainers load its reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=32, num_key_value_heads=1, bos_token_id=None, eos_token_id=1, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


STEPS = {
    "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
    "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
}  # fmt: skip
NUMBERS = range(3, 9)
# What trains, the rows of its data, and options of it.
TRAINERS = {
    "DPO": ({"prompt": "w1 w2", "chosen": "w{} w5 w6", "rejected": "w7 w{}"}, {"max_length": 8}),
    "GRPO": ({"prompt": "w1 w{}"}, {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}),
    "SFT": ({"text": "w1 w{} w4 w5"}, {"max_length": 8}),
}


def trained(kind, folder, **more):
    """A trainer of TRL after three steps of a tiny model."""
    import trl
    from datasets import Dataset

    torch.manual_seed(1)
    row, options = TRAINERS[kind]
    rows = Dataset.from_list([{name: text.format(n) for name, text in row.items()} for n in NUMBERS])
    arguments = getattr(trl, f"{kind}Config")(output_dir=f"{folder}/out", **STEPS, **options)
    rewards = [lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions]]
    run = getattr(trl, f"{kind}Trainer")(
        tiny_model(str(folder)), *rewards * (kind == "GRPO"), args=arguments, train_dataset=rows, eval_dataset=rows,
        processing_class=tokenizer(), **more,
    )  # fmt: skip
    return run, run.train().training_loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.share(3)
def test_three_steps_of_a_trainer_are_the_same(bound, kind, tmp_path):
    logs = []
    for ours in (False, True):
        if ours:
            door.register()
        run, _ = trained(kind, tmp_path)
        losses = [
            {name: x for name, x in row.items() if "loss" in row and "time" not in name}
            for row in run.state.log_history
        ]
        logs.append([row for row in losses if row])
    theirs, got = logs
    assert len(got) == len(theirs) == 3
    assert got[0]["grad_norm"] > 0
    assert door.calls()["served"] >= 3
    assert not door.calls()["left"]
    for one, other in zip(got, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_adapters_are_trained_in_a_model_that_is_put_back_inside_of_trl_s_head(bound, tmp_path):
    """TRL wraps the model's forward after the callback has patched it."""
    from peft import LoraConfig

    found = []
    for callbacks in ([], [tilekern.TrainerCallback(reset=True)]):
        before = tilekern.stats()["swiglu_forward"]["fallbacks"]
        run, loss = trained("SFT", tmp_path, peft_config=LoraConfig(target_modules="all-linear"), callbacks=callbacks)
        found.append([loss, run.evaluate()["eval_loss"]])
        assert (tilekern.stats()["swiglu_forward"]["fallbacks"] > before) == bool(callbacks)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert tilekern.get_patched_ops() == {}
