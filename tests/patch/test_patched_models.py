"""A patched Qwen3 computes what an unpatched one does, however it is called, and is put back bit by bit."""

import functools
import inspect
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from gradient_errors import bound, relative_error
from model_contract import as_exact, both_ways, counted, held, in_one_graph, only
from tiny_qwen3 import FORWARD, IDS, KERNELS, SINGLE, apply, launches, make, same, step, worst
from torch.autograd import forward_ad
from torch.nn.modules import module as modules
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3 import modeling_qwen3

import tilekern
from tilekern.errors import TilekernWarning

interpreted = pytest.mark.usefixtures("interpreted")
# Launches of one step of the two-layer model: 3 norms by themselves (2 of layers' inputs and the last).
FUSED = {
    "rms_norm_forward": 3, "rms_norm_backward": 3, "column_sum": 7, "swiglu_forward": 2,
    "fused_add_rms_norm_forward": 2, "fused_add_rms_norm_backward": 2,
    "qk_norm_rope_forward": 2, "qk_norm_rope_backward": 2, "rope": 0,
}  # fmt: skip
# Without gradients products of few rows have kernels: q, k and v are one launch, and an MLP is two with its gate.
FEW = {"skinny_projections": 2, "skinny_linear": 2 * 2, "swiglu_forward": 0}
FORWARDS = {name: number if name in FORWARD else 0 for name, number in FUSED.items()} | FEW
# The same with nothing fused: 9 norms (4 a layer and the last), 2 MLPs, 2 rotations there and back.
STEP = {"rms_norm_forward": 9, "rms_norm_backward": 9, "column_sum": 9, "swiglu_forward": 2, "rope": 4}
# Each layer's forward runs twice.
AGAIN = {
    "swiglu_forward": 4, "swiglu_backward_remake": 2, "fused_add_rms_norm_forward": 4, "qk_norm_rope_forward": 4,
    "fused_add_rms_norm_backward": 2, "qk_norm_rope_backward": 2,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
PADDED = torch.ones_like(IDS).index_put((torch.tensor(0), torch.arange(3)), torch.tensor(0))


def padded(model):
    model.zero_grad()
    out = model(input_ids=IDS, attention_mask=PADDED, labels=IDS.masked_fill(PADDED == 0, -100))
    out.loss.backward()
    return [out.loss.detach(), out.logits[PADDED.bool()].detach(), *(p.grad.clone() for p in model.parameters())]


def twice(model):
    """One module twice in a graph."""
    model.model.layers[1] = model.model.layers[0]
    model.zero_grad()
    first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, IDS[:1, :3]))
    (first + second).backward()
    return [first.detach(), second.detach(), *(p.grad.clone() for p in model.parameters())]


def recorded(model):
    out = model(input_ids=IDS, output_hidden_states=True, output_attentions=True)
    return [*out.hidden_states, *out.attentions]


def without_gradients(mode):
    def run(model):
        with mode():
            return [model(input_ids=IDS).logits]

    return run


def checkpointed(reentrant):
    """A step without checkpoints and one with them, whose launches add up."""

    def run(model):
        reference = step(model.train())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = step(model)
        model.gradient_checkpointing_disable()
        return [*reference, *found]

    return run


class Doubled(modeling_qwen3.Qwen3RMSNorm):
    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class Named(modeling_qwen3.Qwen3RMSNorm):
    """A norm of somebody's model that computes what its base does."""

    def __init__(self, size):
        super().__init__(size)


class Marked(torch.nn.Parameter):
    pass


def doubled_forward(norm):
    norm.forward = lambda x: 2 * modeling_qwen3.Qwen3RMSNorm.forward(norm, x)


# Norms that do more than their class, which the fused ops would pass over.
NORMS = {
    "hook": lambda norm: norm.register_forward_hook(lambda *given: 2 * given[-1]),
    "backward hook": lambda norm: norm.register_full_backward_hook(lambda _, given, __: (2 * given[0],)),
    "class": lambda norm: setattr(norm, "__class__", Doubled),
    "forward": doubled_forward,
    "weight": lambda norm: setattr(norm, "weight", Marked(2 * norm.weight.detach())),
}


def with_norms(change):
    """A model, in whose first layer two norms are changed."""
    model = make()
    layer = model.model.layers[0]
    for norm in (layer.self_attn.k_norm, layer.post_attention_layernorm):
        change(norm)
    return model


class Case(NamedTuple):
    """A model, what is made of it, and the launches in that."""

    model: Any
    kernels: dict[str, int]
    run: Any = step
    ops: dict[str, bool] = {}  # noqa: RUF012


SUMMED = {name: FUSED[name] + AGAIN[name] for name in AGAIN if name in FUSED}
CASES = {
    **{
        f"{attention}, {heads} of keys, {name}": Case(functools.partial(make, heads, attention), kernels, ops=ops)
        for attention in ("eager", "sdpa")
        for heads in (1, 5)
        for name, kernels, ops in (("fused", FUSED, {}), ("single", STEP, SINGLE))
    },
    "padding on the left": Case(lambda: make().eval(), {"qk_norm_rope_backward": 2}, padded),
    "a window": Case(functools.partial(make, **WINDOW), FUSED),
    "a module twice": Case(make, {}, twice),
    # Its first forward has no gradients.
    "checkpointing, reentrant": Case(make, SUMMED | FEW | {"swiglu_forward": 4}, checkpointed(True)),
    "checkpointing": Case(make, SUMMED, checkpointed(False)),
    "hidden states and attentions": Case(make, {"rms_norm_forward": 3, "qk_norm_rope_forward": 2}, recorded),
    "no_grad": Case(make, FORWARDS, without_gradients(torch.no_grad)),
    "inference_mode": Case(make, FORWARDS, without_gradients(torch.inference_mode)),
    "a class of norms that inherits all": Case(
        functools.partial(with_norms, lambda norm: setattr(norm, "__class__", Named)), FUSED
    ),
    # The first layer's rotation runs alone, there and back.
    **{
        f"{name} of norms": Case(
            functools.partial(with_norms, change),
            {"fused_add_rms_norm_forward": 1, "qk_norm_rope_forward": 1, "rope": 2},
        )
        for name, change in NORMS.items()
    },
}  # fmt: skip


@interpreted
@both_ways
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning", "ignore:.*another forward than")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_computes_what_it_did_and_is_put_back(way, case):
    held(case.model(), way, case.run, case.kernels, **case.ops)


@interpreted
@both_ways
@pytest.mark.parametrize("op", KERNELS)
def test_one_op_alone(way, op):
    ran = held(make(), way, step, **only(op))
    assert ran.keys() - {"column_sum"} == KERNELS[op]


SILU = {"swiglu_forward": 2, "swiglu_backward_remake": 2}
GELU = {"geglu_forward": 2, "geglu_backward": 2}
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": GELU, "gelu_new": GELU, "gelu_pytorch_tanh": GELU, "relu": {}}


@interpreted
@pytest.mark.parametrize(("activation", "kernels"), ACTIVATIONS.items())
def test_gates_by_all_names_of_activations_that_are_known_and_no_other(activation, kernels):
    held(make(hidden_act=activation), lambda _: apply(**only("swiglu")), step, kernels, exactly=True)


@interpreted
@both_ways
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_two_bytes_are_as_exact_as_torch(way, attention, autocast):
    exact = step(make(attention=attention))
    model = make(attention=attention) if autocast else make(attention=attention).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain = step(model)
        way(model)
        patched, ran = counted(lambda: step(model))
    assert ran["qk_norm_rope_backward"] == 2
    # Under autocast the residual is float32 and what the attention adds is not; the sum is fused all the same.
    assert (ran["rms_norm_backward"], ran["fused_add_rms_norm_backward"]) == (3, 2)
    assert {x.dtype for x in patched[1:]} == {torch.float32 if autocast else torch.bfloat16}
    as_exact(patched, plain, exact)


SEEDS = range(2)
RUN = {
    "attention_forward", "attention_delta", "attention_dkdv_kept", "attention_dq_kept", "cross_entropy_fused", "scale",
    "qk_norm_rope_forward", "qk_norm_rope_backward", "fused_add_rms_norm_forward", "fused_add_rms_norm_backward",
    "rms_norm_forward", "rms_norm_backward", "swiglu_forward", "swiglu_backward_remake", "column_sum",
}  # fmt: skip


@interpreted
def test_gradients_of_every_parameter_are_as_near_to_float64_as_hugging_faces():
    def gradients(seed, attention, wide=False):
        """Return gradients of a model like ``from_pretrained``'s: bfloat16 weights, float32 frequencies."""
        torch.manual_seed(seed)
        config = make(use_cache=False).config
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).train()
        model = model.double() if wide else model
        ids = torch.randint(0, 331, (2, 24), generator=torch.Generator().manual_seed(seed))
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters()}

    references = [gradients(seed, "eager", wide=True) for seed in SEEDS]
    theirs = [gradients(seed, "sdpa") for seed in SEEDS]
    apply()
    ours, ran = counted(lambda: [gradients(seed, "tilekern") for seed in SEEDS])
    assert ran.keys() >= RUN
    names = list(references[0])
    for some in (names, *([name] for name in names)):
        own, other = (relative_error(found, references, some) for found in (ours, theirs))
        count = len(SEEDS) * sum(references[0][name].numel() for name in some)
        assert 0 < own <= bound(count) * other, (some, own, other)


@both_ways
def test_the_forwards_take_the_same_arguments(way):
    """By their signatures: whoever wraps a layer reads the names there."""

    def signatures():
        return {type(m).__name__: [*inspect.signature(m.forward).parameters] for m in model.modules()}

    model = make()
    reference = signatures()
    way(model)
    # The head's has one more.
    names = reference["Qwen3ForCausalLM"]
    names.insert(names.index("kwargs"), "skip_logits")
    assert signatures() == reference


@interpreted
@pytest.mark.parametrize("place", ["norm", "linear", "rotation"])
@both_ways
def test_what_was_replaced_after_patching_is_called(way, place, monkeypatch):
    """By somebody who wraps a forward for all models: only who replaced it knows what it computes."""
    owner, name, *fused = {
        "norm": (modeling_qwen3.Qwen3RMSNorm, "forward", "qk_norm_rope_forward", "fused_add_rms_norm_forward"),
        "linear": (torch.nn.Linear, "forward", "swiglu_backward_remake", "fused_linear_cross_entropy"),
        "rotation": (modeling_qwen3, "apply_rotary_pos_emb", "qk_norm_rope_forward"),
    }[place]
    original, model = getattr(owner, name), make().train()

    @functools.wraps(original)
    def other(*args, **kwargs):
        results = original(*args, **kwargs)
        return tuple(2 * x for x in results) if isinstance(results, tuple) else 2 * results

    def replaced():
        with monkeypatch.context() as patching:
            patching.setattr(owner, name, other)
            return step(model)

    reference = replaced()
    way(model, rms_norm=False, rope=False)
    found, ran = counted(replaced)
    assert worst(found, reference) < 1e-5
    assert not set(fused) & ran.keys()
    assert set(fused) <= counted(lambda: step(model))[1].keys()


@pytest.mark.filterwarnings("ignore:(For|Full) backward hook")
@interpreted
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
@both_ways
def test_hooks_on_every_module_run_as_often_as_without_patches(way, kind):
    model = make().train()
    core = [m for m in model.modules() if not isinstance(m, torch.nn.ModuleList)]

    def hooked():
        seen = []
        handle = getattr(modules, f"register_module_{kind}")(lambda module, *_: seen.append(id(module)))
        try:
            return step(model), {id(m): seen.count(id(m)) for m in core}
        finally:
            handle.remove()

    reference, wanted = hooked()
    way(model)
    got, seen = hooked()
    assert seen == wanted
    assert worst(got, reference) < 1e-5


# What falls back in two steps on a CPU without the interpreter, and whether the model's own code runs then.
FALLBACKS = {
    "single": (SINGLE, {"rms_norm_forward": 18, "swiglu_forward": 4, "rope": 4}, 0),
    "fused": (only("qk_norm_rope", "fused_add_rms_norm"),
              {"fused_add_rms_norm_forward": 4, "qk_norm_rope_forward": 4}, 1e-6),
}  # fmt: skip


@pytest.mark.parametrize(("ops", "fallbacks", "tolerance"), FALLBACKS.values(), ids=FALLBACKS)
def test_on_a_cpu_without_the_interpreter_the_models_own_ops_run(monkeypatch, ops, fallbacks, tolerance):
    monkeypatch.delenv("TILEKERN_INTERPRET", raising=False)
    model = make()
    reference = step(model)
    apply(**ops)
    before = {kernel: counts["fallbacks"] for kernel, counts in tilekern.stats().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert max(worst(step(model), reference) for _ in range(2)) <= tolerance
    said = [str(w.message) for w in caught if issubclass(w.category, TilekernWarning)]
    assert len(said) == len(set(said)) >= 2, "one for each kernel, however often it runs"
    assert all("TILEKERN_INTERPRET=1" in text and "the model's own op runs instead" in text for text in said)
    now = tilekern.stats()
    assert {k: now[k]["fallbacks"] - before.get(k, 0) for k in fallbacks} == fallbacks


@interpreted
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("angles", [1, 2])
def test_rope_takes_both_layouts(unsqueeze_dim, angles):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 7, 16), torch.randn(2, 1, 7, 16)
    half = torch.randn(angles, 7, 8)
    cos, sin = torch.cat((half, half), -1).cos(), torch.cat((half, half), -1).sin()
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()

    def turned():
        return modeling_qwen3.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    wanted = turned()
    apply()
    found, ran = counted(turned)
    assert ran == {"rope": 1}
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert worst(found, wanted) < 1e-6


@interpreted
@pytest.mark.parametrize(
    ("q_shape", "angle_shape", "unsqueeze_dim"),
    [((2, 3, 7, 16), (2, 1, 16), 1), ((2, 3, 7, 16), (2, 7, 1), 1), ((7, 16), (7, 16), 0)],
)
def test_rope_leaves_unusual_shapes_to_the_model(q_shape, angle_shape, unsqueeze_dim):
    q, angle = torch.randn(q_shape), torch.randn(angle_shape)

    def turned():
        return modeling_qwen3.apply_rotary_pos_emb(q, q, angle.cos(), angle.sin(), unsqueeze_dim)

    wanted = turned()
    apply()
    found, ran = counted(turned)
    assert same(found, wanted)
    assert not ran


@interpreted
def test_generation_with_a_cache_gives_the_same_tokens():
    model = make().eval()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(IDS, **settings)
    apply()
    found, ran = counted(lambda: model.generate(IDS, **settings))
    assert torch.equal(found, wanted)
    # The attention's outputs and the head too, while it generates.
    tokens = settings["max_new_tokens"]
    assert ran.pop("skinny_projections") == tokens * FEW["skinny_projections"]
    assert ran.pop("skinny_linear") == tokens * (FEW["skinny_linear"] + 2 + 1)
    assert ran.keys() == FORWARD - {"swiglu_forward"}


@interpreted
@both_ways
def test_a_cache_is_not_filled_twice_by_a_layer_that_runs_twice(way):
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


@interpreted
@both_ways
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


@interpreted
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


@interpreted
@pytest.mark.slow
@both_ways
@pytest.mark.share(2)
def test_compiled_in_one_graph_before_and_after(way):
    """A compiled model is compiled again."""
    model = make(layers=1)
    compiled = in_one_graph(model)
    reference = step(model)
    held(compiled, lambda _: way(model), step, {"qk_norm_rope_backward": 1, "fused_linear_cross_entropy": 1})
    assert worst(step(compiled), reference) < 1e-5


@interpreted
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
    assert worst(step(torch.compile(model, fullgraph=True)), reference) < 1e-5
    assert launches()["qk_norm_rope_backward"] == before.get("qk_norm_rope_backward", 0) + 1
