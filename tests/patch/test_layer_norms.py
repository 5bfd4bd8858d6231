"""Layer norms of language models: which calls the op takes, and which run torch's own."""

import pytest
import torch
from tiny_families import IDS, make
from tiny_qwen3 import launched, launches, same, worst
from transformers import GPT2Config
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.nemotron import modeling_nemotron as nemotron
from transformers.models.olmo import modeling_olmo as olmo
from transformers.models.stablelm import modeling_stablelm as stablelm

import tilekern

pytestmark = pytest.mark.usefixtures("interpreted")
WAYS = [lambda _: tilekern.apply(model_type="gpt2"), tilekern.apply_to_model]


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def served(call):
    """How many norms a forward kernel made, alone or with a sum."""
    before = launches()
    call()
    return sum(launched(before).get(name, 0) for name in ("layer_norm_forward", "fused_add_layer_norm_forward"))


@pytest.mark.parametrize("way", WAYS, ids=["class", "model"])
def test_those_of_gpt2_are_served_and_put_back(way):
    model = make("gpt2")[0].eval()
    reference = step(model)
    for _ in range(2):
        way(model)
        assert "layer_norm" in tilekern.get_patched_ops()
        before = launches()
        assert worst(step(model), reference) < 1e-5
        ran = launched(before)
        assert ran["layer_norm_forward"] == ran["layer_norm_backward"] == 3
        assert ran["fused_add_layer_norm_forward"] == ran["fused_add_layer_norm_backward"] == 2
        tilekern.reset()
        assert served(lambda: step(model)) == 0
        assert same(step(model), reference)


def test_one_op_can_be_left_out_and_taken_back():
    model = make("gpt2")[0]
    assert tilekern.apply(model_type="gpt2", layer_norm=False) == ["mlp", "fused_linear_cross_entropy"]
    assert served(lambda: step(model)) == 0
    tilekern.apply(model_type="gpt2")
    assert served(lambda: step(model)) == 5
    assert tilekern.reset("layer_norm") == ["layer_norm"]
    assert served(lambda: step(model)) == 0


@pytest.mark.parametrize("way", WAYS, ids=["class", "model"])
def test_checkpointing_and_captured_states_stay(way):
    model = make("gpt2")[0].train()
    with torch.no_grad():
        expected = model(input_ids=IDS, output_hidden_states=True).hidden_states
    reference = step(model)
    way(model)
    with torch.no_grad():
        states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    assert worst(states, expected) < 1e-5
    model.gradient_checkpointing_enable()
    before = launches()
    assert worst(step(model), reference) < 1e-5
    ran = launched(before)
    assert (ran["layer_norm_forward"], ran["fused_add_layer_norm_forward"]) == (5, 4), "each block's norms run twice"


@pytest.mark.parametrize(
    ("way", "number"), [(lambda _: tilekern.apply(model_type="phi"), 7), (tilekern.apply_to_model, 3)]
)
def test_those_of_heads_are_served_where_the_rotation_is_not_the_method_s_own_stand_in(way, number):
    """One method of a model has one stand-in: the rotation's."""
    model = make("phi")[0].eval()
    expected = model(input_ids=IDS).logits
    for _ in range(2):
        assert {"layer_norm", "rope"} <= set(way(model))
        before = launches()
        assert worst([model(input_ids=IDS).logits], [expected]) < 1e-5
        counted = launched(before)
        assert (counted["layer_norm_forward"], counted["rope"]) == (number, 2)
    told = {row.reason for row in tilekern.report(model).rows if (row.kind, row.op) == ("PhiAttention", "layer_norm")}
    assert told == {"" if number == 7 else "rope has its forward"}


class Own(torch.nn.LayerNorm):
    def forward(self, input):
        return super().forward(input) * 2


def with_hook(norm):
    norm.register_forward_hook(lambda *told: told[-1] * 2)
    return norm


def with_forward(norm):
    inner = norm.forward
    norm.forward = lambda x: inner(x) * 2
    return norm


def with_parametrization(norm):
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Tanh())
    return norm


OTHERS = {
    "subclass": lambda _: Own(24),
    "other class": lambda _: torch.nn.Identity(),
    "hook": with_hook,
    "forward": with_forward,
    "parametrization": with_parametrization,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_norms_run_as_they_are(other):
    model = make("gpt2")[0].eval()
    tilekern.apply(model_type="gpt2")
    first = model.transformer.h[0]
    first.ln_1 = other(first.ln_1)
    logits = []
    assert served(lambda: logits.append(model(input_ids=IDS).logits)) == 4
    tilekern.reset()
    assert worst(logits, [model(input_ids=IDS).logits]) < 1e-5


@pytest.mark.parametrize(
    ("norm", "number"),
    [
        (torch.nn.LayerNorm(24, bias=False), 1),
        (torch.nn.LayerNorm(24, elementwise_affine=False), 1),
        (torch.nn.LayerNorm((3, 24)), 0),
    ],
)
def test_a_norm_without_bias_or_weight_is_served_one_of_two_dimensions_is_not(norm, number):
    tilekern.apply(model_type="gpt2")
    block = make("gpt2")[0].transformer.h[0].eval()
    block.ln_1 = norm
    x = torch.randn(2, 3, 24)
    results = []
    assert served(lambda: results.append(block(x))) == 1 + number
    tilekern.reset()
    assert worst(results, [block(x)]) < 1e-5


def test_a_sum_and_its_norm_have_the_steps_of_cross_attention_between_them():
    """GPT-2's layer has an ``if`` there; the sum of its branch runs as it is, and the norms by themselves."""
    block = GPT2Block(GPT2Config(n_embd=24, n_head=3, add_cross_attention=True), layer_idx=0).eval()
    x, other = torch.randn(2, 3, 24), torch.randn(2, 4, 24)
    expected = block(x, encoder_hidden_states=other)
    tilekern.apply(model_type="gpt2")
    results, before = [], launches()
    results.append(block(x, encoder_hidden_states=other))
    assert launched(before).keys() == {"layer_norm_forward", "activation_forward"}
    assert worst(results, [expected]) < 1e-5


@pytest.mark.parametrize("changed", ["dtype", "shape"])
def test_a_sum_of_other_terms_runs_by_itself(changed):
    """Of two dtypes, or one of which is broadcast."""
    tilekern.apply(model_type="gpt2")
    block = make("gpt2")[0].transformer.h[0].eval()
    attend = block.attn.forward

    def other(*given, **named):
        y, *rest = attend(*given, **named)
        return (y.bfloat16() if changed == "dtype" else y[:, :1], *rest)

    block.attn.forward = other
    x, results, before = torch.randn(2, 3, 24), [], launches()
    results.append(block(x))
    assert "fused_add_layer_norm_forward" not in launched(before)
    tilekern.reset()
    assert worst(results, [block(x)]) < 1e-5


def test_autocast_has_norms_give_what_they_do_without_the_op():
    block = make("gpt2")[0].transformer.h[0].eval()
    results = []
    for apply in (False, True):
        if apply:
            tilekern.apply(model_type="gpt2")
        with torch.autocast("cpu", torch.bfloat16):
            results.append(block(torch.ones(1, 3, 24, dtype=torch.bfloat16).cumsum(-1)))
            results.append(block(torch.ones(1, 3, 24).cumsum(-1)))
    for one, other in zip(results[:2], results[2:], strict=True):
        assert one.dtype == other.dtype
        assert worst([other], [one]) < 1e-2


# Norms and their arguments; the last two have weights for each of five heads.
NORMS = [
    (cohere.CohereLayerNorm, {"hidden_size": 24}),
    (nemotron.NemotronLayerNorm1P, {"normalized_shape": 24}),
    (olmo.OlmoLayerNorm, {"hidden_size": 24}),
    (cohere.CohereLayerNorm, {"hidden_size": (5, 24)}),
    (stablelm.StableLmLayerNormPerHead, {"dim": 24, "num_heads": 5}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "arguments"), NORMS, ids=lambda x: getattr(x, "__name__", ""))
def test_norms_of_families_own_give_what_they_did(kind, arguments, dtype):
    norm = kind(**arguments).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    x = torch.randn(2, 5, 24, dtype=dtype)
    x = (x[:, :, None] if kind is stablelm.StableLmLayerNormPerHead else x).requires_grad_()

    def run():
        y = norm(x)
        return [y, *torch.autograd.grad(y, [x, *norm.parameters()], torch.ones_like(y).cumsum(-1))]

    expected = run()
    tilekern.apply(model_type=kind.__module__.split(".")[-2])
    found = []
    assert served(lambda: found.extend(run())) == 1
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    assert worst(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_norms_of_heads_that_differ_run_as_they_are():
    tilekern.apply(model_type="stablelm")
    norm = stablelm.StableLmLayerNormPerHead(8, 3)
    norm.norms[1].eps = 0.1
    assert served(lambda: norm(torch.randn(2, 3, 5, 8))) == 0
    norm = stablelm.StableLmLayerNormPerHead(8, 3)
    norm.norms[2].register_forward_hook(lambda *told: told[-1])
    assert served(lambda: norm(torch.randn(2, 3, 5, 8))) == 0
