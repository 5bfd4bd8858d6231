import pytest
import torch

from tilekern.ops.grouped_products import grouped_linear, grouped_outer


@pytest.mark.parametrize("rows", [[3, 0, 4], [0, 0, 0], [0, 7, 0]])
@pytest.mark.parametrize(("inner", "columns"), [(16, 8), (5, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_shapes_that_torch_takes_and_of_others(rows, inner, columns, transposed):
    """Rows that do not begin at multiples of 16 bytes go expert by expert; two rows here are of no expert."""
    offsets = torch.tensor(rows).cumsum(0).to(torch.int32)
    x, dy = torch.randn(sum(rows) + 2, inner), torch.randn(sum(rows) + 2, columns)
    weight = torch.randn(3, inner, columns).transpose(1, 2) if transposed else torch.randn(3, columns, inner)
    y, dweight = grouped_linear(x, weight, offsets), grouped_outer(dy, x, offsets)
    start = 0
    for e, end in enumerate(offsets.tolist()):
        torch.testing.assert_close(y[start:end], x[start:end] @ weight[e].t(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dweight[e], dy[start:end].t() @ x[start:end], rtol=1e-4, atol=1e-5)
        start = end
    assert dweight.is_contiguous()
