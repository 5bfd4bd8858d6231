"""A linear layer with an adapter: which tensors it makes and keeps, and which gradients it computes."""

import contextlib
import itertools

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tilekern
from tilekern.ops import lora_linear, swiglu
from tilekern.ops.gated_mlp import lora_gated_mlp
from tilekern.ops.lora_linear import Adapted, lora_linears

ROWS, INNER, RANK = 96, 40, 4
OUT = (56, 24, 48)
PRODUCTS = {"mm", "addmm_", "addmm"}
VIEWS = {"view", "t", "split", "split_with_sizes", "detach", "_unsafe_view", "empty", "empty_like", "resize_"}


def leaves(number=1, device="cpu", dtype=torch.float32, seed=0):
    """x, and layers with frozen weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = normal(2, ROWS // 2, INNER).requires_grad_()
    layers = [
        Adapted(normal(out, INNER), normal(RANK, INNER).requires_grad_(), normal(out, RANK).requires_grad_(), 2.0)
        for out in OUT[:number]
    ]
    return x, layers


def trained(layers):
    return [factor for layer in layers for factor in (layer.a, layer.b)]


class Made(TorchDispatchMode):
    """The names of operations that compute a tensor of at least so many numbers."""

    def __init__(self, least):
        super().__init__()
        self.least, self.names = least, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if any(x.numel() >= self.least for x in pytree.tree_leaves(result)) and name not in VIEWS:
            self.names.append(name)
        return result


def step_of(x, layers):
    results = lora_linears(x, layers)
    slopes = [torch.empty_like(y) for y in results]
    return torch.autograd.grad(results, [x, *trained(layers)], slopes)


@pytest.mark.parametrize("number", [1, 3])
def test_only_products_make_tensors_of_the_size_of_activations(number):
    """On meta tensors, on which operations can be listed without being taken for traced."""
    given = leaves(number, "meta")
    with Made(ROWS * min(OUT)) as made:
        step_of(*given)
    # Forward: the layer's product, and the adapter's that is added to it. Backward: the first product, and all others
    # that are added to it: of further layers, and one of all adapters.
    assert made.names == [*("mm", "addmm_") * number, "mm", *["addmm_"] * number]


def test_the_same_of_layer_and_adapter_apart_would_be_seen():
    x, (layer,) = leaves(1, "meta")
    with Made(ROWS * min(OUT)) as made:
        y = torch.nn.functional.linear(x, layer.weight)
        y = y + torch.nn.functional.linear(torch.nn.functional.linear(x, layer.a), layer.b) * layer.scaling
        torch.autograd.grad(y, [x, layer.a, layer.b], torch.empty_like(y))
    assert sorted(set(made.names) - PRODUCTS) == ["add", "mul"]
    assert len(made.names) == 8


KEPT = {
    "as usual": ({"x", "a", "b"}, False), "of a first layer": ({"a", "b"}, False), "a alone": ({"x", "a"}, False),
    "b alone": ({"x", "b"}, False), "nothing but x": ({"x"}, False), "a bias alone": ({"bias"}, False),
    "all": ({"x", "weight", "a", "b", "bias"}, False), "after a dropout": ({"x", "a", "b"}, True),
    "b alone after a dropout": ({"x", "b"}, True), "a weight after a dropout": ({"weight", "b"}, True),
}  # fmt: skip


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("learning", "drops"), KEPT.values(), ids=KEPT)
def test_what_is_kept_is_what_layers_apart_keep(learning, drops, number):
    """If ``a`` is frozen (LoRA-FA), or reads what was dropped, ``x`` is not kept."""
    x, layers = leaves(number)
    x.requires_grad_("x" in learning)
    layers = [layer._replace(bias=torch.zeros(layer.weight.shape[0])) for layer in layers]
    for layer in layers:
        for name in ("weight", "a", "b", "bias"):
            getattr(layer, name).requires_grad_(name in learning)
    x = x * 1
    dropped = torch.nn.functional.dropout(x) if drops else None

    def kept_by(run):
        kept = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.add((t.untyped_storage().data_ptr(), t.numel())) or t, lambda t: t
        ):
            results = run()
        return kept, results

    def apart():
        lows = [torch.nn.functional.linear(x if dropped is None else dropped, layer.a) for layer in layers]
        pairs = zip(layers, lows, strict=True)
        return lows, [torch.nn.functional.linear(x, w, c) + torch.nn.functional.linear(low, b) * s
                      for (w, _, b, s, c, _), low in pairs]  # fmt: skip

    kept, _ = kept_by(lambda: lora_linears(x, layers, dropped))
    wanted, (lows, _) = kept_by(apart)
    # x @ a^T of all layers is one tensor.
    low = {(part.untyped_storage().data_ptr(), part.numel()) for part in lows}
    assert {each for each in kept if each in wanted} == wanted - low
    assert [size for place, size in kept if (place, size) not in wanted] == [RANK * number * ROWS] * bool(low & wanted)


def apart_after_dropouts(x, layers):
    """As PEFT, whose modules draw in the order of the layers."""
    linear, made = torch.nn.functional.linear, []
    for weight, a, b, scaling, bias, rate in layers:
        y = linear(x, weight, bias)
        if a is not None:
            y = (y + linear(linear(torch.nn.functional.dropout(x.to(a.dtype), rate), a), b) * scaling).to(y.dtype)
        made.append(y)
    return tuple(made)


def mlp_after_dropouts(x, layers):
    gate, up = apart_after_dropouts(x, layers[:2])
    return apart_after_dropouts(torch.nn.functional.silu(gate) * up, layers[2:])[0]


def seeded(run, *given):
    """What it returns, and the state of torch's generator afterwards."""
    torch.manual_seed(4)
    return run(*given), torch.get_rng_state()


@pytest.mark.parametrize("rates", [(0.3, 0.0, 0.6), (0.5,), (0.2, 0.9)])
@pytest.mark.parametrize("learning", [{"x", "a", "b"}, {"a", "b"}, {"x", "b"}, {"a"}, {"x", "weight", "a", "b"}, set()])
def test_dropouts_draw_as_those_of_layers_apart(rates, learning):
    x, layers = leaves(len(rates))
    x.requires_grad_("x" in learning)
    layers = [layer._replace(rate=rate) for layer, rate in zip(layers, rates, strict=True)]
    if len(rates) == 3:
        layers.insert(1, layers[2]._replace(a=None, b=None))
    for layer in layers:
        for name in ("weight", "a", "b"):
            None if getattr(layer, name) is None else getattr(layer, name).requires_grad_(name in learning)
    (found, state), (wanted, right) = (seeded(run, x, layers) for run in (lora_linears, apart_after_dropouts))
    assert torch.equal(state, right)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    read = [part for part in (x, *itertools.chain(*(layer[:3] for layer in layers))) if part is not None]
    read = [part for part in read if part.requires_grad]
    slopes = [torch.randn_like(y) for y in found]
    if read:
        sums = (sum((y * slope).sum() for y, slope in zip(each, slopes, strict=True)) for each in (found, wanted))
        found, wanted = (torch.autograd.grad(total, read) for total in sums)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mode", ["factors of float32", "autocast", "invariant"])
def test_dropouts_of_half_types_draw_as_those_of_layers_apart(mode):
    x, layers = leaves(2, dtype=torch.float32 if mode == "autocast" else torch.bfloat16)
    layers = [layer._replace(a=layer.a.detach(), b=layer.b.detach(), rate=0.4) for layer in layers]
    if mode == "factors of float32":
        layers = [layer._replace(a=layer.a.float(), b=layer.b.float()) for layer in layers]
    read = [x, *(factor.requires_grad_() for layer in layers for factor in layer[1:3])]
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"),
        tilekern.invariant() if mode == "invariant" else contextlib.nullcontext(),
    ):
        (found, state), (wanted, right) = (seeded(run, x, layers) for run in (lora_linears, apart_after_dropouts))
    assert torch.equal(state, right)
    slopes = [torch.randn_like(y) for y in found]
    grads = (torch.autograd.grad(each, read, slopes) for each in (found, wanted))
    for one, other in zip((*found, *next(grads)), (*wanted, *next(grads)), strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= 3e-2 * other.abs().max()


@pytest.mark.parametrize("learning", [("x", "a", "b"), ("a", "b"), ("x", "b")])
@pytest.mark.parametrize("rates", [(0.3, 0.6, 0.2), (0.0, 0.5, 0.0), (0.5, 0.0, 0.0)])
def test_an_mlp_draws_its_dropouts_as_its_layers_apart(learning, rates):
    x, layers, read = mlp_layers(("gate", "up", "down"), learning)
    layers = [layer._replace(rate=rate) for layer, rate in zip(layers, rates, strict=True)]
    (y, state), (other, right) = (seeded(run, x, layers) for run in (lora_gated_mlp, mlp_after_dropouts))
    assert type(y.grad_fn).__name__ == "_GatedMlpBackward"
    assert torch.equal(state, right)
    torch.testing.assert_close(y, other)
    slope = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(each, read, slope) for each in (y, other))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("learns", [True, False])
def test_of_a_dropout_a_mask_is_kept_and_the_input_once_if_a_learns(learns):
    x, layers = leaves(3)
    layers = [layer._replace(rate=0.3, a=layer.a.detach().requires_grad_(learns)) for layer in layers]
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t):
        lora_linears(x, layers)
    own = {part.data_ptr() for layer in layers for part in layer[:3]}
    sizes = sorted(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)
    masks, low = [ROWS * INNER] * 3, 4 * 3 * RANK * ROWS
    assert sizes == sorted([*masks, low, *[4 * ROWS * INNER] * learns])


@pytest.mark.parametrize("drops", [False, True])
def test_what_is_not_kept_may_change_before_the_backward(drops):
    x, (layer,) = leaves()
    layer.a.requires_grad_(drops)
    learning = [x, *(leaf for leaf in (layer.a, layer.b) if leaf.requires_grad)]
    z, slope = x * 1, torch.randn(2, ROWS // 2, OUT[0])
    y = lora_linears(z, [layer], z * 2 if drops else None)[0]
    wanted = torch.autograd.grad(y, learning, slope, retain_graph=True)
    with torch.no_grad():
        z.zero_()
    assert all(map(torch.equal, torch.autograd.grad(y, learning, slope), wanted))


def test_several_layers_give_what_each_gives():
    x, layers = leaves(3)
    results = lora_linears(x, layers)
    for y, layer in zip(results, layers, strict=True):
        torch.testing.assert_close(y, lora_linears(x, [layer])[0], rtol=1e-5, atol=1e-4)
    again = lora_linears(x, layers)
    slopes = [torch.randn_like(y) for y in results]
    found, same = (torch.autograd.grad(each, [x, *trained(layers)], slopes) for each in (results, again))
    assert all(map(torch.equal, found, same))
    for gradient, leaf in zip(found, [x, *trained(layers)], strict=True):
        assert gradient.shape == leaf.shape
        assert gradient.is_contiguous()


@pytest.mark.parametrize("without", [(0,), (1,), (0, 2)])
def test_some_of_the_layers_have_no_adapter(without):
    x, layers = leaves(3)
    layers = [
        layer._replace(a=None, b=None) if n in without else layer._replace(bias=torch.ones(OUT[n]))
        for n, layer in enumerate(layers)
    ]
    learning = [x, *(factor for factor in trained(layers) if factor is not None)]
    results = lora_linears(x, layers)
    apart = [
        torch.nn.functional.linear(x, layer.weight) if layer.a is None else lora_linears(x, [layer])[0]
        for layer in layers
    ]
    for y, other in zip(results, apart, strict=True):
        torch.testing.assert_close(y, other, rtol=1e-5, atol=1e-4)
    slopes = [torch.randn_like(y) for y in results]
    found, wanted = (torch.autograd.grad(each, learning, slopes) for each in (results, apart))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


def test_layers_without_adapters_are_one_op_too():
    x, layers = leaves(2)
    bare = [layer._replace(a=None, b=None) for layer in layers]
    for y, layer in zip(lora_linears(x, bare), bare, strict=True):
        assert torch.equal(y, torch.nn.functional.linear(x, layer.weight))


LAST = 36


def mlp_layers(adapted, learning, biased=False):
    """x, the layers of an MLP with adapters on some, and what learns: x, weights or factors of all."""
    generator = torch.Generator().manual_seed(2)

    def normal(name, *shape):
        return (0.3 * torch.randn(shape, generator=generator)).requires_grad_(name in learning)

    shapes = {"gate": (LAST, INNER), "up": (LAST, INNER), "down": (INNER, LAST)}
    x, layers = normal("x", 2, 9, INNER), []
    for name, (out, inner) in shapes.items():
        factors = (normal("a", RANK, inner), normal("b", out, RANK)) if name in adapted else (None, None)
        bias = normal("bias", out) if biased else None
        layers.append(Adapted(normal("weight", out, inner), *factors, 0.5, bias))
    parts = [x, *(part for layer in layers for part in (layer.weight, layer.a, layer.b, layer.bias))]
    return x, layers, [part for part in parts if part is not None and part.requires_grad]


def mlp_apart(x, layers):
    gate, up = (lora_linears(x, [layer])[0] for layer in layers[:2])
    return lora_linears(swiglu(gate, up), layers[2:])[0]


MLPS = {
    "all": (("gate", "up", "down"), ("x", "a", "b")),
    "of a first layer": (("gate", "up", "down"), ("a", "b")),
    "frozen a": (("gate", "up", "down"), ("x", "b")),
    "frozen b": (("gate", "down"), ("x", "a")),
    "the last": (("down",), ("x", "a", "b", "weight")),
    "one of the first two": (("up",), ("weight", "a", "b")),
    "nothing but x": (("gate", "up", "down"), ("x",)),
}


@pytest.mark.parametrize("kind", MLPS)
def test_an_mlp_with_adapters_is_one_op(kind):
    x, layers, learning = mlp_layers(*MLPS[kind])
    y, other = lora_gated_mlp(x, layers), mlp_apart(x, layers)
    assert type(y.grad_fn).__name__ == "_GatedMlpBackward"
    torch.testing.assert_close(y, other)
    slope = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(each, learning, slope) for each in (y, other))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MLPS)
def test_an_mlp_with_adapters_keeps_no_more_than_its_layers(kind):
    x, layers, _ = mlp_layers(*MLPS[kind])
    x, sizes = x * 1, []
    own = {part.data_ptr() for layer in layers for part in layer if isinstance(part, torch.Tensor)}
    for run in (lora_gated_mlp, mlp_apart):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.update({t.data_ptr(): t}) or t, id):
            run(x, layers)
        sizes.append(sum(t.numel() for place, t in kept.items() if place not in own))
    assert sizes[0] <= sizes[1]


def test_an_mlp_whose_input_is_not_kept_refuses_second_derivatives():
    x, layers, _ = mlp_layers(("down",), ("x",))
    (dx,) = torch.autograd.grad(lora_gated_mlp(x, layers).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        ((dx**2).sum() + (x**3).sum()).backward()


def test_an_mlp_whose_layers_have_biases_runs_by_them():
    x, layers, learning = mlp_layers(("gate", "down"), ("x", "a", "b", "bias"), biased=True)
    y, other = lora_gated_mlp(x, layers), mlp_apart(x, layers)
    torch.testing.assert_close(y, other)
    found, wanted = (torch.autograd.grad(each.sum(), learning) for each in (y, other))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


LEARNING = {
    "the second factor": ("b",), "the first factor": ("a",), "a bias": ("bias",), "the input": ("x",),
    "what was dropped": ("dropped",), "all": ("x", "weight", "a", "b", "bias", "dropped"),
}  # fmt: skip


@pytest.mark.parametrize("names", LEARNING.values(), ids=LEARNING)
def test_gradients_are_those_of_what_learns(names):
    x, (layer,) = leaves()
    given = {"x": x.detach(), "weight": layer.weight, "a": layer.a.detach(), "b": layer.b.detach(), "scaling": 0.5}
    given |= {"bias": torch.randn(OUT[0]), "dropped": x.detach() * (torch.rand_like(x) > 0.5) * 2}
    learning = [given[name].requires_grad_() for name in names]
    y = lora_linear(**given)
    right = torch.nn.functional.linear(given["x"], layer.weight, given["bias"])
    right = right + 0.5 * given["dropped"] @ given["a"].T @ given["b"].T
    slope = torch.randn_like(y)
    torch.testing.assert_close(y, right)
    found, wanted = (torch.autograd.grad(each, learning, slope) for each in (y, right))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("learns", list(itertools.product([False, True], repeat=4))[1:])
@pytest.mark.parametrize(("drops", "rate"), [(False, 0.0), (True, 0.0), (False, 0.4)])
def test_a_second_derivative_is_right_or_refused_whatever_is_kept(learns, drops, rate):
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 6), (7, 6), (2, 6), (7, 2))
    given = [
        torch.randn(shape, generator=generator).requires_grad_(flag)
        for shape, flag in zip(shapes, learns, strict=True)
    ]  # fmt: skip
    learning = [leaf for leaf in given if leaf.requires_grad]

    def second(run):
        torch.manual_seed(1)
        x, *factors = given
        y = run(x * 1, *factors, x * 2 if drops else x)
        first = torch.autograd.grad(y.sum(), learning, create_graph=True)
        total = sum((part**2).sum() for part in first) + sum((leaf**3).sum() for leaf in learning)
        return torch.autograd.grad(total, learning)

    def op(x, w, a, b, low):
        return lora_linears(x, [Adapted(w, a, b, 0.5, rate=rate)], low if drops else None)[0]

    right = second(lambda x, w, a, b, low: x @ w.T + 0.5 * torch.nn.functional.dropout(low, rate) @ a.T @ b.T)
    try:
        found = second(op)
    except RuntimeError as error:
        assert "trying to differentiate twice" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_does_nothing_changes_no_bit():
    x, (layer,) = leaves(dtype=torch.bfloat16)
    made = lora_linear(x, layer.weight, layer.a, torch.zeros_like(layer.b), 2.0)
    assert torch.equal(made, torch.nn.functional.linear(x, layer.weight))


def test_under_autocast_the_factors_learn_in_their_own_dtype():
    x, (layer,) = leaves(dtype=torch.bfloat16)
    wide = [factor.detach().float().requires_grad_() for factor in trained([layer])]
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_linear(x, layer.weight, *wide, 2.0)
    right = lora_linear(x, layer.weight, layer.a, layer.b, 2.0)
    assert torch.equal(y, right)
    slope = torch.randn_like(y)
    for gradient, rounded in zip(
        torch.autograd.grad(y, wide, slope), torch.autograd.grad(right, trained([layer]), slope), strict=True
    ):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, rounded.float())


@pytest.mark.parametrize("kind", ["a layer", "two layers and one without", "dropped", "an MLP"])
def test_factors_of_float32_beside_a_half_type_are_not_rounded(kind):
    x, layers = leaves(3, dtype=torch.bfloat16)
    layers = [
        layer._replace(a=layer.a.detach().float() * 1.001, b=layer.b.detach().float() * 1.001) for layer in layers
    ]
    if kind == "an MLP":
        generator = torch.Generator().manual_seed(5)
        down = torch.randn(INNER, OUT[0], generator=generator), *(None,) * 2
        up = layers[0]._replace(weight=layers[0].weight.flip(0))
        layers = [layers[0], up, Adapted(down[0].bfloat16(), *down[1:])]
    factors = [factor.requires_grad_() for layer in layers for factor in layer[1:3] if factor is not None]
    dropped = x.detach().float().mul(1.25).requires_grad_() if kind == "dropped" else None
    if kind == "two layers and one without":
        layers[1], factors = layers[1]._replace(a=None, b=None), factors[:2] + factors[4:]
    read = [x, *factors] if dropped is None else [x, dropped, *factors]

    def apart(x, layer):
        """As PEFT."""
        y = torch.nn.functional.linear(x, layer.weight)
        if layer.a is None:
            return y
        low = (x.float() if dropped is None else dropped) @ layer.a.t()
        return (y + low @ layer.b.t() * layer.scaling).to(y.dtype)

    if kind == "an MLP":
        results, expected = (
            [lora_gated_mlp(x, layers)],
            [apart(swiglu(*(apart(x, one) for one in layers[:2])), layers[2])],
        )
    else:
        results, expected = lora_linears(x, layers, dropped), [apart(x, layer) for layer in layers]
    slopes = [torch.randn_like(y) for y in results]
    for one, other in zip(results, expected, strict=True):
        # Sums of one product of all factors may have another order.
        assert (one != other).float().mean() < 0.01
    found, right = (torch.autograd.grad(each, read, slopes) for each in (results, expected))
    for one, other, given in zip(found, right, read, strict=True):
        assert one.dtype == given.dtype
        assert (one - other).abs().max() <= (2e-2 if given is x else 1e-5) * other.abs().max()


WRONG = {
    "factors of other ranks": ({"b": torch.ones(OUT[0], RANK + 1)}, "got .*, .*56, 40.*, .*4, 40.*, .*56, 5"),
    "a factor of other columns": ({"a": torch.ones(RANK, INNER + 1)}, "x must be .* a .rank, in_features"),
    "a bias of another size": ({"bias": torch.ones(3)}, r"bias must be \[56\], got \[3\]"),
    "an input without features": ({"x": torch.tensor(1.0)}, "x must be"),
    "another shape after a dropout": ({"dropped": torch.ones(3, INNER)}, r"dropped must be \[2, 48, 40\] as x is"),
    "another device": ({"a": torch.ones(RANK, INNER, device="meta")}, "a is on meta, and must be on cpu"),
}


@pytest.mark.parametrize(("wrong", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(wrong, said):
    x, (layer,) = leaves()
    given = {"x": x, "weight": layer.weight, "a": layer.a, "b": layer.b}
    with pytest.raises(ValueError, match=said):
        lora_linear(**given | wrong)
