"""A layer as one op computes what its ops do, launches less, and leaves to them what it does not serve."""

import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from op_samples import assert_near, launched_by
from tolerances import REORDERED
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilekern
from tilekern import ops
from tilekern.kernels.fp8.scales import scaled_rows
from tilekern.ops import fp8_layer_products
from tilekern.ops.decoder_layer import Numbers, Weights, decoder_layer
from tilekern.ops.fp8_block_linear import fp8_block_linears
from tilekern.ops.fp8_gated_mlp import fp8_gated_mlp
from tilekern.ops.fp8_linear import fp8_linears
from tilekern.ops.gated_mlp import lora_gated_mlp
from tilekern.ops.kept import tell_kept
from tilekern.ops.lora_linear import Adapted, Adapter, lora_linears
from tilekern.ops.mxfp8_linear import mxfp8_linears
from tilekern.ops.rounded_weight import RoundedWeight

BATCH, TOKENS, HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 2, 7, 24, 4, 2, 16, 40
EPS = (1e-6, 1e-5, 3e-6, 2e-6)


class Case(NamedTuple):
    """A kind of layer, and how it is called.

    Attributes:
        adapted: the ranks of adapters by the names of the weights that they are on, which are then frozen as all are.
        learning: the names of what learns, of all weights and factors; None for all that are not frozen.
    """

    heads: bool = True
    biases: bool = False
    window: int | None = None
    packed: bool = False
    own_angles: bool = False
    around: bool = False
    softcap: float | None = None
    offset: float = 0.0
    cast: bool = True
    activation: str = "silu"
    adapted: dict[str, int] = {}  # noqa: RUF012 (no case changes it)
    learning: tuple[str, ...] | None = None


GEMMA = Case(heads=False, offset=1.0, cast=False, activation="gelu_tanh")
# The weights that may have adapters, and the adapters' factors, in the op's order.
LINEAR = ("q", "k", "v", "out", "gate", "up", "down")
FACTORS = tuple(f"{name}.{factor}" for name in LINEAR for factor in "ab")
CASES = {
    "qwen3": Case(),
    "llama": Case(heads=False),
    "qwen2, packed": Case(heads=False, biases=True, packed=True),
    "a window": Case(window=3),
    "angles of each row": Case(own_angles=True, biases=True),
    "gemma": GEMMA,
    "gemma2": GEMMA._replace(around=True, softcap=2.0, window=3),
    "gemma3": GEMMA._replace(around=True, heads=True, own_angles=True),
    "gemma3, packed": GEMMA._replace(around=True, heads=True, window=3, packed=True),
    "norms around, of Llama's kind": Case(around=True, activation="gelu"),
    "norms that round last": Case(cast=False),
    "adapters on all": Case(adapted=dict.fromkeys(LINEAR, 4)),
    "adapters of some ranks, and a packed row": Case(adapted={"q": 3, "v": 5, "down": 2}, packed=True, biases=True),
    "adapters, a first layer": Case(adapted=dict.fromkeys(LINEAR, 4), learning=FACTORS),
    "frozen a": Case(adapted=dict.fromkeys(LINEAR, 4), learning=("x", *FACTORS[1::2])),
    "frozen b": Case(adapted=dict.fromkeys(LINEAR, 4), heads=False, learning=("x", *FACTORS[::2])),
    "adapters behind attention": Case(adapted={"out": 4, "up": 3}, learning=("x", "out.a", "out.b", "up.a", "up.b")),
    "frozen": Case(learning=("x",), biases=True),
    "a frozen first layer but for a norm of heads": Case(learning=("k_norm",)),
    "norms alone": Case(learning=("x", "norm", "mlp_norm")),
    "norms alone in a first layer": Case(learning=("norm", "mlp_norm"), heads=False),
    "biases alone": Case(learning=("q_bias", "v_bias"), biases=True, heads=False),
    "products alone": Case(learning=("k", "out", "up"), heads=False),
    "gemma3, adapters on all": GEMMA._replace(around=True, heads=True, adapted=dict.fromkeys(LINEAR, 4)),
    "gemma2, some adapters": GEMMA._replace(around=True, adapted={"v": 3, "down": 2}, learning=("x", "v.a", "down.b")),
    "gemma3, frozen": GEMMA._replace(around=True, heads=True, learning=("x",)),
    "gemma3, norms alone": GEMMA._replace(around=True, heads=True, learning=("x", "out_norm", "q_norm", "down_norm")),
    "gemma, products alone": GEMMA._replace(learning=("k", "out", "up")),
}


def drawn(case: Case, dtype: torch.dtype = torch.float32) -> tuple[list[Any], Numbers]:
    generator = torch.Generator().manual_seed(3)

    def made(*shape: int, scale: float = 0.2, base: float = 0.0) -> torch.Tensor:
        return (base + scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    def norm(size: int) -> torch.Tensor:
        return made(size, scale=0.1, base=1.0 - case.offset)

    outs = [heads * SIZE for heads in (HEADS, KV_HEADS, KV_HEADS)]
    weights = Weights(
        norm(HIDDEN), *(made(out, HIDDEN) for out in outs), *(made(out) if case.biases else None for out in outs),
        *((norm(SIZE), norm(SIZE)) if case.heads else (None, None)), made(HIDDEN, outs[0]),
        norm(HIDDEN) if case.around else None, norm(HIDDEN), norm(HIDDEN) if case.around else None,
        made(INNER, HIDDEN), made(INNER, HIDDEN), made(HIDDEN, INNER),
    )  # fmt: skip
    batch = 1 if case.packed else BATCH
    angle = torch.randn(batch if case.own_angles else 1, TOKENS, SIZE // 2, generator=generator).repeat(1, 1, 2)
    starts = torch.tensor([0, 3, TOKENS], dtype=torch.int32) if case.packed else None
    x = made(batch, TOKENS, HIDDEN, scale=1.0)
    of_norms = {"offset": case.offset, "cast": case.cast}
    numbers = Numbers(SIZE, EPS, SIZE**-0.5, case.window, softcap=case.softcap, activation=case.activation, **of_norms)
    adapters = []
    for name in LINEAR if case.adapted else ():
        rank, (out, inner) = case.adapted.get(name), getattr(weights, name).shape
        adapters.append(None if rank is None else Adapter(made(rank, inner), made(out, rank), 0.75, rank))
    named = {"x": x, **weights._asdict()}
    for name, adapter in zip(LINEAR, adapters, strict=bool(adapters)):
        named |= {} if adapter is None else {f"{name}.a": adapter.a, f"{name}.b": adapter.b}
    learning = case.learning or [name for name in named if not adapters or name == "x" or "." in name]
    for name, leaf in named.items():
        if leaf is not None:
            leaf.requires_grad_(name in learning)
    given = [x, angle.cos().to(dtype), angle.sin().to(dtype), weights, starts, 4 if case.packed else None, adapters]
    return given, numbers


def by_parts(
    x, cos, sin, weights, numbers, starts, longest, adapters, *, linears=lora_linears, mlp=lora_gated_mlp, lean=False
):
    adapted = dict(zip(LINEAR, adapters or [None] * 7, strict=True))

    def layers(*names):
        return [
            Adapted(
                getattr(weights, name),
                *(adapted[name] or (None, None, 1.0))[:3],
                getattr(weights, f"{name}_bias", None),
                adapted[name].rate if adapted[name] else 0.0,
            )
            for name in names
        ]

    mode = "llama" if numbers.cast else "gemma"
    options, eps = {"offset": numbers.offset, "casting_mode": mode}, numbers.eps
    rows = ops.rms_norm(x, weights.norm, eps[0], **options)
    made = linears(rows, layers("q", "k", "v"))
    q, k, v = (y.view(*y.shape[:2], -1, SIZE) for y in made)
    if weights.q_norm is not None:
        q, k = ops.qk_norm_rope(q, k, weights.q_norm, weights.k_norm, cos, sin, eps[1], **options)
    else:
        q, k = (y.transpose(1, 2) for y in ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, twice=True))
    # Under autocast norms and angles of float32 widen q and k.
    q, k = q.to(v.dtype), k.to(v.dtype)
    of_scores = {"scale": numbers.scale, "window": numbers.window, "softcap": numbers.softcap}
    out = ops.attention(q, k, v, **of_scores, cu_seqlens=starts, max_seqlen=longest, lean=lean)
    tell_kept(out)
    made = linears(out.flatten(2), layers("out"))[0]
    is_cast = made.dtype != x.dtype
    if is_cast and weights.out_norm is not None:
        made = ops.rms_norm(made, weights.out_norm, eps[2], **options)
    made = made.to(x.dtype)
    if weights.out_norm is None or is_cast:
        total, rows = ops.fused_add_rms_norm(x, made, weights.mlp_norm, eps[2], **options)
    else:
        total, rows = ops.fused_rms_norm_add_rms_norm(x, made, weights.out_norm, weights.mlp_norm, eps[2], **options)
    if mlp is not lora_gated_mlp:
        y = mlp(rows, weights.gate, weights.up, weights.down, numbers.activation)
    elif numbers.activation == "silu":
        y = mlp(rows, layers("gate", "up", "down"))
    else:
        active = ops.geglu(*linears(rows, layers("gate", "up")), tanh=numbers.activation == "gelu_tanh")
        (y,) = linears(active, layers("down"))
    if is_cast and weights.down_norm is not None:
        y = ops.rms_norm(y, weights.down_norm, eps[3], **options)
    if is_cast or weights.down_norm is None:
        return total + y
    return ops.fused_rms_norm_add(total, y, weights.down_norm, eps[3], **options)


def exactly(x, cos, sin, weights, numbers, starts, longest, adapters):
    """The layer in torch's operations."""
    for name, adapter in zip(LINEAR, adapters, strict=bool(adapters)):
        if adapter is not None:
            weights = weights._replace(**{name: getattr(weights, name) + adapter.scaling * adapter.b @ adapter.a})

    def normed(y, weight, eps):
        if weight is None:
            return y
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (weight + numbers.offset)

    def turned(y):
        one, other = y.chunk(2, -1)
        return y * cos[:, :, None] + torch.cat((-other, one), -1) * sin[:, :, None]

    rows = normed(x, weights.norm, numbers.eps[0])
    made = (torch.nn.functional.linear(rows, *pair) for pair in zip(weights[1:4], weights[4:7], strict=True))
    q, k, v = (y.view(*y.shape[:2], -1, SIZE) for y in made)
    q, k = normed(q, weights.q_norm, numbers.eps[1]), normed(k, weights.k_norm, numbers.eps[1])
    place = torch.arange(TOKENS)
    shown = place[:, None] >= place
    if numbers.window is not None:
        shown &= place[:, None] - place < numbers.window
    if starts is not None:
        number = torch.bucketize(place, starts[1:], right=True)
        shown &= number[:, None] == number
    q, k, v = (y.transpose(1, 2).repeat_interleave(HEADS // y.shape[2], 1) for y in (turned(q), turned(k), v))
    scores = q @ k.mT * numbers.scale
    if numbers.softcap is not None:
        scores = numbers.softcap * torch.tanh(scores / numbers.softcap)
    out = scores.masked_fill(~shown, -torch.inf).softmax(-1) @ v
    added = out.transpose(1, 2).flatten(2) @ weights.out.t()
    total = x + normed(added, weights.out_norm, numbers.eps[2])
    rows = normed(total, weights.mlp_norm, numbers.eps[2])
    gate, up = rows @ weights.gate.t(), rows @ weights.up.t()
    curve = torch.nn.functional.silu
    if numbers.activation != "silu":
        curve = partial(torch.nn.functional.gelu, approximate="tanh" if numbers.activation == "gelu_tanh" else "none")
    return total + normed((curve(gate) * up) @ weights.down.t(), weights.down_norm, numbers.eps[3])


def leaves(given):
    every = [given[0], *given[3], *(factor for adapter in given[-1] if adapter for factor in adapter[:2])]
    return [leaf for leaf in every if leaf is not None and leaf.requires_grad]


def doubled(given):
    """The same arguments in float64, with leaves of their own."""

    def wide(leaf):
        return None if leaf is None else leaf.detach().double().requires_grad_(leaf.requires_grad)

    x, cos, sin, weights, *rest, adapters = given
    others = [each and each._replace(a=wide(each.a), b=wide(each.b)) for each in adapters]
    return [wide(x), cos.double(), sin.double(), Weights(*map(wide, weights)), *rest, others]


def run(layer, given, numbers):
    x, cos, sin, weights, *rest = given
    y = layer(x, cos, sin, weights, numbers, *rest)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves(given), slope)]


@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients_are_exact_to_the_dtype_s_error(name):
    given, numbers = drawn(CASES[name])
    for found, exact in zip(run(decoder_layer, given, numbers), run(exactly, doubled(given), numbers), strict=True):
        assert_near(found, exact.to(found.dtype), REORDERED)


@pytest.mark.parametrize("is_cast", [False, True], ids=["of half types", "under autocast"])
@pytest.mark.parametrize("name", CASES)
def test_in_half_types_it_is_as_near_as_its_parts(name, is_cast):
    given, numbers = drawn(CASES[name], torch.float32 if is_cast else torch.bfloat16)
    exact = run(exactly, doubled(given), numbers)

    def cast(layer):
        def call(*arguments):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                return layer(*arguments)

        return call

    if is_cast and CASES[name].around and CASES[name].cast:
        assert cast(decoder_layer)(*given[:4], numbers, *given[4:]) is None
        return
    ours, theirs = (run(cast(layer), given, numbers) for layer in (decoder_layer, by_parts))
    assert torch.equal(ours[0], theirs[0])
    assert {y.dtype for y in ours} == {given[0].dtype}
    for one, other, right in zip(ours, theirs, exact, strict=True):
        wrong, usual = ((y.double() - right).norm() for y in (one, other))
        assert wrong <= 1.2 * usual + 1e-3 * right.norm()


@pytest.mark.parametrize("name", ["qwen3", "gemma", "adapters on all"])
def test_the_gradients_of_the_first_norm_and_of_the_sum_are_one_launch(name):
    given, numbers = drawn(CASES[name])
    apart, together = (launched_by(lambda way=way: run(way, given, numbers)) for way in (by_parts, decoder_layer))
    kind = "_offset" if numbers.offset else ""
    assert apart.pop(f"rms_norm{kind}_backward") == 1
    assert apart | {f"fused_add_rms_norm{kind}_backward": 2} == together


@pytest.mark.parametrize("name", ["qwen3", "gemma", "norms that round last", "gemma3"])
def test_norms_that_products_alone_read_are_cast_in_their_launch_under_autocast(name):
    given, numbers = drawn(CASES[name])
    with torch.autocast("cpu", torch.bfloat16):
        apart, together = (launched_by(lambda way=way: run(way, given, numbers)) for way in (by_parts, decoder_layer))
    for norm in ("rms_norm", "fused_add_rms_norm"):
        kind = norm if name == "qwen3" else f"{norm}_offset"
        assert apart[f"{kind}_forward"] - together.get(f"{kind}_forward", 0) == together[f"{kind}_to_forward"] == 1


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_with_norms_around_its_halves_it_launches_what_its_parts_do(name):
    given, numbers = drawn(CASES[name])
    apart, together = (launched_by(lambda way=way: run(way, given, numbers)) for way in (by_parts, decoder_layer))
    assert apart == together


def kept_by(layer, given, numbers):
    """The number of bytes that a layer keeps for its backward, without those of its parameters and angles."""
    kept, x = {}, given[0] * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({address(t): t}) or t, lambda t: t):
        y = layer(x, *given[1:4], numbers, *given[4:])
    for own in (*given[1:3], *given[3], given[4], *(part for each in given[-1] if each for part in each[:2])):
        kept.pop(None if own is None else address(own), None)
    del y
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def address(x):
    return x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", CASES)
def test_it_keeps_no_more_than_its_parts(name):
    given, numbers = drawn(CASES[name])
    assert kept_by(decoder_layer, given, numbers) <= kept_by(by_parts, given, numbers)


@pytest.mark.parametrize("is_cast", [False, True], ids=["of float32", "under autocast"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.adapted and case.cast != case.around])
def test_dropouts_of_adapters_draw_as_those_of_its_parts(name, is_cast):
    (*rest, adapters), numbers = drawn(CASES[name])
    rates = (0.3, 0.0, 0.5, 0.2, 0.7, 0.1, 0.4)
    given = [*rest, [each and each._replace(rate=rate) for each, rate in zip(adapters, rates, strict=True)]]
    results = []
    for layer in (decoder_layer, by_parts):
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            results.append([*run(layer, given, numbers), torch.get_rng_state()])
    (y, *found, state), (other, *wanted, right) = results
    assert torch.equal(state, right)
    assert torch.equal(y, other)
    for one, another in zip(found, wanted, strict=True):
        assert (one - another).abs().max() <= (3e-2 if is_cast else 1e-4) * another.abs().max()
    assert kept_by(decoder_layer, given, numbers) <= kept_by(by_parts, given, numbers)


@pytest.mark.parametrize("names", [("x",), ("x", "out", "down"), ("norm", "q"), ("x", "up", "mlp_norm")])
def test_rows_that_no_gradient_reads_are_not_kept(names):
    some, every = (kept_by(decoder_layer, *drawn(Case(heads=False, learning=learning))) for learning in (names, None))
    unread = [not {"q", "k", "v"} & {*names}, not {"gate", "up"} & {*names}]
    assert every - some == sum(unread) * BATCH * TOKENS * HIDDEN * 4


def test_a_layer_in_which_nothing_up_to_the_attention_learns_runs_by_parts():
    for names in (("none",), ("out", "mlp_norm", "gate", "up", "down")):
        given, numbers = drawn(Case(learning=names))
        assert decoder_layer(*given[:4], numbers) is None


def test_factors_of_float32_are_cast_under_autocast_alone():
    given, numbers = drawn(CASES["adapters on all"], torch.bfloat16)
    wide = [each._replace(a=each.a.detach().float().requires_grad_(), b=each.b.detach().float().requires_grad_())
            for each in given[-1]]  # fmt: skip
    of_wide = [*given[:-1], wide]
    outside, of_parts = run(decoder_layer, of_wide, numbers), run(by_parts, of_wide, numbers)
    assert [y.dtype for y in outside] == [y.dtype for y in of_parts]
    assert torch.equal(outside[0], of_parts[0])
    expected = run(decoder_layer, given, numbers)
    assert not torch.equal(outside[0], expected[0])
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = run(decoder_layer, of_wide, numbers), run(by_parts, of_wide, numbers)
        doubles = [each._replace(a=each.a.double()) for each in wide]
        assert decoder_layer(*given[:4], numbers, *given[4:6], doubles) is None
    assert [y.dtype for y in found] == [y.dtype for y in theirs]
    assert torch.equal(found[0], theirs[0])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.bfloat16(), other)
    # No product rounds the gradients of factors.
    assert not any(torch.equal(slope, slope.bfloat16().float()) for slope in found[2:])


def test_it_runs_in_checkpoints_and_under_hooks_on_kept_tensors():
    given, numbers = drawn(CASES["qwen3"])
    expected = run(decoder_layer, given, numbers)

    def again(*arguments):
        return checkpoint(decoder_layer, *arguments, use_reentrant=False)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        copied = run(decoder_layer, given, numbers)
    for found in (run(again, given, numbers), copied):
        assert all(map(torch.equal, found, expected))


def test_a_graph_that_is_kept_gives_the_same_twice_and_second_derivatives_are_refused():
    given, numbers = drawn(CASES["llama"])
    y = decoder_layer(*given[:4], numbers)
    first, second = (torch.autograd.grad(y.sum(), leaves(given), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    (dx,) = torch.autograd.grad(y.square().sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()


def test_second_derivatives_are_refused_where_all_that_learns_is_kept_as_casts():
    given, numbers = drawn(Case(learning=("q", "down")))
    with torch.autocast("cpu", torch.bfloat16):
        y = decoder_layer(*given[:4], numbers)
    slopes = torch.autograd.grad(y.sum(), leaves(given), create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        sum(slope.square().sum() for slope in slopes).backward()


def misaligned(weight):
    room = torch.empty(weight.numel() + 1)
    moved = room[1:].view(weight.shape)
    moved.data.copy_(weight.detach())
    return moved.requires_grad_()


REFUSED = {
    "another dtype of a weight": lambda x, cos, sin, w: (x, cos, sin, w._replace(norm=w.norm.double())),
    "angles of float32 beside half types": lambda x, cos, sin, weights: (x, cos.double(), sin.double(), weights),
    "angles that learn": lambda x, cos, sin, weights: (x, cos.clone().requires_grad_(), sin, weights),
    "gaps": lambda x, cos, sin, weights: (x.repeat(1, 2, 1)[:, ::2], cos, sin, weights),
    "an odd address": lambda x, cos, sin, w: (x, cos, sin, w._replace(norm=misaligned(w.norm))),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_it_does_not_serve_runs_by_parts(kind):
    given, numbers = drawn(CASES["llama"])
    assert decoder_layer(*REFUSED[kind](*given[:4]), numbers) is None


@pytest.mark.parametrize("name", ["norm", "q_norm", "k_norm", "out_norm", "mlp_norm", "down_norm"])
def test_a_norm_of_an_odd_address_runs_by_parts(name):
    (x, cos, sin, weights, *_), numbers = drawn(CASES["gemma3"])
    assert decoder_layer(x, cos, sin, weights, numbers) is not None
    moved = weights._replace(**{name: misaligned(getattr(weights, name))})
    assert decoder_layer(x, cos, sin, moved, numbers) is None


@pytest.mark.parametrize("change", [{"offset": 1.0}, {"cast": False}, {"activation": "gelu"}])
def test_layers_of_one_shape_and_other_kinds_have_plans_of_their_own(change, monkeypatch):
    class Keys(dict):
        def __missing__(self, key):
            seen.append(key)
            raise KeyError

    seen = []
    given, numbers = drawn(CASES["llama"])
    monkeypatch.setattr(sys.modules[decoder_layer.__module__], "_plans", Keys())
    for kind in (numbers, numbers._replace(**change)):
        assert decoder_layer(*given[:4], kind) is not None
    assert len(set(seen)) == 2


def test_a_cap_that_is_no_cap_is_an_error():
    given, numbers = drawn(CASES["gemma2"])
    with pytest.raises(ValueError, match="softcap must be positive"):
        decoder_layer(*given[:4], numbers._replace(softcap=0.0))


def test_without_gradients_in_the_invariant_mode_and_between_half_types_parts_run():
    given, numbers = drawn(CASES["llama"])
    with torch.no_grad():
        assert decoder_layer(*given[:4], numbers) is None
    half, _ = drawn(CASES["llama"], torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        assert decoder_layer(*half[:4], numbers) is None
    with tilekern.invariant():
        assert decoder_layer(*given[:4], numbers) is None


def test_without_a_kernel_its_parts_run_and_say_so(without_interpreter):
    given, numbers = drawn(CASES["llama"])
    assert decoder_layer(*given[:4], numbers) is None


def of_format(linears, mlp=None):
    """The parts of a layer of 8-bit floats."""

    def of_layers(x, layers):
        return linears(x, [(layer.weight, layer.bias) for layer in layers])

    def by_linears(x, gate, up, down, activation):
        made = linears(x, [(gate, None), (up, None)])
        active = ops.swiglu(*made) if activation == "silu" else ops.geglu(*made, tanh=activation == "gelu_tanh")
        return linears(active, [(down, None)])[0]

    return partial(by_parts, linears=of_layers, mlp=mlp or by_linears, lean=True)


FORMATS = {
    "rowwise": (fp8_layer_products.ROWWISE, of_format(fp8_linears, fp8_gated_mlp)),
    "blockwise": (fp8_layer_products.BLOCKWISE, of_format(fp8_block_linears)),
    "mxfp8": (fp8_layer_products.MXFP8, of_format(mxfp8_linears)),
}
UNGRADED = "a frozen first layer but for a norm of heads"
OF_FORMATS = [("rowwise", name) for name, case in CASES.items() if not case.adapted and name != UNGRADED]
OF_FORMATS += [(format, name) for format in ("blockwise", "mxfp8") for name in ("qwen3", "gemma2", "products alone")]


def eight_bits(format):
    products, parts = FORMATS[format]

    def whole(x, cos, sin, weights, numbers, starts=None, longest=None, adapters=()):
        return decoder_layer(x, cos, sin, weights, numbers, starts, longest, adapters, products)

    return whole, parts


@pytest.mark.parametrize(("format", "name"), OF_FORMATS)
def test_of_8_bit_floats_it_has_the_bits_and_the_launches_of_its_parts(format, name):
    (whole, parts), (given, numbers) = eight_bits(format), drawn(CASES[name], torch.bfloat16)
    ours, theirs, launches = [], [], []
    for found, way in ((ours, whole), (theirs, parts)):
        launches.append(launched_by(lambda found=found, way=way: found.extend(run(way, given, numbers))))
    learning = [leaf for leaf in leaves(given) if leaf is given[0] or leaf is given[3].norm]
    # The gradients of the sum and of the first norm are one launch, which rounds once.
    count = 0 if CASES[name].around else len(learning)
    assert all(map(torch.equal, [ours[0], *ours[1 + count :]], [theirs[0], *theirs[1 + count :]]))
    for one, other in zip(ours[1 : 1 + count], theirs[1 : 1 + count], strict=True):
        assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()
    together, apart = launches
    kind = "_offset" if numbers.offset or not numbers.cast else ""
    if count:
        assert apart.pop(f"rms_norm{kind}_backward") == 1
        apart[f"fused_add_rms_norm{kind}_backward"] += 1
    assert together == apart


@pytest.mark.parametrize("format", FORMATS)
def test_of_8_bit_floats_it_keeps_no_more_than_its_parts(format):
    (whole, parts), (given, numbers) = eight_bits(format), drawn(CASES["qwen3"], torch.bfloat16)
    ours, theirs = (kept_by(way, given, numbers) for way in (whole, parts))
    # Hooks pack tensors here, so that the parts keep the rotated q and k.
    assert ours <= theirs - 2 * BATCH * TOKENS * (HEADS + KV_HEADS) * SIZE


@pytest.mark.parametrize("format", FORMATS)
def test_of_8_bit_floats_it_runs_in_checkpoints_under_hooks_and_under_autocast_to_its_dtype(format):
    (whole, _), (given, numbers) = eight_bits(format), drawn(CASES["qwen3"], torch.bfloat16)
    expected = run(whole, given, numbers)

    def again(*arguments):
        return checkpoint(whole, *arguments, use_reentrant=False)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        copied = run(whole, given, numbers)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(whole, given, numbers)
    for found in (run(again, given, numbers), copied, cast):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", ["qwen3", "frozen"])
def test_weights_that_were_rounded_before_give_the_same_bits(name):
    """As FSDP2 gathers them."""
    whole, _ = eight_bits("rowwise")
    (x, cos, sin, weights, *rest), numbers = drawn(CASES[name], torch.bfloat16)
    expected = run(whole, [x, cos, sin, weights, *rest], numbers)
    rounded = {
        name: RoundedWeight(*scaled_rows(weight.detach()), weight.dtype).requires_grad_(weight.requires_grad)
        for name, weight in weights._asdict().items()
        if name in LINEAR
    }
    found = run(whole, [x, cos, sin, weights._replace(**rounded), *rest], numbers)
    assert all(map(torch.equal, found, expected))


def test_what_8_bit_floats_do_not_serve_runs_by_parts():
    whole, _ = eight_bits("rowwise")
    for name in (UNGRADED, "adapters on all"):  # where q, k and v have few rows without a gradient; adapters
        given, numbers = drawn(CASES[name], torch.bfloat16)
        assert whole(*given[:4], numbers, *given[4:]) is None
    for dtype in (torch.float32, torch.float64):
        given, numbers = drawn(CASES["llama"], dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert whole(*given[:4], numbers) is None
    given, numbers = drawn(CASES["llama"], torch.bfloat16)
    with tilekern.invariant():
        assert whole(*given[:4], numbers) is None
    with forward_ad.dual_level():
        assert whole(*given[:4], numbers) is None
    assert whole(*given[:4], numbers) is not None
