import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import launched_by
from tolerances import ONCE

from tilekern import ops


def logits_of(tokens, experts, dtype=torch.float32, seed=0):
    """From -2 to 2, as far apart as so many experts can be: rounding decides nothing."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return ((order - experts / 2) * (4 / experts)).to(dtype)


def mixtral(logits, choices, normalized):
    """Route like Mixtral, Qwen3-MoE, OLMoE and Qwen2-MoE: the softmax comes first."""
    weights, ids = logits.softmax(-1).topk(choices, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if normalized else weights


def gpt_oss(logits, choices):
    values, ids = logits.topk(choices, -1)
    return ids, values.softmax(-1)


def deepseek_v3(logits, choices, bias, groups, kept, scale, normalized):
    """Route like the class of transformers, with a loop over tokens instead of masks."""
    rows, share = [], logits.sigmoid()
    for row in (share + bias).detach():
        parts = row.view(groups, -1)
        best = parts.sort(1, descending=True).values[:, :2].sum(1).topk(kept).indices.tolist()
        allowed = [e for g in best for e in range(g * parts.shape[1], (g + 1) * parts.shape[1])]
        rows.append(sorted(allowed, key=lambda e, row=row: -float(row[e]))[:choices])
    ids = torch.tensor(rows)
    weights = share.gather(1, ids)
    return ids, scale * (weights / (weights.sum(1, keepdim=True) + 1e-20) if normalized else weights)


def check(logits, choices, reference, **how):
    """Hold ids, weights and the gradient of the logits to a reference in float64."""
    logits, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    ids, weights = reference(wide)
    slope = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad(weights, wide, slope.double())
    found = {}

    def step():
        found["choice"] = ops.router(logits, choices, dtype=torch.float32, **how)
        found["slope"] = torch.autograd.grad(found["choice"].weights, logits, slope)[0]

    kernel = f"router_{how.get('scores', 'softmax')}_"
    assert launched_by(step) == {kernel + "forward": 1, kernel + "backward": 1}
    assert torch.equal(found["choice"].ids, ids)
    assert found["slope"].dtype == logits.dtype
    torch.testing.assert_close(found["choice"].weights.double(), weights, rtol=2e-6, atol=1e-9)
    allowed = ONCE[logits.dtype] * expected.norm() + 1e-6 * slope.norm()
    assert (found["slope"].double() - expected).norm() <= allowed


@examples(12)
@given(
    tokens=st.integers(1, 9),
    experts=st.integers(2, 130),
    choices=st.integers(1, 16),
    normalized=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_softmax_then_the_choice(tokens, experts, choices, normalized, dtype):
    choices = min(choices, experts)
    logits = logits_of(tokens, experts, dtype)
    if dtype == torch.float32:
        check(logits, choices, lambda wide: mixtral(wide, choices, normalized), normalized=normalized)
    else:
        # Rounded, logits may be equal.
        expected = torch.sort(logits, descending=True, stable=True).indices[:, :choices]
        reference = logits.double().softmax(-1).gather(1, expected)
        found = ops.router(logits, choices, normalized=normalized)
        assert torch.equal(found.ids, expected)
        assert found.weights.dtype == dtype
        if normalized:
            reference = reference / reference.sum(1, keepdim=True)
        torch.testing.assert_close(found.weights.double(), reference, rtol=8e-3, atol=1e-6)


def test_the_choice_then_softmax_is_the_normalised_softmax():
    check(logits_of(7, 32), 4, lambda wide: gpt_oss(wide, 4))


@examples(12)
@given(
    tokens=st.integers(1, 6),
    groups=st.sampled_from([1, 2, 3, 8]),
    size=st.integers(2, 33),
    choices=st.integers(1, 9),
    kept=st.integers(1, 4),
    normalized=st.booleans(),
    biased=st.booleans(),
)
def test_sigmoid_with_groups_and_a_bias(tokens, groups, size, choices, kept, normalized, biased):
    experts, kept = groups * size, min(kept, groups)
    choices = min(choices, kept * size)
    bias = torch.linspace(-0.2, 0.3, experts).square() if biased else None
    added = 0.0 if bias is None else bias.double()
    check(
        logits_of(tokens, experts),
        choices,
        lambda wide: deepseek_v3(wide, choices, added, groups, kept, 2.5, normalized),
        scores="sigmoid", bias=bias, groups=groups, kept_groups=kept, scale=2.5, normalized=normalized,
    )  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"scores": "sigmoid", "groups": 8, "kept_groups": 4}])
def test_the_sizes_of_deepseek_v3(how):
    logits = logits_of(3, 256)
    found = ops.router(logits, 8, **how)
    reference = mixtral(logits, 8, True) if not how else deepseek_v3(logits, 8, torch.zeros(256), 8, 4, 1.0, True)
    assert torch.equal(found.ids, reference[0])
    torch.testing.assert_close(found.weights, reference[1])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("way", ["kernel", "formula"])
def test_equals_are_taken_by_their_ids_and_nan_first(scores, way):
    logits = torch.tensor([[1.0, 2, 2, 1, 2, 1], [0.0] * 6, [1, torch.nan, 3, torch.inf, torch.nan, 2]])
    logits = logits if way == "kernel" else logits.double()
    found = ops.router(logits, 4, scores=scores)
    # The sigmoid of infinity is 1.
    last = [1, 3, 4, 2] if scores == "softmax" else [1, 4, 3, 2]
    assert found.ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], last]
    assert found.weights[2].isnan().all()
    assert found.weights[:2].isfinite().all()


def test_groups_that_are_equal_are_kept_by_their_ids():
    for logits in (torch.zeros(2, 12), torch.zeros(2, 12, dtype=torch.float64)):
        found = ops.router(logits, 5, scores="sigmoid", groups=4, kept_groups=2, bias=torch.eye(12)[7])
        assert found.ids.tolist() == [[7, 0, 1, 2, 6]] * 2


def test_masked_experts_get_no_weight():
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 4] = 1.0
    found = ops.router(logits, 3)
    assert found.ids.tolist() == [[4, 0, 1]]
    assert found.weights.tolist() == [[1.0, 0.0, 0.0]]


def test_the_bias_has_no_gradient():
    bias = torch.zeros(6, requires_grad=True)
    logits = logits_of(3, 6).requires_grad_()
    ops.router(logits, 2, scores="sigmoid", bias=bias).weights.square().sum().backward()
    assert bias.grad is None
    assert logits.grad.abs().sum() > 0


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_what_no_kernel_takes_runs_in_torch(scores):
    logits = torch.randn(4, 300, requires_grad=True)
    assert launched_by(lambda: ops.router(logits, 3, scores=scores).weights.sum().backward()) == {}
    found, wide = ops.router(logits, 3, scores=scores), ops.router(logits.double(), 3, scores=scores)
    assert torch.equal(found.ids, wide.ids)
    torch.testing.assert_close(found.weights.double(), wide.weights, rtol=1e-6, atol=1e-7)


def test_an_even_router_has_the_number_of_choices_as_its_balance():
    logits, ids = torch.zeros(8, 4), torch.arange(16).view(8, 2) % 4
    balance, z = ops.router_losses(logits, ids)
    assert balance == pytest.approx(2.0)
    assert z == pytest.approx(torch.tensor(4.0).log().item() ** 2)
    one = torch.full_like(logits, -50.0).index_fill(1, torch.tensor([3]), 0.0)
    assert ops.router_losses(one, torch.full((8, 1), 3)).balance == pytest.approx(4.0)
