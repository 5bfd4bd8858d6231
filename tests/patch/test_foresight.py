"""At its first miss a step tells what else it will miss: the very problems that it then asks for."""

import gc
import re
import threading
from pathlib import Path

import pytest
import torch
from marks import needs_compiler
from one_record import asked_for_nothing
from test_fp8_models import model_of
from tiny_qwen3 import IDS, make, step

import tilekern
from tilekern import fp8
from tilekern.compile import cutile
from tilekern.errors import InputError, ToolchainMissing
from tilekern.kernels import spec_named
from tilekern.patch import foresight
from tilekern.patch.stepping import Call
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace, tracing
from tilekern.spec.targets import INTERPRETED, resolve

H200 = resolve("H200")
POSITIONS = torch.arange(7).repeat(2, 1)
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


@pytest.fixture(autouse=True)
def nothing_traced():
    foresight._traced.clear()


def seen_from_inside(model, **given):
    """What is foreseen in the midst of a forward with its backward: where angles are computed."""
    found = []

    def look(*_):
        if dispatch._state.trace is None:  # the trace of the step comes here too
            foreseen = foresight.foresee(INTERPRETED)
            found.append(foreseen and foreseen.problems)

    # A hook would be a reason for an op not to run.
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda *args, **more: look() or forward(*args, **more)
    try:
        result = model(**given)
    finally:
        del rotary.forward
    return found[0], result


def asked(model, **given):
    """What the same step asks for, when kernels run."""
    with tracing(Trace(INTERPRETED, real=True)) as found:
        result = model(**given)
        if result.get("loss") is not None:
            result.loss.backward()
        elif torch.is_grad_enabled():
            result.logits.sum().backward()
    return list(found.asked)


def named(problems):
    return {(spec.name, problem) for spec, problem in problems}


def is_all_that_misses(foreseen, problems):
    """Whether nothing else is asked for but kernels of few rows, which run on a GPU only where they were measured."""
    others = set(problems) - named(foreseen)
    return named(foreseen) <= set(problems) and all(kernel.startswith("skinny_") for kernel, _ in others)


def train(model):
    return model.train()


def evaluate(model):
    return model.eval()


def checkpoint(model):
    model.gradient_checkpointing_enable()
    return model.train()


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    return model.train()


STEPS = {
    "training": (train, {"labels": IDS}),
    "own loss": (train, {}),
    "evaluation with a gradient": (evaluate, {"labels": IDS}),
    "checkpointing": (checkpoint, {"labels": IDS}),
    "frozen": (freeze, {"labels": IDS}),
    "ones as the mask": (train, {"labels": IDS, "attention_mask": torch.ones_like(IDS)}),
    "padding": (train, {"labels": IDS, "attention_mask": PADDED}),
    "positions": (train, {"labels": IDS, "position_ids": POSITIONS}),
}


@pytest.mark.parametrize("attention", ["eager", "tilekern"])
@pytest.mark.parametrize("name", STEPS)
def test_what_is_foreseen_is_what_the_step_asks_for(interpreted, name, attention):
    change, given = STEPS[name]
    tilekern.apply(model_type="qwen3")
    model = change(make(attention=attention))
    before = {key: x.clone() for key, x in model.state_dict().items()}
    foreseen, _ = seen_from_inside(model, input_ids=IDS, use_cache=False, **given)
    assert all(x.grad is None for x in model.parameters())
    assert is_all_that_misses(foreseen, asked(model, input_ids=IDS, use_cache=False, **given))
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize("attention", ["eager", "tilekern"])
@pytest.mark.parametrize("wide", [True, False])
def test_autocast_is_foreseen(interpreted, attention, wide):
    tilekern.apply(model_type="qwen3")
    model = make(attention=attention).train().to(torch.float32 if wide else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        foreseen, _ = seen_from_inside(model, input_ids=IDS, labels=IDS)
        real = asked(model, input_ids=IDS, labels=IDS)
    assert named(foreseen) == set(real)
    assert any("bfloat16" in problem.key for _, problem in foreseen)


def test_without_a_gradient_no_backward_is_foreseen(interpreted):
    tilekern.apply(model_type="qwen3")
    model = make().eval()
    with torch.no_grad():
        foreseen, _ = seen_from_inside(model, input_ids=IDS)
        assert is_all_that_misses(foreseen, asked(model, input_ids=IDS))
    assert not [spec.name for spec, _ in foreseen if "backward" in spec.name]


def test_the_step_itself_is_not_changed(interpreted):
    """Its loss and gradients are those of a step that nobody looks at."""
    tilekern.apply(model_type="qwen3")
    losses = []
    for look in (False, True):
        model = make().train()
        given = {"input_ids": IDS, "labels": IDS}
        loss = seen_from_inside(model, **given)[1].loss if look else model(**given).loss
        loss.backward()
        losses.append([loss.detach(), *(x.grad for x in model.parameters())])
    assert all(map(torch.equal, *losses))


def test_tilekern_s_optimizer_is_foreseen_if_the_job_has_one(interpreted, monkeypatch):
    monkeypatch.setattr("tilekern.ops.adamw.MOST_TOGETHER", 0)
    gc.collect()  # other tests' optimizers
    tilekern.apply(model_type="qwen3")
    model = make().train()
    names = []
    for make_optimizer in (torch.optim.AdamW, tilekern.AdamW):
        foresight._traced.clear()
        optimizer = make_optimizer(model.parameters())
        foreseen, _ = seen_from_inside(model, input_ids=IDS, labels=IDS)
        names.append({spec.name for spec, _ in foreseen})
    assert optimizer is not None
    assert names[1] - names[0] == {"adamw"}


def test_a_step_is_traced_once_for_its_shapes(interpreted, monkeypatch):
    tilekern.apply(model_type="qwen3")
    model = make().train()
    monkeypatch.setattr(foresight, "_MOST_STEPS", 2)
    lengths = [seen_from_inside(model, input_ids=ids, labels=ids)[0] for ids in (IDS, IDS, IDS[:1], IDS[:, :3])]
    assert [found is not None for found in lengths] == [True, False, True, False]


def test_a_model_that_cannot_be_traced_foresees_nothing(interpreted):
    from transformers import DynamicCache

    tilekern.apply(model_type="qwen3")
    model = make().eval()
    cache = DynamicCache(config=model.config)
    foreseen, _ = seen_from_inside(model, input_ids=IDS, past_key_values=cache)
    assert foreseen is None
    assert cache.get_seq_length() == IDS.shape[1], "the step of the job alone has filled it"
    assert foresight.foresee(INTERPRETED) is None, "no model's forward is on the stack"


def test_a_model_that_calls_kernels_with_values_in_its_trace_foresees_nothing(interpreted):
    """The trace's thread would wait for the lock of the lookup that waits for it."""
    tilekern.apply(model_type="qwen3")
    model = make().train()
    weight, real = torch.ones(48), torch.ones(2, 48)
    forward = model.model.norm.forward

    def also(x):
        tilekern.ops.rms_norm(real, weight)
        return forward(x)

    model.model.norm.forward = also
    with dispatch._state.lock:
        foreseen, _ = seen_from_inside(model, input_ids=IDS, labels=IDS)
    assert foreseen is None


def test_a_model_that_another_thread_calls_is_not_disturbed(interpreted):
    tilekern.apply(model_type="qwen3")
    model, is_inside, goes_on, results = make().eval(), threading.Event(), threading.Event(), []
    expected = model(input_ids=IDS).logits
    embed = model.model.embed_tokens

    def wait(*_):
        is_inside.set()
        goes_on.wait(60)

    hold = embed.register_forward_pre_hook(wait)
    other = threading.Thread(target=lambda: results.append(model(input_ids=IDS).logits))
    other.start()
    assert is_inside.wait(60)
    hold.remove()
    assert seen_from_inside(model, input_ids=IDS)[0]
    goes_on.set()
    other.join()
    assert torch.equal(results[0], expected)


def test_hooks_and_modules_of_the_job_do_not_see_the_trace(interpreted):
    """A hook of accelerate keeps the device of its input, and a forward may keep a tensor in its module."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    tilekern.apply(model_type="qwen3")
    model, seen = make().train(), []
    hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
    add_hook_to_module(model.model.layers[0], hook)
    model.model.norm.register_forward_hook(lambda *given: seen.append(given[2]))
    model.lm_head.register_full_backward_hook(lambda *given: seen.append(given[2][0]))
    embed = model.model.embed_tokens
    forward = embed.forward

    def keeping(ids):
        embed.kept = forward(ids)
        return embed.kept

    embed.forward = keeping
    given = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    expected = set(asked(model, **given))
    seen.clear()
    foreseen, result = seen_from_inside(model, **given)
    result.loss.backward()
    assert named(foreseen) == expected
    places = [hook.input_device, embed.kept.device, *(x.device for x in seen)]
    assert [str(place) for place in places] == ["cpu"] * 4


def test_a_gradient_that_a_hook_asks_for_is_foreseen(interpreted):
    """So adapters train under checkpoints: by a hook that has the embeddings' result require a gradient."""
    tilekern.apply(model_type="qwen3")
    model = freeze(make())
    model.enable_input_require_grads()
    given = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    assert named(seen_from_inside(model, **given)[0]) == set(asked(model, **given))


def test_a_model_whose_shards_are_gathered_is_made_again(interpreted, tmp_path):
    """In the middle of a forward FSDP's parameters are whole ones, and its hooks would free what the job reads."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    tilekern.apply(model_type="qwen3")
    given = {"input_ids": IDS, "labels": IDS}
    expected = step(make(layers=1).train())
    foreseen, _ = seen_from_inside(make(layers=1).train(), **given)
    foresight._traced.clear()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = fully_shard(make(layers=1).train(), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        assert named(seen_from_inside(model, **given)[0]) == named(foreseen)
        assert all(map(torch.allclose, step(model), expected))
    finally:
        dist.destroy_process_group()


def test_an_error_of_foresight_does_not_reach_the_step(tmp_path, monkeypatch):
    def fail(_):
        raise RuntimeError("a model of an odd kind")

    compiled = []
    monkeypatch.setattr(dispatch, "_compiled", lambda *asked: compiled.append(asked))
    with asked_for_nothing(tmp_path / "cache", monkeypatch):
        dispatch.foresee_by(fail)
        spec, sizes = dispatch_swiglu()
        assert dispatch.plan_for(spec, torch.device("cuda", 0), *sizes) is None
    assert len(compiled) == 1


def test_a_miss_of_a_patched_model_has_its_step_compiled(tmp_path, monkeypatch):
    """Only one of the calls is a real one: without a GPU no kernel is launched."""
    begun = []
    monkeypatch.setattr(dispatch, "compile_ahead", lambda problems, target: begun.append((problems, target)))
    monkeypatch.setattr(dispatch, "_compiled", lambda *_: None)
    model = make().train()
    tilekern.apply_to_model(model)
    with asked_for_nothing(tmp_path / "cache", monkeypatch):
        spec, sizes = dispatch_swiglu()
        mlp = model.model.layers[-1].mlp
        forward = mlp.forward

        def miss(x):
            if dispatch._state.trace is None:
                dispatch.plan_for(spec, torch.device("cuda", 0), *sizes)
            return forward(x)

        mlp.forward = miss
        model(input_ids=IDS, labels=IDS)
        [(problems, target)] = begun
        assert target == H200
        assert problems[0] == (spec, spec.bucketed(spec.problem(rows=14, columns=208, dtype="float32")))
        assert {"rms_norm_forward", "rms_norm_backward", "swiglu_backward_remake"} < {one.name for one, _ in problems}
        tilekern.reset()
        dispatch.forget()
        foresight._traced.clear()
        model(input_ids=IDS, labels=IDS)
        assert len(begun) == 1, "nothing is patched any more"


def test_without_a_compiler_it_is_said_once_what_is_missing_and_what_that_costs(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr("tilekern.compile.cutile._tileiras", lambda: None)
    cutile.toolkit.cache_clear()
    model = make(layers=1).train()
    tilekern.apply_to_model(model)
    # As of a wheel, which has the packs of few models.
    monkeypatch.setattr("tilekern.runtime.data_packages.NOTES", Path(__file__))
    with asked_for_nothing(tmp_path / "cache", monkeypatch):
        call = Call(kwargs={"input_ids": IDS, "labels": IDS})
        monkeypatch.setattr(foresight, "_running", lambda: (model, call))
        for name, columns in (("rms_norm_forward", (80, torch.float32)), ("swiglu_forward", (208,))):
            assert dispatch.plan_for(spec_named(name), torch.device("cuda", 0), 14, *columns, torch.float32) is None
        # Another length is another miss.
        dispatch.plan_for(spec_named("swiglu_forward"), torch.device("cuda", 0), 140, 208, torch.float32)
    cutile.toolkit.cache_clear()
    first, second = [str(one.message) for one in recwarn if "no cache holds" in str(one.message)]
    assert re.fullmatch(
        r"no cache holds 13 of the 18 problems that a step of Qwen3ForCausalLM asks for on H200, and no compiler is "
        r"installed; the model's own ops, or other kernels of the same op, run for column_sum, .*, swiglu_forward, "
        r"which costs some \S+ ms of GPU time a step by the bytes moved; mend it with: pip install "
        r"tilekern-packs-h200, or pip install 'tilekern\[compile\]'",
        first,
    ), first
    assert "no cache holds swiglu_forward for this model on H200" in second
    assert second.endswith("pip install tilekern-packs-h200, or tune it with: python -m tilekern.tune MODEL --gpu H200")


def test_the_cost_is_the_difference_of_the_bytes_moved(interpreted):
    """RMSNorm's forward with its backward reads and writes a few rows; its own operations do so many times."""
    model = make(layers=1).train()
    tilekern.apply_to_model(model)
    ids = torch.zeros(2, 8, dtype=torch.long)  # as many as a bucket has
    step = Call(kwargs={"input_ids": ids, "labels": ids}).on_meta()
    # What ops keep from their first call is made by neither.
    foresight._traced_step(model, step, H200, torch.autocast("cpu", enabled=False))
    fused = foresight._traced_step(model, step, H200, torch.autocast("cpu", enabled=False), counts=True)
    own = foresight._traced_step(
        model, step, H200, torch.autocast("cpu", enabled=False), counts=True,
        lacking=["swiglu_forward", "swiglu_backward_remake"],
    )  # fmt: skip
    assert {spec.name for spec, _ in fused.problems} - {spec.name for spec, _ in own.problems} == {
        "swiglu_forward", "swiglu_backward_remake",
    }  # fmt: skip
    # In float32, x [16, 208]: the kernels move 3 and 6 of these; torch reads and writes, forward, 2 for silu and 3 for
    # the product, backward 6 for the product's two gradients and 3 for silu's.
    x = 4 * 16 * 208
    # The gated MLP adds its two gradients of the input, [16, 80], in a product; autograd adds them by themselves.
    assert own.bytes - fused.bytes == (2 + 3 + 6 + 3 - 3 - 6) * x + 2 * 4 * 16 * 80


@pytest.mark.parametrize(("dtype", "products"), [(torch.bfloat16, set()), (torch.float32, {"fp8_matmul"})])
def test_nothing_is_compiled_that_runs_only_where_it_was_measured(dtype, products):
    """torch's library has products of e4m3 numbers in bfloat16."""
    model = model_of(dtype=dtype)
    fp8.convert(model)
    ids = torch.zeros(2, 16, dtype=torch.long)
    step = Call(kwargs={"input_ids": ids, "labels": ids}).on_meta()
    found = foresight._traced_step(model, step, H200, torch.autocast("cpu", enabled=False))
    assert {spec.name for spec, _ in found.problems if "fp8" in spec.name} == {"fp8_rows", "fp8_turned"} | products


def dispatch_swiglu():
    return spec_named("swiglu_forward"), (14, 208, torch.float32)


@needs_compiler
@pytest.mark.processes
def test_prepare_fills_the_cache_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    model = make(layers=1).to(torch.bfloat16)
    tilekern.apply_to_model(model, **only("swiglu"))
    with asked_for_nothing(tmp_path / "cache", monkeypatch):
        batch = {"input_ids": IDS, "labels": IDS}
        done = tilekern.prepare(model, batch, gpu="H200")
        assert (done.problems, done.compiled, done.missing) == (2, 2, ())
        assert tilekern.prepare(model, batch, gpu="H200") == foresight.Prepared(2, 0, ())
        assert len(list((tmp_path / "cache").rglob("v1/*/*/*/*.json"))) == 2


def only(*ops):
    from tilekern.patch import registry

    return {op: op in ops for op in registry.known_ops()}


def test_prepare_says_what_is_wrong(monkeypatch):
    with pytest.raises(InputError, match="prepare: this machine has no CUDA GPU; name one, for example gpu='H200'"):
        tilekern.prepare(make())
    with pytest.raises(InputError, match="Linear has no configuration"):
        tilekern.prepare(torch.nn.Linear(2, 2), gpu="H200")
    with pytest.raises(InputError, match="the model is given a Thread"):
        tilekern.prepare(make(), {"input_ids": threading.Thread()}, gpu="H200")
    monkeypatch.setattr("tilekern.compile.cutile.toolkit", lambda: None)
    with pytest.raises(ToolchainMissing, match="the tile compiler"):
        tilekern.prepare(make(), gpu="H200")


def test_a_padding_mask_with_zeros_becomes_a_dense_one():
    meta = Call(kwargs={"attention_mask": PADDED}).on_meta().kwargs["attention_mask"]
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 1, 7, 7), torch.bool, "meta")
    meta = Call(kwargs={"attention_mask": torch.ones_like(PADDED)}).on_meta().kwargs["attention_mask"]
    assert (meta.shape, meta.dtype, meta.device.type) == ((2, 7), torch.int64, "meta")
