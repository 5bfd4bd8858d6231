"""fused_neighborhood_attention against a mask in float64, and what it copies."""

import pytest
import torch

import tilekern
from tilekern.ops import attention, fused_neighborhood_attention


def tensors(batch=2, tokens=13, heads=2, kv_heads=1, dtype=torch.float32, tokens_first=False):
    found = []
    for number in (heads, kv_heads, kv_heads):
        shape = (batch, tokens, number, 8) if tokens_first else (batch, number, tokens, 8)
        x = torch.randn(shape).to(dtype).requires_grad_()
        found.append(x.transpose(1, 2) if tokens_first else x)
    return found


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
