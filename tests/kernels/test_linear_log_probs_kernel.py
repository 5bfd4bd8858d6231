"""A head's log-probabilities as composites: over any chunks, by whoever multiplies, and what is planned for them."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import inputs_of

from tilekern.kernels import log_probs, spec_named
from tilekern.kernels.composites import head, linear_log_probs
from tilekern.kernels.composites.head import split
from tilekern.runtime.dispatch import counters, plan_for
from tilekern.spec import DTYPES, ITEM_BYTES, Config
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.plan.given import with_parts
from tilekern.tuning.verify.check import compare, expected_results

FORWARD, BACKWARD = spec_named("linear_log_probs_forward"), spec_named("linear_log_probs_backward")
WAYS = ("cublas", "tuned")
H200 = resolve("H200")


def problem_of(spec, rows, vocabulary, hidden=4096, dtype="bfloat16"):
    return spec.problem(rows=rows, hidden=hidden, vocabulary=vocabulary, dtype=dtype)


def run(spec, config, problem, inputs):
    call = spec.implement(problem, config)
    results = call.bound(plan_for)(*(inputs[name] for name in call.inputs))
    return dict(zip(spec.outputs(problem, 1), results, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
@examples(20)
@given(data=st.data())
def test_results_over_chunks_match_float64(spec, way, data):
    rows, chunk = data.draw(st.integers(1, 30), label="rows"), data.draw(st.integers(1, 40), label="chunk")
    vocabulary = data.draw(st.one_of(st.integers(2, 150), st.sampled_from([127, 128, 129])), label="vocabulary")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    problem = problem_of(spec, rows, vocabulary, data.draw(st.integers(16, 80), label="hidden"), dtype)
    inputs = inputs_of(spec, problem, seed=data.draw(st.integers(0, 3), label="seed"))
    outputs = run(spec, Config(chunk=chunk, products=way), problem, inputs)
    check = compare(spec, problem, outputs, expected_results(spec, problem, inputs))
    # Each chunk rounds the weight's gradient once more.
    few = len(split(rows, chunk)) <= 3
    assert check.passed or (not few and check.relative_error < 2e-2), check.reason


def test_wide_sums_lose_nothing_over_many_chunks():
    problem = problem_of(BACKWARD, 60, 83, 24)
    inputs = inputs_of(BACKWARD, problem)
    expected = expected_results(BACKWARD, problem, inputs)["dweight"]
    errors = {}
    for wide in (False, True):
        wanted = linear_log_probs.Wanted(wide_sums=wide)
        found = run(BACKWARD, Config(chunk=2, products="cublas"), problem, inputs | {"wanted": wanted})["dweight"]
        assert found.dtype == (torch.float32 if wide else torch.bfloat16)
        errors[wide] = float((found.double() - expected).norm() / expected.norm())
    assert errors[True] < 4e-3 < errors[False]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_only_what_is_wanted_is_multiplied(wanted):
    problem = problem_of(BACKWARD, 10, 83, 24, "float32")
    inputs = inputs_of(BACKWARD, problem) | {"wanted": linear_log_probs.Wanted(*wanted)}
    before = counters("matmul").launches
    found = run(BACKWARD, Config(chunk=4, products="tuned"), problem, inputs)
    chunks = len(split(10, 4))
    assert counters("matmul").launches - before == chunks * (1 + sum(wanted[:2]))
    assert tuple(x is not None for x in found.values()) == wanted


@pytest.mark.parametrize(("vocabulary", "dtype"), [(128256, "bfloat16"), (151936, "bfloat16"), (50304, "float32")])
def test_chunks_take_no_more_than_700_mib(vocabulary, dtype):
    problem, space = problem_of(FORWARD, 8192, vocabulary, dtype=dtype), FORWARD.space
    chunks = {config["chunk"] for config in space.candidates(problem, H200)}
    assert chunks
    assert max(chunks) * vocabulary * ITEM_BYTES[dtype] <= 700 << 20
    for target in (*KNOWN, INTERPRETED):
        default = head.default(problem, target)
        assert default == Config(chunk=max(chunks), products="cublas")
        assert space.violated(problem, default, target) is None
    assert "700 MiB" in space.violated(problem, Config(chunk=8192, products="cublas"), H200)


@pytest.mark.parametrize(("spec", "kernel"), list(zip((FORWARD, BACKWARD), log_probs.SPECS, strict=True)))
def test_the_parts_are_planned_with_the_composite(spec, kernel):
    problem = problem_of(spec, 8192, 151936)
    planned = with_parts([(spec.name, problem)], H200)
    names = {name for name, _ in planned}
    assert names == {spec.name, kernel.name, "matmul"}
    products = [found for name, found in planned if name == "matmul"]
    assert any(found["a_transposed"] for found in products) == (spec is BACKWARD)
