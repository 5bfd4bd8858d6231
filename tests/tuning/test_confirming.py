"""The candidates that must pass the whole battery after a race; one that fails does not win."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tuning_samples import COMPILED, SMALL

from tilekern.kernels import spec_named
from tilekern.kernels.skinny.linear import sizes
from tilekern.tuning.compile.stage import compile_all
from tilekern.tuning.measure.bench import to_confirm
from tilekern.tuning.measure.stage import entrants
from tilekern.tuning.measure.timing import Timing
from tilekern.tuning.measure.worker import _Measuring
from tilekern.tuning.publishing import winners
from tilekern.tuning.strategies import SLOWER, TIED, WON
from tilekern.tuning.sweep.candidates import candidates
from tilekern.tuning.sweep.folder import Sweep
from tilekern.tuning.verify.check import Check

RIGHT = Check(passed=True, relative_error=1e-3, elementwise_error=2e-3)
CASE = {"case": "random", "sizes": "rows=251", "passed": True, "relative_error": 1e-3, "elementwise_error": 2e-3}
CONFIRMED = Check(True, 1e-3, 2e-3, cases=[CASE])
WRONG = Check(False, float("inf"), float("inf"), "nan in x: y: 1 elements are finite where the reference is not",
              cases=[CASE, {**CASE, "case": "nan in x", "passed": False}])  # fmt: skip


@pytest.fixture
def field(sweep, h200):
    """Three that raced, and the generic variant."""
    found = entrants(*SMALL, h200, sweep.compiled(), ())
    return [*[entrant for entrant in found if entrant.is_aligned][:3], found[-1]]


def timings(field):
    """The second has won, the third is tied with it, the first is slower."""
    figures = [(12.0, SLOWER, 0.2), (10.0, WON, 0.0), (10.05, TIED, 0.004)]
    return {
        entrant.key: Timing(median, 0.1, 30, left, behind)
        for entrant, (median, left, behind) in zip(field, figures, strict=False)
    }


def confirm(field, outcomes):
    """Whom a process asks to stand the battery, where ``outcomes`` says what becomes of them, by their place."""
    checks, asked = dict.fromkeys([entrant.key for entrant in field], RIGHT), []
    for entrant in to_confirm(field, timings(field), checks):
        place = [one.key for one in field].index(entrant.key)
        asked.append(place)
        checks[entrant.key] = outcomes.get(place, CONFIRMED)
    return asked, checks


@pytest.mark.parametrize(
    ("outcomes", "asked"),
    [
        ({}, [3, 1]),
        ({1: WRONG}, [3, 1, 2]),
        ({1: WRONG, 2: WRONG}, [3, 1, 2, 0]),
        ({0: WRONG, 1: WRONG, 2: WRONG}, [3, 1, 2, 0]),
        ({3: WRONG}, [3, 1]),
    ],
)
def test_from_the_winner_on_until_one_has_passed(field, outcomes, asked):
    assert confirm(field, outcomes)[0] == asked


@pytest.fixture(scope="module")
def products(h200, tmp_path_factory):
    """Entrants of a matrix product: cuBLAS, two kernels, and the generic variant."""
    spec = spec_named("matmul")
    flags = {d.name: False for d in spec.dimensions if d.kind == "flag"}
    problem = spec.problem(rows=64, inner=32, columns=64, dtype="bfloat16", **flags)
    tile = spec.default(problem, h200)
    few = [tile.but(implementation="cublas"), tile, tile.but(schedule="block")]
    sweep = Sweep(tmp_path_factory.mktemp("products"))
    sweep.begin(h200, "test", [("matmul", problem)], {("matmul", problem): few})
    assert compile_all(sweep, jobs=2).failed == 0
    return entrants("matmul", problem, h200, sweep.compiled(), (), sweep.candidates("matmul", problem))


@pytest.mark.parametrize(
    ("order", "outcomes", "asked"),
    [
        ((0, 1, 2), {}, [3, 0, 1]),
        ((0, 1, 2), {1: WRONG}, [3, 0, 1, 2]),
        ((0, 1, 2), {0: WRONG}, [3, 0, 1]),
        ((1, 0, 2), {}, [3, 1]),
        ((1, 0, 2), {1: WRONG}, [3, 1, 0, 2]),
    ],
)
def test_where_a_library_has_won_the_best_kernel_stands_the_battery_too(products, order, outcomes, asked):
    timed = {
        products[place].key: Timing(10.0 + rank, 0.1, 30, WON if rank == 0 else SLOWER, float(rank))
        for rank, place in enumerate(order)
    }
    checks, found = dict.fromkeys([entrant.key for entrant in products], RIGHT), []
    for entrant in to_confirm(products, timed, checks):
        found.append([one.key for one in products].index(entrant.key))
        checks[entrant.key] = outcomes.get(found[-1], CONFIRMED)
    assert found == asked


def test_where_a_composite_has_won_too(h200, tmp_path):
    spec, sweep = spec_named("skinny_linear"), Sweep(tmp_path)
    problem = spec.problem(**sizes(8, 8192, 2048, "bfloat16", ()))
    split = next(item.config for item in candidates(spec.name, problem, h200) if "splits" in item.config)
    sweep.begin(h200, "test", [(spec.name, problem)], {(spec.name, problem): [split, spec.default(problem, h200)]})
    items = sweep.candidates(spec.name, problem)
    lines = {item.artifact: COMPILED for item in items}
    composite, kernel, generic = entrants(spec.name, problem, h200, lines, (), items)
    timed = {
        composite.key: Timing(10.0, 0.1, 30, WON, 0.0),
        kernel.key: Timing(11.0, 0.1, 30, SLOWER, 1.0),
    }
    checks = {one.key: RIGHT for one in (composite, kernel, generic)}
    found = []
    for entrant in to_confirm([composite, kernel, generic], timed, checks):
        found.append(entrant)
        checks[entrant.key] = CONFIRMED
    assert found == [generic, composite, kernel]


def test_a_generic_variant_that_was_found_wrong_before_is_not_asked(field):
    checks = dict.fromkeys([entrant.key for entrant in field], RIGHT) | {field[3].key: WRONG}
    assert next(to_confirm(field, timings(field), checks)).key == field[1].key


@pytest.mark.parametrize(
    ("bits", "outcomes", "asked"),
    [
        (("a", "b", "a", "b"), {}, [3, 1, 2]),
        (("a", "b", "a", "b"), {2: WRONG}, [3, 1, 2, 0]),
        (("b", "b", "b", "b"), {}, [3, 1]),
        (("", "b", None, "b"), {}, [3, 1]),
        (("a", "", "b", "b"), {}, [3, 1, 2, 0]),
    ],
)
def test_one_of_each_bit_class_stands_the_battery_too(field, bits, outcomes, asked):
    checks = {one.key: replace(RIGHT, bits=of) for one, of in zip(field, bits, strict=True)}
    found = []
    for entrant in to_confirm(field, timings(field), checks, invariant=True):
        found.append([one.key for one in field].index(entrant.key))
        checks[entrant.key] = replace(outcomes.get(found[-1], CONFIRMED), bits=checks[entrant.key].bits)
    assert found == asked


class Classifying(_Measuring):
    """A measuring process at the bit classes: whose launch fails is of no class, and has passed as before."""

    def __init__(self, digests, checks):
        self._checks, self._told, self._digests = checks, {}, digests
        self._steps = SimpleNamespace(begin=lambda _: None)
        self._connection = SimpleNamespace(send=lambda message: self._told.update([message[1]]))
        self._bench = SimpleNamespace(
            placements=lambda: iter((0, 1)), digests=lambda place, one: digests[one.key][place]
        )

    def _own(self, entrant, take):
        return take(entrant) or WRONG


def test_who_cannot_run_among_other_rows_is_of_no_class_and_goes_on(field):
    first, second, third, generic = (one.key for one in field)
    digests = {
        first: ({"": "a"}, {"": "a"}), second: ({"": "a"}, None), third: ({"": "a"}, {"": "b"}),
        generic: ({"": "a"}, {"": "a"}),
    }  # fmt: skip
    checks = dict.fromkeys(digests, RIGHT) | {generic: WRONG}
    process = Classifying(digests, checks)
    process._classify(field)
    assert {key: check.bits for key, check in process._told.items()} == {first: "a", second: "", third: ""}
    assert all(check.passed for check in process._told.values())
    process._told.clear()
    process._classify(field)
    assert not process._told, "what is known is not asked again"


@pytest.mark.parametrize(("outcomes", "winner"), [({}, 1), ({1: WRONG}, 2), ({1: WRONG, 2: WRONG}, 0)])
def test_who_fails_is_in_the_journal_with_the_figures_and_the_next_one_wins(sweep, field, outcomes, winner):
    _, checks = confirm(field, outcomes)
    for entrant in field:
        line = {"candidate": entrant.key, "check": checks[entrant.key].as_dict()}
        timing = timings(field).get(entrant.key)
        sweep.note("measured", line | ({"timing": timing.as_dict()} if timing else {}))
    sweep.note("gpu", {"gpu": "NVIDIA H200", "driver": "580", "torch": "2"})
    [(found, _)] = winners(sweep, {"key": "tileiras-1-cuda_tile-1", "tileiras": "1", "cuda_tile": "1"})
    assert found.record.config == dict(field[winner].candidate.config)
    assert found.record.check == CONFIRMED.as_dict()
    assert found.record.failed == len(outcomes)
    measured = sweep.measured()
    for place, check in outcomes.items():
        assert measured[field[place].key]["check"] == check.as_dict()
