"""Gradients of a patched bfloat16 model are as near to float64 as Hugging Face's own."""

import pytest
import torch
from gradient_errors import bound, relative_error
from tiny_qwen3 import apply, launched, launches
from transformers import AutoModelForCausalLM, Qwen3Config

import tilekern

SEEDS = range(4)
KERNELS = {
    "attention_forward", "attention_delta", "attention_dkdv", "attention_dq", "cross_entropy_fused", "scale",
    "qk_norm_rope_forward", "qk_norm_rope_backward", "fused_add_rms_norm_forward", "fused_add_rms_norm_backward",
    "rms_norm_forward", "rms_norm_backward", "swiglu_forward", "swiglu_backward_remake", "column_sum",
}  # fmt: skip


def make(seed, attention):
    """A Qwen3 with odd sizes and bfloat16 weights, but float32 frequencies, as ``from_pretrained`` makes one."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=80, num_attention_heads=5, num_key_value_heads=1, head_dim=16, intermediate_size=208,
        vocab_size=331, num_hidden_layers=2, max_position_embeddings=64, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def gradients(model, seed):
    """Every parameter's gradient by name, in float64."""
    ids = torch.randint(0, 331, (2, 24), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def patched_gradients(seed):
    apply()
    try:
        return gradients(make(seed, "tilekern"), seed)
    finally:
        tilekern.reset()


@pytest.mark.usefixtures("interpreted")
def test_gradients_of_every_parameter_are_as_exact_as_hugging_faces():
    references = [gradients(make(seed, "eager").double(), seed) for seed in SEEDS]
    theirs = [gradients(make(seed, "sdpa"), seed) for seed in SEEDS]
    before = launches()
    ours = [patched_gradients(seed) for seed in SEEDS]
    assert set(launched(before)) >= KERNELS
    names = list(references[0])
    for some in (names, *([name] for name in names)):
        own, other = (relative_error(found, references, some) for found in (ours, theirs))
        count = len(SEEDS) * sum(references[0][name].numel() for name in some)
        assert 0 < own <= bound(count) * other, (some, own, other)
