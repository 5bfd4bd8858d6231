"""Patched models under autocast, checkpointing, no_grad, torch.compile, and used twice in a graph."""

import functools

import pytest
import torch
from tiny_qwen3 import FORWARD, IDS, apply, launched, launches, make, same, step, worst
from torch.autograd import forward_ad

import tilekern

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]
ways = pytest.mark.parametrize("way", [lambda _: apply(), tilekern.apply_to_model], ids=["class", "model"])


@ways
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(way, reentrant):
    model = make().train()
    reference = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    way(model)
    before = launches()
    assert worst(step(model), reference) < 1e-5
    assert launched(before)["swiglu_forward"] == 4, "each layer's forward runs twice"
    assert launched(before)["swiglu_backward_remake"] == 2
    assert launched(before)["fused_add_rms_norm_forward"] == launched(before)["qk_norm_rope_forward"] == 4
    assert launched(before)["fused_add_rms_norm_backward"] == launched(before)["qk_norm_rope_backward"] == 2


@ways
def test_a_cache_is_not_filled_twice_by_a_layer_that_runs_twice(way):
    from transformers import DynamicCache

    model = make().train()
    layer, given = model.model.layers[0], {}
    layer.register_forward_pre_hook(lambda _layer, _args, kwargs: given.update(kwargs), with_kwargs=True)
    model(input_ids=IDS)
    (name,) = {"cache", "past_key_values"} & given.keys()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    way(model)
    x = torch.randn(1, 7, model.config.hidden_size, requires_grad=True)
    cache = DynamicCache()
    places = {key: given[key] for key in ("position_embeddings", "position_ids") if key in given}
    out = layer(x, attention_mask=None, use_cache=True, **places, **{name: cache})
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert cache.get_seq_length() == 0


@ways
def test_autocast(way):
    model = make()
    exact = step(model)
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(model)
        way(model)
        before = launches()
        patched = step(model)
    # The residual is float32 and what the attention adds is not, so that the sum is not fused.
    assert launched(before)["rms_norm_backward"] == 5
    assert launched(before)["qk_norm_rope_backward"] == 2
    assert all(tensor.dtype == torch.float32 for tensor in patched[1:])
    for ours, torchs, reference in zip(patched, plain, exact, strict=True):
        assert worst([ours], [reference]) <= 1.25 * worst([torchs], [reference]) + 4e-3


@ways
@pytest.mark.parametrize("attention", ["tilekern", "sdpa"])
def test_on_meta(way, attention):
    with torch.device("meta"):
        model = make()
        way(model)
        model.set_attn_implementation(attention)
        loss = model(input_ids=IDS.to("meta"), labels=IDS.to("meta")).loss
        loss.backward()
    assert loss.shape == ()
    assert all(x.grad.shape == x.shape for x in model.parameters())


@ways
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(way, mode):
    model = make()
    with mode():
        wanted = model(input_ids=IDS).logits
        way(model)
        before = launches()
        assert worst([model(input_ids=IDS).logits], [wanted]) < 1e-5
    assert set(launched(before)) == FORWARD


@pytest.mark.parametrize("attention", ["eager", "tilekern"])
@pytest.mark.parametrize("patched", [True, False])
def test_forward_mode_derivatives_are_refused_and_not_wrong(attention, patched):
    """Also where nothing needs a gradient, so that autograd does not know of the ops."""
    apply()
    if not patched:
        tilekern.reset()
    model = make(attention=attention).requires_grad_(False)
    embedded = torch.randn(2, 7, 80)
    with forward_ad.dual_level():
        given = forward_ad.make_dual(embedded, embedded)
        if patched or attention == "tilekern":
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                model(inputs_embeds=given)
        else:
            assert forward_ad.unpack_dual(model(inputs_embeds=given).logits).tangent is not None


@ways
def test_one_module_twice_in_a_graph(way):
    model = make()
    model.model.layers[1] = model.model.layers[0]

    def twice():
        model.zero_grad()
        first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, IDS[:1, :3]))
        (first + second).backward()
        return [first.detach(), second.detach(), *(p.grad.clone() for p in model.parameters())]

    reference = twice()
    way(model)
    assert worst(twice(), reference) < 1e-5


@pytest.mark.slow
@ways
@pytest.mark.share(2)
def test_compiled_in_one_graph_before_and_after(way):
    torch._dynamo.reset()
    model = make(layers=1)
    reference = step(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    unpatched = step(compiled)
    before = launches()
    way(compiled)
    assert worst(step(compiled), reference) < 1e-5, "the compiled model is compiled again"
    assert launched(before)["qk_norm_rope_backward"] == 1
    tilekern.reset()
    before = launches()
    assert same(step(compiled), unpatched)
    assert not launched(before)


@pytest.mark.slow
@pytest.mark.nightly
def test_compiled_by_inductor(monkeypatch):
    """By a C++ compiler that optimizes nothing and is not asked for vectors: what is made is run once."""
    monkeypatch.setattr(torch._inductor.config.aot_inductor, "debug_compile", True)
    # Whether it has them is found out by compiling a program for each kind that a CPU may have.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", False)
    torch._dynamo.reset()
    model = make(layers=1)
    reference, before = step(model), launches()
    apply()
    compiled = torch.compile(model, fullgraph=True)
    assert worst(step(compiled), reference) < 1e-5
    assert launched(before)["qk_norm_rope_backward"] == 1


@ways
def test_hidden_states_and_attentions_are_still_recorded(way):
    model = make()
    run = functools.partial(model, input_ids=IDS, output_hidden_states=True, output_attentions=True)
    wanted = run()
    way(model)
    found = run()
    assert worst(found.hidden_states, wanted.hidden_states) < 1e-5
    assert worst(found.attentions, wanted.attentions) < 1e-5
    tilekern.reset()
    assert same(run().attentions, wanted.attentions)
