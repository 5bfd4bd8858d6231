"""A decoder layer is one op while its modules do no more than that op, in each call anew."""

import copy
import gc
import io
import weakref
from collections import OrderedDict

import pytest
import tiny_families
import torch
from tiny_qwen3 import IDS, apply, make, step
from torch.nn.utils import parametrize
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import output_capturing

import tilekern
from tilekern.errors import TilekernWarning
from tilekern.patch import families, matching, whole_layers

pytestmark = pytest.mark.usefixtures("interpreted")
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "vocab_size": 99, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def served(monkeypatch):
    """Whether each layer that asked for the op got it, in the order of the calls."""
    found = []

    def layer(*given):
        y = whole(*given)
        found.append(y is not None)
        return y

    whole = whole_layers.decoder_layer
    monkeypatch.setattr(whole_layers, "decoder_layer", layer)
    return found


def small(attention="tilekern", **changes):
    return make(attention=attention, use_cache=False, **changes).train()


def near(results, references):
    """Whether float32 explains all differences."""
    pairs = list(zip(results, references, strict=True))
    return all(float((one - other).abs().max()) <= 1e-5 * float(other.abs().max()) + 1e-7 for one, other in pairs)


def steps_of(model, served, **given):
    served.clear()
    return step(model, **given)


# Gemma's layers have windows in turns, and other scales than those of their heads' size.
MIXED = {
    "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 40,
    "attn_logit_softcapping": 2.0,
}  # fmt: skip
FAMILIES = {
    "llama": {}, "mistral": {"sliding_window": 3}, "qwen2": {}, "qwen3": {}, "ministral": {}, "cwm": {}, "gemma": {},
    "gemma2": MIXED, "gemma3": MIXED,
}  # fmt: skip


def of_family(family, attention="tilekern", **changes):
    torch.manual_seed(0)
    name = "gemma3_text" if family == "gemma3" else family
    config = AutoConfig.for_model(name, **SIZES, **FAMILIES[family], use_cache=False, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        # As a model has learnt them.
        for weight in (module.weight for name, module in model.named_modules() if name.endswith("norm")):
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


ROWS = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_the_form_train_by_it(family, served, monkeypatch):
    expected = step(of_family(family, "eager"), ROWS)
    tilekern.apply(model_type=family)
    found = steps_of(of_family(family), served, ids=ROWS)
    assert near(found, expected)
    assert served == [True, True]
    monkeypatch.setattr(whole_layers, "decoder_layer", lambda *_: None)
    assert torch.equal(step(of_family(family), ROWS)[0], found[0])


def test_the_ops_that_it_is_made_of_must_all_be_on(served):
    expected = step(small("eager"))
    for op in ("rms_norm", "swiglu", "rope", "qk_norm_rope", "fused_add_rms_norm"):
        apply(**{op: False})
        assert near(steps_of(small(), served), expected)
        assert not served, op
    apply()
    assert near(steps_of(small(), served), expected)
    assert served == [True, True]


def layer_numbers(name, value):
    def change(layer):
        owner, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(owner), attribute, value)

    return change


def other_gates(layer):
    layer.mlp.act_fn = torch.nn.SiLU()


def a_hook_behind(name):
    def change(layer):
        layer.get_submodule(name).register_forward_hook(lambda *given: 2 * given[-1])

    return change


# What changes in the first layer between two steps of Gemma's, and whether it is one op then.
OF_GEMMA = {
    "the eps of all norms before the MLP": (
        lambda layer: [
            layer_numbers(f"{name}.eps", 0.5)(layer)
            for name in ("post_attention_layernorm", "pre_feedforward_layernorm")
        ], True,
    ),
    "the eps of the last norm": (layer_numbers("post_feedforward_layernorm.eps", 0.5), True),
    "the eps of one of two norms": (layer_numbers("pre_feedforward_layernorm.eps", 0.5), False),
    "the eps of one head's norm": (layer_numbers("self_attn.q_norm.eps", 0.5), False),
    "another scale": (layer_numbers("self_attn.scaling", 0.7), True),
    "another window": (layer_numbers("self_attn.sliding_window", 2), True),
    "other gates": (other_gates, True),
    "both directions": (layer_numbers("self_attn.is_causal", False), False),
    **{
        f"a hook on {name}": (a_hook_behind(name), False)
        for name in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
            "self_attn.k_norm", "mlp.act_fn",
        )
    },
}  # fmt: skip


def second_step(family, attention, change, served):
    model = of_family(family, attention)
    step(model, ROWS)
    change(model.model.layers[0])
    return steps_of(model, served, ids=ROWS)


@pytest.mark.parametrize("kind", OF_GEMMA)
def test_what_changes_in_a_layer_of_gemma_s_is_heeded(kind, served):
    change, is_whole = OF_GEMMA[kind]
    expected = second_step("gemma3", "tilekern", change, served)
    assert not served
    tilekern.apply(model_type="gemma3")
    assert near(second_step("gemma3", "tilekern", change, served), expected)
    assert served == [True] * (1 + is_whole)


# Of Gemma-3's code: what is written otherwise.
OTHERWISE = {
    "a number from elsewhere": ("sliding_window=self.sliding_window", "sliding_window=self.config.window"),
    "a cap from elsewhere": ("sliding_window=", "softcap=self.config.cap, sliding_window="),
    "norms of two kinds": ("self.q_norm = Gemma3RMSNorm", "self.q_norm = OtherRMSNorm"),
    "norms that may have no weight": (
        "output = output * (1.0 + self.weight.float())",
        "if self.with_scale:\n            output = output * self.weight.float()",
    ),
    "other angles": ("return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"),
}


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_layer_with_other_code_is_not_one_op(kind):
    llama, gemma = (
        matching.path_of(families.module_of(name)).read_text(encoding="utf-8") for name in ("llama", "gemma3")
    )
    norm = llama[llama.index("class LlamaRMSNorm") : llama.index("class LlamaRotaryEmbedding")]
    text = gemma + norm.replace("LlamaRMSNorm", "OtherRMSNorm")
    assert matching.Module("gemma3", text).whole("Gemma3DecoderLayer") is not None
    old, new = OTHERWISE[kind]
    assert old in text
    assert matching.Module("gemma3", text.replace(old, new)).whole("Gemma3DecoderLayer") is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_helper_of_norms_that_is_replaced_is_heeded(is_whole, served, monkeypatch):
    def second(attention):
        model = of_family("gemma3", attention)
        step(model, ROWS)
        kind = type(model.model.norm)
        with monkeypatch.context() as patch:
            helper = kind._norm
            patch.setattr(kind, "_norm", lambda self, x: 2 * helper(self, x))
            return steps_of(model, served, ids=ROWS)

    expected = second("eager")
    tilekern.apply(model_type="gemma3", **({} if is_whole else {"swiglu": False}))
    assert near(second("tilekern"), expected)
    assert not served


def test_another_cap_of_scores_is_heeded(served):
    change = layer_numbers("self_attn.attn_logit_softcapping", 0.5)
    expected = second_step("gemma2", "eager", change, served)
    tilekern.apply(model_type="gemma2")
    assert near(second_step("gemma2", "tilekern", change, served), expected)
    assert served == [True, True]


def test_tokens_of_images_see_each_other_and_text_alone_trains_by_it(served):
    """Of an image's tokens each sees all, which the mask says."""
    model, ids, more = tiny_families.make_seeing("gemma3")
    model.eval()  # in training, older releases ask for token types
    model.config.text_config.use_cache = False
    expected = [step(model, *given[:1], **given[1]) for given in ((IDS % 50, {}), (ids, more))]
    tilekern.apply(model_type="gemma3")
    model.set_attn_implementation({"text_config": "tilekern"})
    assert near(steps_of(model, served, ids=IDS % 50), expected[0])
    assert served == [True, True]
    assert near(steps_of(model, served, ids=ids, **more), expected[1])
    assert not served


def hooked(name):
    def change(model):
        seen = []
        module = model.get_submodule(f"model.layers.0.{name}")
        handle = module.register_forward_hook(lambda *_: seen.append(name))
        return lambda: (handle.remove(), seen)[1]

    return change


def test_it_is_said_how_deepspeed_gathers_a_layer_at_once(served):
    def gather(*_):
        """As DeepSpeed's hook."""

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    apply()
    model = small()
    for module in model.modules():
        module.register_forward_pre_hook(gather)
    with pytest.warns(TilekernWarning, match=r'"leaf_module": .*modeling_qwen3.Qwen3DecoderLayer"'):
        step(model)
    assert not served


def of_its_own(name):
    def change(model):
        seen = []
        module = model.get_submodule(f"model.layers.0.{name}")
        forward = module.forward

        def own(*given, **more):
            seen.append(name)
            return forward(*given, **more)

        module.forward = own
        return lambda: (delattr(module, "forward"), seen)[1]

    return change


def exchanged(model):
    class Linear(torch.nn.Linear):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    seen = []
    layer, name = model.model.layers[0].self_attn, "o_proj"
    old = getattr(layer, name)
    new = Linear(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    setattr(layer, name, new)
    return lambda: (setattr(layer, name, old), seen)[1]


def parametrized(model):
    class Same(torch.nn.Module):
        def forward(self, weight):
            seen.append(weight)
            return weight.clone()

    seen = []
    layer = model.model.layers[0].mlp.up_proj
    parametrize.register_parametrization(layer, "weight", Same())
    return lambda: (parametrize.remove_parametrizations(layer, "weight"), seen)[1]


def of_a_class(model):
    kind, seen = type(model.model.layers[0].mlp), []
    forward = kind.forward

    def other(self, x):
        seen.append(x)
        return forward(self, x)

    kind.forward = other
    return lambda: (setattr(kind, "forward", forward), seen)[1]


def global_hook(model):
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    return lambda: (handle.remove(), seen)[1]


def compiled(model):
    seen, mlp = [], model.model.layers[0].mlp
    # As torch.nn.Module.compile does.
    mlp._compiled_call_impl = lambda *given: (seen.append(1), mlp._call_impl(*given))[1]
    return lambda: (delattr(mlp, "_compiled_call_impl"), seen)[1]


INSIDE = [
    "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.o_proj", "self_attn.k_norm",
    "post_attention_layernorm", "mlp", "mlp.act_fn", "mlp.down_proj",
]  # fmt: skip
CHANGES = {
    **{f"a hook on {name}": hooked(name) for name in INSIDE},
    **{f"a forward of {name}'s own": of_its_own(name) for name in INSIDE},
    "another layer": exchanged, "a parametrization": parametrized, "a forward of a class": of_a_class,
    "a hook on all modules": global_hook, "a compiled MLP": compiled,
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_module_does_besides_is_done_when_it_comes_and_not_when_it_has_gone(kind, served):
    expected = step(small("eager"))
    apply()
    model = small()
    assert near(steps_of(model, served), expected)
    assert served == [True, True]
    take_back = CHANGES[kind](model)
    names = [name for name, _ in model.named_parameters()]
    found = steps_of(model, served)
    gradients = dict(zip(names, found[1:], strict=True))
    assert len(served) == (0 if kind in ("a forward of a class", "a hook on all modules") else 1)
    assert take_back()
    order = [name for name, _ in model.named_parameters()]
    moved = "model.layers.0.mlp.up_proj.parametrizations.weight.original"
    assert near([found[0], *(gradients.get(name, gradients.get(moved)) for name in order)], expected)
    assert near(steps_of(model, served), expected)
    assert served == [True, True]


def biased(name):
    def change(model, _):
        layer = model.get_submodule(f"model.layers.0.{name}")
        layer.bias = torch.nn.Parameter(torch.full((layer.out_features,), 0.01))

    return change


def hooks_of_another_dictionary(model, _):
    layer = model.model.layers[0].mlp.down_proj
    layer._forward_hooks = OrderedDict()
    layer.register_forward_hook(lambda *given: 2 * given[-1])


def parameters_of_another_dictionary(model, _):
    layer = model.model.layers[0].mlp.down_proj
    layer._parameters = {"weight": torch.nn.Parameter(2 * layer.weight.detach()), "bias": None}


def plain_attribute(model, _):
    layer = model.model.layers[0].self_attn.q_proj
    weight = layer._parameters.pop("weight")
    layer.weight = 2 * weight.detach()


def buffer(model, _):
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_buffer("weight", layer._parameters.pop("weight").detach())


def forward_of_another(name):
    def change(model, _):
        first, second = (layer.get_submodule(name) for layer in model.model.layers)
        second.forward = first.forward

    return change


def another_attention(model, monkeypatch):
    name = model.config._attn_implementation
    function = ALL_ATTENTION_FUNCTIONS[name]

    def other(*given, **more):
        y, weights = function(*given, **more)
        return 2 * y, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, other)


# What changes between two steps, what the second is asked, and how many layers are then one op.
LATER = {
    "a bias of a layer that had none": (biased("self_attn.o_proj"), {}, 1),
    "a bias inside the MLP": (biased("mlp.up_proj"), {}, 1),
    "a hook in another dictionary": (hooks_of_another_dictionary, {}, 1),
    "a weight in another dictionary": (parameters_of_another_dictionary, {}, 2),
    "a weight that is a plain attribute, as of FSDP1": (plain_attribute, {}, 2),
    "a weight that is a buffer": (buffer, {}, 1),
    "the forward of another MLP": (forward_of_another("mlp"), {}, 1),
    "the forward of another norm": (forward_of_another("input_layernorm"), {}, 1),
    "another attention of that name": (another_attention, {}, 0),
    "attention to later tokens": (lambda *_: None, {"is_causal": False}, 0),
    "what Trainer tells of the batch": (lambda *_: None, {"num_items_in_batch": 9}, 2),
}


@pytest.mark.parametrize("kind", LATER)
def test_what_comes_between_two_steps_is_heeded(kind, served, monkeypatch):
    change, given, layers = LATER[kind]

    def second_step(attention):
        model = small(attention)
        step(model)
        change(model, monkeypatch)
        return steps_of(model, served, **given)

    expected = second_step("sdpa")
    apply()
    assert near(second_step("tilekern"), expected)
    assert served == [True] * layers


def test_dropout_masks_caches_and_other_attentions_are_the_model_s(served):
    apply()
    padded = torch.ones_like(IDS).index_put((torch.tensor(0), torch.arange(3)), torch.tensor(0))
    cases = (
        (small(attention_dropout=0.5), {}),
        (small("sdpa"), {}),
        (small(), {"attention_mask": padded}),
        (small(), {"use_cache": True}),
    )
    for model, given in cases:
        steps_of(model, served, **given)
        assert not served


def test_autocast_to_the_model_s_own_dtype_casts_nothing(served):
    """As trainers train with ``bf16=True``."""
    expected = step(small("eager").bfloat16())
    apply()
    model = small().bfloat16()
    plain = steps_of(model, served)
    assert served == [True, True]
    with torch.autocast("cpu", torch.bfloat16):
        found = steps_of(model, served)
        assert served == [True, True]
    assert all(map(torch.equal, found, plain))
    for one, other in zip(found, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(one.double().ravel(), other.double().ravel(), 0) > 0.99


def test_a_report_counts_the_layers_that_run_as_one_op(served):
    apply()
    model = small()
    assert not tilekern.report(model).whole
    for _ in range(2):
        step(model)
    assert tilekern.report(model).whole == {"model.layers.0": 2, "model.layers.1": 2}
    assert "layers as one op: 2, 4 times in all" in str(tilekern.report(model)).splitlines()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    step(model)
    assert tilekern.report(model).whole == {"model.layers.1": 3}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_float32_train_by_it_under_autocast(family, served, monkeypatch):
    """As TRL's trainers train, unless they are told a dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(of_family(family, "eager"), ROWS)
        tilekern.apply(model_type=family)
        found = steps_of(of_family(family), served, ids=ROWS)
        assert served == [True, True]
        monkeypatch.setattr(whole_layers, "decoder_layer", lambda *_: None)
        by_parts = step(of_family(family), ROWS)
    assert torch.equal(found[0], by_parts[0])
    assert {one.dtype for one in found} == {torch.float32}
    for one, other, part in zip(found, expected, by_parts, strict=True):
        near, usual = (torch.nn.functional.cosine_similarity(x.ravel(), other.ravel(), 0) for x in (one, part))
        assert near > min(0.99, usual - 1e-3), (near, usual)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_packed_rows_are_told_apart(family, served):
    ids, positions = ROWS[:1, :7], torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    expected = step(of_family(family, "eager"), ids[:, :3])[1:]
    rest = step(of_family(family, "eager"), ids[:, 3:])[1:]
    tilekern.apply(model_type=family)
    labels = ids.clone()
    labels[0, 3] = -100
    # Of 2 and of 3 labels.
    both = [(2 * one + 3 * other) / 5 for one, other in zip(expected, rest, strict=True)]
    starts = {"cu_seq_lens_q": torch.tensor([0, 3, 7], dtype=torch.int32)}
    for more in ({}, starts, {**starts, "max_length_q": 4, "cu_seq_lens_k": starts["cu_seq_lens_q"]}):
        found = steps_of(of_family(family), served, ids=ids, labels=labels, position_ids=positions, **more)[1:]
        assert served == [True, True]
        assert near(found, both)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize(("is_half", "bf16"), [(False, False), (True, True), (False, True)])
def test_a_trainer_trains_by_it(family, is_half, bf16, served, tmp_path):
    tilekern.apply(model_type=family)
    model = of_family(family).bfloat16() if is_half else of_family(family)
    options = {"max_steps": 2, "bf16": bf16, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows).train()
    assert served == [True] * 4


def test_hidden_states_and_checkpoints_go_on_working(served):
    expected = step(small("eager"))
    states = small("eager")(input_ids=IDS, output_hidden_states=True).hidden_states
    apply()
    assert near(small()(input_ids=IDS, output_hidden_states=True).hidden_states, states)
    for reentrant in (True, False):
        model = small()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert near(steps_of(model, served), expected)
        # Once a layer: the first way makes its forward without gradients, and the other ends the second one early.
        assert served == [True, True]


def test_hooks_that_collect_hidden_states_change_nothing(served):
    """They stay on attentions; a checkpoint must make again what it kept before there were any."""
    expected = step(small("eager"))
    states = small("eager")(input_ids=IDS, output_hidden_states=True).hidden_states
    apply()
    model = small()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        assert near(model(input_ids=IDS, output_hidden_states=True).hidden_states, states)
    assert model.model.layers[0].self_attn._forward_hooks
    loss.backward()
    assert near([loss.detach(), *(parameter.grad for parameter in model.parameters())], expected)
    for options in ({}, {"output_hidden_states": True}):
        assert near(steps_of(model, served, **options), expected)
        assert served == [True, True]


@pytest.mark.parametrize("index", [0, 1])
def test_hooks_that_collect_what_an_attention_returns_are_called(index, served):
    apply()
    model = small()
    step(model)
    names = ("install_output_capuring_hook", "install_output_capturing_hook")
    install = next(getattr(output_capturing, name) for name in names if hasattr(output_capturing, name))
    install(model.model.layers[0].self_attn, "seen", index)
    steps_of(model, served)
    # The second result is weights, of which there are none.
    assert len(served) == 1 + index


def test_one_model_alone_is_served_and_others_are_not(served):
    expected = step(small("eager"))
    model, other = small(), small()
    tilekern.apply_to_model(model)
    assert near(steps_of(model, served), expected)
    assert served == [True, True]
    assert near(steps_of(other, served), expected)
    assert not served
    copied = copy.deepcopy(model)
    assert near(steps_of(copied, served), expected)
    assert served == [True, True]


def test_a_layer_that_was_seen_can_be_saved_and_freed(served):
    apply()
    model = small()
    steps_of(model, served)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    first = step(model)
    assert near(steps_of(again, served), first)
    assert served == [True, True]
    gone = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    model.model.layers[0].mlp.up_proj = torch.nn.Identity()
    assert gone() is None
    gone = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    del model
    gc.collect()
    assert gone() is None


class OfIds(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


def traced_by_torchscript(model):
    return [torch.jit.trace(OfIds(model), IDS, check_trace=False)(IDS.flip(1))]


def of_each_row(model):
    def loss(given, row):
        return torch.func.functional_call(model, given, kwargs={"input_ids": row[None], "labels": row[None]}).loss

    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return list(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(given, IDS).values())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("error::tilekern.errors.TilekernWarning", "ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("run", [traced_by_torchscript, of_each_row], ids=lambda run: run.__name__)
def test_what_traces_or_transforms_a_model_sees_operations_of_torch(run, served):
    expected = run(small("sdpa"))
    apply()
    assert near(run(small()), expected)
    assert not any(served)
