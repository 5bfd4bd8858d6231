"""A linear layer with an adapter on the GPU: float64's results, the same bits again, memory, and models of PEFT."""

import pytest
import torch
from gpu_tolerances import OF_OPS
from op_samples import assert_near
from transformers import AutoModelForCausalLM, Qwen3Config

import tilekern
from tilekern.ops.lora_linear import Adapted, lora_linears
from tilekern.patch.graphs import EAGER_STEPS, graphs_of

pytestmark = pytest.mark.gpu
SIZES = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip
IDS = torch.arange(512).view(2, 256) * 37 % 2048


@pytest.fixture(autouse=True)
def reset():
    yield
    tilekern.reset()


def leaves(dtype, rows=1009, inner=512, outs=(768, 256, 256), rank=16):
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, by=1.0):
        return (torch.randn(shape, generator=generator, device="cuda") / by).to(dtype)

    layers = []
    for out in outs:
        factors = normal(rank, inner, by=inner**0.5), normal(out, rank, by=rank**0.5)
        layers.append(Adapted(normal(out, inner, by=inner**0.5), *factors, 2.0))
    for layer in layers:
        layer.a.requires_grad_(), layer.b.requires_grad_()
    return normal(1, rows, inner).requires_grad_(), layers


def learning(x, layers):
    return [x, *(factor for layer in layers for factor in (layer.a, layer.b))]


def wide(x, layers):
    return x.detach().double().requires_grad_(), [
        Adapted(*(part.detach().double().requires_grad_() for part in layer[:3]), layer.scaling) for layer in layers
    ]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("dtype", OF_OPS, ids=str)
def test_results_and_gradients_match_float64(dtype, number, full_float32):
    x, layers = leaves(dtype)
    layers = layers[:number]
    exact_x, exact = wide(x, layers)
    right = [exact_x @ w.T + scaling * exact_x @ a.T @ b.T for w, a, b, scaling, *_ in exact]
    results = lora_linears(x, layers)
    slopes = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, learning(x, layers), slopes)
    wanted = torch.autograd.grad(right, learning(exact_x, exact), [slope.double() for slope in slopes])
    for got, reference in zip((*results, *found), (*right, *wanted), strict=True):
        assert_near(got, reference, 2 * OF_OPS[dtype])
    again = lora_linears(x, layers)
    assert all(map(torch.equal, again, results))
    assert all(map(torch.equal, torch.autograd.grad(again, learning(x, layers), slopes), found))


def test_nothing_else_of_the_size_of_activations_is_made():
    x, layers = leaves(torch.bfloat16, 8192, 1024, (2048,))
    slope = torch.randn(1, 8192, 2048, device="cuda", dtype=torch.bfloat16)

    def peak(run):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = run()
        return torch.cuda.max_memory_allocated() - before, made

    for _ in range(2):  # what cuBLAS works in, it keeps
        forward, (y,) = peak(lambda: lora_linears(x, layers))
        backward, found = peak(lambda y=y: torch.autograd.grad(y, learning(x, layers), slope))
        del found
    assert forward < 1.2 * y.numel() * 2
    assert backward < 1.2 * x.numel() * 2


def adapted(*, cast):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config(**SIZES, attn_implementation="tilekern"), dtype=torch.bfloat16
        )
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=cast).train()


def step(model, *, autocast):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS.cuda(), labels=IDS.cuda()).loss
    loss.backward()
    return [loss.detach().clone(), *(x.grad.clone() for x in model.parameters() if x.requires_grad)]


def error(found, expected):
    """The relative error of all gradients together."""
    pairs = list(zip(found[1:], expected[1:], strict=True))
    lost = sum(float((one.double() - other.double()).square().sum()) for one, other in pairs)
    return (lost / sum(float(other.double().square().sum()) for _, other in pairs)) ** 0.5


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "float32 under autocast"])
def test_a_model_of_peft_has_its_gradients_also_from_a_graph(autocast):
    model = adapted(cast=autocast)
    tilekern.apply(lora=False)
    expected = step(model, autocast=autocast)
    tilekern.apply()
    found = step(model, autocast=autocast)
    assert abs(float(found[0] - expected[0])) < 2e-2 * float(expected[0])
    assert error(found, expected) < 5e-2
    assert not tilekern.report(model).reasons.get("lora_linear")
    tilekern.graphed(model)
    for _ in range(EAGER_STEPS + 2):
        replayed = step(model, autocast=autocast)
        assert all(map(torch.equal, replayed, found))
    (graphs,) = graphs_of(model).values()
    assert graphs.replays >= 1, str(graphs)
