"""Models in adapters of PEFT, hooks and casts of accelerate and shards of FSDP2: patched before and after, put back."""

import functools
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.state import AcceleratorState
from accelerate.utils import compile_regions
from model_contract import both_ways, counted, is_put_back, reasons
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny_qwen3 import IDS, OPS, apply, make, same, step, worst
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tilekern

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
]
LORA = functools.partial(LoraConfig, task_type="CAUSAL_LM", init_lora_weights=False)
CONFIGS = {
    "linear layers and head": LORA(target_modules="all-linear", modules_to_save=["lm_head"]),
    "directions and magnitudes": LORA(target_modules=["q_proj", "o_proj", "gate_proj"], use_dora=True),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
LOSS = "fused_linear_cross_entropy"
FUSED = {"fused_add_rms_norm_forward": 1, "qk_norm_rope_backward": 1, "swiglu_forward": 1, LOSS: 1}


@pytest.fixture(scope="module", autouse=True)
def mesh(tmp_path_factory):
    """This process alone shares models with itself."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def adapted(config, model):
    torch.manual_seed(1)
    return get_peft_model(model, config).train()


def adapted_again(reentrant, model):
    """With layers that are made again in the backward."""
    model = adapted(CONFIGS["linear layers and head"], model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def cast(model):
    AcceleratorState._reset_state(reset_partial_state=True)
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    return prepared


class Counting(ModelHook):
    """Runs around a module's forward, as those do that bring its weights."""

    def __init__(self):
        self.calls = 0

    def pre_forward(self, *args, **kwargs):
        self.calls += 1
        return args[1:], kwargs


def hooked(model, hook=None):
    for module in model.modules():
        add_hook_to_module(module, hook or Counting())
    return model


def sharded(model, **options):
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options).train()


class Wrapper(NamedTuple):
    """A wrapper of a model, and the facts that hold for the wrapped model.

    Attributes:
        wrap: wraps it.
        kernels: launches of a step.
        unserved: ops that the report says are not served.
        tolerance: of the relative error.
        bits: whether it computes the same bits once it is put back.
    """

    wrap: Any
    kernels: dict[str, int]
    unserved: set[str] = set()  # noqa: RUF012
    tolerance: float = 1e-5
    bits: bool = True


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPPERS = {
    **{name: Wrapper(functools.partial(adapted, config), FUSED) for name, config in CONFIGS.items()},
    **{
        f"checkpointing of adapters, {reentrant}": Wrapper(
            functools.partial(adapted_again, reentrant), FUSED | {"fused_add_rms_norm_forward": 2, "swiglu_forward": 2}
        )
        for reentrant in (True, False)
    },
    "shards": Wrapper(sharded, FUSED),
    "gathered shards of two bytes": Wrapper(
        functools.partial(sharded, mp_policy=HALF, reshard_after_forward=False), FUSED, tolerance=5e-2
    ),
    "casts": Wrapper(cast, {"swiglu_forward": 1, LOSS: 1}, tolerance=5e-2),
    # Norms, linear layers and activations have something to do beside their own forward.
    "hooks": Wrapper(
        hooked, dict.fromkeys(FUSED, 0) | {"rms_norm_forward": 5},
        {"fused_add_rms_norm", "qk_norm_rope", "swiglu", LOSS},
    ),
    "compiled regions": Wrapper(lambda model: compile_regions(model, backend="eager"), FUSED, bits=False),
}  # fmt: skip
ORDERS = {
    "class first": (lambda _: apply(), None),
    "model first": (tilekern.apply_to_model, None),
    "model last": (None, tilekern.apply_to_model),
}


@pytest.mark.parametrize("wrapper", [
    pytest.param(wrapper, marks=pytest.mark.slow if "compiled" in name else (), id=name)
    for name, wrapper in WRAPPERS.items()
])  # fmt: skip
@pytest.mark.parametrize(("early", "late"), ORDERS.values(), ids=ORDERS)
@pytest.mark.share(6)
def test_what_wraps_a_model_stays_around_what_runs_and_is_kept_by_reset(early, late, wrapper):
    wrap, kernels, unserved, tolerance, bits = wrapper
    reference = step(wrap(make(layers=1)))
    model = make(layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tilekern.errors.TilekernWarning)
        if early:
            early(model)
        model = wrap(model)
        if late:
            assert set(late(model)) >= {"rms_norm", "swiglu", LOSS}
    told = reasons(model, *OPS)
    # Rope is told of where its norms are not fused with it.
    assert {op for (_, op), reason in told.items() if reason} - {"rope"} == unserved
    assert {op for _, op in told} - {"rope"} == {*OPS} - {"rope"}
    found, ran = counted(lambda: step(model))
    assert worst(found, reference) < tolerance
    assert {name: ran.get(name, 0) for name in kernels} == kernels
    assert LOSS in tilekern.get_patched_ops()
    if bits:
        is_put_back(lambda: step(model), reference)
        return
    tilekern.reset()
    found, ran = counted(lambda: step(model))
    assert worst(found, reference) < 1e-6
    assert not ran


@pytest.mark.parametrize(("early", "late"), ORDERS.values(), ids=ORDERS)
def test_layers_in_wrappers_are_made_again_in_the_backward(early, late):
    # The last norm runs once, and twice those of the layer that are not fused.
    for wrap, norms in ((hooked, 9), (sharded, 3)):
        tilekern.reset()
        model = make(layers=1)
        for patch in (early, wrap, late):
            if patch:
                patch(model)
        model.train().gradient_checkpointing_enable()
        assert counted(lambda: step(model))[1]["rms_norm_forward"] == norms, wrap  # noqa: B023 (it is called here)


def test_hooks_are_called_and_taken_out_of_a_model_that_was_put_back():
    model, hook = make(layers=1), Counting()
    reference = step(model)
    hooked(model, hook)
    tilekern.apply_to_model(model)
    tilekern.reset()
    is_put_back(lambda: step(model), reference)
    # All but the list of layers.
    assert hook.calls == len(list(model.modules())) - 1
    remove_hook_from_submodules(model)
    assert same(step(model), reference)
    assert tilekern.apply_to_model(model)
    assert set(reasons(model, "fused_add_rms_norm").values()) == {""}


@both_ways
def test_hooks_that_hold_a_stand_in_call_the_original_after_a_reset(way):
    model = make(layers=1)
    reference = step(model)
    way(model)
    hooked(model)
    is_put_back(lambda: step(model), reference)


def test_hooks_that_hold_what_the_class_had_before_are_reported():
    model = hooked(make(layers=1))
    apply()
    assert "" not in reasons(model, "rms_norm").values()
    assert "rms_norm_forward" not in counted(lambda: step(model))[1]


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


def test_norms_that_are_sharded_by_themselves_are_reported(mesh):
    model = make(layers=1)
    fully_shard(model.model.layers[0].post_attention_layernorm, mesh=mesh)
    sharded(model)
    apply()
    assert reasons(model, "fused_add_rms_norm") == {
        ("model.layers.0", "fused_add_rms_norm"): "hooks on post_attention_layernorm have the steps run one by one"
    }
    assert "fused_add_rms_norm_forward" not in counted(lambda: step(model))[1]


def test_adapters_are_switched_off_merged_and_taken_out():
    model = make(layers=1).eval()
    plain = model(input_ids=IDS, labels=IDS).loss
    adapters = adapted(CONFIGS["linear layers and head"], model).eval()
    with torch.no_grad():
        adapters.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
        wanted = adapters(input_ids=IDS, labels=IDS).loss
    apply()
    with torch.no_grad():
        skipping = {"input_ids": IDS, "labels": IDS, "skip_logits": True}
        with adapters.disable_adapter():
            torch.testing.assert_close(adapters(**skipping).loss, plain)
        torch.testing.assert_close(adapters(**skipping).loss, wanted)
        adapters.merge_adapter()
        torch.testing.assert_close(adapters(**skipping).loss, wanted)
        adapters.unmerge_adapter()
        whole = adapters.merge_and_unload()
        torch.testing.assert_close(whole(**skipping).loss, wanted)
    # No module of PEFT's is left, so that the MLP is one op again.
    whole.train().requires_grad_()
    assert "swiglu_backward_remake" in counted(lambda: step(whole))[1]


def test_an_adapter_in_the_head_makes_logits_and_the_report_says_so():
    model = adapted(LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"), make(layers=1))
    tilekern.apply_to_model(model)
    (reason,) = reasons(model, LOSS).values()
    assert reason == "its head is Linear of peft.tuners.lora.layer"
    assert model(input_ids=IDS, labels=IDS).logits.shape == (2, 7, 331)
