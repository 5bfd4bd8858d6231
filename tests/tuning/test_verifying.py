"""Judging results: figures, NaN and infinity, leeway, and what journals and records keep of it."""

import json
import math
import re

import pytest
import torch

from tilekern.kernels import all_specs, spec_named
from tilekern.spec import Tolerance
from tilekern.tuning.verify.check import Check, Leeway, compare, errors, judge, make_outputs, odd_problem

TOLERANCE = Tolerance(relative=1e-2, elementwise=2e-2)
NAN, INF = math.nan, math.inf


def judged(actual, expected, dtype=torch.float32, **leeway):
    results = {"y": torch.tensor(actual, dtype=dtype)}
    return judge(results, {"y": torch.tensor(expected).double()}, TOLERANCE, {"y": Leeway(**leeway)})


# Of two elements the second depends on what is not finite.
SECOND = torch.tensor([False, True])
WITHOUT = {"plain": torch.tensor([5.0, 7.0]).double(), "reached": SECOND}


def test_an_element_that_a_kernel_does_not_write_is_not_zero():
    """A reference may be zero there."""
    scale, labels = spec_named("scale"), spec_named("labels")
    floats = make_outputs(scale, scale.problem(rows=3, columns=5, dtype="bfloat16"), 1, "cpu")
    integers = make_outputs(labels, labels.problem(rows=3, wide=True), 1, "cpu")
    assert all(x.isnan().all() for x in floats.values())
    assert all((x == torch.iinfo(x.dtype).min).all() for x in integers.values())
    assert floats
    assert integers


def test_the_sign_of_infinity_counts_but_for_sums_of_rounded_operands():
    for actual, passes in (([5.0, INF], True), ([5.0, -INF], False)):
        assert judged(actual, [5.0, INF], **WITHOUT).passed == passes
    assert judged([5.0, -INF], [5.0, INF], is_coarse=True, **WITHOUT).passed
    assert not judged([5.0, 7.0], [5.0, INF], is_coarse=True, plain=WITHOUT["plain"]).passed
    assert not judged([5.0, NAN], [5.0, INF], is_coarse=True, **WITHOUT).passed


def test_errors_are_of_the_norm_and_of_the_largest_element():
    relative, elementwise = errors(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]).double())
    assert relative == pytest.approx(0.1)
    assert elementwise == pytest.approx(0.125)
    assert errors(torch.empty(0), torch.empty(0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        ([1.0, NAN], [1.0, 2.0], "1 elements are not finite where the reference is"),
        ([1.0, INF], [1.0, 2.0], "1 elements are not finite where the reference is"),
        ([1.0, 2.0], [1.0, NAN], "1 elements are finite where the reference is not"),
        ([1.0, 2.0], [1.0, INF], "1 elements are finite where the reference is not"),
        ([1.0, INF], [1.0, NAN], "1 elements are infinite where the reference is NaN"),
        ([1.0, -INF], [1.0, INF], "1 elements are infinite with the wrong sign"),
        ([1.0, NAN], [1.0, INF], "1 elements are NaN where the reference is infinite"),
        ([1.1, NAN], [1.0, NAN], "relative error 1.00e-01"),
        ([1.0], [1.0, 1.0], r"its shape is \(1,\), not \(2,\)"),
    ],
)
def test_what_fails_says_why(actual, expected, reason):
    check = judged(actual, expected)
    assert not check.passed
    assert check.reason.startswith("y: ")
    assert re.search(reason, check.reason)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [([1.0, NAN], [1.0, NAN]), ([1.0, INF], [1.001, INF]), ([-INF, NAN], [-INF, NAN]), ([0.0], [0.0])],
)
def test_nan_and_infinity_where_the_reference_has_them_are_right(actual, expected):
    assert judged(actual, expected).passed


def test_the_reference_is_infinite_where_the_dtype_of_the_result_is():
    assert judged([1.0, INF], [1.0, 7e4], dtype=torch.float16).passed
    assert not judged([1.0, INF], [1.0, 6e4], dtype=torch.float16).passed
    assert not judged([1.0, 65504.0], [1.0, 7e4], dtype=torch.float16).passed


def test_a_result_that_must_be_zero_has_no_room_for_an_error():
    assert not judged([0.0, 1e-20], [0.0, 0.0]).passed


def test_leeway_is_on_top_of_the_tolerance():
    assert not judged([1.0, 1.1], [1.0, 1.0]).passed
    assert judged([1.0, 1.1], [1.0, 1.0], norm=0.1, peak=0.09).passed
    assert not judged([1.0, 1.1], [1.0, 1.0], norm=0.1).passed
    assert not judged([1.0, 1.1], [1.0, 1.0], peak=0.1).passed


def test_what_does_not_depend_on_a_nan_may_keep_its_value():
    leeway = WITHOUT
    assert judged([5.0, NAN], [NAN, NAN], **leeway).passed
    assert judged([NAN, NAN], [NAN, NAN], **leeway).passed
    assert not judged([6.0, NAN], [NAN, NAN], **leeway).passed
    assert not judged([5.0, 7.0], [NAN, NAN], **leeway).passed
    assert not judged([NAN, NAN], [5.0, NAN], **leeway).passed


def test_an_infinity_may_give_nan_where_nan_in_its_place_would_and_nowhere_else():
    leeway = WITHOUT | {"tainted": SECOND}
    assert judged([5.0, NAN], [5.0, 1.0], **leeway).passed
    assert judged([5.0, NAN], [5.0, INF], **leeway).passed
    assert judged([5.0, 1.0], [5.0, 1.0], **leeway).passed
    assert not judged([NAN, 1.0], [5.0, 1.0], **leeway).passed
    assert not judged([5.0, INF], [5.0, 1.0], **leeway).passed
    assert not judged([5.0, 2.0], [5.0, 1.0], **leeway).passed
    assert not judged([5.0, 1.0], [5.0, NAN], **leeway).passed
    assert judged([5.0, INF], [5.0, NAN], **leeway).passed
    assert not judged([INF, 1.0], [NAN, 1.0], **leeway).passed


def test_the_spec_says_the_tolerance():
    spec = spec_named("column_sum")
    problem = spec.problem(rows=3, columns=4, dtype="float32")
    expected = {"y": torch.ones(4, dtype=torch.float64)}
    assert compare(spec, problem, {"y": torch.ones(4)}, expected).passed
    assert not compare(spec, problem, {"y": torch.full((4,), 1 + 1e-4)}, expected).passed


def test_checks_of_earlier_journals_and_records_are_read_and_lines_keep_their_keys():
    earlier = {"passed": False, "relative_error": 1.0, "elementwise_error": 2.0, "reason": "y"}
    assert Check(**earlier).as_dict() == earlier
    assert set(Check(True, 0.0, 0.0).as_dict()) == {"passed", "relative_error", "elementwise_error"}


def test_a_check_with_cases_survives_json():
    case = {"case": "zeros", "sizes": "rows=3", "passed": True, "relative_error": 0.0, "elementwise_error": 0.0}
    check = Check(True, 1e-3, 2e-3, cases=[case])
    again = Check(**json.loads(json.dumps(check.as_dict(), allow_nan=False)))
    assert again == check


@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
def test_odd_sizes_are_primes_of_at_most_the_size_and_a_batch_is_of_two(spec):
    bucketed = [d.name for d in spec.dimensions if d.kind == "bucketed"]
    values = {d.name: 512 for d in spec.dimensions}
    kinds = {"dtype": "bfloat16", "flag": False}
    problem = spec.problem(**{d.name: kinds.get(d.kind, values[d.name]) for d in spec.dimensions})
    odd = odd_problem(spec, problem)
    for name in bucketed:
        assert odd[name] == (2 if name == "batch" and len(bucketed) > 1 else 509)
    assert {name: odd[name] for name in odd if name not in bucketed} == {
        name: problem[name] for name in problem if name not in bucketed
    }
    assert all(odd_problem(spec, problem, 61)[name] <= 61 for name in bucketed)
