"""Losses of post-training against their formulas, written out sequence by sequence over float64 logits."""

import math

import pytest
import torch

from tilekern.integrations import losses
from tilekern.ops import linear_log_probs

HIDDEN, VOCABULARY, TOKENS = 12, 19, 7
IGNORED = -100


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


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
        log_probs = self.naive().detach()
        self.ref, self.old = ((log_probs + x) * self.mask for x in noise)
        self.advantages = random(sequences)

    def log_probs(self):
        return linear_log_probs(self.hidden, self.weight, self.ids)[0]

    def naive(self, hidden=None, weight=None):
        """[sequences, tokens] from logits in float64, 0 where a token does not count."""
        hidden, weight = (self.hidden if hidden is None else hidden), (self.weight if weight is None else weight)
        every = (hidden.double() @ weight.double().T).log_softmax(-1)
        return every.gather(-1, self.ids.clamp(min=0)[..., None])[..., 0] * self.mask


def pairs(batch, values):
    """(chosen, rejected) of each pair: the values of the tokens that count."""
    half = len(values) // 2
    kept = [row[mask] for row, mask in zip(values, batch.mask, strict=True)]
    return list(zip(kept[:half], kept[half:], strict=True))


def average(terms):
    return torch.stack(list(terms)).mean()


def naive_dpo(b, p, beta=0.1, label_smoothing=0.0):
    margins = [beta * (c.sum() - r.sum()) for c, r in pairs(b, p - b.ref)]
    e = label_smoothing
    return average(-(1 - e) * torch.log(sigmoid(x)) - e * torch.log(sigmoid(-x)) for x in margins)


def naive_ipo(b, p, beta=0.1):
    return average((c.mean() - r.mean() - 1 / (2 * beta)) ** 2 for c, r in pairs(b, p - b.ref))


def naive_orpo(b, p, beta=0.1):
    odds = lambda x: torch.exp(x.mean()) / (1 - torch.exp(x.mean()))  # noqa: E731
    both = pairs(b, p)
    nll = -torch.cat([c for c, _ in both]).mean()
    return nll - beta * average(torch.log(sigmoid(torch.log(odds(c) / odds(r)))) for c, r in both)


def naive_cpo(b, p, beta=0.1, alpha=1.0):
    both = pairs(b, p)
    preference = average(-torch.log(sigmoid(beta * (c.sum() - r.sum()))) for c, r in both)
    return preference - alpha * torch.cat([c for c, _ in both]).mean()


def naive_simpo(b, p, beta=2.0, gamma=0.5):
    return average(-torch.log(sigmoid(beta * (c.mean() - r.mean()) - gamma)) for c, r in pairs(b, p))


def naive_kto(b, p, desirable, baseline):
    values = [row[mask].sum() for row, mask in zip(p - b.ref, b.mask, strict=True)]
    good = lambda x: 1.5 * (1 - sigmoid(0.2 * (x - baseline)))  # noqa: E731
    bad = lambda x: 0.7 * (1 - sigmoid(0.2 * (baseline - x)))  # noqa: E731
    return average(good(x) if is_good else bad(x) for x, is_good in zip(values, desirable, strict=True))


GOOD = torch.tensor([True, False, False, True])
PAIRED = {
    "dpo": (lambda b, p: losses.dpo(p, b.ref), naive_dpo),
    "dpo, smoothed": (
        lambda b, p: losses.dpo(p, b.ref, beta=0.3, label_smoothing=0.2), lambda b, p: naive_dpo(b, p, 0.3, 0.2),
    ),
    "ipo": (lambda b, p: losses.ipo(p, b.ref, b.mask, beta=0.2), lambda b, p: naive_ipo(b, p, 0.2)),
    "orpo": (lambda b, p: losses.orpo(p, b.mask, beta=0.4), lambda b, p: naive_orpo(b, p, 0.4)),
    "cpo": (lambda b, p: losses.cpo(p, b.mask, alpha=0.5), lambda b, p: naive_cpo(b, p, alpha=0.5)),
    "simpo": (lambda b, p: losses.simpo(p, b.mask), naive_simpo),
    "cpo-simpo": (
        lambda b, p: losses.simpo(p, b.mask, beta=1.5, gamma=0.2, alpha=0.5),
        lambda b, p: naive_simpo(b, p, 1.5, 0.2) + naive_cpo(b, p, 0.0, 0.5) - math.log(2),
    ),
    "kto": (
        lambda b, p: losses.kto(p, b.ref, GOOD, 0.3, beta=0.2, desirable_weight=1.5, undesirable_weight=0.7),
        lambda b, p: naive_kto(b, p, GOOD, 0.3),
    ),
}  # fmt: skip


def naive_vespo(log_weight, advantage, ratio):
    """The factor of a sequence whose weights and whose engine's are these."""
    weight, (k, decay) = torch.exp(log_weight) * ratio, (2, 3) if advantage >= 0 else (3, 2)
    return (weight**k * torch.exp(decay * (1 - weight))).detach()


def naive_grpo(b, p, loss_type, level="token", low=0.2, high=0.2, delta=None, beta=0.0, kl_weighted=False, ratio=1.0):
    """Token by token."""
    rows = []
    for row in range(len(p)):
        at, advantage = b.mask[row], b.advantages[row]
        logs = p[row][at] - b.old[row][at]
        terms = []
        for number, log in enumerate(logs):
            weight = torch.exp(log if level == "token" else logs.mean())
            if loss_type == "cispo":
                term = -min(weight.detach(), torch.tensor(high)) * advantage * p[row][at][number]
            elif loss_type == "sapo":
                t = 1.0 if advantage > 0 else 1.05
                term = -4 / t * sigmoid(t * (weight - 1)) * advantage
            elif loss_type == "vespo":
                term = -naive_vespo(logs.sum(), advantage, ratio) * advantage * p[row][at][number]
            else:
                clipped = min(max(weight, 1 - low), 1 + high)
                bounded = weight if delta is None else min(weight, delta)
                term = -min(bounded * advantage, clipped * advantage)
            term = term if loss_type == "vespo" else term * ratio
            difference = (b.ref - p)[row][at][number]
            divergence = torch.exp(difference) - difference - 1
            terms.append(term + beta * divergence * (weight if kl_weighted else 1))
        rows.append(torch.stack(terms))
    if loss_type in ("grpo", "sapo"):
        return average(x.mean() for x in rows)
    divisors = {"bnpo": b.mask.sum(), "dr_grpo": len(p) * 11, "luspo": len(p)}
    divisors |= dict.fromkeys(("dapo", "cispo", "vespo"), 29)
    return torch.cat(rows).sum() / divisors[loss_type]


NEEDED = {"dr_grpo": {"max_completion_length": 11}} | {name: {"num_items": 29} for name in ("dapo", "cispo", "vespo")}
VARIANTS = [
    *({"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")),
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "luspo", "level": "sequence"},
    {"loss_type": "vespo", "sampling_ratio": 0.8, "beta": 0.1},
    {"loss_type": "sapo", "level": "sequence", "sampling_ratio": 0.8},
    {"loss_type": "grpo", "level": "sequence", "epsilon": 0.1},
    {"loss_type": "dapo", "level": "sequence", "beta": 0.3, "kl_weighted": True},
    {"loss_type": "bnpo", "beta": 0.2, "epsilon": 0.1, "epsilon_high": 0.28, "delta": 1.3},
    {"loss_type": "grpo", "beta": 0.2, "kl_weighted": True, "sampling_ratio": 0.8},
]


def check(batch, loss, naive, tolerance=1e-5):
    """A loss and its gradients through the head."""
    leaves = (batch.hidden, batch.weight)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    got, wanted = loss(batch.log_probs()), naive(batch.naive(*wide))
    assert got.shape == ()
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(wanted, wide), strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("name", PAIRED)
def test_losses_and_gradients_are_those_of_the_formula(name):
    batch = Batch()
    ours, naive = PAIRED[name]
    check(batch, lambda p: ours(batch, p), lambda p: naive(batch, p))


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto"])
def test_heads_of_two_bytes_lose_no_more_than_their_rounding(name):
    batch = Batch(torch.bfloat16)
    ours, naive = PAIRED[name]
    check(batch, lambda p: ours(batch, p), lambda p: naive(batch, p), 3e-2)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_group_losses_and_gradients_are_those_of_the_formula(options):
    batch = Batch()
    names = {"epsilon": "low", "epsilon_high": "high", "sampling_ratio": "ratio"}
    naive = {names.get(name, name): value for name, value in options.items()}
    if "sampling_ratio" in options:
        options = options | {"sampling_ratio": torch.full((4, 1), options["sampling_ratio"])}
    options = options | NEEDED.get(options["loss_type"], {}) | {"old_log_probs": batch.old, "ref_log_probs": batch.ref}
    check(
        batch,
        lambda p: losses.grpo(p, batch.advantages, batch.mask, **options),
        lambda p: naive_grpo(batch, p, **naive),
    )


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


def naive_divergence(s, t, beta):
    kl = lambda one, other: (one.exp() * (one - other)).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return kl(t, s) if beta == 0 else kl(s, t)
    mixed = torch.log(beta * t.exp() + (1 - beta) * s.exp())
    return beta * kl(t, mixed) + (1 - beta) * kl(s, mixed)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_divergences_of_heads_are_those_of_their_logits(beta):
    b = Batch()
    got = losses.jsd(
        b.hidden, b.weight, b.other_hidden, b.other_weight, b.mask, beta=beta, temperature=1.3
    )  # fmt: skip
    wide = [x.detach().double().requires_grad_() for x in (b.hidden, b.weight)]
    every = [
        (hidden.double() @ weight.double().T / 1.3).log_softmax(-1)
        for hidden, weight in (wide, (b.other_hidden, b.other_weight))
    ]
    wanted = naive_divergence(*every, beta)[b.mask].mean()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(got, (b.hidden, b.weight)), torch.autograd.grad(wanted, wide)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.3, "softcap": 2.0, "bias": torch.linspace(-1, 1, VOCABULARY)}]
)
def test_the_teacher_s_likeliest_ids_are_gathered_and_the_rest_is_one(tail, options):
    b = Batch()
    teacher = (b.other_hidden.double() @ b.other_weight.double().T).log_softmax(-1)
    likeliest, ids = teacher.topk(4)
    likeliest[0, 1, 2:] = -torch.inf
    likeliest[0, 6] = -torch.inf  # a row that does not count
    s = losses.top_k_log_probs(b.hidden, b.weight, ids, **options)
    got = losses.top_k_distillation(s, likeliest.float(), b.mask, tail=tail)

    wide = [x.detach().double().requires_grad_() for x in (b.hidden, b.weight)]
    logits = wide[0] @ wide[1].T + options.get("bias", 0)
    if "softcap" in options:
        logits = 2 * torch.tanh(logits / 2) / 1.3
    every = logits.log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(s.double(), every, rtol=1e-5, atol=1e-5)
    rows = []
    for t, x in zip(likeliest[b.mask], every[b.mask], strict=True):
        p, q = t.exp(), torch.where(t > -torch.inf, x.exp(), 0)
        if tail:
            p, q = (torch.cat((one, 1 - one.sum()[None])) for one in (p, q))
        else:
            p, q = p / p.sum(), q / q.sum()
        rows.append((p[p > 0] * torch.log(p[p > 0] / q[p > 0])).sum())
    wanted = torch.stack(rows).mean()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(got, (b.hidden, b.weight)), torch.autograd.grad(wanted, wide)
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_sequences_and_batches_without_tokens_give_numbers():
    b = Batch()
    b.ids[2:] = IGNORED
    b.mask = b.ids != IGNORED
    p = b.log_probs()
    for loss in (losses.ipo(p, b.ref * b.mask, b.mask), losses.simpo(p, b.mask), losses.cpo(p, b.mask)):
        assert torch.autograd.grad(loss, b.hidden, retain_graph=True)[0].isfinite().all()
    none = torch.zeros_like(b.mask)
    assert losses.jsd(b.hidden, b.weight, b.other_hidden, b.other_weight, none) == 0
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
