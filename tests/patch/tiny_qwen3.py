"""A Qwen3 small enough for the interpreter, with sizes that no tile divides, and one training step of it."""

import functools

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import tilekern
from tilekern.patch import registry
from tilekern.patch.families import FAMILIES

# What is patched of it.
OPS = list(FAMILIES["qwen3"].ops)
# Other tests may have imported other families, which take a second.
apply = functools.partial(tilekern.apply, model_type="qwen3")
# The kernels of each op but the sum of its weights' gradients.
KERNELS = {
    "rms_norm": {"rms_norm_forward", "rms_norm_backward"},
    "swiglu": {"swiglu_forward", "swiglu_backward_remake"},
    "qk_norm_rope": {"qk_norm_rope_forward", "qk_norm_rope_backward"},
    "rope": {"rope"},
    "fused_add_rms_norm": {"fused_add_rms_norm_forward", "fused_add_rms_norm_backward"},
}
FORWARD = {"rms_norm_forward", "swiglu_forward", "qk_norm_rope_forward", "fused_add_rms_norm_forward"}
# What switches off the ops that fuse others.
SINGLE = {op: False for op in registry.known_ops() if op not in ("rms_norm", "swiglu", "rope")}
IDS = torch.randint(0, 331, (2, 7), generator=torch.Generator().manual_seed(1))


def make(kv_heads=1, attention="eager", layers=2, **changes):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=80, num_attention_heads=5, num_key_value_heads=kv_heads, head_dim=16, intermediate_size=208,
        vocab_size=331, num_hidden_layers=layers, max_position_embeddings=64, attn_implementation=attention, **changes,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def step(model, ids=IDS, labels=None, factor=1.0, **more):
    """The loss and the gradient of every parameter that has one, in one list."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids if labels is None else labels, **more).loss
    (loss * factor).backward()
    core = getattr(model, "_orig_mod", model)
    return [loss.detach(), *(_whole(p.grad).clone() for p in core.parameters() if p.grad is not None)]


def _whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def launches():
    return {kernel: counts["launches"] for kernel, counts in tilekern.stats().items()}


def launched(before):
    """Launches of each kernel since ``before``; kernels with none are left out."""
    return {kernel: n - before.get(kernel, 0) for kernel, n in launches().items() if n != before.get(kernel, 0)}


def worst(results, references):
    """The largest relative error among tensors."""
    pairs = zip(results, references, strict=True)
    return max(float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm()) for a, b in pairs)


def same(results, references):
    return all(torch.equal(a, b) for a, b in zip(results, references, strict=True))
