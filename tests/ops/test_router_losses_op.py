import pytest
import torch

from tilekern import ops


def test_an_even_router_has_the_number_of_choices_as_its_balance():
    logits, ids = torch.zeros(8, 4), torch.arange(16).view(8, 2) % 4
    balance, z = ops.router_losses(logits, ids)
    assert balance == pytest.approx(2.0)
    assert z == pytest.approx(torch.tensor(4.0).log().item() ** 2)
    one = torch.full_like(logits, -50.0).index_fill(1, torch.tensor([3]), 0.0)
    assert ops.router_losses(one, torch.full((8, 1), 3)).balance == pytest.approx(4.0)


def test_it_is_traced_in_one_graph():
    logits, ids = torch.randn(4, 9), torch.arange(8).view(4, 2)
    compiled = torch.compile(ops.router_losses, backend="eager", fullgraph=True)(logits, ids)
    torch.testing.assert_close(list(compiled), list(ops.router_losses(logits, ids)))
