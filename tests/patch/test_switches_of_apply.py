"""The arguments and variables that choose what is patched; the attention and the optimizer of who names none."""

import pickle

import pytest
import tiny_families
import torch
from tiny_families import IDS
from tiny_families import make as make_family
from tiny_qwen3 import make
from transformers import AutoConfig, AutoModelForCausalLM

import tilekern
import tilekern.fp8
from tilekern.errors import InputError
from tilekern.patch import defaults
from tilekern.runtime.settings import CHOICES
from tilekern.runtime.switches import EXTRAS, OPS, switches_of

NONE = dict.fromkeys(OPS, False)
DOORS = {
    "apply": tilekern.apply,
    "apply_to_model": lambda *given, **named: tilekern.apply_to_model(make(), *given, **named),
}


@pytest.fixture(params=DOORS)
def door(request):
    return DOORS[request.param]


def test_a_name_in_the_place_of_a_switch_is_refused_with_a_hint(door):
    with pytest.raises(InputError) as refused:
        door("rope")
    assert "the switch rms_norm must be True or False, got 'rope'" in str(refused.value)
    hint = str(refused.value).rpartition("for rope alone: tilekern.apply(")[2]
    assert hint == '**tilekern.runtime.switches.switches_of("rope"))'
    assert not tilekern.get_patched_ops()
    assert tilekern.apply(**switches_of("rope")) == ["rope"]


@pytest.mark.parametrize("value", [1, 0, None, "True", "", ["rope"], torch.tensor(True)])
@pytest.mark.parametrize("name", ["swiglu", "experts", "mlp"])
def test_other_values_are_refused(door, name, value):
    with pytest.raises(InputError, match=f"the switch {name} must be True or False, got "):
        door(**{name: value})
    assert not tilekern.get_patched_ops()


def test_wrong_arguments_are_told_which_function_takes_them():
    with pytest.raises(InputError, match=r"tilekern.apply_to_model\(model\)"):
        tilekern.apply(make())
    with pytest.raises(InputError, match="apply_to_model takes a model"):
        tilekern.apply_to_model("rope")
    with pytest.raises(InputError, match=r"model.set_attn_implementation\(\"tilekern\"\)"):
        tilekern.apply_to_model(make(), attention=True)


@pytest.mark.parametrize("value", ["foo", "FALLBACK", " 1", "yes"])
@pytest.mark.parametrize("name", [*CHOICES, "TILEKERN_APPLY", "TILEKERN_LOOKUP_AGAIN_S"])
def test_variables_with_unknown_values_are_refused_before_anything_is_patched(door, monkeypatch, name, value):
    if (name, value) == ("TILEKERN_LOOKUP_AGAIN_S", " 1"):
        pytest.skip("a number with a space before it")
    if (name, value) == ("TILEKERN_APPLY", " 1"):
        pytest.skip("its words may have spaces around them")
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=name):
        door()
    assert not tilekern.get_patched_ops()


@pytest.mark.parametrize("name", [*CHOICES, "TILEKERN_APPLY", "TILEKERN_LOOKUP_AGAIN_S"])
def test_an_empty_variable_is_as_not_set(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert tilekern.apply(**switches_of("rope")) == ["rope"]


def test_command_lines_refuse_them_too(monkeypatch, capsys):
    import tilekern.patch.__main__
    import tilekern.run
    import tilekern.tuning.cli
    from tilekern.cache_tools.__main__ import main as tools

    monkeypatch.setenv("TILEKERN_ON_MISS", "fallbak")
    for main in (tilekern.tuning.cli.main, tilekern.run.main, tilekern.patch.__main__.main, tools):
        assert main(["ls"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        said = "unknown value 'fallbak'; known: compile, fallback, error; did you mean fallback?"
        assert line == f"tilekern: TILEKERN_ON_MISS: {said}"


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("llama", "tilekern"),
        ("gemma2", "tilekern"),
        ("gpt_oss", "tilekern"),
        ("gpt_neo", "eager"),
        ("deepseek_v32", "sdpa"),
    ],
)
def test_models_without_a_name_of_an_attention_get_ours(monkeypatch, family, chosen):
    """GPT-Neo has a class for each attention that it knows, and DeepSeek V3.2 hands over chosen keys."""
    monkeypatch.setattr(tiny_families, "_made", lambda auto, config: auto.from_config(config))
    monkeypatch.delitem(tiny_families.SIZES, "attn_implementation")
    before = make_family(family)[0]
    assert tilekern.apply(**NONE, attention=True) == ["attention"]
    assert list(tilekern.get_patched_ops()) == ["attention"]
    model = make_family(family)[0].eval()
    assert model.config._attn_implementation == chosen
    model.load_state_dict(before.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, before.eval()(input_ids=IDS).logits)
    assert tilekern.reset() == ["attention"]
    assert make_family(family)[0].config._attn_implementation == before.config._attn_implementation


def test_a_name_that_is_given_stays_and_a_second_call_takes_ours_back():
    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=61
    )
    for _ in range(2):
        tilekern.apply(**NONE, attention=True)
    for name in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=name)
        assert model.config._attn_implementation == name
    tilekern.apply(**NONE)
    assert not defaults.is_attention_on()
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_torch_s_adamw_is_ours_as_long_as_it_is_asked_for():
    from torch.optim import AdamW  # as a script imports it, before

    weight = torch.nn.Parameter(torch.ones(4))
    assert tilekern.apply(**NONE, adamw=True) == ["adamw"]
    made = AdamW([weight], lr=0.1, fused=True)
    assert isinstance(made, tilekern.AdamW)
    assert isinstance(made, AdamW)
    weight.grad = torch.ones(4)
    made.step()
    copied = pickle.loads(pickle.dumps(made))
    assert isinstance(copied, tilekern.AdamW)
    assert copied.state_dict()["state"][0]["step"] == 1
    subclass = type("Mine", (AdamW,), {})
    assert type(subclass([weight])) is subclass
    with pytest.raises(TypeError, match="params"):
        AdamW()
    assert tilekern.reset("adamw") == ["adamw"]
    assert type(AdamW([weight], lr=0.1, fused=False)) is AdamW
    assert tilekern.reset() == []


@pytest.mark.parametrize(
    "given",
    [{"amsgrad": True}, {"capturable": True}, {"differentiable": True}, {"betas": (0.9, 0.99), "amsgrad": True}],
)
def test_an_optimizer_that_ours_does_not_do_is_torch_s(given, recwarn):
    tilekern.apply(**NONE, adamw=True)
    assert type(torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))], **given)) is torch.optim.AdamW
    tilekern.reset()


def test_what_is_off_by_default_stays_off():
    assert not set(EXTRAS).intersection(tilekern.apply())
    assert not defaults.is_adamw_on()
    assert not defaults.is_attention_on()


@pytest.mark.parametrize(
    "function", ["apply_to_model", "report", "graphed", "warmup_all_kernels", "convert", "restore"]
)
def test_what_is_no_model_is_refused(function):
    called = getattr(tilekern.fp8 if function in ("convert", "restore") else tilekern, function)
    with pytest.raises(InputError, match=f"{function} takes a model, a torch.nn.Module, got str"):
        called("qwen3-8b")


def test_a_format_in_the_place_of_a_choice_of_layers_is_refused():
    with pytest.raises(InputError, match="convert: chosen is a function of a layer's name and the layer, got 'mxfp8'"):
        tilekern.fp8.convert(torch.nn.Linear(256, 256), "mxfp8")


def test_a_family_that_is_no_text_is_refused():
    with pytest.raises(InputError, match="unknown model type 3"):
        tilekern.apply(model_type=3)
