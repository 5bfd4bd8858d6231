"""Models of 8-bit floats under what else their users do: compiling, hooks, copies, threads, a Trainer, reports."""

import copy
import functools
import io
import threading
from types import SimpleNamespace

import pytest
import torch
import transformers
from fp8_losses import ids_of
from test_fp8_models import config_of, model_of
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import tilekern
import tilekern.fp8
from tilekern.errors import InputError
from tilekern.patch.fp8 import converted_layers
from tilekern.patch.projecting import projected
from tilekern.runtime import dispatch


@pytest.fixture(autouse=True)
def _reset():
    yield
    tilekern.reset()


@pytest.fixture
def counted(monkeypatch):
    """Why calls of layers of 8-bit floats ran torch's, from now on."""
    monkeypatch.setattr(dispatch._state, "counters", {})
    return lambda: dispatch.reasons().get("fp8_matmul", {})


def converted(**options):
    model = model_of(**options)
    tilekern.fp8.convert(model)
    return model


def step(model, ids=None, **options):
    """The loss of a step and each gradient."""
    ids = ids_of() if ids is None else ids
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False, **options).loss
    loss.backward()
    return [loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def assert_same(found, wanted):
    assert all(map(torch.equal, found, wanted)), "not the same bits"
    assert len(found) == len(wanted)


@pytest.mark.slow
def test_a_compiled_model_runs_as_in_bfloat16_in_one_graph_and_says_so(counted):
    import torch._dynamo

    wanted = step(torch.compile(model_of(), backend="aot_eager"))
    torch._dynamo.reset()
    model = converted()
    explained = torch._dynamo.explain(model)(input_ids=ids_of(), labels=ids_of(), use_cache=False)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    assert counted() == {"torch.compile": 14}
    torch._dynamo.reset()
    assert_same(step(torch.compile(model, backend="aot_eager")), wanted)


@pytest.mark.slow
def test_layers_that_are_compiled_by_themselves_and_before_run_as_in_bfloat16(counted):
    model = model_of()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    wanted = step(model)
    tilekern.fp8.convert(model)
    assert_same(step(model), wanted)
    assert set(counted()) == {"torch.compile"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_checkpoints_give_the_same_bits(reentrant):
    model = converted()
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(step(model), wanted)


def test_selective_checkpoints_run_as_in_bfloat16_and_are_counted(counted):
    selecting = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    model = converted()
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": selecting})
    assert_same(step(model), step(model_of()))
    assert list(counted()) == ["a transform or a mode of torch, as vmap or selective checkpoints"]


def test_checkpoints_that_keep_attention_run_8_bit_floats(counted):
    model = converted(config=config_of(attn_implementation="eager"))
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": tilekern.keep_attention})
    assert_same(step(model), wanted)
    assert not any("mode" in reason for reason in counted())


def test_accumulated_steps_are_a_batch():
    model, ids = converted(dtype=torch.float32), ids_of()
    for row in ids.split(1):
        model(input_ids=row, labels=row, num_items_in_batch=190).loss.backward()
    found = [x.grad for x in model.parameters()]
    for one, other in zip(found, step(converted(dtype=torch.float32), num_items_in_batch=190)[1:], strict=True):
        # Rows of one batch have scales of their own; the gradient's common scale is that of the largest row.
        assert ((one - other).norm() / other.norm()) < 1e-3


def test_moves_copies_and_files_keep_the_layers_and_the_bits():
    model = converted()
    wanted = step(model)
    assert_same(step(copy.deepcopy(model)), wanted)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_same(step(torch.load(file, weights_only=False)), wanted)
    other = converted()
    with torch.no_grad():
        for x in other.parameters():
            x.zero_()
    other.load_state_dict(model.state_dict())
    assert_same(step(other), wanted)
    assert_same(step(converted(dtype=torch.float32).to(torch.bfloat16)), wanted)


def test_evaluations_between_steps_leave_the_bits_and_have_the_loss():
    model, ids = converted(), ids_of()
    wanted = step(model)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(model(input_ids=ids, labels=ids).loss, wanted[0])
    assert_same(step(model), wanted)
    found = torch.func.functional_call(model, dict(model.named_parameters()), (), {"input_ids": ids, "labels": ids})
    assert torch.equal(found.loss, wanted[0])


def test_weights_that_are_frozen_get_no_gradient_and_others_the_same():
    model, whole = converted(), converted()
    step(whole)
    wanted = {name: x.grad for name, x in whole.named_parameters()}
    for name, x in model.named_parameters():
        x.requires_grad_("q_proj" in name or "norm" in name)
    step(model)
    for name, x in model.named_parameters():
        assert x.grad is None if not x.requires_grad else torch.equal(x.grad, wanted[name])


def test_a_weight_of_two_layers_gets_both_gradients():
    torch.manual_seed(0)
    one, other = (torch.nn.Linear(128, 256, bias=False) for _ in range(2))
    other.weight = one.weight
    x, found = torch.randn(100, 128), []
    for kind in (torch.nn.Linear, tilekern.fp8.Linear):
        one.__class__ = other.__class__ = kind
        (one(x).square().sum() + other(2 * x).sum()).backward()
        found.append(one.weight.grad)
        one.weight.grad = None
    assert ((found[0] - found[1]).norm() / found[0].norm()) < 0.05


def test_the_default_dtype_changes_nothing():
    model = converted()
    wanted = step(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same(step(model), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_hooks_of_all_kinds_run_once_and_leave_the_bits():
    model, seen = converted(), []
    wanted = step(model)
    layer = model.model.layers[0].mlp.gate_proj
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    assert_same(step(model), wanted)
    assert sorted(seen) == ["after", "backward", "before", "gradient"]


def test_threads_train_models_side_by_side():
    wanted, found = step(converted()), [None, None]
    models = [converted(), converted()]

    def train(n):
        found[n] = [step(models[n]) for _ in range(2)]

    threads = [threading.Thread(target=train, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for steps in found:
        for one in steps:
            assert_same(one, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_weights_of_float32(dtype):
    model, ids = converted(dtype=torch.float32), ids_of()
    with torch.autocast("cpu", dtype):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.autocast("cpu", dtype):
        plain = model_of(dtype=torch.float32)(input_ids=ids, labels=ids).loss
    assert abs(loss - plain) / plain < 0.02
    assert all(x.grad.dtype == torch.float32 for x in model.parameters())


def test_a_subclass_of_tensor_is_counted_once_by_each_layer(counted):
    class Named(torch.Tensor):
        pass

    tilekern.apply()
    model = converted()
    x = torch.randn(1, 96, 256, dtype=torch.bfloat16).as_subclass(Named)
    mlp = model.model.layers[0].mlp
    projected([mlp.gate_proj, mlp.up_proj], x)
    assert counted() == {"a subclass of Tensor": 2}


def test_restore_reaches_a_layer_whose_forward_a_hook_holds():
    accelerate = pytest.importorskip("accelerate")
    model = converted()
    for name in ("gate_proj", "up_proj", "down_proj"):
        accelerate.hooks.add_hook_to_module(getattr(model.model.layers[0].mlp, name), accelerate.hooks.ModelHook())
    assert_same(step(model), step(converted()))
    assert len(tilekern.fp8.restore(model)) == 14
    assert_same(step(model), step(model_of()))


def test_a_layer_that_is_of_another_class_since_is_not_restored_in_silence():
    model = converted()
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    rows = {row.module: row.reason for row in tilekern.report(model).rows if row.op == "fp8"}
    assert rows["model.layers.1.mlp.up_proj"] == ""
    with pytest.raises(InputError, match=r"model.layers.1.mlp.up_proj is a ParametrizedLinear now"):
        tilekern.fp8.restore(model)
    assert len(converted_layers(model)) == 14


def test_offloaded_weights_are_read_where_they_are_then():
    accelerate = pytest.importorskip("accelerate")
    model, ids = converted().eval(), ids_of()
    wanted = model(input_ids=ids).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert torch.equal(model(input_ids=ids).logits, wanted)


def test_a_tied_head_stays_the_embedding():
    model = model_of(config_of(tie_word_embeddings=True))
    assert len(tilekern.fp8.convert(model)) == 14
    step(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_inside_of_a_wrapper_the_decoder_is_found_all_the_same():
    model = model_of()
    # As a vision tower: layers with numbers beside the decoder.
    model.eye = torch.nn.ModuleList([torch.nn.ModuleDict({"up": torch.nn.Linear(128, 128)})])
    wrapped = torch.nn.ModuleDict({"module": model})
    assert tilekern.fp8.convert(wrapped) == [f"module.{name}" for name in tilekern.fp8.convert(model)]
    assert type(model.eye[0]["up"]) is torch.nn.Linear


def test_the_report_says_that_a_model_was_made_before_apply():
    model = model_of()
    assert not [row for row in tilekern.report(model).rows if row.op == "fp8"]
    tilekern.apply(fp8="rowwise")
    rows = {row.module: row.reason for row in tilekern.report(model).rows if row.op == "fp8"}
    assert rows["model.layers.0.mlp.up_proj"].startswith("the model was made before tilekern.apply(fp8=...)")
    assert rows["lm_head"].startswith("stays in its dtype")


def test_apply_converts_the_layers_that_convert_does_and_no_vision_tower():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**sizes, vocab_size=512),
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14),
    )
    found = []
    for is_applied in (False, True):
        if is_applied:
            tilekern.apply(fp8="rowwise")
        with torch.device("meta"):
            model = transformers.LlavaForConditionalGeneration._from_config(config)
        found.append([name for name, _ in converted_layers(model)] if is_applied else tilekern.fp8.convert(model))
    assert found[0] == found[1]
    assert all("language_model" in name for name in found[0])


def test_apply_leaves_the_layers_of_a_model_to_its_quantiser():
    tilekern.apply(fp8="rowwise")
    config = config_of()
    config.quantization_config = {"quant_method": "bitsandbytes"}
    model = model_of(config)
    assert {type(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear)} == {torch.nn.Linear}


def test_the_callback_of_a_trainer_patches_a_converted_model_too():
    state = SimpleNamespace(is_local_process_zero=False)
    tilekern.TrainerCallback().on_init_end(SimpleNamespace(n_gpu=0), state, None, model=converted())
    assert "fused_add_rms_norm" in tilekern.get_patched_ops()


def test_converted_layers_run_without_values():
    """On the device "meta", which has no autocast of its own."""
    tilekern.apply()
    model = model_of().to("meta")
    tilekern.fp8.convert(model)
    layer = model.model.layers[0]
    x = torch.empty(2, 80, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    layer.mlp(layer.post_attention_layernorm(x)).sum().backward()
    assert x.grad.shape == x.shape
    assert layer.mlp.up_proj.weight.grad.shape == (384, 256)


def test_the_report_counts_the_gates_of_8_bit_mlps(counted):
    tilekern.apply()
    model = converted()
    step(model)
    assert "swiglu: patched; 2 of 2 calls fell back" in str(tilekern.report(model))
