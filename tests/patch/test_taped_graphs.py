"""Graphed models against eager ones, where a replay runs no Python: operations alone are recorded, as in CUDA graphs.

Either losses and weights are equal bit by bit, or the step is refused with its reason.
"""

import random

import numpy as np
import pytest
import taping
import tiny_families
import torch
from tiny_qwen3 import make

import tilekern
from tilekern.patch import graphs

pytestmark = pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
STEPS = 6
REPLAYS = STEPS - graphs.EAGER_STEPS


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    taping.use(monkeypatch)


def trained(model, step):
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
    taping.seeded()
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        found.append(step(model, number))
        optimizer.step()
    return found


def check(build, step):
    """Train twins; return the graphs of one, which may differ from the eager one in no bit."""
    eager, mine = build().train(), tilekern.graphed(build().train())
    assert trained(mine, step) == trained(eager, step)
    assert all(map(torch.equal, mine.state_dict().values(), eager.state_dict().values()))
    return graphs.graphs_of(mine)[""]


# Families.


def family(build, name):
    _, ids, more = build(name)

    def step(model, number):
        drawn = torch.randint(3, 55, ids.shape, generator=torch.Generator().manual_seed(number))
        x = torch.where(ids >= 55, ids, drawn)  # tokens of images stay
        loss = model(input_ids=x, labels=x.masked_fill(x >= 55, -100), **more).loss
        loss.backward()
        return loss.item()

    return check(lambda: build(name)[0], step)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "jamba", "qwen3_5_moe", "gemma4"])
def test_families(name):
    assert family(tiny_families.make, name).replays == REPLAYS


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(tiny_families.OWN))
def test_all_families(name):
    assert family(tiny_families.make, name).replays == REPLAYS


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(tiny_families.SEEING) - {"llama4"}))
def test_all_families_that_see(name):
    found = family(tiny_families.make_seeing, name)
    # Most wait for the GPU, and some keep positions of a batch with images for its generation.
    assert found.replays + found.reasons.total() == REPLAYS


# Loops.


def ids(seed, rows=2, tokens=7):
    return torch.randint(0, 331, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def of_texts(**more):
    def step(model, number):
        x = ids(number)
        loss = model(**{"input_ids": x, "labels": x, **{name: get(number) for name, get in more.items()}}).loss
        loss.backward()
        return loss.item()

    return step


def expanded(number):
    return ids(number, rows=1).expand(2, -1)


def turned(number):
    return ids(number, 7, 2).t()


@pytest.mark.parametrize("get", [expanded, turned], ids=lambda x: x.__name__)
def test_inputs_of_other_strides(get):
    assert check(make, of_texts(input_ids=get)).replays == REPLAYS


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints(is_reentrant):
    def build():
        model = make()
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        return model

    assert check(build, of_texts()).replays == REPLAYS


def test_hidden_states_in_the_loss():
    def step(model, number):
        result = model(input_ids=ids(number), labels=ids(number), output_hidden_states=True)
        (result.loss + result.hidden_states[1].square().mean()).backward()
        return [x.sum().item() for x in result.hidden_states]

    assert check(make, step).replays == REPLAYS


def test_two_models_in_a_step():
    def step(models, number):
        total = sum(model(input_ids=ids(number), labels=ids(number)).loss for model in models)
        total.backward()
        return total.item()

    models = torch.nn.ModuleList([make(), tilekern.graphed(make())]).train()
    eager = torch.nn.ModuleList([make(), make()]).train()
    assert trained(models, step) == trained(eager, step)
    assert all(map(torch.equal, models.parameters(), eager.parameters()))
    assert graphs.graphs_of(models)["1"].replays == REPLAYS


def test_gradients_of_autograd_s_grad_are_the_caller_s():
    def step(model, number):
        weights = list(model.parameters())
        slopes, losses = [], []
        for x in (ids(number), ids(number + 9)):
            loss = model(input_ids=x, labels=x).loss
            slopes.append(torch.autograd.grad(loss, weights))
            losses.append(loss.item())
        for weight, first, second in zip(weights, *slopes, strict=True):
            weight.grad = first - 0.5 * second
        return losses

    assert check(make, step).replays == 2 * STEPS - graphs.EAGER_STEPS


# Python beside the operations.


class Toy(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.count, self.seen, self.counts, self.last = 0, [], {"all": {"calls": 0}}, torch.zeros(3, 4)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("average", torch.zeros(3, 4))
        self._run = forward

    def forward(self, x):
        return {"loss": self._run(self, x, self.layer(x)).square().mean()}


def counting(toy, x, y):
    toy.count += 1
    return y * toy.count


def listing(toy, x, y):
    toy.seen.append(1)
    return y * len(toy.seen)


def counting_deep(toy, x, y):
    toy.counts["all"]["calls"] += 1
    return y * toy.counts["all"]["calls"]


def remembering(toy, x, y):
    last, toy.last = toy.last, y.detach()
    return y + last


def remembering_in_place(toy, x, y):
    last = toy.last.clone()
    toy.last.copy_(y.detach())
    return y + last


def exchanging_a_buffer(toy, x, y):
    toy.average = toy.average * 0.5 + y.detach()
    return y + toy.average


def decaying(toy, x, y):
    with torch.no_grad():
        toy.layer.bias.mul_(0.9)
    return y + toy.layer.bias


def by_chance(toy, x, y):
    return y if random.random() < 0.5 else y * 2


def by_chance_of_numpy(toy, x, y):
    return y * float(np.random.rand())


def by_a_generator(toy, x, y):
    return y * torch.rand(4, generator=toy.generator)


def dropping(toy, x, y):
    return torch.nn.functional.dropout(y, 0.5)


def of_toys(model, number):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
    loss = model(x)["loss"]
    loss.backward()
    return loss.item(), x.tolist()


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (counting, "its forward changes count of Toy"),
        (listing, "its forward changes seen of Toy"),
        (counting_deep, "its forward changes counts of Toy"),
        (remembering, "its forward changes last of Toy"),
        (remembering_in_place, "its forward changes last of Toy"),
        (exchanging_a_buffer, "its buffers change in training"),
        (decaying, "its parameters change in the forward"),
        (by_chance, "random numbers of Python or numpy"),
        (by_chance_of_numpy, "random numbers of Python or numpy"),
        (by_a_generator, "its forward changes generator of Toy"),
    ],
)
def test_what_a_replay_would_miss_runs_eagerly(forward, reason):
    assert check(lambda: Toy(forward), of_toys).reasons == {reason: REPLAYS}


def test_arguments_that_the_forward_changes_are_changed():
    def forward(toy, x, y):
        with torch.no_grad():
            x.add_(1)
        return y.detach() + toy.layer.bias * x

    found = check(lambda: Toy(forward), of_toys)
    assert found.reasons == {"its arguments change in the forward": REPLAYS}


def test_dropout_draws_anew():
    assert check(lambda: Toy(dropping), of_toys).replays == REPLAYS


def test_an_eager_step_that_fails_is_watched_again():
    def forward(toy, x, y):
        if x.isnan().any():
            raise ValueError("nothing")
        return counting(toy, x, y)

    model = tilekern.graphed(Toy(forward).train())
    of_toys(model, 0)
    with pytest.raises(ValueError, match="nothing"):
        model(torch.full((3, 4), float("nan")))
    for number in range(3):
        of_toys(model, number)
    assert graphs.graphs_of(model)[""].reasons == {"its forward changes count of Toy": 2}
