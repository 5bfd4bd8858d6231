"""One of two ranks that train tiny models under FSDP2 and transformers' own plans, against such models in one piece.

    python parallel_worker.py MEET RANK COUNT DEVICE FOLDER

DEVICE is ``cpu`` or ``cuda``; checkpoints go into FOLDER. Exit status: 0 where all agree, 77 where this torch cannot
shard, which the last line of output explains.
"""

import os
import sys
from pathlib import Path

import tiny_qwen3
import torch
import torch.distributed as dist
from tiny_families import EXPERTS, SIZES
from tiny_qwen3 import worst
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import tilekern
from benchmarks.sharing import configured
from tilekern.runtime.dispatch import counters

RANKS = 2
FUSED_LOSS, SHARED_LOSS = "fused_linear_cross_entropy", "linear_log_probs_backward"
# Heads and experts that two ranks can share; rows of 16 bytes, which torch's grouped product asks for.
EVEN = SIZES | {"vocab_size": 62, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {name: EVEN | EXPERTS | {"moe_intermediate_size": 40} for name in ("qwen3_moe", "gpt_oss")} | {"qwen3": EVEN}
TENSORS, EXPERTS_TOO, DATA, EXPERTS_AND_DATA = (
    {"tp_size": RANKS}, {"tp_size": RANKS, "ep_size": RANKS}, {"fsdp_size": RANKS},
    {"fsdp_size": RANKS, "ep_size": RANKS},
)  # fmt: skip
# And whether the patches come first.
WAYS = (
    ("qwen3", TENSORS, True), ("qwen3", TENSORS, False), ("qwen3_moe", TENSORS, True),
    ("qwen3_moe", EXPERTS_TOO, True), ("qwen3_moe", EXPERTS_TOO, False), ("qwen3_moe", DATA, True),
    ("qwen3_moe", EXPERTS_AND_DATA, False), ("gpt_oss", EXPERTS_TOO, True),
)  # fmt: skip
# Kernels that the patched families run.
RUN = {
    "qwen3": {"rms_norm_forward", "fused_add_rms_norm_forward", "qk_norm_rope_backward", "swiglu_forward"},
    "qwen3_moe": {"rms_norm_forward", "fused_add_rms_norm_forward", "qk_norm_rope_backward", "experts_gate_backward"},
    "gpt_oss": {"rms_norm_offset_forward", "fused_add_rms_norm_offset_forward", "rope", "experts_gate_backward"},
}
# What has no form that is known, and runs experts.
NO_MLP = "GptOssMLP"


def whole(x):
    """What ranks share, on each of them; torch 2.11 has no way to gather shards that are in several pieces."""
    if not hasattr(x, "full_tensor"):
        return x
    place = x.placements[0]
    if not hasattr(place, "split_factor") or x.device_mesh.ndim > 1:
        return x.full_tensor()
    own = x.to_local().contiguous()
    shards = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(shards, own, x.device_mesh.get_group())
    pieces = [shard.chunk(place.split_factor, place.dim) for shard in shards]
    return torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair], place.dim)


def shards(kind, model, mesh):
    """Shard every layer and the root by torch's own function, and the head as ``kind`` says."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {"mesh": mesh}
    if kind == "mixed":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    if kind in ("head", "mixed"):
        fully_shard(model.lm_head, **settings)
    elif kind == "group":
        fully_shard([model.model.norm, model.lm_head], **settings)
    fully_shard(model, **settings)


def step(model, ids, **more):
    """The loss and each gradient, twice in a row, so that weights are gathered and hooks called again."""
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, **more).loss
        (loss * 0.37).backward()
    return [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]


def of_rows(rows, rank):
    """What a rank has that trains on one row: its own loss, and the mean of all gradients, as FSDP takes it."""
    return [rows[rank][0], *(sum(parts) / RANKS for parts in zip(*(row[1:] for row in rows), strict=True))]


def compare_sharded(kind, mesh, rank, device):
    """Losses and gradients of a model that torch's FSDP2 shards, each rank with its own row."""

    def made():
        return tiny_qwen3.make(layers=1, tie_word_embeddings=kind == "tied").to(device).train()

    single, ids = made(), tiny_qwen3.IDS.to(device)
    rows = [step(single, ids[n : n + 1], num_items_in_batch=6) for n in range(RANKS)]
    tilekern.apply()
    model = made()
    shards(kind, model, mesh)
    before = counters(FUSED_LOSS).launches
    found = step(model, ids[rank : rank + 1], num_items_in_batch=6)
    assert counters(FUSED_LOSS).launches == before + 2, f"{kind}: the fused loss did not run"
    error, allowed = worst(found, of_rows(rows, rank)), 5e-2 if kind == "mixed" else tolerance(device)
    assert error < allowed, f"{kind}: relative error {error}"
    model.eval()
    assert model(input_ids=ids[rank : rank + 1], labels=ids[rank : rank + 1]).logits.shape == (1, 7, 331)
    tilekern.reset()


def tolerance(device):
    # Products of float32 are TF32 on the GPU.
    return 1e-5 if device == "cpu" else 5e-3


class Reference:
    """A family's tiny model in one piece, saved to a folder, and what a step of it gives."""

    def __init__(self, family, folder, device):
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **FAMILIES[family])
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", **({"experts_implementation": "eager"} if family != "qwen3" else {})
        ).to(device)
        self.folder = folder / family
        self.ids = torch.randint(3, 55, (RANKS, 7), generator=torch.Generator().manual_seed(3)).to(device)
        model.save_pretrained(self.folder)
        dist.barrier()
        self.names = ["loss", *(name for name, _ in model.named_parameters()), "logits"]
        self.rows = [self.results(model, self.ids[n : n + 1]) for n in range(RANKS)]
        self.batch = self.results(model, self.ids)

    @staticmethod
    def results(model, ids):
        found = step(model.train(), ids)
        with torch.no_grad():
            return [*found, whole(model.eval()(input_ids=ids).logits)]

    def expected(self, rank, by_rows):
        return [*of_rows(self.rows, rank)[:-1], self.rows[rank][-1]] if by_rows else self.batch


def compare_shared(reference, family, settings, rank, device, first):
    """A model that transformers shares out, patched before that or after it, then with activations made anew."""
    shared = configured(settings)
    if shared is None:
        return
    if first:
        tilekern.apply(experts=True)
    model = AutoModelForCausalLM.from_pretrained(
        reference.folder, distributed_config=shared, attn_implementation="tilekern", dtype=torch.float32
    )
    if not first:
        tilekern.apply(experts=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    by_rows = "fsdp_size" in settings
    before = {name: (counts["launches"], counts["fallbacks"]) for name, counts in tilekern.stats().items()}
    found = reference.results(model, reference.ids[rank : rank + 1] if by_rows else reference.ids)
    where = f"{family} {settings} {'patched first' if first else 'patched last'}"
    for name, x, wanted in zip(reference.names, found, reference.expected(rank, by_rows), strict=True):
        error = float((x.double() - wanted.double()).norm() / wanted.double().norm())
        assert error < tolerance(device), f"{where}: {name} has a relative error of {error}"
    # Older releases, 5.17 among them, have hooks on norms of heads, which run as they are then, and share no head with
    # the experts.
    norms = [module for name, module in model.named_modules() if name.endswith((".q_norm", ".k_norm"))]
    hooked, held = (any(module.__dict__.get(name) for module in norms) for name in ("_backward_hooks", "forward"))
    is_split = hasattr(model.lm_head.weight, "placements") and not by_rows
    lacking = RUN[family] | {SHARED_LOSS if is_split else FUSED_LOSS, "attention_forward"}
    lacking -= {"qk_norm_rope_backward"} if hooked else set()
    for name, counts in tilekern.stats().items():
        launches, fallbacks = before.get(name, (0, 0))
        lacking -= {name} if counts["launches"] > launches else set()
        may_fall_back = hooked and name == "qk_norm_rope_forward"
        assert may_fall_back or counts["fallbacks"] == fallbacks, f"{where}: {name} fell back"
    assert not lacking, f"{where}: {lacking} did not run"
    odd = {(row.op, row.reason) for row in tilekern.report(model).rows if row.reason and row.kind != NO_MLP}
    expected = {("qk_norm_rope", "hooks on q_norm, k_norm have the steps run one by one")} if hooked else set()
    if not first:
        reason = "transformers' parallelism holds its forward of before; patch before the model is made"
        # Norms of heads run with their rotation all the same. Releases that have hooks on these hold routers too.
        routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        expected = {("rms_norm", reason)} if held else expected
        expected |= {("experts", reason)} if any("forward" in module.__dict__ for module in routers) else set()
    assert odd == expected, f"{where}: {odd}"
    tilekern.reset()


def main():
    """Go through all ways of sharing."""
    meet, rank, count, device, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", init_method=meet, rank=rank, world_size=count
        )
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(device, (count,))
        fully_shard(torch.nn.Linear(4, 4).to(device), mesh=mesh)(torch.ones(1, 4, device=device)).sum().backward()
    except (ImportError, RuntimeError, NotImplementedError, AttributeError) as error:
        print(f"this torch cannot run FSDP2 here: {str(error).splitlines()[0]}")  # noqa: T201
        sys.exit(77)
    for kind in ("root", "head", "group", "tied", "mixed"):
        compare_sharded(kind, mesh, rank, device)
    references = {family: Reference(family, folder, device) for family in FAMILIES}
    for family, settings, first in WAYS:
        compare_shared(references[family], family, settings, rank, device, first)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
