"""Training with patches is training without them: the same losses, and gradients that are as exact."""

import os

import pytest
import torch
from curve_spread import rank_of_division
from gpu_tolerances import TOLD_APART
from gpu_training import CONFIG, ORDERS, ROWS, TOKENS, batches, curve, gradients, patched
from gradient_errors import bound, relative_error

import tilekern
from tilekern import cache
from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.records import record_of
from tilekern.spec import Config
from tilekern.spec.targets import here
from tilekern.tuning.plan.models import plan_of_model
from tilekern.tuning.plan.steps import Steps

STEPS, WINDOW = 200, 10
BATCHES = 8
# Launches of each kernel in a step; those of the norms and of the sums of weights' gradients belong to several ops.
LAYERS = CONFIG["num_hidden_layers"]
COMMON = {
    "rms_norm_forward": LAYERS + 1, "rms_norm_backward": LAYERS + 1, "fused_add_rms_norm_forward": LAYERS,
    "fused_add_rms_norm_backward": LAYERS, "qk_norm_rope_forward": LAYERS, "qk_norm_rope_backward": LAYERS,
    "column_sum": 3 * LAYERS + 1, "swiglu_forward": LAYERS, "swiglu_backward_remake": LAYERS,
    "attention_forward": LAYERS, "attention_backward": LAYERS, "fused_linear_cross_entropy": 1, "scale": 2,
    "labels": 1,
}  # fmt: skip
KERNELS = COMMON | dict.fromkeys(("attention_delta", "attention_dkdv_kept", "attention_dq_kept"), LAYERS)
ATTENTIONS = ["tilekern", "tilekern_nondeterministic"]


@pytest.fixture(scope="module")
def unpatched():
    """The losses of trainings that differ in the order of sums alone, [orders, STEPS]."""
    return curves("sdpa")


@pytest.fixture(scope="module")
def references():
    """Every parameter's gradient for each batch in float64, and the unpatched model's in bfloat16."""
    ids = batches(BATCHES)
    return gradients("eager", ids, exact=True), gradients("sdpa", ids)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Write to a cache of the test's own, and read the shared one too."""
    known = [str(cache.user_root()), *os.environ.get("TILEKERN_CACHE_PATH", "").split(os.pathsep)]
    monkeypatch.setenv("TILEKERN_CACHE_PATH", os.pathsep.join(path for path in known if os.path.exists(path)))
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    dispatch.forget()


def choose_cudnn():
    """Put a record into the cache by which cuDNN runs the attention's backward, as a tuned cache may hold it."""
    spec, target, tools = spec_named("attention_backward"), here(), toolkit()
    if tools is None:
        pytest.skip("no compiler is here whose key a record could bear")
    steps = Steps([ROWS * TOKENS], [TOKENS], ops=["attention"], attention=["tilekern_nondeterministic"])
    problem = dict(plan_of_model(CONFIG, steps, target).problems)[spec.name]
    record = record_of(spec, problem, Config(implementation="cudnn"), target, tools.describe(), {}, "default")
    cache.Store(cache.user_root()).write(record, {})
    dispatch.forget()


def kernels_of(attention):
    """The launches of a step, with cuDNN chosen for the backward of the one that it may serve."""
    if attention == "tilekern":
        return KERNELS
    choose_cudnn()
    return COMMON


def curves(attention, change=None):
    """The losses of a training in every order, [orders, STEPS]; all of them learn."""
    losses = torch.stack([curve(attention, STEPS, order, change) for order in ORDERS])
    assert bool((losses[:, -WINDOW:].mean(1) < 0.6 * losses[:, 0]).all())
    return losses


def assert_all_ran(kernels, steps):
    counts = tilekern.stats()
    assert {name: count["fallbacks"] for name, count in counts.items() if count["fallbacks"]} == {}
    launched = {name: count["launches"] for name, count in counts.items() if count["launches"]}
    # The loss is made chunk by chunk, in as many as the cache's config says.
    assert launched.pop("cross_entropy_fused") % steps == 0
    assert launched == {name: steps * number for name, number in kernels.items()}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_losses_are_those_of_an_unpatched_training(attention, unpatched):
    kernels = kernels_of(attention)
    with patched():
        losses = curves(attention)
    assert_all_ran(kernels, STEPS * len(ORDERS))
    assert rank_of_division(losses, unpatched, WINDOW) > TOLD_APART


def test_losses_of_scores_that_are_a_tenth_too_large_are_told_apart(unpatched):
    def enlarge(model):
        for layer in model.model.layers:
            layer.self_attn.scaling *= 1.1

    assert rank_of_division(curves("sdpa", enlarge), unpatched, WINDOW) <= TOLD_APART


@pytest.mark.usefixtures("own_cache")
def test_a_patched_training_gives_the_same_bits_each_time():
    with patched():
        first, second = (curve("tilekern", 20) for _ in range(2))
    assert_all_ran(KERNELS, 2 * 20)
    assert torch.equal(first, second)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_of_every_parameter_are_as_exact_as_hugging_faces(attention, references):
    exact, theirs = references
    kernels = kernels_of(attention)
    with patched():
        ours = gradients(attention, batches(BATCHES))
    assert_all_ran(kernels, BATCHES)
    names, wrong = list(exact[0]), {}
    for some in (names, *([name] for name in names)):
        own, other = (relative_error(found, exact, some) for found in (ours, theirs))
        if not own <= bound(BATCHES * sum(exact[0][name].numel() for name in some)) * other:
            wrong[" ".join(some)] = (own, other)
    assert not wrong
