"""Losses of post-training against their formulas, over float64 logits of the same head."""

import loss_formulas as formulas
import pytest
import torch
from loss_formulas import IGNORED

from tilekern.integrations import losses
from tilekern.ops import linear_log_probs

HIDDEN, VOCABULARY, TOKENS = 12, 19, 7


class Batch:
    """Sequences of hidden states with a head, a reference's and an old policy's, and completions of several lengths."""

    def __init__(self, dtype=torch.float32, sequences=4):
        generator = torch.Generator().manual_seed(3)
        random = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.hidden = random(sequences, TOKENS, HIDDEN).to(dtype).requires_grad_()
        self.weight = random(VOCABULARY, HIDDEN).to(dtype).requires_grad_()
        ids = torch.randint(VOCABULARY, (sequences, TOKENS), generator=generator)
        lengths = torch.tensor([5, 7, 1, 3, 6, 2])[:sequences, None]
        self.ids = ids.where(torch.arange(TOKENS) < lengths, IGNORED)
        self.mask = self.ids != IGNORED
        self.other_hidden, self.other_weight = random(sequences, TOKENS, 9).to(dtype), random(VOCABULARY, 9).to(dtype)
        noise = 0.3 * random(2, sequences, TOKENS)
        log_probs = formulas.chosen(self.hidden.double() @ self.weight.double().T, self.ids).detach()
        self.ref, self.old = ((log_probs + x) * self.mask for x in noise)
        self.advantages = random(sequences)
        self.good = torch.tensor([True, False, False, True])

    @property
    def teacher(self):
        return self.other_hidden, self.other_weight

    def log_probs(self, hidden=None, weight=None):
        """Return log-probabilities by the op, or from logits for other leaves."""
        if hidden is None:
            return linear_log_probs(self.hidden, self.weight, self.ids)[0]
        return formulas.chosen(hidden @ weight.T, self.ids)


def check(batch, loss, tolerance=1e-5):
    """A loss by ``tilekern.integrations.losses`` and by its formula in float64, and its gradients through the head."""
    leaves = (batch.hidden, batch.weight)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got, wanted = loss(losses, *leaves, batch.log_probs()), loss(formulas, *wide, batch.log_probs(*wide))
    assert got.shape == ()
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, wide), strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


# The loss, what of a batch it takes beside the log-probabilities, and its options.
PREFERENCES = [
    ("dpo", ("ref",), {}),
    ("dpo", ("ref",), {"beta": 0.3, "label_smoothing": 0.2}),
    ("ipo", ("ref", "mask"), {"beta": 0.2}),
    ("orpo", ("mask",), {"beta": 0.4}),
    ("cpo", ("mask",), {"alpha": 0.5}),
    ("simpo", ("mask",), {}),
    ("simpo", ("mask",), {"beta": 1.5, "gamma": 0.2, "alpha": 0.5}),
    ("kto", ("ref", "good"), {"baseline": 0.3, "beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.7}),
]


@pytest.mark.parametrize(("name", "given", "options"), PREFERENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_and_gradients_are_those_of_the_formula(name, given, options, dtype):
    """Heads of two bytes lose no more than their rounding."""
    b = Batch(dtype)
    named = [getattr(b, each) for each in given]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    check(b, lambda by, _, __, p: getattr(by, name)(p, *named, **options), tolerance)


NEEDED = {"dr_grpo": {"max_completion_length": 11}} | {name: {"num_items": 29} for name in ("dapo", "cispo", "vespo")}


@pytest.mark.parametrize(
    "options",
    [
        *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")),
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss_type": "luspo", "level": "sequence"},
        {"loss_type": "vespo", "sampling_ratio": 0.8, "beta": 0.1},
        {"loss_type": "sapo", "level": "sequence", "sampling_ratio": 0.8},
        {"loss_type": "grpo", "level": "sequence", "epsilon": 0.1},
        {"loss_type": "dapo", "level": "sequence", "beta": 0.3, "kl_weighted": True},
        {"loss_type": "bnpo", "beta": 0.2, "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.3},
        {"loss_type": "grpo", "beta": 0.2, "kl_weighted": True, "sampling_ratio": 0.8},
    ],
    ids=str,
)
def test_group_losses_and_gradients_are_those_of_the_formula(options):
    b = Batch()
    if "sampling_ratio" in options:
        options = options | {"sampling_ratio": torch.full((4, 1), options["sampling_ratio"])}
    options = options | NEEDED.get(options["loss_type"], {}) | {"old_log_probs": b.old, "ref_log_probs": b.ref}
    check(b, lambda by, _, __, p: by.grpo(p, b.advantages, b.mask, **options))


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_divergences_of_heads_are_those_of_their_logits(beta):
    b = Batch()

    def loss(by, hidden, weight, _):
        teacher = [x.to(hidden.dtype) for x in b.teacher]
        return by.jsd(hidden, weight, *teacher, b.mask, beta=beta, temperature=1.3)

    check(b, loss)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.3, "softcap": 2.0, "bias": torch.linspace(-1, 1, VOCABULARY)}]
)
def test_the_teacher_s_likeliest_ids_are_gathered_and_the_rest_is_one(tail, options):
    b = Batch()
    likeliest, ids = (b.other_hidden.double() @ b.other_weight.double().T).log_softmax(-1).topk(4)
    likeliest[0, 1, 2:] = -torch.inf
    likeliest[0, 6] = -torch.inf  # a row that does not count
    found = [
        by.top_k_log_probs(*(x.to(dtype) for x in (b.hidden, b.weight)), ids, **options)
        for by, dtype in ((losses, torch.float32), (formulas, torch.float64))
    ]
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-5, atol=1e-5)

    def loss(by, hidden, weight, _):
        taught = likeliest.to(hidden.dtype)
        return by.top_k_distillation(by.top_k_log_probs(hidden, weight, ids, **options), taught, b.mask, tail=tail)

    check(b, loss)


def test_what_the_policy_made_itself_has_the_weight_one():
    batch = Batch()
    p = batch.log_probs()
    loss = losses.grpo(p, batch.advantages, batch.mask, loss_type="bnpo")
    (got,) = torch.autograd.grad(loss, p)
    torch.testing.assert_close(got, (-batch.advantages[:, None] * batch.mask / batch.mask.sum()).float())
    each = batch.advantages[:, None].expand(4, TOKENS)
    torch.testing.assert_close(losses.grpo(p, each, batch.mask, loss_type="bnpo"), loss)


def test_a_baseline_is_not_negative_and_has_no_gradient():
    batch = Batch()
    p = batch.log_probs()
    values = (p.double() - batch.ref).sum(-1).mean()
    found = [losses.kto_baseline(p, batch.ref + shift * batch.mask) for shift in (-1, 1)]
    assert not found[0].requires_grad
    torch.testing.assert_close(found[0].double(), (values + batch.mask.sum() / 4).detach())
    assert found[1] == 0


def test_sequences_and_batches_without_tokens_give_numbers():
    b = Batch()
    b.ids[2:] = IGNORED
    b.mask = b.ids != IGNORED
    p = b.log_probs()
    for loss in (losses.ipo(p, b.ref * b.mask, b.mask), losses.simpo(p, b.mask), losses.cpo(p, b.mask)):
        assert torch.autograd.grad(loss, b.hidden, retain_graph=True)[0].isfinite().all()
    none = torch.zeros_like(b.mask)
    assert losses.jsd(b.hidden, b.weight, *b.teacher, none) == 0
    assert losses.grpo(p * 0, b.advantages, none) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of grpo, bnpo, .*, luspo, vespo, got 'ppo'"),
        ({"loss_type": "luspo"}, "luspo has weights of sequences; pass level='sequence'"),
        ({"level": "word"}, "level must be token or sequence, got 'word'"),
        ({"beta": 0.1}, "ref_log_probs, which beta asks for, is missing"),
        ({"loss_type": "dr_grpo"}, "max_completion_length, which dr_grpo divides by, is missing"),
        ({"loss_type": "cispo"}, "epsilon_high, the bound of cispo, is missing"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    b = Batch()
    with pytest.raises(ValueError, match=f"grpo: {message}"):
        losses.grpo(b.log_probs(), b.advantages, b.mask, **options)
