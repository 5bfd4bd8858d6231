"""Every op: numbers as in float64, one launch, graphs, autocast, tracing, torch's settings and modes.

:data:`contract.CASES` has the ops; a new one is held to all of this by its declaration, or by a row there.
"""

import contextlib
import itertools
import re

import pytest
import torch
from contract import (
    CASES,
    Drawn,
    as_on_a_gpu,
    check,
    gradients,
    is_the_same_under_defaults,
    leaves,
    mapped,
    near,
    same,
    several,
    step,
    uncalled,
    wide,
)
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from op_samples import DTYPES, OPS, SHIPPED, launched_by, slopes_of
from tolerances import CAST, FLOAT64, REORDERED, TOLERANCE
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tilekern.ops import labels, registration
from tilekern.runtime import dispatch

SEVERAL = [case for case in CASES.values() if len(case.reference(wide(case.given(Drawn())))) > 1]
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")


def every(point="", *, variants=False, least=1, among=None):
    """Each case that the point is for, with each of its sets of options if asked, and so many of them at least."""
    chosen = [case for case in among or CASES.values() if point not in case.skips]
    if not variants:
        return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])
    pairs = [(case, number) for case in chosen for number in range(max(least, case.variants))]
    return pytest.mark.parametrize(("case", "variant"), pairs, ids=[f"{case.name} {number}" for case, number in pairs])


def every_tensor(chosen):
    """Each tensor of each case for which ``chosen(case, name, arguments)``."""
    pairs = []
    for case in CASES.values():
        given = case.given(Drawn())
        names = [name for name, x in given.items() if isinstance(x, torch.Tensor) and chosen(case, name, given)]
        pairs += [pytest.param(case, name, id=f"{case.name} {name}") for name in names]
    return pytest.mark.parametrize(("case", "name"), pairs)


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def kernel(request, monkeypatch):
    """Return whether kernels run, or torch's own operations."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1" if request.param else "0")
    return request.param


def fallbacks():
    return sum(counted["fallbacks"] for counted in dispatch.stats().values())


def test_every_op_is_called():
    assert not uncalled()


@every()
@pytest.mark.share(6)
@examples(30)
@given(data=st.data())
def test_float64(case, data):
    """Draw shape, dtype, layout and options."""
    drawn = Drawn(data)
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    other = data.draw(st.sampled_from(DTYPES), label="of the others") if case.apart else None
    layouts = data.draw(st.lists(st.sampled_from(case.layouts), min_size=2, max_size=4), label="layouts")
    given = case.given(drawn, dtype, other, tuple(layouts))
    check(case, given, data.draw(st.sampled_from(case.layouts), label="layout of the slopes"))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_small_values_stay_finite(name, dtype):
    """Squares and exponentials are taken in float32; what overflows there overflows in torch as well."""
    case = CASES[name]
    for scale in (1e-4, 30.0, 200.0):
        given = case.given(Drawn(), dtype)
        first = next(iter(given))
        given[first] = (given[first].detach() * scale).requires_grad_()
        if name == "swiglu" or scale > 1:
            # A share that was rounded to 1 says no more how much less it was.
            check(case, given, least=3.0 if name == "softmax" else 0.0)


@every(variants=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_usual_calls(case, variant, dtype):
    check(case, case.given(Drawn(variant=variant), dtype), table=case.table)


@every(among=[case for case in CASES.values() if case.apart])
@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_mixed_dtypes(case, one, other):
    check(case, case.given(Drawn(), one, other), table=case.table)


@every(among=[case for case in CASES.values() if case.launches])
def test_one_launch_in_each_direction_and_one_for_all_sums(case):
    given = case.given(Drawn())
    assert launched_by(lambda: step(case, given)) == case.launches


@every(variants=True, among=[case for case in CASES.values() if case.kernel])
def test_in_float64_torch_s_own_operations_run_and_are_counted(case, variant):
    given, before = wide(case.given(Drawn(variant=variant))), (dispatch.counters(case.kernel).launches, fallbacks())
    results, found = step(case, given)
    assert {y.dtype for y in results if y.is_floating_point()} <= {torch.float64, FLOAT32}
    assert fallbacks() > before[1]
    assert dispatch.counters(case.kernel).launches == before[0]
    exact = wide(given)
    right = case.reference(exact)
    for y, reference in zip(results, right, strict=True):
        near(y, reference, FLOAT64)
    for gradient, reference in zip(found.values(), gradients(right, leaves(exact)).values(), strict=True):
        near(gradient, reference, FLOAT64, 1e-7)


@every(variants=True)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.usefixtures("without_interpreter")
def test_where_no_kernel_runs_torch_s_own_operations_give_the_same(case, variant, dtype):
    # Torch rounds after each of them.
    check(case, case.given(Drawn(variant=variant), dtype), tolerance=4 * max(case.factors) * TOLERANCE[dtype])


EMPTY = [
    (case, leading)
    for case, leading in itertools.product(CASES.values(), [(0,), (2, 0)])
    if not next(iter(case.given(Drawn(leading=leading)).values())).numel()
]


@pytest.mark.parametrize(("case", "leading"), EMPTY, ids=[f"{case.name} {leading}" for case, leading in EMPTY])
def test_without_rows(case, leading):
    given = case.given(Drawn(leading=leading))
    results, found = step(case, given)
    for y, reference in zip(results, case.reference(wide(given)), strict=True):
        torch.testing.assert_close(y.double(), reference.double(), equal_nan=True)
    for name, gradient in found.items():
        assert gradient.shape == given[name].shape
        assert any(y.numel() for y in results) or not gradient.any()


@every("compiled", variants=True, least=2)
@pytest.mark.share(12)
@pytest.mark.slow
def test_torch_compile_without_a_graph_break(case, variant):
    """Compile known sizes, then others, then other strides."""
    torch._dynamo.reset()
    dynamic = variant % 2 == 1
    given = case.given(Drawn(variant=variant), layouts=case.layouts[dynamic : dynamic + 1])
    fixed = {name: x for name, x in given.items() if not isinstance(x, torch.Tensor)}
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    compiled = torch.compile(
        lambda **tensors: case.call(**{name: fixed[name] if name in fixed else tensors[name] for name in given}),
        fullgraph=True, backend="aot_eager", dynamic=dynamic,
    )  # fmt: skip
    results, right = several(compiled(**tensors)), case.run(given)
    same(results, right, REORDERED)
    assert [y.stride() for y in results] == [y.stride() for y in right]
    same(gradients(results, leaves(given)).values(), gradients(right, leaves(given)).values(), REORDERED)


class Watched(TorchDispatchMode):
    """To whom an op is one of torch's, so that what is registered runs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@every(variants=True)
def test_what_is_registered_with_torch_gives_the_same(case, variant, kernel):
    given = case.given(Drawn(variant=variant))
    right, wanted = step(case, given)
    with Watched():
        results, found = step(case, given)
    same((*results, *found.values()), (*right, *wanted.values()), REORDERED)
    assert not kernel or [y.stride() for y in results] == [y.stride() for y in right]


@every("autocast")
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_autocast(case, dtype, kernel):
    """It casts what goes into products, as of a linear layer, and changes no bit of other ops."""
    given = case.given(Drawn(), dtype)
    with as_on_a_gpu(), torch.autocast("cpu", BFLOAT16):
        results = case.run(given)
        found = gradients(results, leaves(given))
    if not case.is_cast:
        right, wanted = step(case, given)
        same((*results, *found.values()), (*right, *wanted.values()))
        assert [y.dtype for y in results] == case.dtypes(given, len(results))
        return
    assert [y.dtype for y in results] == (case.dtypes(given, len(results)) if case.dtype else [BFLOAT16] * len(results))
    exact = wide(given)
    right = case.reference(exact)
    wanted = gradients(right, leaves(exact))
    for y, reference in zip(results, right, strict=True):
        near(y, reference, CAST)
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        near(gradient, wanted[name], 2 * CAST, 1e-3, name)


@every("cast backward")
def test_a_backward_inside_of_autocast_has_the_dtypes_of_its_forward(case):
    given = case.given(Drawn())
    _, right = step(case, given)
    before, results = fallbacks(), case.run(given)
    with torch.autocast("cpu", BFLOAT16), as_on_a_gpu():
        found = gradients(results, leaves(given))
    assert fallbacks() == before
    for name, gradient in found.items():
        assert gradient.dtype == right[name].dtype
        near(gradient, right[name], REORDERED, 1e-6)


@every("second", variants=True, least=2)
def test_second_derivatives_are_refused_and_not_wrong(case, variant):
    given = case.given(Drawn(variant=variant))
    _, loss = twice_differentiated(case, given, variant)
    if loss is not None:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            loss.backward()


@every("second", variants=True, least=2)
def test_second_derivatives_of_what_is_registered_are_refused_or_right(case, variant):
    """Where a mode is to see torch's operations, some ops are torch's, and have such derivatives."""
    given = case.given(Drawn(variant=variant))
    with Watched():
        of, loss = twice_differentiated(case, given, variant)
    if loss is None:
        return
    said = ""
    try:
        loss.backward()
    except RuntimeError as error:
        said = str(error)
    if said:
        assert "differentiate twice" in said
        return
    exact = wide(given)
    right, loss = twice_differentiated(case, exact, variant, case.reference)
    loss.backward()
    for name, x in of.items():
        near(x.grad, right[name].grad, TWICE, TWICE, name)


# Of derivatives of derivatives in float32.
TWICE = 1e-3


def twice_differentiated(case, given, variant, run=None):
    """The leaves, and a scalar that depends on their gradients; None if these are constants."""
    power, said = 2 - variant % 2, SHIPPED.get(case.name)
    if power == 1 and said is not None and not said.gradients.keys() & said.saved:
        return {}, None  # The gradient of a sum is a constant, as of rotated numbers.
    of = leaves(given)
    loss = sum((y**power).sum() for y in (run or case.run)(given))
    found = torch.autograd.grad(loss, list(of.values()), create_graph=True, materialize_grads=True)
    return of, sum(x.square().sum() for x in found) + sum(x.sum() for x in of.values())


@every("kept")
def test_a_graph_that_is_kept_gives_the_same_gradients_each_time(case):
    """The caller owns the gradients and may change them."""
    given = case.given(Drawn())
    _, right = step(case, given)
    results = case.run(given)
    for _ in range(3):
        again = gradients(results, leaves(given), retain_graph=True)
        same(again.values(), right.values(), REORDERED)
        for x in again.values():
            x.add_(1)
    same(gradients(results, leaves(given)).values(), right.values(), REORDERED)


@every()
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(case, use_reentrant):
    given = case.given(Drawn())
    _, right = step(case, given)
    names = list(given)
    results = several(
        checkpoint(
            lambda *x: case.call(**dict(zip(names, x, strict=True))), *given.values(), use_reentrant=use_reentrant
        )
    )
    shown = [y for y in results if y.requires_grad]
    torch.autograd.backward(shown, [slope.to(y.dtype) for y, slope in zip(shown, slopes_of(shown), strict=True)])
    same([x.grad for x in leaves(given).values()], right.values(), REORDERED)


@every()
def test_what_is_saved_may_be_kept_elsewhere(case):
    given = case.given(Drawn())
    _, right = step(case, given)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        results = case.run(given)
    same(gradients(results, leaves(given)).values(), right.values(), REORDERED)


@every()
def test_gradients_are_accumulated_without_a_copy_of_them(case):
    """The tensor of one backward becomes the leaf's gradient, and no two leaves share one."""
    given, made = case.given(Drawn()), []
    hooks = [x.register_hook(lambda grad: made.append(grad.data_ptr())) for x in leaves(given).values()]
    sum(y.square().sum() for y in case.run(given)).backward()
    grads = [x.grad for x in leaves(given).values()]
    assert len(hooks) == len(made)
    assert len({x.data_ptr() for x in grads}) == len(grads)


@every(variants=True)
def test_no_grad_and_inference_mode_keep_nothing(case, variant):
    given, kept = case.given(Drawn(variant=variant)), []
    right = [y.detach() for y in case.run(given)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            results = case.run(given)
        assert not any(y.requires_grad for y in results)
        same(results, right, REORDERED)
    assert not kept
    same(step(case, given)[0], right)


@every(variants=True)
@pytest.mark.share(8)
def test_gradients_are_the_same_whichever_are_asked_for(case, variant):
    given = case.given(Drawn(variant=variant))
    _, right = step(case, given)
    for asked in (*[{name} for name in right], *[right.keys() - {name} for name in right if len(right) > 2]):
        frozen = {
            name: x.detach().requires_grad_(name in asked) if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }
        results = case.run(frozen)
        if any(y.requires_grad for y in results):
            found = gradients(results, leaves(frozen))
            assert found.keys() == asked
            same(found.values(), [right[name] for name in found], REORDERED)


@every(among=SEVERAL)
def test_results_that_nothing_uses_add_nothing(case, kernel):
    given = case.given(Drawn())
    exact = wide(given)
    for number in range(len(case.reference(exact))):
        reference = case.reference(exact)[number]
        if not reference.requires_grad:
            continue
        wanted = torch.autograd.grad(reference.square().sum(), leaves(exact).values(), materialize_grads=True)
        y = case.run(given)[number]
        found = torch.autograd.grad(y.square().sum(), leaves(given).values(), materialize_grads=True)
        for one, other in zip(found, wanted, strict=True):
            near(one, other, 4 * max(case.factors) * TOLERANCE[FLOAT32], 1e-6)


@every()
def test_results_are_in_memory_of_their_own_and_inputs_stay_as_they_are(case):
    for layout in case.layouts:
        given = {
            name: x.detach() if isinstance(x, torch.Tensor) else x
            for name, x in case.given(Drawn(), layouts=(layout,)).items()
        }
        before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
        for y in case.run(given):
            y.zero_()
        assert all(torch.equal(given[name], x) for name, x in before.items())


def saved_by(case, given):
    """Return the addresses of a call's tensors that its backward reads, and the call's results."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        first = case.run(given)
    return {*saved} & {x.data_ptr() for x in (*first, *given.values()) if isinstance(x, torch.Tensor)}, first


def noticed(is_saved):
    return pytest.raises(RuntimeError, match=r"modified (by an )?inplace") if is_saved else contextlib.nullcontext()


@every()
def test_an_input_that_is_saved_and_changed_before_the_backward_is_noticed(case):
    given = case.given(Drawn())
    name, x = next(iter(leaves(given).items()))
    changed = given | {name: x * 1}
    saved, _ = saved_by(case, changed)
    results = case.run(changed)
    with torch.no_grad():
        changed[name].add_(1)
    with noticed(changed[name].data_ptr() in saved):
        gradients(results, {name: x})


@every(among=[case for case in CASES.values() if case not in SEVERAL])
def test_a_result_may_be_changed_in_place_unless_it_is_saved(case):
    given = case.given(Drawn())
    saved, (y,) = saved_by(case, given)
    is_saved = y.data_ptr() in saved
    (again,) = case.run(given)
    right = gradients((2 * again,), leaves(given), retain_graph=True)
    with noticed(is_saved):
        same(gradients((again.mul_(2),), leaves(given)).values(), right.values(), REORDERED)


@every("functorch")
def test_functorch_s_transforms_go_through_torch_s_own_operations(case):
    given = case.given(Drawn())
    name, x = next(iter(leaves(given).items()))
    right = torch.autograd.grad(sum(y.square().sum() for y in case.run(given)), x)[0]
    others = mapped(given, torch.Tensor.detach)

    def loss(x):
        return sum(y.square().sum() for y in case.run({**others, name: x}))

    x = x.detach()
    near(torch.func.grad(loss)(x), right, 10 * REORDERED, 1e-6)
    if "vmap" not in case.skips:
        near(torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x]))[0], right, 10 * REORDERED, 1e-6)


@every()
def test_defaults_of_a_user_change_no_result(case, kernel, nothing_kept):
    given = case.given(Drawn())
    is_the_same_under_defaults(case, given)


@every()
def test_a_training_step_goes_on_from_what_inference_mode_left(case, nothing_kept):
    given = case.given(Drawn())
    with torch.inference_mode():
        results = case.run(mapped(given, torch.Tensor.detach))
    same(results, step(case, given)[0], REORDERED)


@pytest.fixture
def nothing_kept(monkeypatch):
    """Empty the stores, as in a process whose first call is the test's."""
    monkeypatch.setattr(registration, "_rows", {})
    monkeypatch.setattr(labels, "_seen", {})


@every("meta")
@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
def test_on_meta_an_op_has_the_shapes_of_its_results(case, graded):
    given = case.given(Drawn())
    away = {
        name: x.detach().to("meta").requires_grad_(x.requires_grad and graded) if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }
    here, there = case.run(given), case.run(away)
    assert [(y.shape, y.dtype) for y in there] == [(y.shape, y.dtype) for y in here]
    assert all(y.is_meta for y in there)
    if graded:
        found = torch.autograd.grad(sum(y.sum() for y in there), leaves(away).values(), materialize_grads=True)
        assert [x.shape for x in found] == [x.shape for x in leaves(away).values()]


@every_tensor(lambda case, name, given: "device" not in case.skips and name != next(iter(given)))
@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
def test_a_tensor_on_another_device_is_refused_by_its_name(case, name, graded):
    if not graded and case.name in ("gated_mlp", "mlp"):
        return  # Without a gradient torch's own layers take the weights.
    given = case.given(Drawn())
    given |= {key: x.detach() for key, x in given.items() if isinstance(x, torch.Tensor) and not graded}
    given[name] = given[name].detach().to("meta").requires_grad_(given[name].requires_grad)
    with pytest.raises(ValueError, match=rf"\b{name}\b.* is on meta, and must be on cpu as \w+ is") as caught:
        case.run(given)
    other = re.search(r"as (\w+) is$", str(caught.value)).group(1)
    assert other in {key.lstrip("_") for key in given}, f"{other} is not an argument of the op"


@every_tensor(lambda case, name, given: given[name].requires_grad and "forward" not in case.skips)
def test_forward_mode_derivatives_are_refused_and_not_lost(case, name):
    # None of the tensors needs a gradient: an op that autograd has to know of is torch's to refuse.
    given = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in case.given(Drawn()).items()}
    x = given[name]

    def call(x):
        return case.run({**given, name: x})

    with forward_ad.dual_level():
        assert all(y.isfinite().all() for y in call(x))
        with contextlib.suppress(NotImplementedError):  # else they are those of torch's own operations
            assert any(forward_ad.unpack_dual(y).tangent is not None for y in call(forward_ad.make_dual(x, x)))
    # functorch's transforms run the formula, whose tangents are torch's.
    with contextlib.suppress(NotImplementedError):
        tangents = torch.func.jvp(call, (x,), (x,))[1]
        pairs = zip(tangents, call(1.01 * x), call(x), strict=True)
        assert all(tangent.count_nonzero() or torch.equal(a, b) for tangent, a, b in pairs)


@pytest.mark.filterwarnings("ignore:Casting complex")
@every_tensor(lambda case, name, _: not case.skips & {"dtype", f"dtype of {name}"})
@pytest.mark.parametrize("graded", [False, True], ids=["plain", "graded"])
def test_a_dtype_that_an_op_cannot_compute_is_refused_by_the_argument_s_name(case, name, graded):
    given = case.given(Drawn())
    if not graded:
        given = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    x = given[name].detach()
    for dtype in (torch.complex64, torch.bool, torch.int32 if x.is_floating_point() else torch.float32):
        with pytest.raises((ValueError, TypeError)) as caught:
            case.run(given | {name: x.to(dtype)})
        said = str(caught.value)
        assert re.search(rf"\b{name.lstrip('_')}\b", said), said
        assert str(dtype) in said
        assert "\n" not in said
