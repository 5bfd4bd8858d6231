"""The module classes: state dicts that go both ways with torch's and Hugging Face's, and what calling them runs."""

import inspect

import pytest
import torch
from op_samples import assert_near
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from tilekern import ops
from tilekern.runtime.dispatch import counters

LLAMA = LlamaConfig(hidden_size=24, num_attention_heads=4, intermediate_size=40)
BIASED = LlamaConfig(hidden_size=24, num_attention_heads=4, intermediate_size=40, mlp_bias=True)
GEMMA = GemmaConfig(hidden_size=24, num_attention_heads=4, intermediate_size=40)
nn = torch.nn


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X, LOGITS, TARGET = random(3, 5, 24), random(6, 24), torch.tensor([0, 3, -100, 9, 23, 1])
PROBABILITIES = random(6, 24).flip(0).softmax(-1)
# A class of ours, one that it stands for, and what both are called with.
TWINS = {
    "LayerNorm": (ops.LayerNorm(24), nn.LayerNorm(24), (X,)),
    "LayerNorm of two dimensions": (ops.LayerNorm((5, 24)), nn.LayerNorm((5, 24)), (X,)),
    "LayerNorm without a bias": (ops.LayerNorm(24, bias=False), nn.LayerNorm(24, bias=False), (X,)),
    "LayerNorm without parameters": (
        ops.LayerNorm(24, elementwise_affine=False), nn.LayerNorm(24, elementwise_affine=False), (X,),
    ),
    "RMSNorm": (ops.RMSNorm(24), LlamaRMSNorm(24), (X,)),
    "RMSNorm of Gemma": (ops.RMSNorm(24, offset=1.0, casting_mode="gemma"), GemmaRMSNorm(24), (X,)),
    "RMSNorm of two dimensions": (ops.RMSNorm((5, 24)), nn.RMSNorm((5, 24), eps=1e-6), (X,)),
    "RMSNorm without a weight": (
        ops.RMSNorm(24, elementwise_affine=False), nn.RMSNorm(24, 1e-6, elementwise_affine=False), (X,),
    ),
    "GroupNorm": (ops.GroupNorm(3, 6), nn.GroupNorm(3, 6), (random(2, 6, 5),)),
    "GroupNorm without parameters": (
        ops.GroupNorm(3, 6, affine=False), nn.GroupNorm(3, 6, affine=False), (random(2, 6, 5),),
    ),
    "Softmax": (ops.Softmax(), nn.Softmax(-1), (X,)),
    "Softmax of another dimension": (ops.Softmax(1), nn.Softmax(1), (X,)),
    "KLDiv": (ops.KLDiv(reduction="sum"), nn.KLDivLoss(reduction="sum"), (LOGITS.log_softmax(-1), PROBABILITIES)),
    "KLDiv of logarithms": (
        ops.KLDiv(reduction="batchmean", log_target=True), nn.KLDivLoss(reduction="batchmean", log_target=True),
        (LOGITS.log_softmax(-1), PROBABILITIES.log()),
    ),
    "CrossEntropy": (ops.CrossEntropy(), nn.CrossEntropyLoss(), (LOGITS, TARGET)),
    "CrossEntropy with classes in the second dimension": (
        ops.CrossEntropy(label_smoothing=0.1, reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), (X, torch.arange(3 * 24).view(3, 24) % 5),
    ),
    "CrossEntropy with weights": (
        ops.CrossEntropy(torch.linspace(0.5, 2, 24)), nn.CrossEntropyLoss(torch.linspace(0.5, 2, 24)), (LOGITS, TARGET)
    ),
    "SwiGLUMLP": (ops.SwiGLUMLP(LLAMA), LlamaMLP(LLAMA), (X,)),
    "SwiGLUMLP with biases": (ops.SwiGLUMLP(BIASED), LlamaMLP(BIASED), (X,)),
    "TiledSwiGLUMLP": (ops.TiledSwiGLUMLP(LLAMA, 3), LlamaMLP(LLAMA), (X,)),
    "GEGLUMLP": (ops.GEGLUMLP(GEMMA), GemmaMLP(GEMMA), (X,)),
    "TiledGEGLUMLP": (ops.TiledGEGLUMLP(GEMMA, 3), GemmaMLP(GEMMA), (X,)),
}  # fmt: skip


def fresh(x):
    return x.clone().requires_grad_(x.is_floating_point() and x is not PROBABILITIES)


@pytest.mark.parametrize("name", TWINS)
def test_results_gradients_and_state_dicts_are_those_of_the_class_it_stands_for(name):
    ours, theirs, inputs = TWINS[name]
    for parameter in theirs.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    results = []
    for module in (ours, theirs):
        leaves = [fresh(x) for x in inputs]
        y = module(*leaves)
        graded = [leaves[0], *module.parameters()]
        results.append((y, *torch.autograd.grad(y.sin().sum(), graded)))
    for got, wanted in zip(*results, strict=True):
        assert_near(got, wanted, 1e-5)


@pytest.mark.parametrize(
    ("module", "inputs", "op", "arguments"),
    [
        (ops.FusedAddRMSNorm(24), (X, X + 1), ops.fused_add_rms_norm, (X, X + 1, torch.ones(24), 1e-6, 0.0, "llama")),
        (
            ops.FusedAddRMSNorm(24, offset=1.0, casting_mode="gemma"),
            (X, X),
            ops.fused_add_rms_norm,
            (X, X, torch.zeros(24), 1e-6, 1.0, "gemma"),
        ),
        (
            ops.FusedLinearJSD(0.3, 7, 2.0, wide_logits=True),
            (X, LOGITS, X, LOGITS, TARGET),
            ops.fused_linear_jsd,
            (X, LOGITS, X, LOGITS, TARGET, 0.3, 7, 2.0, None, True),
        ),
        (ops.Sparsemax(1), (X,), ops.sparsemax, (X, 1)),
        (ops.DyT(24, init_alpha=0.7), (X,), ops.dyt, (X, torch.tensor([0.7]), torch.ones(24), torch.zeros(24))),
        (ops.DyT(24, beta=False), (X,), ops.dyt, (X, torch.tensor([0.5]), torch.ones(24), None)),
        (ops.PolyNorm(), (X,), ops.poly_norm, (X, torch.full((3,), 1 / 3), torch.tensor(1.0), 1e-6)),
        (ops.JSD(0.3, 7), (LOGITS, X, TARGET), ops.jsd, (LOGITS, X, TARGET, 0.3, 7)),
        (ops.TVD("sum", 9), (LOGITS, X, TARGET), ops.tvd, (LOGITS, X, TARGET, "sum", 9)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_options_go_to_the_op(module, inputs, op, arguments, monkeypatch):
    seen = []
    monkeypatch.setattr(ops, op.__name__, lambda *given, **more: seen.append((*given, *more.values())))
    module(*inputs)
    assert len(seen[0]) == len(arguments)
    for got, wanted in zip(seen[0], arguments, strict=True):
        assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
# Parameters of Liger-Kernel 0.8.5's classes, as the same arguments make them.
OF_LIGER = {
    "DyT": (ops.DyT(24), {"alpha": (1,), "gamma": (24,), "beta": (24,)}),
    "DyT without beta": (ops.DyT(24, beta=False), {"alpha": (1,), "gamma": (24,)}),
    "PolyNorm": (ops.PolyNorm(), {"weight": (3,), "bias": ()}),
    "FusedAddRMSNorm": (ops.FusedAddRMSNorm(24), {"weight": (24,)}),
    "FusedNeighborhoodAttention": (
        ops.FusedNeighborhoodAttention(24, 3, dropout=0.1),
        {f"{name}.weight": (24, 24) for name in PROJECTIONS} | {f"{name}.bias": (24,) for name in PROJECTIONS},
    ),
    "FusedNeighborhoodAttention without biases": (
        ops.FusedNeighborhoodAttention(24, 3, bias=False), {f"{name}.weight": (24, 24) for name in PROJECTIONS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_LIGER)
def test_state_dicts_have_the_names_and_shapes_of_liger_s_classes(name):
    module, shapes = OF_LIGER[name]
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == shapes
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    module.load_state_dict({name: torch.zeros(shape) for name, shape in shapes.items()}, strict=True)


def test_the_fused_head_takes_the_options_of_its_op():
    hidden, weight = random(6, 8), random(24, 8)
    bias, options = random(24), {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3, "reduction": "mean"}
    module = ops.FusedLinearCrossEntropy(torch.linspace(0.5, 2, 24), **options)
    wanted = ops.fused_linear_cross_entropy(
        hidden, weight, TARGET, class_weight=torch.linspace(0.5, 2, 24), bias=bias, num_items=3, **options
    )
    assert_near(module(hidden, weight, TARGET, bias, num_items=3), wanted, 1e-6)
    assert not module.state_dict()
    assert "z_loss=0.001" in repr(module)


def test_a_neighborhood_attention_is_its_projections_around_the_op():
    module = ops.FusedNeighborhoodAttention(24, 3, kernel_size=5, dilation=2)
    assert [name for name, _ in module.named_children()] == ["q_proj", "k_proj", "v_proj", "out_proj", "dropout"]
    heads = [project(X).view(3, 5, 3, 8).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj)]
    wanted = module.out_proj(ops.fused_neighborhood_attention(*heads, 5, 2).transpose(1, 2).reshape(3, 5, 24))
    torch.testing.assert_close(module(X), wanted)
    assert "kernel_size=5, dilation=2" in repr(module)
    with pytest.raises(ValueError, match="5 heads do not divide a hidden size 24"):
        ops.FusedNeighborhoodAttention(24, 5)


def test_cross_entropy_has_the_options_of_its_op():
    module = ops.CrossEntropy(reduction="sum", softcap=5.0, return_z_loss=True, z_loss=1e-3)
    found, wanted = module(LOGITS, TARGET), ops.cross_entropy(LOGITS, TARGET, None, -100, "sum", **module.options)
    assert torch.equal(found.loss, wanted.loss)
    assert torch.equal(found.z_loss, wanted.z_loss)


def test_a_new_norm_of_gemma_s_changes_nothing_but_the_scale():
    norm = ops.RMSNorm(24, offset=1.0, casting_mode="gemma")
    assert not norm.weight.any()
    torch.testing.assert_close(norm(X), ops.RMSNorm(24)(X))
    assert "offset=1.0, casting_mode=gemma" in repr(norm)


def test_what_stands_in_the_place_of_a_projection_counts():
    module = ops.TiledSwiGLUMLP(LLAMA, 2)
    plain = module(X)
    module.up_proj = nn.Sequential(module.up_proj, nn.Flatten(), nn.Unflatten(1, (40,)))
    torch.testing.assert_close(module(X), plain)
    module.up_proj = nn.Linear(24, 40)
    assert not torch.allclose(module(X), plain)


def test_kernels_run_below():
    before = counters("rms_norm_forward").launches
    ops.RMSNorm(24)(X)
    assert counters("rms_norm_forward").launches == before + 1


@pytest.mark.parametrize("module", [ops.LayerNorm((5, 24)), ops.RMSNorm(20)])
def test_other_sizes_are_refused(module):
    with pytest.raises(ValueError, match="the input must end with the dimensions"):
        module(random(5, 23))


@pytest.mark.parametrize(("kind", "config"), [(ops.SwiGLUMLP, GEMMA), (ops.GEGLUMLP, LLAMA)])
def test_another_activation_is_refused(kind, config):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: the activation must be one of"):
        kind(config)


def test_every_module_class_is_public():
    from tilekern.ops import modules

    found = {name for name, kind in vars(modules).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    assert {name for name in found if not name.startswith("_")} == set(modules.CLASSES) <= set(ops.__all__)
