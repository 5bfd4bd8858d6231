"""PEFT's linear layers with LoRA run one op; whatever that would not compute the same runs PEFT's own code."""

import contextlib
import functools
import subprocess
import sys
import types

import pytest
import torch
from model_contract import only, reasons
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as peft_layers
from tiny_families import IDS as FEW
from tiny_families import make as make_family
from tiny_qwen3 import IDS, make, same, step, worst

import tilekern
from tilekern.patch import adapters
from tilekern.patch.digests import digest_of
from tilekern.runtime import dispatch

ALL = "all-linear"
LORA = only("lora")
lora = functools.partial(LoraConfig, r=4, task_type="CAUSAL_LM", init_lora_weights=False, target_modules=ALL)


def adapted(config=None, model=None, dtype=torch.float32, *, cast=False):
    model = (make(layers=1) if model is None else model).to(dtype)
    torch.manual_seed(1)
    return get_peft_model(model, config or lora(), autocast_adapter_dtype=cast).train()


def seeded(model, ids=IDS):
    """A step whose dropout draws the same numbers each time."""
    torch.manual_seed(2)
    return step(model, ids)


@pytest.fixture
def calls(monkeypatch):
    """The number of layers in each call of the op, or "mlp"."""
    found, run, run_mlp = [], adapters.lora_linears, adapters.lora_gated_mlp
    monkeypatch.setattr(
        adapters, "lora_linears", lambda x, layers, *more: found.append(len(layers)) or run(x, layers, *more)
    )
    monkeypatch.setattr(adapters, "lora_gated_mlp", lambda *given: found.append("mlp") or run_mlp(*given))
    return found


def fallbacks():
    return dispatch.reasons().get(adapters.KERNEL, {})


@pytest.fixture(autouse=True)
def uncounted():
    dispatch.forget()
    counters = dispatch.counters(adapters.KERNEL)
    counters.reasons.clear()
    counters.fallbacks = 0


def test_the_code_that_it_replaces_is_the_installed_one():
    assert digest_of(peft_layers.Linear.forward) in adapters.PATCH.digests


ORDERS = {
    "before": lambda make: (tilekern.apply(**LORA), make())[1],
    "after": lambda make: (make(), tilekern.apply(**LORA))[0],
    "one model": lambda make: (model := make(), tilekern.apply_to_model(model, **LORA))[0],
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_apply_comes_before_or_after_peft_and_is_undone(order, calls):
    expected = step(adapted())
    model = order(adapted)
    assert worst(step(model), expected) < 1e-5
    assert calls == [1] * 7
    assert set(reasons(model, "lora").values()) == {""}
    assert len(reasons(model, "lora")) == 7
    assert str(tilekern.report(model)).count("lora: patched; no call fell back") == 1
    assert tilekern.reset() == ["lora"]
    assert same(step(model), expected)
    assert len(calls) == 7
    assert "not patched" in next(iter(set(reasons(model, "lora").values())))


def test_peft_is_patched_when_it_is_imported():
    code = (
        "import sys, tilekern; tilekern.apply(); assert 'peft' not in sys.modules\n"
        "import peft.tuners.lora.layer as home; print(home.Linear.forward.__module__)\n"
        "tilekern.apply(lora=False); print(home.Linear.forward.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [adapters.__name__, adapters.HOME]


@pytest.mark.usefixtures("interpreted")
def test_layers_that_share_their_input_are_one_call_in_patched_modules(calls):
    expected = step(adapted())
    model = adapted()
    tilekern.apply_to_model(model)
    assert worst(step(model), expected) < 1e-5
    assert calls == [3, 1, "mlp"]


def moved(model, named="swift.tuners.peft"):
    """Give factors the forward that ms-swift gives them, which moves inputs to the weight's device."""
    code = "def forward(self, x):\n    return self.forward_origin(x.to(self.weight.device))"
    exec(code, home := {"__name__": named})
    for name, module in model.named_modules():
        if "lora_A." in name or "lora_B." in name:
            module.forward_origin = module.forward
            module.forward = types.MethodType(home["forward"], module)
    return model


@pytest.mark.usefixtures("interpreted")
def test_factors_with_ms_swift_s_forward_are_served(calls):
    expected = step(adapted())
    model = moved(adapted())
    tilekern.apply_to_model(model)
    assert worst(step(model), expected) < 1e-5
    assert calls == [3, 1, "mlp"]
    assert not fallbacks()
    factor = model.base_model.model.model.layers[0].mlp.up_proj.lora_A["default"]
    factor.forward_origin = lambda x: torch.nn.functional.linear(x, factor.weight)
    assert worst(step(model), expected) < 1e-5
    assert calls == [3, 1, "mlp", 3, 1, 1, 1]
    assert sum(fallbacks().values()) == 1, "the forward behind it is another one"
    calls.clear()
    other = moved(adapted(), "elsewhere")
    tilekern.apply_to_model(other)
    assert worst(step(other), expected) < 1e-5
    assert not calls


def test_factors_on_another_device_run_peft_s_code():
    model = adapted()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_A.to("meta")
    assert isinstance(adapters.adapted_of(layer), str)


SERVED = {
    "some layers": ({"target_modules": ["q_proj", "v_proj"]}, [3]),
    "some of an MLP": ({"target_modules": ["up_proj"]}, ["mlp"]),
    "the last of an MLP": ({"target_modules": ["down_proj"]}, ["mlp"]),
    "a scale by the root of the rank": ({"use_rslora": True}, [3, 1, "mlp"]),
    "other ranks": ({"rank_pattern": {"q_proj": 2, "up_proj": 7}}, [3, 1, "mlp"]),
    "dropout": ({"lora_dropout": 0.3}, [3, 1, "mlp"]),
    "biases that learn": ({"bias": "all"}, [3, 1, "mlp"]),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("options", "wanted"), SERVED.values(), ids=SERVED)
def test_what_is_served(options, wanted, calls):
    make_one = functools.partial(adapted, lora(**options))
    expected = seeded(make_one())
    model = make_one()
    tilekern.apply_to_model(model)
    assert worst(seeded(model), expected) < 1e-5
    assert calls == wanted
    assert not fallbacks()


def test_layers_of_gpt_2_are_served(calls):
    make_one = lambda: adapted(lora(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True), make_family("gpt2")[0])  # noqa: E731
    expected = seeded(make_one(), FEW)
    model = make_one()
    tilekern.apply_to_model(model, **LORA)
    assert worst(seeded(model, FEW), expected) < 1e-5
    assert set(calls) == {1}


@pytest.mark.usefixtures("interpreted")
def test_an_mlp_that_calls_up_first_draws_so():
    def made():
        targets = ["gate_proj", "up_proj", "down_proj"]
        return adapted(lora(target_modules=targets, lora_dropout=0.3), make_family("falcon_h1")[0])

    expected = seeded(made(), FEW)
    model = made()
    tilekern.apply_to_model(model)
    assert worst(seeded(model, FEW), expected) < 1e-4


def second(model):
    """A second adapter, which is active with the first one."""
    model.add_adapter("other", lora())
    model.base_model.set_adapter(["default", "other"])


def hooked(model):
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default").register_forward_hook(
        lambda *_: None
    )


SEVERAL, ELSE = "several adapters or a variant of LoRA", adapters._ELSE
OWN = {
    "a direction and a magnitude": (lora(use_dora=True), lambda _: None, {SEVERAL: 7}),
    "a bias in adapters": (lora(lora_bias=True), lambda _: None, {ELSE: 7}),
    "two adapters": (lora(), second, {SEVERAL: 7}),
    "hooks on a part": (lora(target_modules=["q_proj"]), hooked, {ELSE: 1}),
    "an adapter that is disabled": (lora(), lambda model: model.base_model.disable_adapter_layers(), {}),
    "an adapter that is merged": (lora(), lambda model: model.merge_adapter(), {}),
}


@pytest.mark.filterwarnings("ignore:Already following adapters were merged")
@pytest.mark.parametrize(("config", "change", "said"), OWN.values(), ids=OWN)
def test_peft_s_own_code_runs_with_its_bits(config, change, said, calls):
    model = adapted(config)
    change(model)
    model.requires_grad_()  # of a disabled adapter nothing else learns
    expected = step(model)
    tilekern.apply(**LORA)
    assert same(step(model), expected)
    assert fallbacks() == said
    assert not calls


def test_adapters_chosen_for_each_row_are_peft_s(calls):
    model = adapted().eval()
    expected = model(input_ids=IDS, adapter_names=["default", "__base__"]).logits
    tilekern.apply(**LORA)
    assert torch.equal(model(input_ids=IDS, adapter_names=["default", "__base__"]).logits, expected)
    assert fallbacks() == {adapters._ROWS: 7}
    assert not calls


AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
CASTS = {
    "adapters of float32 under autocast": (torch.bfloat16, True, AUTOCAST, {}),
    "all of float32 under autocast": (torch.float32, False, AUTOCAST, {}),
    "adapters of bfloat16": (torch.bfloat16, False, contextlib.nullcontext, {}),
    "adapters of float32 outside of it": (torch.bfloat16, True, contextlib.nullcontext, {}),
}


@pytest.mark.parametrize(("dtype", "cast", "mode", "said"), CASTS.values(), ids=CASTS)
def test_dtypes(dtype, cast, mode, said, calls):
    """Gradients of adapters have their dtype; errors are as PEFT's, against float32."""
    exact = step(adapted())
    theirs, ours = adapted(dtype=dtype, cast=cast), adapted(dtype=dtype, cast=cast)
    with mode():
        expected = step(theirs)
        tilekern.apply_to_model(ours, **LORA)
        found = step(ours)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert fallbacks() == said
    assert same(found, expected) == bool(said)
    assert len(calls) == (0 if said else 7)
    # Each of the two is the better one of some drawn tokens.
    own, other = (worst([x.float() for x in each], exact) for each in (found, expected))
    assert own <= 2 * other + 4e-3


def test_adapters_that_round_more_than_their_layer_are_peft_s(calls):
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    expected = step(model)
    tilekern.apply_to_model(model, **LORA)
    assert same(step(model), expected)
    assert fallbacks() == {"an adapter of another dtype than its layer's or float32, outside of autocast": 7}
    assert not calls


def test_without_gradients_the_results_are_the_same(calls):
    model = adapted().eval()
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        tilekern.apply(**LORA)
        torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    assert calls == [1] * 7


def test_a_scale_that_changes_is_read_at_each_call(calls):
    model = adapted()
    tilekern.apply(**LORA)
    for module in model.modules():
        if isinstance(module, peft_layers.Linear):
            module.scale_layer(3.0)
    found = step(model)
    tilekern.reset()
    assert worst(found, step(model)) < 1e-5
    assert len(calls) == 7


def test_in_the_invariant_mode_the_products_are_apart_as_peft_s():
    model = adapted()
    with tilekern.invariant():
        expected = step(model)
        tilekern.apply(**LORA)
        assert same(step(model), expected)


def test_other_code_of_peft_is_left_alone_and_said(monkeypatch):
    monkeypatch.setattr(peft_layers.Linear, "forward", lambda self, x: self.base_layer(x))
    with pytest.warns(tilekern.errors.TilekernWarning) as said:
        assert tilekern.apply(**LORA) == []
    (warning,) = said
    assert "lora is not patched: peft.tuners.lora.layer.Linear.forward is not the code" in str(warning.message)
    assert "Install a peft release that this tilekern knows (0.18.0 to 0.21.2)" in str(warning.message)


def test_a_family_alone_leaves_peft_alone():
    tilekern.apply(model_type="llama")
    assert "lora" not in tilekern.get_patched_ops()
    tilekern.apply(**LORA)
    tilekern.apply(model_type="llama")
    assert "lora" in tilekern.get_patched_ops()
    tilekern.apply(lora=False)
    assert "lora" not in tilekern.get_patched_ops()


@pytest.mark.slow
def test_torch_compile_takes_peft_s_code(calls):
    model = adapted()
    expected = step(model)
    tilekern.apply(**LORA)
    compiled = torch.compile(model.base_model.model.model.layers[0].mlp.down_proj, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, compiled.in_features)
    torch.testing.assert_close(compiled(x), model.base_model.model.model.layers[0].mlp.down_proj(x))
    assert calls == [1]
    assert worst(step(model), expected) < 1e-5
