"""linear_log_probs as users call it: its options by float64, both slopes, chunks, autocast, graphs, errors."""

import importlib
import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, TOLERANCE, assert_near

import tilekern
from tilekern.kernels.composites import head
from tilekern.ops import linear_log_probs
from tilekern.runtime.dispatch import counters, plan_for

module = importlib.import_module("tilekern.ops.linear_log_probs")


def sample(leading=(7,), width=24, vocabulary=83, dtype=torch.float32, seed=0, bias=False):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 4).to(dtype).requires_grad_()
    ids = torch.randint(vocabulary, leading, generator=generator)
    shift = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, ids, shift


def expected(hidden, weight, ids, *, bias=None, temperature=1.0, softcap=None, ignore_index=-100, wide_sums=False):
    """By torch in float64."""
    logits = hidden.double() @ weight.double().t()
    logits = logits if bias is None else logits + bias.double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    found = torch.distributions.Categorical(logits=logits / temperature)
    counted = ids != ignore_index
    return found.log_prob(ids.where(counted, 0)) * counted, found.entropy() * counted


def check(hidden, weight, ids, slopes=None, tolerance=None, **options):
    """Both results and all gradients against :func:`expected`."""
    leaves = {"hidden": hidden, "weight": weight, "bias": options.get("bias")}
    wide = {name: None if x is None else x.detach().double().requires_grad_() for name, x in leaves.items()}
    rest = {name: value for name, value in options.items() if name != "bias"}
    reference = expected(wide["hidden"], wide["weight"], ids, bias=wide["bias"], **rest)
    results = linear_log_probs(hidden, weight, ids, **options)
    tolerance = tolerance or 2 * TOLERANCE[hidden.dtype]
    for result, right in zip(results, reference, strict=True):
        assert result.dtype == torch.float32
        assert_near(result, right, tolerance)
    slopes = slopes or [torch.rand_like(x) + 0.5 for x in results]
    names = [name for name, x in leaves.items() if x is not None and x.requires_grad]
    got = torch.autograd.grad(results, [leaves[name] for name in names], slopes)
    wanted = torch.autograd.grad(reference, [wide[name] for name in names], [slope.double() for slope in slopes])
    for name, gradient, right in zip(names, got, wanted, strict=True):
        assert gradient.dtype == leaves[name].dtype
        assert_near(gradient, right, tolerance)


@examples(40)
@given(data=st.data())
def test_any_options_shape_and_dtype(data):
    leading = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2), label="leading"))
    vocabulary = data.draw(st.one_of(st.integers(9, 40), st.sampled_from([63, 64, 65, 255])), label="vocabulary")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    hidden, weight, ids, bias = sample(
        leading, vocabulary=vocabulary, dtype=dtype, seed=data.draw(st.integers(0, 5), label="seed"),
        bias=data.draw(st.booleans(), label="bias"),
    )  # fmt: skip
    ignored = data.draw(st.sampled_from([-100, -1, 0, 3]), label="ignore_index")
    if ids.numel() > 1:
        ids.view(-1)[1] = ignored
    ids.view(-1)[0] = 5
    options = {
        "bias": bias, "ignore_index": ignored, "temperature": data.draw(st.sampled_from([1.0, 0.7, 3.0])),
        "softcap": data.draw(st.sampled_from([None, 2.0, 30.0])), "wide_sums": data.draw(st.booleans()),
    }  # fmt: skip
    check(hidden, weight, ids, **options)


@pytest.mark.parametrize("one", [0, 1])
def test_the_gradient_of_one_result_alone(one):
    hidden, weight, ids, _ = sample()
    result = linear_log_probs(hidden, weight, ids)[one]
    got = torch.autograd.grad(result.sum(), (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = torch.autograd.grad(expected(*wide, ids)[one].sum(), wide)
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b, 2e-5)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_a_frozen_tensor_gets_no_gradient_and_the_others_the_same(frozen):
    given = dict(zip(("hidden", "weight", "ids", "bias"), sample(bias=True), strict=True))
    total = sum(x.sum() for x in linear_log_probs(**given))
    leaves = [name for name in ("hidden", "weight", "bias") if name != frozen]
    wanted = torch.autograd.grad(total, [given[name] for name in leaves])
    given[frozen] = given[frozen].detach()
    total = sum(x.sum() for x in linear_log_probs(**given))
    got = torch.autograd.grad(total, [given[name] for name in leaves])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.fixture
def chunks_of_four(monkeypatch):
    for place in (module, module.composite):
        monkeypatch.setattr(
            place, "chunk_plans", lambda lookup, specs, _, *rest: head.chunk_plans(lookup, specs, 4, *rest)
        )


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_several_chunks_with_a_tail(rows):
    chunks = -(-rows // 4)
    before = {name: counters(name).launches for name in ("log_probs_forward", "log_probs_backward")}
    check(*sample((rows,))[:3])
    assert {name: counters(name).launches - count for name, count in before.items()} == dict.fromkeys(before, chunks)


@pytest.fixture
def made(monkeypatch, chunks_of_four):
    """The rows whose logits products have made, in their order, in chunks of four."""
    found = []

    def logits(self, part):
        found.append((part.start, part.stop))
        return of_head(self, part)

    of_head = head.Head.logits
    monkeypatch.setattr(head.Head, "logits", logits)
    return found


def graded(rows=10):
    hidden, weight, ids, _ = sample((rows,))
    return linear_log_probs(hidden, weight, ids)[0].sum(), (hidden, weight)


def test_the_backward_finds_the_logits_of_the_last_chunk_once_and_has_the_same_bits_without_them(made):
    total, leaves = graded()
    assert made == [(0, 4), (4, 8), (8, 10)]
    made.clear()
    with_them = torch.autograd.grad(total, leaves, retain_graph=True)
    assert made == [(0, 4), (4, 8)]
    made.clear()
    without = torch.autograd.grad(total, leaves)
    assert made == [(8, 10), (0, 4), (4, 8)]
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True))


def test_of_several_forwards_one_keeps_logits_until_its_backward_or_its_end(made):
    (first, leaves), (second, others) = graded(4), graded(4)
    made.clear()
    torch.autograd.grad(second, others)
    assert made == [(0, 4)], "the first one holds its own"
    made.clear()
    torch.autograd.grad(first, leaves)
    assert not made
    graded(4)  # and is forgotten
    third, others = graded(4)
    made.clear()
    torch.autograd.grad(third, others)
    assert not made


def test_a_forward_without_gradients_keeps_no_logits(made):
    with torch.no_grad():
        linear_log_probs(*sample((4,))[:3])
    assert module.composite.Room._holding is None or module.composite.Room._holding() is None


def test_ids_that_are_none_give_nan_in_their_row_and_in_the_gradients():
    hidden, weight, ids, _ = sample()
    ids[2] = 83
    log_probs, entropy = linear_log_probs(hidden, weight, ids)
    assert log_probs.isnan().nonzero().tolist() == [[2]]
    assert bool(entropy.isfinite().all())
    dhidden, dweight = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    assert dhidden.isnan().any(-1).nonzero().tolist() == [[2]]
    assert bool(dweight.isnan().all())
    with pytest.raises(ValueError, match="linear_log_probs got the label 83 in"):
        tilekern.check_labels()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_of_any_integer_dtype(dtype):
    hidden, weight, ids, _ = sample()
    for a, b in zip(
        linear_log_probs(hidden, weight, ids.to(dtype)), linear_log_probs(hidden, weight, ids), strict=True
    ):
        assert torch.equal(a, b)


def test_strided_inputs():
    hidden, weight, ids, bias = (None if x is None else x.detach() for x in sample((8,), bias=True))
    check(
        hidden.t().contiguous().t().view(2, 4, 24).requires_grad_(),
        weight.repeat_interleave(2, 1)[:, ::2].requires_grad_(),
        ids.repeat_interleave(2)[::2].view(2, 4),
        bias=bias.repeat_interleave(2)[::2].requires_grad_(),
    )
    check(hidden[:1].expand(8, 24).requires_grad_(), weight.requires_grad_(), ids[:1].expand(8))


@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_without_rows(leading):
    hidden, weight, ids, _ = sample(leading)
    results = linear_log_probs(hidden, weight, ids)
    assert [x.shape for x in results] == 2 * [torch.Size(leading)]
    dhidden, dweight = torch.autograd.grad(sum(x.sum() for x in results), (hidden, weight))
    assert (dhidden.shape, dweight.any().item()) == (hidden.shape, False)


def test_autocast_casts_as_a_linear_layer_does():
    hidden, weight, ids, bias = sample(bias=True)
    with torch.autocast("cpu", torch.bfloat16):
        results = linear_log_probs(hidden, weight, ids, bias=bias)
    got = torch.autograd.grad(sum(x.sum() for x in results), (hidden, weight, bias))
    reference = expected(hidden, weight, ids, bias=bias)
    wanted = torch.autograd.grad(sum(x.sum() for x in reference), (hidden, weight, bias))
    for a, b in zip((*results, *got), (*reference, *wanted), strict=True):
        assert a.dtype == torch.float32
        assert_near(a, b, 3e-2)


def test_torch_compile_keeps_the_op_whole_and_gives_the_same():
    torch._dynamo.reset()
    hidden, weight, ids, bias = sample(bias=True)
    options = {"bias": bias, "temperature": 0.7, "softcap": 4.0}
    compiled = torch.compile(lambda *given: linear_log_probs(*given, **options), fullgraph=True, backend="aot_eager")
    launches = counters("linear_log_probs_forward").launches
    traced, eager = compiled(hidden, weight, ids), linear_log_probs(hidden, weight, ids, **options)
    assert counters("linear_log_probs_forward").launches == launches + 2
    leaves = (hidden, weight, bias)
    got, wanted = (torch.autograd.grad(sum(x.sum() for x in found), leaves) for found in (traced, eager))
    for a, b in zip((*traced, *got), (*eager, *wanted), strict=True):
        assert_near(a, b, 1e-6)


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused_and_not_wrong(power):
    hidden, weight, ids, _ = sample()
    total = sum((x**power).sum() for x in linear_log_probs(hidden, weight, ids))
    for gradient in torch.autograd.grad(total, (hidden, weight), create_graph=True):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_what_no_kernel_serves_runs_torch_s_own_operations_and_counts(monkeypatch):
    hidden, weight, ids, bias = sample(bias=True)
    ids[3] = -100
    name = "linear_log_probs_forward"
    same = linear_log_probs(hidden, weight, ids, bias=bias)
    launches, fallbacks = counters(name).launches, counters(name).fallbacks
    far = ids.where(ids >= 0, 2**40)
    found = [
        linear_log_probs(hidden.double(), weight.double(), ids, bias=bias.double()),
        linear_log_probs(hidden, weight, ids, bias=bias.double()),
        linear_log_probs(hidden, weight, far, bias=bias, ignore_index=2**40),
    ]
    monkeypatch.setattr(
        module, "plan_for", lambda spec, *sizes: None if spec.name == "log_probs_backward" else plan_for(spec, *sizes)
    )
    found.append(linear_log_probs(hidden, weight, ids, bias=bias))
    for results in found:
        for a, b in zip(results, same, strict=True):
            assert_near(a, b, 1e-5)
    assert found[0][0].dtype == torch.float64
    assert counters(name).launches == launches
    assert counters(name).fallbacks == fallbacks + 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(())}, "hidden must be"),
        ({"weight": torch.zeros(5, 7)}, r"hidden must be .*, got \[3, 8\] and \[5, 7\]"),
        ({"ids": torch.zeros(4, dtype=torch.long)}, r"ids must be \[3\] as the rows of hidden are, got \[4\]"),
        ({"ids": torch.zeros(3)}, "ids must be of an integer dtype, got torch.float32"),
        ({"ids": torch.zeros(3, dtype=torch.long, device="meta")}, "ids is on meta, and must be on cpu"),
        ({"bias": torch.ones(6)}, r"bias must be \[5\], got \[6\]"),
        ({"temperature": 0.0}, "temperature must be positive and finite .*, got 0.0"),
        ({"temperature": math.nan}, "temperature must be positive and finite"),
        ({"softcap": math.inf}, "softcap must be positive and finite .*, got inf"),
    ],
)
def test_bad_input_is_refused(changes, message):
    given = {"hidden": torch.zeros(3, 8), "weight": torch.zeros(5, 8), "ids": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(ValueError, match=f"^linear_log_probs: {message}"):
        linear_log_probs(**given | changes)
