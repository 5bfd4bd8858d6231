"""The head's loss as a composite: which chunks there are, who multiplies, and what the tuner is asked for first."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import inputs_of, interpret

from tilekern.errors import CacheMiss
from tilekern.kernels import spec_named
from tilekern.kernels.composites.fused_linear_cross_entropy import LossOptions, loss_and_gradients
from tilekern.kernels.composites.head import split
from tilekern.kernels.matmul import product as linear
from tilekern.runtime.dispatch import LibraryPlan, counters, plan_for
from tilekern.spec import DTYPES, ITEM_BYTES, Config, bucket, cdiv
from tilekern.spec.targets import INTERPRETED, KNOWN, resolve
from tilekern.tuning.plan.given import with_parts
from tilekern.tuning.plan.presets import PRESETS
from tilekern.tuning.verify.check import compare, expected_results

SPEC = spec_named("fused_linear_cross_entropy")
WAYS = ("cublas", "tuned")
MIB = 1 << 20
H200 = resolve("H200")


def problem_of(rows, vocabulary, hidden=4096, dtype="bfloat16"):
    return SPEC.problem(rows=rows, hidden=hidden, vocabulary=vocabulary, dtype=dtype)


def chunks_of(problem, target=H200):
    return sorted({config["chunk"] for config in SPEC.space.candidates(problem, target)}, reverse=True)


def run(config, problem, inputs, lookup=plan_for):
    names = ("hidden", "weight", "target", "scale", "options")
    given = loss_and_gradients(lookup, config, *(inputs[name] for name in names))
    return dict(zip(SPEC.outputs(problem, 1), given, strict=True))


def multiplied():
    return counters("matmul").launches


@given(rows=st.integers(1, 40000), chunk=st.integers(1, 9000))
def test_parts_are_all_rows_once_no_more_than_needed_and_of_one_size(rows, chunk):
    parts = split(rows, chunk)
    assert [row for part in parts for row in (part.start, part.stop)][1:-1:2] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop, len(parts)) == (0, rows, cdiv(rows, chunk))
    sizes = [part.stop - part.start for part in parts]
    assert len(set(sizes[:-1])) <= 1
    assert max(sizes) == sizes[0] <= chunk
    assert sizes[-1] > 0


def test_parts_are_whole_tiles_and_even():
    assert [part.stop - part.start for part in split(8192, 2816)] == [2816, 2816, 2560]
    assert [part.stop - part.start for part in split(6000, 2816)] == [2048, 2048, 1904]
    assert [part.stop - part.start for part in split(2100, 2048)] == [1152, 948]


@pytest.mark.parametrize(
    ("rows", "vocabulary", "dtype", "wanted"),
    [
        (8192, 128256, "bfloat16", [2816, 2048]),  # a third: 689 MiB
        (8192, 151936, "bfloat16", [2048, 1408]),
        (32768, 151936, "bfloat16", [2304, 2048, 1408]),
        (2048, 128256, "bfloat16", [2048]),
        (4096, 50304, "bfloat16", [4096]),
        (8192, 50304, "bfloat16", [4096, 2816]),
        (8192, 128256, "float32", [1408, 1024, 768]),
        (64, 128256, "bfloat16", [128]),
        (4096, 4_000_000, "bfloat16", [128]),
    ],
)
def test_chunks_that_the_tuner_races(rows, vocabulary, dtype, wanted):
    assert chunks_of(problem_of(rows, vocabulary, dtype=dtype)) == wanted


@examples(200)
@given(rows=st.integers(1, 1 << 20), vocabulary=st.integers(1, 300000), dtype=st.sampled_from(DTYPES))
def test_no_chunk_takes_more_than_its_share_and_each_has_both_ways(rows, vocabulary, dtype):
    problem = SPEC.bucketed(problem_of(rows, vocabulary, dtype=dtype))
    found = list(SPEC.space.candidates(problem, H200))
    chunks = chunks_of(problem)
    assert len(found) == len(chunks) * len(WAYS) <= 12
    row_bytes = vocabulary * ITEM_BYTES[dtype]
    assert all(chunk * row_bytes <= 700 * MIB for chunk in chunks)
    assert all(chunk % 128 == 0 for chunk in chunks)
    counts = [len(split(problem["rows"], chunk)) for chunk in chunks]
    assert len(set(counts)) == len(chunks), "two chunks that split all rows alike would be timed twice"
    fewer = counts[0] - 1
    assert not fewer or 128 * cdiv(problem["rows"], 128 * fewer) * row_bytes > 700 * MIB, "fewer parts would fit"


@pytest.mark.parametrize("target", [*KNOWN, INTERPRETED], ids=lambda target: target.key)
def test_the_default_is_the_largest_chunk_by_cublas(target):
    problem = problem_of(8192, 128256)
    assert SPEC.default(problem, target) == Config(chunk=2816, products="cublas")
    reason = SPEC.space.violated(problem, SPEC.default(problem, target).but(chunk=4096), target)
    assert reason == "a chunk of logits takes more than 700 MiB"
    assert "twice as often" in SPEC.space.violated(problem, SPEC.default(problem, target).but(chunk=1408), target)


@pytest.mark.parametrize("way", WAYS)
@examples(20)
@given(data=st.data())
def test_loss_and_gradients_over_chunks_match_float64(way, data):
    problem = problem_of(
        data.draw(st.integers(1, 40)),
        data.draw(st.one_of(st.integers(1, 150), st.sampled_from([127, 128, 129, 255, 257]))),
        data.draw(st.integers(16, 80)),
        data.draw(st.sampled_from(DTYPES)),
    )
    chunk = data.draw(st.integers(1, 40))
    inputs = inputs_of(SPEC, problem, seed=data.draw(st.integers(0, 3)))
    outputs = run(Config(chunk=chunk, products=way), problem, inputs)
    expected = expected_results(SPEC, problem, inputs)
    few = len(split(problem["rows"], chunk)) <= 3
    check = compare(SPEC, problem, outputs, expected)
    # Each chunk rounds the weight's gradient once more.
    assert check.passed or (not few and check.relative_error < 2e-2), check.reason
    loss = run(Config(chunk=chunk, products=way), problem, inputs | {"scale": None})["loss"]
    assert compare(SPEC, problem, {"loss": loss}, {"loss": expected["loss"]}).passed


@pytest.mark.parametrize("hidden_gradient", [True, False])
@pytest.mark.parametrize("weight_gradient", [True, False])
def test_only_what_is_tuned_is_looked_up_and_only_what_is_wanted_is_multiplied(hidden_gradient, weight_gradient):
    problem = problem_of(10, 83, 24, "float32")
    inputs = inputs_of(SPEC, problem)
    wanted = {"hidden_gradient": hidden_gradient, "weight_gradient": weight_gradient}
    inputs |= {"options": LossOptions(**wanted)}
    for way, launches in (("cublas", 0), ("tuned", 3 * (1 + hidden_gradient + weight_gradient))):
        before = multiplied()
        outputs = run(Config(chunk=4, products=way), problem, inputs)
        assert multiplied() - before == launches
        assert (outputs["dhidden"] is None, outputs["dweight"] is None) == (not hidden_gradient, not weight_gradient)


def test_wide_sums_are_added_up_by_the_library_in_both_ways():
    problem = problem_of(10, 83, 24)
    inputs = inputs_of(SPEC, problem) | {"options": LossOptions(wide_sums=True)}
    narrow, tuned = (run(Config(chunk=4, products=way), problem, inputs) for way in WAYS)
    assert narrow["dweight"].dtype == tuned["dweight"].dtype == torch.float32
    torch.testing.assert_close(narrow["dweight"], tuned["dweight"], rtol=1e-2, atol=1e-2)


def lookup(matmul):
    """Plans as usual, but those of products from ``matmul``."""
    return lambda spec, *sizes: matmul(*sizes) if spec is linear.SPEC else plan_for(spec, *sizes)


def of_the_library(device, *sizes):
    names = [dimension.name for dimension in linear.SPEC.dimensions]
    problem = linear.SPEC.problem(**dict(zip(names, (*sizes[:-1], "float32"), strict=True)))
    (config,) = (c for c in linear.SPEC.space.candidates(problem, INTERPRETED) if c["implementation"] == "cublas")
    return LibraryPlan(linear.SPEC.implement(problem, config).bound(plan_for), config)


@pytest.mark.parametrize("matmul", [lambda *_: None, of_the_library], ids=["nothing", "cublas"])
def test_where_no_kernel_won_cublas_runs_in_the_same_memory(matmul, monkeypatch):
    problem = problem_of(10, 83, 24, "float32")
    inputs, before = inputs_of(SPEC, problem), multiplied()
    by_cublas = Mock(side_effect=linear.by_cublas)
    monkeypatch.setattr(linear, "by_cublas", by_cublas)
    outputs = run(Config(chunk=4, products="tuned"), problem, inputs, lookup(matmul))
    assert compare(SPEC, problem, outputs, expected_results(SPEC, problem, inputs)).passed
    assert multiplied() == before
    assert by_cublas.call_count == 3 * 3
    assert len({call.args[2].data_ptr() for call in by_cublas.call_args_list}) == 1 + 3 + 1


def test_a_miss_that_the_policy_calls_an_error_is_one():
    def miss(*_):
        raise CacheMiss("no cache holds matmul")

    problem = problem_of(10, 83, 24, "float32")
    inputs = inputs_of(SPEC, problem)
    with pytest.raises(CacheMiss):
        run(Config(chunk=4, products="tuned"), problem, inputs, lookup(miss))
    assert run(Config(chunk=4, products="cublas"), problem, inputs, lookup(miss))["loss"].isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_both_ways_repeat_bit_by_bit(way):
    problem = problem_of(10, 83, 24)
    inputs = inputs_of(SPEC, problem)
    first, again = (run(Config(chunk=4, products=way), problem, inputs) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_every_config_of_several_chunks_is_right():
    problem = problem_of(300, 40, 24, "float32")
    inputs = inputs_of(SPEC, problem)
    found = [Config(chunk=chunk, products=way) for chunk, way in itertools.product((128, 256, 384), WAYS)]
    assert [interpret(SPEC, problem, config, inputs).passed for config in found] == [True] * len(found)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("tokens", [64, 2048, 5000, 8192, 32768])
def test_the_products_of_every_chunk_are_planned_with_the_loss(model, tokens):
    config = PRESETS[model].get("text_config", PRESETS[model])
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    loss = SPEC.bucketed(SPEC.problem(rows=tokens, hidden=hidden, vocabulary=vocabulary, dtype="bfloat16"))
    planned = with_parts([(SPEC.name, loss)], H200)
    asked = []

    def noted(spec, device, *sizes):
        names = [d.name for d in spec.dimensions]
        asked.append(spec.bucketed(spec.problem(**dict(zip(names, (*sizes[:-1], "bfloat16"), strict=True)))))

    for chunk in chunks_of(loss):
        part = split(loss["rows"], chunk)[0].stop
        x, weight, logits = (
            torch.empty(part, hidden, device="meta"),
            torch.empty(vocabulary, hidden, device="meta"),
            torch.empty(part, vocabulary, device="meta"),
        )
        linear.by_winner(noted, x, weight, logits, ("b_transposed",))
        linear.by_winner(noted, logits, weight, x, ())
        linear.by_winner(noted, logits, x, weight, ("a_transposed",))
        if part < loss["rows"]:
            linear.by_winner(noted, logits, x, weight, ("a_transposed", "accumulated"))
    products = {problem for kernel, problem in planned if kernel == linear.SPEC.name}
    assert set(asked) <= products
    parts = {bucket(part.stop - part.start) for chunk in chunks_of(loss) for part in split(loss["rows"], chunk)}
    assert {problem["rows"] for problem in products} == parts, "what no config launches is not tuned"


def test_the_reference_s_gradients_are_what_autograd_says():
    inputs = inputs_of(SPEC, problem_of(7, 30, 16, "float32"))
    hidden, weight = (inputs[name].double().requires_grad_() for name in ("hidden", "weight"))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), inputs["target"].long(), reduction="none")
    expected = torch.autograd.grad((inputs["scale"] * loss).sum(), (hidden, weight))
    with torch.no_grad():
        found = SPEC.reference(**inputs | {"hidden": hidden, "weight": weight})
    for name, gradient in zip(("dhidden", "dweight"), expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9)
