"""Routers and their losses on the GPU: choices, gradients, the same bits, and no wait for the device."""

import pytest
import torch
from gpu_samples import nothing_waits

import tilekern
from tilekern import ops
from tilekern.patch.registry import known_ops
from tilekern.runtime import dispatch

ROUTERS = {
    "gpt_oss": (32, 4, {}),
    "qwen3_moe": (128, 8, {}),
    "qwen2_moe": (60, 4, {"normalized": False}),
    "deepseek_v3": (256, 8, {"scores": "sigmoid", "groups": 8, "kept_groups": 4, "scale": 2.5}),
}


def step(logits, choices, **how):
    leaf = logits.clone().requires_grad_()
    ids, weights = ops.router(leaf, choices, **how)
    slopes = torch.linspace(-1, 1, choices, dtype=weights.dtype, device=weights.device)
    (slope,) = torch.autograd.grad(weights, leaf, slopes.expand(weights.shape))
    return ids, weights.detach(), slope


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_weights_and_gradient(name):
    experts, choices, how = ROUTERS[name]
    order = torch.rand(1000, experts, generator=torch.Generator().manual_seed(0)).argsort(1)
    logits = (order - experts / 2) * (4 / experts)
    ids, weights, slope = (x.cpu() for x in step(logits.cuda(), choices, **how))
    expected = step(logits.double(), choices, **how)
    assert torch.equal(ids, expected[0])
    for found, right in ((weights, expected[1]), (slope, expected[2])):
        assert (found.double() - right).norm() < 3e-6 * right.norm()
    kernel = f"router_{how.get('scores', 'softmax')}_"
    for direction in ("forward", "backward"):
        assert dispatch.counters(kernel + direction).launches > 0


@pytest.mark.parametrize("name", ROUTERS)
def test_nothing_waits_for_the_gpu_and_two_runs_give_the_same_bits(name):
    experts, choices, how = ROUTERS[name]
    # In bfloat16 many are equal.
    logits = torch.randn(1000, experts, device="cuda", dtype=torch.bfloat16)
    first = step(logits, choices, **how)
    with nothing_waits():
        second = step(logits, choices, **how)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    expected = ops.router(logits.cpu().double(), choices, **how).ids
    if name != "deepseek_v3":
        assert torch.equal(first[0].cpu(), expected)


def test_losses_and_their_gradient():
    logits = torch.randn(1000, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares, ids = (torch.arange(1000) % 3).clamp(max=1).double(), ops.router(logits, 4).ids

    def losses(device, dtype):
        leaf = logits.to(device, dtype, copy=True).requires_grad_()
        found = ops.router_losses(leaf, ids.to(device), shares.to(device))
        return torch.stack(found).detach(), torch.autograd.grad(found.balance + found.z, leaf)[0]

    losses("cuda", torch.float32)
    with nothing_waits():
        leaf = torch.zeros(4, 6, device="cuda", requires_grad=True)
        sum(ops.router_losses(leaf, torch.zeros(4, 2, device="cuda", dtype=torch.int64))).backward()
    for found, again, right in zip(
        losses("cuda", torch.float32), losses("cuda", torch.float32), losses("cpu", torch.float64), strict=True
    ):
        assert torch.equal(found, again)
        assert (found.cpu().double() - right).norm() < 3e-6 * right.norm()
    assert dispatch.counters("router_losses_backward").launches > 0


def test_a_patched_model_chooses_and_computes_what_it_does_as_it_is():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=80, num_attention_heads=5, num_key_value_heads=5, head_dim=16, vocab_size=331,
        num_hidden_layers=2, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=32, norm_topk_prob=True,
        output_router_logits=True, attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    model, ids = Qwen3MoeForCausalLM(config).cuda(), torch.randint(331, (2, 37), device="cuda")

    def step():
        chosen = []
        hooks = [x.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2])) for x in model.model.layers]
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for hook in hooks:
            hook.remove()
        gate = model.model.layers[0].mlp.gate.weight
        return [x.sort(1).values for x in chosen], [loss.detach(), gate.grad.clone()]

    expected = step()
    tilekern.apply_to_model(model, **{op: op == "experts" for op in known_ops()})
    kernels = [f"router_{name}_{way}" for name in ("softmax", "losses") for way in ("forward", "backward")]
    before = {kernel: dispatch.counters(kernel).launches for kernel in kernels}
    try:
        found = step()
    finally:
        tilekern.reset()
    assert all(torch.equal(x, y) for x, y in zip(found[0], expected[0], strict=True))
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()
    assert all(dispatch.counters(kernel).launches > number for kernel, number in before.items())
