"""Models in accelerate's hooks and casts: patched before and after, and put back inside of them."""

import warnings

import pytest
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.state import AcceleratorState
from accelerate.utils import compile_regions
from tiny_qwen3 import apply, launched, launches, make, same, step, worst

import tilekern

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
]


@pytest.fixture
def quiet():
    """tilekern has nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", tilekern.errors.TilekernWarning)
        yield


@pytest.fixture
def prepare():
    def prepared(model):
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, mixed_precision="bf16").prepare(model)

    yield prepared
    AcceleratorState._reset_state(reset_partial_state=True)


class Counting(ModelHook):
    """Runs around a module's forward, as those do that bring its weights."""

    def __init__(self):
        self.calls = 0

    def pre_forward(self, *args, **kwargs):
        self.calls += 1
        return args[1:], kwargs


def hooked(model):
    hook = Counting()
    for module in model.modules():
        add_hook_to_module(module, hook)
    return hook


def served(model, op):
    return [row.module for row in tilekern.report(model).rows if row.op == op and not row.reason]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("early", "late"),
    [(lambda _: apply(), None), (tilekern.apply_to_model, None), (None, tilekern.apply_to_model)],
    ids=["class first", "model first", "model afterwards"],
)
def test_casts_for_mixed_precision_stay_around_what_runs(prepare, early, late):
    reference = step(prepare(make(layers=1)))
    model = make(layers=1)
    if early:
        early(model)
    prepare(model)
    if late:
        assert "fused_linear_cross_entropy" in late(model)
    assert served(model, "fused_linear_cross_entropy") == [""]
    before = launches()
    assert worst(step(model), reference) < 5e-2
    assert launched(before)["fused_linear_cross_entropy"] == 1
    assert "fused_linear_cross_entropy" in tilekern.get_patched_ops()
    tilekern.reset()
    before = launches()
    assert same(step(model), reference), "the casts are gone, or a patch runs"
    assert not launched(before)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("early", "late"),
    [(lambda _: apply(), None), (tilekern.apply_to_model, None), (None, tilekern.apply_to_model)],
    ids=["class first", "model first", "model afterwards"],
)
def test_hooks_stay_around_what_runs(early, late):
    model = make(layers=1)
    reference = step(model)
    if early:
        early(model)
    hook = hooked(model)
    if late:
        late(model)
    before = launches()
    assert worst(step(model), reference) < 1e-5
    # Its norms and linear layers have something to do beside their own forward.
    assert launched(before)["rms_norm_forward"] == 5
    assert launched(before)["swiglu_forward"] == 1
    assert not {"fused_add_rms_norm_forward", "qk_norm_rope_forward", "fused_linear_cross_entropy"} & {
        *launched(before)
    }
    assert len(served(model, "rms_norm")) == 5
    assert not served(model, "fused_add_rms_norm")
    assert not served(model, "qk_norm_rope")
    model.train().gradient_checkpointing_enable()
    before = launches()
    step(model)
    assert launched(before)["swiglu_forward"] == 2, "the layer's forward runs twice"
    model.gradient_checkpointing_disable()
    tilekern.reset()
    before, calls = launches(), hook.calls
    assert same(step(model), reference)
    assert not launched(before)
    # All but the list of layers.
    assert hook.calls - calls == len(list(model.modules())) - 1
    remove_hook_from_submodules(model)
    assert same(step(model), reference)
    assert tilekern.apply_to_model(model)
    assert len(served(model, "fused_add_rms_norm")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", [lambda _: apply(), tilekern.apply_to_model], ids=["class", "model"])
@pytest.mark.parametrize("first", [True, False], ids=["patched first", "compiled first"])
@pytest.mark.share(4)
def test_regions_that_are_compiled_by_themselves_have_the_fused_loss(way, first):
    """Accelerate makes shallow copies of a model's modules and wraps its layers and its head."""
    model = make(layers=1)
    reference = step(model)
    if first:
        way(model)
    regions = compile_regions(model, backend="eager")
    if not first:
        way(regions)
    assert served(regions, "fused_linear_cross_entropy") == [""]
    before = launches()
    assert worst(step(regions), reference) < 1e-5
    assert launched(before)["fused_linear_cross_entropy"] == launched(before)["swiglu_forward"] == 1
    tilekern.reset()
    before = launches()
    assert worst(step(regions), reference) < 1e-6
    assert not launched(before)


def test_hooks_that_hold_what_the_class_had_before_are_reported():
    model = make(layers=1)
    hooked(model)
    apply()
    assert not served(model, "rms_norm")
    before = launches()
    step(model)
    assert "rms_norm_forward" not in launched(before)


def test_a_wrapper_that_hides_what_it_calls_is_left_alone():
    model = make(layers=1)
    reference, mlp = step(model), model.model.layers[0].mlp
    theirs = type(mlp).forward

    def forward(self, x):
        return type(self).forward(self, x)

    forward.__wrapped__ = theirs
    mlp.forward = own = forward.__get__(mlp)
    with pytest.warns(tilekern.errors.TilekernWarning, match="1 modules have another forward than"):
        assert "swiglu" not in tilekern.apply_to_model(model)
    assert mlp.forward == own
    assert worst(step(model), reference) < 1e-5
