"""Norms, and sums with norms: what is particular to some of them; ``test_contract.py`` has what holds for all."""

import pytest
import torch
from contract import CASES, Drawn
from op_samples import DTYPES, EPS, assert_near, slopes_of
from tolerances import FLOAT64

import tilekern
from tilekern.kernels.dyt import BACKWARD
from tilekern.kernels.families.stripes import groups_of
from tilekern.ops import dyt, fused_add_rms_norm, group_norm, poly_norm, rms_norm
from tilekern.ops.fused_rms_norm_add import fused_rms_norm_add
from tilekern.ops.fused_rms_norm_add_rms_norm import fused_rms_norm_add_rms_norm
from tilekern.ops.operation import FUNCTIONS
from tilekern.ops.rms_norm import CASTING_MODES
from tilekern.runtime import dispatch
from tilekern.spec import bucket
from tilekern.spec.targets import resolve

GEMMA = (EPS, 1.0, "gemma")
SUMS = {
    "fused_add_rms_norm": fused_add_rms_norm, "fused_rms_norm_add": fused_rms_norm_add,
    "fused_rms_norm_add_rms_norm": fused_rms_norm_add_rms_norm,
}  # fmt: skip
NAMES = {"fused_add_rms_norm": "fused_add_rms_norm with options"}
every_sum = pytest.mark.parametrize("name", SUMS)


def usual(name, dtype=torch.float32):
    """The tensors of a case."""
    return [x for x in CASES[name].given(Drawn(), dtype).values() if isinstance(x, torch.Tensor)]


def of_sum(name, dtype=torch.float32):
    return usual(NAMES.get(name, name), dtype)


@every_sum
def test_terms_of_two_dtypes_run_torch_s_own_operations(name):
    case = CASES[NAMES.get(name, name)]
    residual, x, *weights = of_sum(name)
    given = [residual, x.bfloat16(), *weights]
    found = SUMS[name](*given, EPS)
    wanted = case.formula(**dict(zip("abcd", map(torch.Tensor.double, given), strict=False)), eps=EPS)
    for y, right in zip(*((z if isinstance(z, tuple) else (z,)) for z in (found, wanted)), strict=True):
        assert y.dtype == torch.float32
        assert_near(y, right, 1e-2 if name != "fused_add_rms_norm" else FLOAT64)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "dyt", "poly_norm"])
def test_weights_of_two_dtypes_run_the_formula(name):
    case = CASES[name]
    given = case.given(Drawn(), torch.bfloat16)
    last = "alpha" if name == "dyt" else "bias"
    given[last] = given[last].detach().float()
    (y,) = case.run(given)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert next(x for key, x in given.items() if key in ("weight", "gamma")).grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_what_the_layers_of_transformers_compute(dtype):
    """In float32 to rounding; in bfloat16 sums are the very same and norms one unit away at most."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    residual, x, weight, following = (x.detach() for x in of_sum("fused_rms_norm_add_rms_norm", dtype))

    def norm(kind, weight):
        module = kind(weight.shape[0], eps=EPS).to(dtype)
        module.weight.data.copy_(weight)
        return module

    near = {"rtol": 1e-6 if dtype == torch.float32 else 2**-7, "atol": 1e-6}
    total, y = fused_add_rms_norm(residual, x, weight, EPS)
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(y, norm(Qwen3RMSNorm, weight)(total), **near)
    total, y = fused_rms_norm_add_rms_norm(residual, x, weight, following, *GEMMA)
    torch.testing.assert_close(total, residual + norm(Gemma2RMSNorm, weight)(x), **near)
    torch.testing.assert_close(y, norm(Gemma2RMSNorm, following)(total), **near)
    assert torch.equal(total, fused_rms_norm_add(residual, x, weight, *GEMMA))


def test_a_sum_that_is_changed_before_the_backward_of_its_norm_is_noticed():
    *leaves, following = of_sum("fused_rms_norm_add_rms_norm")
    for total, y in (fused_add_rms_norm(*leaves, EPS), fused_rms_norm_add_rms_norm(*leaves, following, *GEMMA)):
        total.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_each_casting_mode_rounds_where_it_says():
    """``llama`` rounds the normalised row before the weight, which costs half a unit more; others the result alone."""
    x, weight = torch.randn(40, 256).bfloat16(), (torch.randn(256) / 8).bfloat16().requires_grad_()
    formula = CASES["rms_norm with options"].formula
    normal = formula(x=x.double(), weight=None, eps=EPS)
    for offset in (0.0, 1.0):
        wanted = formula(x=x.double(), weight=weight.double(), eps=EPS, offset=offset)
        errors = [(rms_norm(x, weight, EPS, offset, mode).double() - wanted).norm() for mode in CASTING_MODES]
        assert errors[1] == errors[2] < 0.8 * errors[0]
        rounded = (normal.bfloat16().float() * (weight.float() + offset)).bfloat16()
        assert (rms_norm(x, weight, EPS, offset) != rounded).float().mean() < 0.01
    wide = weight.detach().float().requires_grad_()
    (gradient,) = torch.autograd.grad(rms_norm(x[:1], wide, EPS).sum(), wide)
    assert torch.equal(gradient, gradient.bfloat16().float()), "of one row it is the rounded row itself"


def test_the_plain_ops_serve_what_the_options_leave_as_it_was():
    x, weight = torch.randn(3, 16), torch.randn(16)
    before = dispatch.counters("rms_norm_offset_forward").launches
    for options in ((0.0, "llama"), (0.0,), ()):
        rms_norm(x, weight, EPS, *options)
    rms_norm(x, None, EPS, 1.0, "llama")
    assert dispatch.counters("rms_norm_offset_forward").launches == before


def test_channels_that_are_last_in_memory():
    x, weight, bias = usual("group_norm")
    spread = x.detach().contiguous(memory_format=torch.channels_last)
    y = group_norm(spread, weight, bias, 12, 4)
    assert y.is_contiguous()
    assert torch.equal(y, group_norm(x, weight, bias, 12, 4))


@pytest.mark.parametrize("in_place", [True, False])
def test_the_gradient_that_comes_in_is_left_as_it_is(in_place):
    y = poly_norm(*usual("poly_norm"), 1e-6, in_place)
    slope = torch.randn_like(y)
    before = slope.clone()
    y.backward(slope)
    assert torch.equal(slope, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_offset", "fused_add_rms_norm", "fused_add_rms_norm_offset"])
def test_norms_of_float32_between_products_of_another_dtype_have_the_bits_of_casts(name, dtype):
    """And so have their gradients, also of a sum that nothing else reads."""
    op, norm = (FUNCTIONS[each][each] for each in (f"{name}_to", name))
    given, scalars = usual(f"{name}_to"), (EPS, *((1.0, False) if name.endswith("offset") else ()))
    if name.startswith("fused"):
        given[1] = given[1].detach().to(dtype).requires_grad_()
        *found, y = op(*given, *scalars)
        *wanted, wide = norm(given[0], given[1].float(), *given[2:], *scalars)
    else:
        found, wanted, y, wide = [], [], op(*given, *scalars, dtype), norm(*given, *scalars)
    slopes = slopes_of([*found, y])
    for results, right in (([*found, y], [*wanted, wide.to(dtype)]), ([y], [wide.to(dtype)])):
        assert all(map(torch.equal, results, right))
        pulled = (torch.autograd.grad(z, given, slopes[-len(z) :], retain_graph=True) for z in (results, right))
        assert all(map(torch.equal, *pulled))


def test_numbers_near_0_keep_their_digits():
    x = torch.logspace(-8, 1, 83).repeat(2, 1)
    one = torch.ones(83)
    torch.testing.assert_close(dyt(x, one[:1], one), torch.tanh(x.double()).float(), rtol=5e-7, atol=0)


def test_a_trace_has_the_sums_of_every_config_that_may_win():
    """A group of blocks leaves a row of sums, and the winner's grid says how many groups there are."""
    with torch.device("meta"):
        leaves = [torch.randn(size, requires_grad=True) for size in ((8192, 4096), (1,), (4096,), (4096,))]
    with tilekern.trace(gpu="H200") as found:
        dyt(*leaves).sum().backward()
    target, problems = resolve("H200"), dict(found.problems)
    problem = problems["dyt_backward"]
    ways = (BACKWARD.device(problem, config) for config in BACKWARD.space.candidates(problem, target))
    grids = {way.grid(problem, target.sm_count) for way in ways}
    sums = {problem["rows"] for name, problem in found.problems if name == "dyt_sums"}
    assert sums == {bucket(groups_of(blocks, 4096)) for blocks in grids}
    assert len(sums) > 1
