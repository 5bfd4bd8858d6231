"""``fully_shard`` before and after the patches, by one process on the CPU; ``parallel_worker.py`` has two processes."""

import pytest
import torch
import torch.distributed as dist
from tiny_qwen3 import IDS, apply, launched, launches, make, same, worst
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tilekern

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),
]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model, mesh, **options):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options).train()


def step(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]


@pytest.mark.parametrize("way", [lambda _: apply(), tilekern.apply_to_model], ids=["class", "model"])
@pytest.mark.parametrize("first", [True, False], ids=["sharded first", "patched first"])
def test_a_sharded_model_is_patched_and_put_back(mesh, way, first):
    # One in half precision whose layers stay gathered, the other as it is by default.
    options = {"mp_policy": HALF, "reshard_after_forward": False} if first else {}
    reference = step(sharded(make(), mesh, **options))
    model = make()
    if first:
        sharded(model, mesh, **options)
    patched = way(model)
    assert list(tilekern.get_patched_ops()) == patched
    if not first:
        sharded(model, mesh, **options)
    unserved = [row for row in tilekern.report(model).rows if row.reason and row.op != "attention"]
    assert not unserved
    before = launches()
    assert worst(step(model), reference) < (5e-2 if first else 1e-5)
    assert launched(before)["fused_add_rms_norm_forward"] == launched(before)["qk_norm_rope_backward"] == 2
    assert launched(before)["fused_linear_cross_entropy"] == 1
    model.gradient_checkpointing_enable()
    before = launches()
    step(model)
    assert launched(before)["fused_add_rms_norm_forward"] == 4, "each layer's forward runs twice"
    model.gradient_checkpointing_disable()
    tilekern.reset()
    before = launches()
    assert same(step(model), reference)
    assert not launched(before)


def test_norms_that_are_sharded_by_themselves_are_reported(mesh):
    model = make(layers=1)
    fully_shard(model.model.layers[0].post_attention_layernorm, mesh=mesh)
    sharded(model, mesh)
    apply()
    told = {row.module: row.reason for row in tilekern.report(model).rows if row.op == "fused_add_rms_norm"}
    assert told == {"model.layers.0": "hooks on post_attention_layernorm have the steps run one by one"}
    before = launches()
    step(model)
    assert "fused_add_rms_norm_forward" not in launched(before)
