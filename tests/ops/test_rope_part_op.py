"""rope of a part of each head, and of pairs."""

import pytest
import torch
from op_samples import assert_near, laid_out

from tilekern.ops import qk_norm_rope, rope
from tilekern.runtime import dispatch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def turned(x, theta, rotary, interleaved):
    """In float64; ``theta`` [batch, tokens, rotary / 2]."""
    c, s = theta.cos()[:, None], theta.sin()[:, None]
    part, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        one, other = part[..., ::2], part[..., 1::2]
        return torch.cat((torch.stack((one * c - other * s, other * c + one * s), -1).flatten(-2), rest), -1)
    one, other = part.chunk(2, -1)
    return torch.cat((one * c - other * s, other * c + one * s, rest), -1)


def given(head_dim, rotary, dtype, layout="contiguous", batch=1):
    q, k = (laid_out(torch.randn(3, heads, 5, head_dim).to(dtype), layout).requires_grad_() for heads in (4, 2))
    return q, k, torch.rand(batch, 5, rotary // 2, dtype=torch.float64) * 6


@pytest.mark.parametrize(
    ("dtype", "angle_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("angles", ["half", "twice", "full"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 8), (15, 6), (16, 16)])
def test_parts_and_pairs_match_autograd_in_float64(head_dim, rotary, interleaved, angles, dtype, angle_dtype):
    layout = {"half": "contiguous", "twice": "transposed", "full": "spread"}[angles]
    q, k, theta = given(head_dim, rotary, dtype, layout, batch=3 if angles == "full" else 1)
    cos, sin = theta.cos().to(angle_dtype), theta.sin().to(angle_dtype)
    theta = torch.atan2(sin.double(), cos.double())
    if angles != "half":
        cos, sin = (x.repeat_interleave(2, -1) if interleaved else torch.cat((x, x), -1) for x in (cos, sin))
    results = rope(q, k, cos, sin, twice=angles == "twice", rotary_dim=rotary, interleaved=interleaved)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    # A rotation by rounded angles is longer or shorter by their length, which the reference has too.
    length = (cos[..., : rotary // 2].double() ** 2 + sin[..., : rotary // 2].double() ** 2).sqrt()
    if interleaved and angles != "half":
        length = (cos[..., ::2].double() ** 2 + sin[..., ::2].double() ** 2).sqrt()
    scale = length.repeat_interleave(2, -1) if interleaved else torch.cat((length, length), -1)
    scale = torch.nn.functional.pad(scale, (0, head_dim - rotary), value=1.0)[:, None]
    references = [turned(x, theta, rotary, interleaved) * scale for x in wide]
    slopes = [torch.randn_like(y) for y in results]
    found = torch.autograd.grad(results, (q, k), slopes)
    wanted = torch.autograd.grad(references, wide, [slope.double() for slope in slopes])
    tolerance = TOLERANCE[torch.bfloat16 if torch.bfloat16 in (dtype, angle_dtype) else dtype]
    for got, expected in zip((*results, *found), (*references, *wanted), strict=True):
        assert_near(got, expected, tolerance)
    assert {y.dtype for y in results} == {torch.promote_types(dtype, angle_dtype)}
    assert all(torch.equal(y[..., rotary:], x[..., rotary:]) for x, y in zip((q, k), results, strict=True))


def test_as_many_numbers_turn_as_there_are_angles():
    q, k, theta = given(16, 12, torch.float32)
    cos, sin = (torch.cat((x, x), -1).float() for x in (theta.cos(), theta.sin()))
    for got, expected in zip(rope(q, k, cos, sin), rope(q, k, cos, sin, rotary_dim=12), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_is_one_launch_in_each_direction(interleaved):
    q, k, theta = given(16, 8, torch.float32)
    kernel = "llama4_rope" if interleaved else "rope"
    before = dispatch.counters(kernel).launches
    results = rope(q, k, theta.cos().float(), theta.sin().float(), rotary_dim=8, interleaved=interleaved)
    sum(y.sum() for y in results).backward()
    assert dispatch.counters(kernel).launches == before + 2


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_parts_can_be_traced(interleaved, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    torch._dynamo.reset()
    q, k, theta = given(16, 8, torch.float32)
    cos, sin = theta.cos().float(), theta.sin().float()

    def call(q, k):
        return torch.cat([y.flatten() for y in rope(q, k, cos, sin, rotary_dim=8, interleaved=interleaved)])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(call(q, k).square().sum() + call(q, k)[:99].sum(), (q, k))
    found = torch.autograd.grad(compiled(q, k).square().sum() + compiled(q, k)[:99].sum(), (q, k))
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("rotary_dim", "width"), [(7, 7), (18, 18), (8, 6), (-2, 8)])
def test_parts_that_do_not_fit_are_refused(rotary_dim, width):
    q, k, _ = given(16, 16, torch.float32)
    with pytest.raises(ValueError, match=r"rope: rotary_dim must be even, at most 16"):
        rope(q, k, torch.ones(5, width), torch.ones(5, width), rotary_dim=rotary_dim)


def test_qk_norm_rope_refuses_a_part_of_a_head():
    q, k, theta = given(16, 8, torch.float32)
    cos = torch.cat((theta, theta, theta), -1).cos().float()
    with pytest.raises(ValueError, match=r"\[1 or 3, 5, 16 or 8\], with an even head size"):
        qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), torch.ones(16), torch.ones(16), cos, cos)
