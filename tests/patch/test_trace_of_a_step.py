"""A trace on meta tensors has the problems of a patched model's step, and no others."""

import hashlib
import itertools
import threading
from pathlib import Path
from random import Random

import pytest
import tiny_families
import torch
from examples import profile
from tiny_qwen3 import IDS, SINGLE, apply, make

import tilekern
from tilekern.errors import InputError
from tilekern.kernels import spec_named
from tilekern.patch.families import FAMILIES
from tilekern.patch.stepping import Batch, step_as_it_is
from tilekern.runtime import dispatch
from tilekern.runtime.recorder import Trace, tracing
from tilekern.spec.targets import resolve

H200 = resolve("H200")
SEQUENCES, LENGTH = IDS.shape
PACKED = {
    "input_ids": IDS.view(1, -1),
    "labels": IDS.view(1, -1),
    "position_ids": torch.arange(LENGTH).repeat(SEQUENCES).view(1, -1),
    "cu_seq_lens_q": torch.arange(0, IDS.numel() + 1, LENGTH, dtype=torch.int32),
    "cu_seq_lens_k": torch.arange(0, IDS.numel() + 1, LENGTH, dtype=torch.int32),
    "max_length_q": LENGTH,
    "max_length_k": LENGTH,
}
PADDING = torch.ones_like(IDS)
PADDING[1, :2] = 0
STEPS = {
    "plain": (Batch(SEQUENCES, LENGTH), {"input_ids": IDS, "labels": IDS}),
    "packed": (Batch(SEQUENCES, LENGTH, packed=True), PACKED),
    "padded": (Batch(SEQUENCES, LENGTH, padded=True), {"input_ids": IDS, "labels": IDS, "attention_mask": PADDING}),
}
ATTENTIONS = ("eager", "tilekern", "tilekern_nondeterministic")
# Every attention with every step; ops by themselves with each of them once, as neither depends on the other.
ASKING = [
    *(pytest.param({}, *pair, id="-".join(("fused", *pair))) for pair in itertools.product(ATTENTIONS, STEPS)),
    *(pytest.param(SINGLE, *pair, id="-".join(("single", *pair))) for pair in zip(ATTENTIONS, STEPS, strict=True)),
]


@pytest.fixture
def h200(interpreted, monkeypatch):
    """The interpreter runs with an H200's defaults and grids; the optimizer's kernel takes the smallest parameters."""
    monkeypatch.setattr(dispatch, "INTERPRETED", H200)
    monkeypatch.setattr("tilekern.ops.adamw.MOST_TOGETHER", 0)


def bucketed(spec, sizes):
    named = zip(spec.dimensions, sizes, strict=True)
    values = {d.name: str(x).removeprefix("torch.") if d.kind == "dtype" else x for d, x in named}
    return spec.bucketed(spec.problem(**values))


def asked_by_a_real_step(model, inputs):
    """The problems that the interpreter was asked for: kernel and values."""
    dispatch.forget()
    model(**inputs).loss.backward()
    tilekern.AdamW(model.parameters()).step()
    return {(key[0], bucketed(spec_named(key[0]), key[2:])) for key in dispatch._state.plans}


def traced(model, batch):
    with tracing(Trace(H200)) as found:
        step_as_it_is(model, batch)
    return found


@pytest.mark.parametrize(("switches", "attention", "step"), ASKING)
@pytest.mark.share(16)
def test_a_step_asks_for_what_was_traced_and_nothing_else(h200, switches, attention, step):
    apply(**switches)
    model = make(attention=attention).train().to(torch.bfloat16)
    batch, inputs = STEPS[step]
    found = traced(model, batch)
    assert set(found.asked) == asked_by_a_real_step(model, inputs)
    kernels = {kernel for kernel, _ in found.asked}
    assert {"rms_norm_backward", "swiglu_forward", "column_sum", "adamw"} <= kernels
    assert ("attention_backward" in kernels) == (attention != "eager" and step != "padded")
    assert bool(found.fallbacks["attention_forward"]) == (attention != "eager" and step == "padded")
    assert ("fused_linear_cross_entropy" in kernels) == (not switches)


def drawn_families(count):
    """Some of the families, others where the code is other that patches, asks and traces; all in ``thorough``."""
    names = sorted(name for name, family in FAMILIES.items() if family.is_here and name not in NAMED)
    if profile == "thorough":
        return names
    package = Path(tilekern.__file__).parent
    files = [file for room in ("patch", "ops", "tracing") for file in sorted((package / room).rglob("*.py"))]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return Random(digest).sample(names, count)


# With a rotation by itself; with gelu and a capped loss; with scaled logits; with angles of three axes.
NAMED = ("llama", "gemma2", "granite", "qwen2_vl")
# Its router reads how many tokens each expert has.
REFUSED = "jetmoe"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*NAMED, *drawn_families(5)])
@pytest.mark.share(8)
def test_so_it_is_in_other_families(h200, family):
    """Their text alone, if they see images: whose grids a tower reads, which meta tensors do not have."""
    tilekern.apply(experts=True)
    model = tiny_families.make(family)[0].train().to(torch.bfloat16)
    inputs = {"input_ids": tiny_families.IDS, "labels": tiny_families.IDS}
    batch = Batch(*tiny_families.IDS.shape)
    if family == REFUSED:
        with pytest.raises(InputError, match="cannot be stepped on meta tensors"):
            traced(model, batch)
        return
    found = traced(model, batch)
    assert set(found.asked) == asked_by_a_real_step(model, inputs)
    kernels = {kernel for kernel, _ in found.asked}
    assert {"fused_linear_cross_entropy", "adamw"} <= kernels
    assert family not in NAMED or ("rope" in kernels and not found.fallbacks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_so_it_is_in_other_dtypes_and_with_checkpointing(h200, dtype, checkpointing):
    """In float16 the fused loss goes by another way: forward and backward each make the logits."""
    apply()
    model = make(attention="tilekern").train().to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable()
    batch, inputs = STEPS["plain"]
    assert set(traced(model, batch).asked) == asked_by_a_real_step(model, inputs)


@pytest.mark.parametrize("tokens", [1, 33, 600, pytest.param(1100, marks=pytest.mark.nightly)])
@pytest.mark.share(4)
@pytest.mark.slow
def test_so_it_is_in_steps_of_odd_lengths(h200, tokens):
    """Beyond a chunk of the fused loss, with a part that is left over."""
    apply()
    model = make().train().to(torch.bfloat16)
    ids = torch.arange(tokens).remainder(331).view(1, -1)
    asked = asked_by_a_real_step(model, {"input_ids": ids, "labels": ids})
    assert set(traced(model, Batch(1, tokens)).asked) == asked


def test_a_model_is_as_it_was_and_counts_nothing(h200):
    model = make(attention="tilekern").eval()
    tilekern.apply_to_model(model)
    before, stats = {name: x.clone() for name, x in model.state_dict().items()}, tilekern.stats()
    found = traced(model, STEPS["padded"][0])
    assert found.fallbacks["attention_forward"] == 2
    assert tilekern.stats() == stats
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None and x.device.type == "cpu" for x in model.parameters())


def test_a_forward_may_ask_for_autocast_on_meta(h200, monkeypatch):
    """As transformers 5.0 asks on every device; torch raises on meta."""
    model, asked, own = make(attention="tilekern"), [], torch.is_autocast_enabled
    rotary = type(model.model.rotary_emb)
    forward = rotary.forward

    def asking(self, x, *ids, **more):
        asked.append((x.device.type, torch.is_autocast_enabled(x.device.type)))
        return forward(self, x, *ids, **more)

    monkeypatch.setattr(rotary, "forward", asking)
    traced(model, STEPS["plain"][0])
    assert set(asked) == {("meta", False)}
    assert torch.is_autocast_enabled is own


def test_objects_that_cannot_be_copied_are_the_job_s_own(h200):
    apply()
    model = make()
    expected = traced(model, STEPS["plain"][0]).problems
    model.lock, model.model.draws, model.model.layers[0].whole = threading.Lock(), torch.Generator(), [model]
    assert traced(model, STEPS["plain"][0]).problems == expected


def test_parameters_that_do_not_train_have_no_optimizer_and_no_gradient(h200):
    apply()
    model = make()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    found = traced(model, STEPS["plain"][0])
    assert [problem["rows"] * problem["columns"] for kernel, problem in found.asked if kernel == "adamw"] == [32768]
    assert "swiglu_backward_remake" not in {kernel for kernel, _ in found.asked}


def test_wrappers_are_looked_through_and_shards_are_made_whole(h200):
    """FSDP2 among two ranks of which only this one is there: its hooks would gather parameters from the other."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    apply()
    expected = traced(make(), STEPS["plain"][0])
    compiled = torch.compile(torch.nn.Sequential(make()))
    assert traced(compiled, STEPS["plain"][0]).problems == expected.problems
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        sharded = fully_shard(make(), mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
        assert traced(sharded, STEPS["plain"][0]).problems == expected.problems
        tilekern.apply_to_model(own := make())
        with pytest.raises(InputError, match="was patched by itself and then sharded"):
            traced(fully_shard(own, mesh=dist.device_mesh.init_device_mesh("cpu", (2,))), STEPS["plain"][0])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Linear(2, 2), "Linear has no configuration, so what its step is given is not known"),
        (make().model, "Qwen3Model cannot be stepped on meta tensors: "),
    ],
)
def test_a_model_whose_step_is_not_known_is_refused(model, words):
    with pytest.raises(InputError, match=words):
        traced(model, Batch(1, 4))
