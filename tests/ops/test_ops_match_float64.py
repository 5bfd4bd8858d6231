"""Every op, forward and backward, against the same formula in float64, over shapes, layouts and dtypes."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, LAYOUTS, OPS, TOLERANCE, assert_near, expected, inputs_of, laid_out, shapes

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def check(op, inputs, dy_layout="contiguous", seed=1, of_slopes=False):
    leaves = [x for x in inputs if x.requires_grad]
    results = op.run(*inputs)
    generator = torch.Generator().manual_seed(seed)
    slopes = [laid_out(torch.randn(y.shape, generator=generator).to(y.dtype), dy_layout) for y in results]
    gradients = torch.autograd.grad(results, leaves, slopes)
    wide_results, wide_gradients = expected(op, inputs, slopes)
    tolerance = max(TOLERANCE[x.dtype] for x in inputs)
    for result, reference in zip(results, wide_results, strict=True):
        assert_near(result, reference, tolerance)
    for leaf, gradient, reference in zip(leaves, gradients, wide_gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        if of_slopes:
            assert (gradient.double() - reference).norm() < tolerance * sum(slope.double().norm() for slope in slopes)
        else:
            assert_near(gradient, reference, tolerance)


@every_op
@examples(60)
@given(data=st.data())
def test_any_shape_layout_and_dtype(op, data):
    shape = data.draw(shapes(op), label="shape")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    layouts = data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=2, max_size=4), label="layouts")
    dy_layout = data.draw(st.sampled_from(LAYOUTS), label="layout of dy")
    check(op, inputs_of(op, shape, [dtype], layouts), dy_layout)


@pytest.mark.parametrize("one", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_rms_norm_of_mixed_dtypes(one, other):
    op = OPS["rms_norm"]
    inputs = inputs_of(op, (3, 5, 33), [one, other], ["contiguous"])
    assert op.run(*inputs)[0].dtype == torch.promote_types(one, other)
    check(op, inputs)


@pytest.mark.parametrize("one", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_rope_of_mixed_dtypes(one, other):
    op = OPS["rope"]
    inputs = inputs_of(op, (2, 3, 5, 10), [one, one, other, other], ["contiguous"])
    assert all(y.dtype == torch.promote_types(one, other) for y in op.run(*inputs))
    check(op, inputs)


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_very_short_rows(name, columns):
    """Gradients may cancel here, so that errors are judged against the size of the slopes."""
    op = OPS[name]
    inputs = inputs_of(op, (7, columns), [torch.float32], ["contiguous"])
    (y,) = op.run(*inputs)
    slope = torch.ones_like(y)
    wide, gradients = expected(op, inputs, [slope])
    torch.testing.assert_close(y, wide[0].float(), rtol=1e-5, atol=1e-6)
    for got, reference in zip(torch.autograd.grad(y, inputs, slope), gradients, strict=True):
        torch.testing.assert_close(got, reference.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("angles", ["full", "half", "2-dimensional", "per batch", "twice"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rope_takes_angles_of_every_form(angles, layout):
    from tilekern.ops import rope

    op = OPS["rope"]
    q, k, _, _ = inputs_of(op, (3, 4, 5, 12), [torch.float32], [layout])
    theta = torch.rand(3 if angles == "per batch" else 1, 5, 6) * 6
    if angles == "2-dimensional":
        theta = theta[0]
    cos, sin = theta.cos(), theta.sin()
    if angles != "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    results = rope(q, k, cos, sin, twice=angles == "twice")
    wide = [x if x.dim() == 3 else x.unsqueeze(0) for x in (cos, sin)]
    slopes = [torch.randn_like(y) for y in results]
    references, gradients = expected(op, [q, k, *wide], slopes)
    for got, reference in zip(results, references, strict=True):
        assert_near(got, reference, 1e-5)
    for got, reference in zip(torch.autograd.grad(results, (q, k), slopes), gradients, strict=True):
        assert_near(got, reference, 1e-5)


@every_op
def test_the_result_is_in_memory_that_is_not_shared_with_an_input(op):
    for layout in LAYOUTS:
        inputs = [x.detach() for x in inputs_of(op, (2, 3, 4, 10)[-4:], [torch.float32], [layout])]
        before = [x.clone() for x in inputs]
        for result in op.run(*inputs):
            result.zero_()
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@every_op
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_values_stay_finite(op, dtype):
    """Squares and exponentials are taken in float32; what overflows there overflows in torch as well."""
    for scale in (1e-4, 30.0, 200.0):
        inputs = inputs_of(op, (2, 3, 4, 16), [dtype], ["contiguous"])
        inputs[0] = (inputs[0].detach() * scale).requires_grad_()
        if op.name == "swiglu" or scale > 1:
            # A share that was rounded to 1 says no more how much less it was.
            check(op, inputs, of_slopes=op.name == "softmax")
