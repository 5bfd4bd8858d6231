"""fused_neighborhood_attention against a mask in float64, and what it copies."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import assert_near

import tilekern
from tilekern.ops import attention, fused_neighborhood_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def expected(query, key, value, kernel_size, dilation, scale=None):
    """The neighbours that there are, by a mask over all scores, as Liger's kernel makes it."""
    position = torch.arange(query.shape[2])
    distance = position - position[:, None]
    seen = (distance.abs() <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


def tensors(batch=2, tokens=13, heads=2, kv_heads=1, dtype=torch.float32, tokens_first=False):
    found = []
    for number in (heads, kv_heads, kv_heads):
        shape = (batch, tokens, number, 8) if tokens_first else (batch, number, tokens, 8)
        x = torch.randn(shape).to(dtype).requires_grad_()
        found.append(x.transpose(1, 2) if tokens_first else x)
    return found


def check(inputs, *options):
    dtype = inputs[0].dtype
    wide = [x.detach().double().requires_grad_() for x in inputs]
    y, reference = fused_neighborhood_attention(*inputs, *options), expected(*wide, *options)
    assert y.dtype == dtype
    assert_near(y, reference, TOLERANCE[dtype])
    slope = torch.randn(y.shape).to(dtype)
    gradients = torch.autograd.grad(y, inputs, slope)
    for got, wanted in zip(gradients, torch.autograd.grad(reference, wide, slope.double()), strict=True):
        # The gradients of a token that sees itself alone are 0, but for their rounding.
        assert (got - wanted).norm() <= TOLERANCE[dtype] * wanted.norm() + 1e-5


@examples(8)
@given(data=st.data())
def test_results_and_gradients_match_float64(data):
    """With fewer tokens than neighbours, than the dilation, or of any remainder by it."""
    inputs = tensors(
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 14)),
        kv_heads=data.draw(st.integers(1, 2)),
        dtype=data.draw(st.sampled_from(list(TOLERANCE))),
        tokens_first=data.draw(st.booleans()),
    )
    size, dilation = data.draw(st.sampled_from([1, 3, 5, 7])), data.draw(st.integers(1, 6))
    check(inputs, size, dilation, data.draw(st.sampled_from([None, 0.3])))


def test_a_token_at_a_border_sees_the_neighbours_that_there_are():
    """NATTEN would show it further ones on the other side."""
    value = torch.eye(8).view(1, 1, 8, 8)
    y = fused_neighborhood_attention(torch.zeros_like(value), torch.zeros_like(value), value, 5, 2)
    wanted = torch.tensor([1, 0, 1, 0, 1, 0, 0, 0.0]) / 3
    torch.testing.assert_close(y[0, 0, 0], wanted)
    torch.testing.assert_close(y[0, 0, 3], torch.tensor([0, 1, 0, 1, 0, 1, 0, 1.0]) / 4)


@pytest.mark.parametrize(("tokens", "launches"), [(12, 1), (13, 2), (3, 1)])
def test_all_sequences_of_one_length_are_one_launch(tokens, launches):
    before = tilekern.stats().get("attention_forward", {}).get("launches", 0)
    fused_neighborhood_attention(*tensors(tokens=tokens), 5, 4)
    assert tilekern.stats()["attention_forward"]["launches"] == before + launches


def test_sequences_of_one_length_are_not_copied_out_of_what_a_projection_wrote(monkeypatch):
    taken = []
    noting = lambda *parts, **options: taken.extend(parts) or attention(*parts, **options)  # noqa: E731
    monkeypatch.setitem(fused_neighborhood_attention.__globals__, "attention", noting)
    inputs = tensors(tokens=12, tokens_first=True)
    fused_neighborhood_attention(*inputs, 3, 4)
    assert [x.data_ptr() for x in taken] == [x.data_ptr() for x in inputs]


def test_no_tokens_give_no_result():
    query, key, value = tensors(tokens=0)
    assert fused_neighborhood_attention(query, key, value, 3, 2).shape == (2, 2, 0, 8)


def test_torch_compile_traces_it_whole():
    inputs = tensors()
    compiled = torch.compile(fused_neighborhood_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs, 3, 2), fused_neighborhood_attention(*inputs, 3, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel_size": 4}, "kernel_size must be odd and positive, got 4"),
        ({"kernel_size": -1}, "kernel_size must be odd and positive, got -1"),
        ({"dilation": 0}, "dilation must be at least 1, got 0"),
        ({"key": torch.ones(2, 1, 12, 8)}, "with as many queries as keys"),
        ({"query": torch.ones(4, 13, 8)}, r"must be \[batch, heads, tokens, head_dim\]"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    query, key, value = tensors()
    with pytest.raises(ValueError, match=message):
        fused_neighborhood_attention(**({"query": query, "key": key, "value": value} | changes))
