"""References of gradients equal autograd's of the forward's reference in float64."""

import inspect
import itertools

import pytest
import torch
from spec_samples import SPECS, inputs_of, is_float, sized

import tilekern.ops  # noqa: F401  (declares the ops)
from tilekern.kernels import all_specs, spec_named
from tilekern.ops.operation import DECLARED

SHIPPED = [op for op in DECLARED.values() if op.formula.__module__.startswith("tilekern.ops.")]
FORWARD = "_forward"
# Gradients of more or fewer results than a forward kernel's, or parts of them; the tests of these kernels compare them
# with autograd, or with gradients that are compared with it.
ELSEWHERE = (
    "attention_dkdv_apart", "attention_dkdv_kept", "attention_dq_kept", "attention_sums", "experts_gate_backward",
    "fp8_experts_gate_backward",
    "fused_linear_cross_entropy", "fused_linear_jsd", "grouped_weight_gradient", "router_losses_backward",
)  # fmt: skip


def _outputs_of(spec):
    return list(spec.outputs(sized(spec, flags=True), 1))


def _inputs_of(spec):
    return list(inputs_of(spec, sized(spec, flags=True)))


def _forward_by_name(name):
    """Return the forward with the longest name that, without ``_forward``, starts a spec's name; None if none does."""
    stems = [found.removesuffix(FORWARD) for found in all_specs() if found.endswith(FORWARD) and found != name]
    stem = max((stem for stem in stems if name.startswith(f"{stem}_")), key=len, default=None)
    return None if stem is None else f"{stem}{FORWARD}"


def _pairs():
    """Return pairs of forward and backward: as ops declare them, or by their names."""
    # If a loss comes with its gradient, the backward only multiplies by the slope.
    found = [(op.forward.name, op.backward.name) for op in SHIPPED if op.backward and "gradient" not in op.kept]
    for spec in SPECS:
        forward = _forward_by_name(spec.name)
        graded = {"gradient", *(f"d{name}" for name in _inputs_of(spec_named(forward)))} if forward else set()
        if not graded.isdisjoint(_outputs_of(spec)):
            found.append((forward, spec.name))
    return [pair for pair in dict.fromkeys(found) if pair[0] != pair[1] and pair[1] not in ELSEWHERE]


PAIRS = _pairs()
# Losses that come with their gradient; ops whose backward is the forward by another flag.
AT_ONCE = [spec.name for spec in SPECS if {"loss", "gradient"} <= {*_outputs_of(spec)}]
TURNED_BACK = {op.name: op for op in SHIPPED if op.backward_flags}


def _leaves(spec, problem):
    """Return the inputs of a spec; floating-point ones require gradients."""
    return {k: v.double().requires_grad_() if is_float(v) else v for k, v in inputs_of(spec, problem).items()}


def _results(spec, problem, given):
    """Return the reference's results for those of the given values, and of the flags, that are its parameters."""
    names = {*_inputs_of(spec), *inspect.signature(spec.reference).parameters}
    return spec.reference(**{name: x for name, x in (dict(problem) | given).items() if name in names})


def _gradients(results, slopes, given):
    """Return gradients as ``d<input>``, for the inputs that the results depend on."""
    leaves = {name: x for name, x in given.items() if is_float(x)}
    asked = [results[name] for name in slopes]
    found = torch.autograd.grad(asked, list(leaves.values()), list(slopes.values()), allow_unused=True)
    return {f"d{name}": x for name, x in zip(leaves, found, strict=True) if x is not None}


def _detached(values):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in values.items()}


def _assert_like(got, gradients, results):
    """Compare gradients by their names; ``gradient`` is the first input's, ``sums`` are those without another name."""
    others = [x.flatten() for name, x in gradients.items() if name not in got]
    known = (
        results | gradients | {"gradient": next(iter(gradients.values())), "sums": torch.cat([*others, torch.empty(0)])}
    )
    held = got.keys() & known.keys()
    assert held & {*gradients, "gradient"}, "no gradient is compared"
    for name in held:
        expected = known[name].reshape(got[name].shape)
        torch.testing.assert_close(got[name], expected, rtol=1e-9, atol=1e-9, msg=lambda said, at=name: f"{at}: {said}")


def _slopes(results, given, own):
    """Return a backward's names of the results' gradients: ``d<result>``, or else the input without a source."""
    graded = [name for name, x in results.items() if x.requires_grad]
    called = {name: f"d{name}" for name in graded if f"d{name}" in own}
    others = {*given, *results, *called.values()}
    rest = [name for name, x in own.items() if is_float(x) and name not in others]
    assert len(rest) <= 1, f"unknown inputs of the backward: {rest}"
    return called | dict(zip([name for name in graded if name not in called], rest, strict=False))


def _made_between(forward, names):
    """Return the other kernels of a forward that compute inputs of the backward, such as attention's ``delta``."""
    beside = [spec for spec in SPECS if _forward_by_name(spec.name) == forward]
    return {name: spec for spec in beside for name in names & {*_outputs_of(spec)}}


def _every_flag(*specs):
    """Yield problems of some specs, for all combinations of their flags."""
    names = list(dict.fromkeys(d.name for spec in specs for d in spec.dimensions if d.kind == "flag"))
    for values in itertools.product((False, True), repeat=len(names)):
        flags = dict(zip(names, values, strict=True))
        plain = [sized(spec) for spec in specs]
        yield [problem.but(**{name: flags[name] for name in names if name in problem}) for problem in plain]


@pytest.mark.parametrize(("forward", "backward"), PAIRS)
def test_a_backward_s_reference_equals_autograd(forward, backward):
    forward, backward = spec_named(forward), spec_named(backward)
    for problem, of_backward in _every_flag(forward, backward):
        _assert_backward(forward, backward, problem, of_backward)


def _assert_backward(forward, backward, problem, of_backward):
    given, own = _leaves(forward, problem), inputs_of(backward, of_backward)
    results = _results(forward, problem, given)
    between = _made_between(forward.name, own.keys() - given.keys() - results.keys())
    called = _slopes(results, given, {name: x for name, x in own.items() if name not in between})
    drawn = {name: torch.randn_like(results[name]) for name in called} or {"loss": torch.ones_like(results["loss"])}
    gradients = _gradients(results, drawn, given)
    handed = own | _detached(given | results) | {called[name]: x for name, x in drawn.items() if name in called}
    handed |= {name: _results(spec, problem, handed)[name] for name, spec in between.items()}
    for name, x in own.items():
        if isinstance(x, torch.Tensor):
            # Integers keep their dtype; groups of experts are flattened.
            handed[name] = handed[name].to(handed[name].dtype if is_float(x) else x.dtype).reshape(x.shape)
    _assert_like(_results(backward, dict(of_backward) | dict(problem), handed), gradients, _detached(results))


@pytest.mark.parametrize("name", AT_ONCE)
def test_gradients_that_come_with_a_loss_equal_autograd(name):
    spec = spec_named(name)
    for (problem,) in _every_flag(spec):
        if problem.get("graded", True):
            given = _leaves(spec, problem)
            results = _results(spec, problem, given)
            gradients = _gradients(results, {"loss": torch.ones_like(results["loss"])}, given)
            _assert_like(_detached(results), gradients, {})


@pytest.mark.parametrize("flags", [False, True])
@pytest.mark.parametrize("name", TURNED_BACK)
def test_an_op_whose_backward_is_its_inverse_equals_autograd(name, flags):
    """Results and inputs with gradients have the same order."""
    op = TURNED_BACK[name]
    problem = sized(op.forward, flags=flags)
    there = problem.but(**{flag: value == "True" for flag, value in op.flags.items() if flag in op.backward_flags})
    back = problem.but(**{flag: value == "True" for flag, value in op.backward_flags.items()})
    given = _leaves(op.forward, problem)
    results = _results(op.forward, there, given)
    drawn = {result: torch.randn_like(results[result]) for result in op.shown}
    gradients = _gradients(results, drawn, given)
    slopes = dict(zip(op.gradients, drawn.values(), strict=True))
    got = _results(op.backward, back, _detached(given | slopes))
    named = {f"d{name}": got[result] for name, result in zip(op.gradients, op.shown, strict=True)}
    _assert_like(named, gradients, {})


def test_every_gradient_is_held_to_autograd():
    """Here, or where :data:`ELSEWHERE` says: whatever is called a gradient or a backward."""
    held = {*AT_ONCE, *ELSEWHERE, *(backward for _, backward in PAIRS)}
    for spec in SPECS:
        named = {name for name in _inputs_of(spec) if f"d{name}" in _outputs_of(spec)}
        assert spec.name in held or not (named or "backward" in spec.name or "gradient" in _outputs_of(spec)), spec.name
