"""The battery on the CPU: every spec's kernels stand it, and kernels that are wrong in one way each do not."""

from __future__ import annotations

import functools
import math

import cuda.tile as ct
import pytest
import torch
from spec_samples import NAMES, SPECS, draws_of, launch_arguments, sized

from tilekern import interpreter
from tilekern.errors import CannotRun
from tilekern.kernels import spec_named
from tilekern.kernels.tiles import ConstInt
from tilekern.runtime import dispatch
from tilekern.runtime.dispatch import plan_for
from tilekern.spec import DTYPES, Config, KernelSpec, LibraryCall, Problem
from tilekern.spec.targets import INTERPRETED
from tilekern.tuning.verify.battery import Battery
from tilekern.tuning.verify.cases import Kept, Room, ValueCases
from tilekern.tuning.verify.check import judge

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Composite specs look their kernels up; here these run on the CPU."""
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    dispatch.forget()
    yield
    dispatch.forget()


def interpret(spec: KernelSpec, config: Config, problem: Problem, inputs: dict, outputs: dict):
    """Run a config of a spec on the CPU."""
    implementation = spec.implement(problem, config)
    if isinstance(implementation, LibraryCall):
        return implementation.bound(plan_for)(*(inputs[name] for name in implementation.inputs))
    grid = (implementation.grid(problem, INTERPRETED.sm_count),)
    return interpreter.launch(implementation.function, grid, launch_arguments(implementation, inputs, outputs))


def battery_of(spec: KernelSpec, problem: Problem, room: Room | None = None) -> Battery:
    return Battery(spec, problem, INTERPRETED.sm_count, "cpu", room)


def stands(spec: KernelSpec, problem: Problem, *, generic: bool = False):
    config = spec.generic(problem) if generic else spec.default(problem, INTERPRETED)
    check = battery_of(spec, problem).confirm(config, functools.partial(interpret, spec, config))
    assert check.passed, (problem, config, check.reason)


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
@pytest.mark.share(20)
def test_every_spec_passes_the_battery(spec):
    """With no flag and with all of them, the default and the generic config, in two dtypes: which with which is drawn.

    A flag alone takes another path through a kernel than all of them do; one of them is drawn.
    """
    random = draws_of(spec)
    one, other = random.sample(DTYPES, 2)
    generic = random.random() < 0.5
    stands(spec, sized(spec, one), generic=generic)
    stands(spec, sized(spec, other, flags=True), generic=not generic)
    if len(flags := [d.name for d in spec.dimensions if d.kind == "flag"]) > 1:
        stands(spec, sized(spec, random.choice(DTYPES)).but(**{random.choice(flags): True}))


def test_the_default_config_of_every_spec_passes_the_screening():
    """One that did not could not be tuned at all."""
    sizes = {"heads": 4, "kv_heads": 2, "pairs": 8, "queries": 16, "keys": 16, "page_size": 4}
    values = {"bucketed": 8, "exact": 16, "flag": False, "dtype": "float32"}
    for spec in SPECS:
        problem = spec.problem(**{d.name: sizes.get(d.name, values[d.kind]) for d in spec.dimensions})
        config = spec.default(problem, INTERPRETED)
        check = battery_of(spec, problem).screen(config, functools.partial(interpret, spec, config))
        assert check.passed, (spec.name, check.reason)


@pytest.mark.parametrize("splits", [1, 4])
def test_what_a_config_leaves_to_its_follower_may_be_unwritten(splits):
    """The result, if parts are added up, and the parts, if there is one; a part that counts shows in the sum."""
    spec = spec_named("decode_attention")
    problem = sized(spec, "bfloat16", kv_heads=2, keys=256)
    config = spec.default(problem, INTERPRETED).but(splits=splits)
    assert battery_of(spec, problem).screen(config, functools.partial(interpret, spec, config)).passed

    def forgets(problem, inputs, outputs):
        kept = {name: found[:1].clone() for name, found in outputs.items()}
        interpret(spec, config, problem, inputs, outputs)
        for name, found in outputs.items():
            found[:1] = kept[name]

    check = battery_of(spec, problem).screen(config, forgets)
    assert not check.passed
    assert ("elements of out were not written" if splits == 1 else "out") in check.reason


COLUMN_SUM = spec_named("column_sum")
SWIGLU = spec_named("swiglu_forward")
NORM = spec_named("rms_norm_forward")
LOSS = spec_named("cross_entropy_forward")
PROBLEMS = {
    COLUMN_SUM: COLUMN_SUM.problem(rows=256, columns=83, dtype="float32"),
    SWIGLU: SWIGLU.problem(rows=256, columns=83, dtype="bfloat16"),
    NORM: NORM.problem(rows=64, columns=83, dtype="float16", weight_dtype="float16"),
    LOSS: sized(LOSS, "float32"),
}


def right(spec, inputs, outputs):
    """The reference's own results, rounded."""
    flags = {name: value for name, value in PROBLEMS[spec].items() if name in ("weighted", "smoothed", "capped")}
    for name, value in spec.reference(**inputs, **flags).items():
        outputs[name].copy_(value)


def beyond(array, elements=1):
    """Memory from the end of an array on."""
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    return array.as_strided((elements,), (1,), array.storage_offset() + last + 1)


@ct.kernel
def whole_tiles_only(x, y, tile_m: ConstInt, tile_n: ConstInt):
    """A column sum that forgets the rows behind the last whole tile."""
    total = ct.zeros((tile_m, tile_n), ct.float32)
    for r in range(x.shape[0] // tile_m):
        total = total + ct.load(x, (r, ct.bid(0)), (tile_m, tile_n), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (ct.bid(0),), ct.sum(total, axis=0))


def forgets_the_tail(problem, inputs, outputs):
    interpreter.launch(whole_tiles_only, (3,), (inputs["x"], outputs["y"], 4, 32))


def leaves_the_last_element(problem, inputs, outputs):
    before = outputs["y"][-1].clone()
    right(COLUMN_SUM, inputs, outputs)
    outputs["y"][-1] = before


def writes_behind_the_output(problem, inputs, outputs):
    right(COLUMN_SUM, inputs, outputs)
    beyond(outputs["y"]).zero_()


def writes_behind_rows(problem, inputs, outputs):
    """The last row apart; without gaps the next row hides it."""
    for gate, up, y in zip(inputs["gate"], inputs["up"], outputs["y"], strict=True):
        right(SWIGLU, {"gate": gate, "up": up}, {"y": y})
        if y.storage_offset() != outputs["y"][-1].storage_offset():
            beyond(y).zero_()


def writes_to_its_input(problem, inputs, outputs):
    right(SWIGLU, inputs, outputs)
    inputs["gate"].mul_(inputs["up"])


def adds_to_what_was_there(problem, inputs, outputs):
    outputs["y"].add_(inputs["x"].sum(0))


def reads_behind_its_input(problem, inputs, outputs):
    rows, columns = inputs["x"].shape
    longer = inputs["x"].as_strided((rows + 1, columns), inputs["x"].stride(), inputs["x"].storage_offset())
    right(COLUMN_SUM, {"x": longer}, outputs)


def drops_nan(problem, inputs, outputs):
    right(SWIGLU, {name: value.nan_to_num(nan=0.0) for name, value in inputs.items()}, outputs)


def clamps_infinity(problem, inputs, outputs):
    right(SWIGLU, {name: value.clamp(-3e38, 3e38) for name, value in inputs.items()}, outputs)


def spreads_nan_to_the_next_row(problem, inputs, outputs):
    right(SWIGLU, inputs, outputs)
    outputs["y"] += 0 * outputs["y"].roll(1, 0).nan_to_num(posinf=0, neginf=0) * outputs["y"].roll(1, 0).isfinite()
    outputs["y"][1:][outputs["y"][:-1].isnan()] = torch.nan


def is_wrong_from(rows):
    def run(problem, inputs, outputs):
        right(SWIGLU, inputs, outputs)
        if problem["rows"] == rows:
            outputs["y"][-1] = 0

    return run


class Wavers:
    """Gives another last bit at every run of some sizes."""

    def __init__(self, rows):
        self.rows, self.runs = rows, 0

    def __call__(self, problem, inputs, outputs):
        right(COLUMN_SUM, inputs, outputs)
        self.runs += problem["rows"] == self.rows
        outputs["y"][0] *= 1 + self.runs * torch.finfo(torch.float32).eps


@ct.kernel
def squares_in_float16(x, weight, y, eps, tile_n: ConstInt):
    """An RMSNorm whose squares have 5 bits for their exponent."""
    tile = ct.load(x, (ct.bid(0), 0), (1, tile_n), padding_mode=ct.PaddingMode.ZERO)
    scale = ct.load(weight, (0,), (tile_n,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    squares = (tile * tile).astype(ct.float32)
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    normal = (tile.astype(ct.float32) * rstd).astype(ct.float16).astype(ct.float32)
    ct.store(y, (ct.bid(0), 0), (normal * scale).astype(y.dtype))


def overflows(problem, inputs, outputs):
    arguments = (inputs["x"], inputs["weight"], outputs["y"], inputs["eps"], 128)
    interpreter.launch(squares_in_float16, (problem["rows"],), arguments)


def norm(x, weight, eps, most=torch.inf):
    x = x.double()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).clamp(-most, most) * weight.double()


def forgets_eps(problem, inputs, outputs):
    outputs["y"].copy_(norm(inputs["x"], inputs["weight"], 0.0))


def saturates(problem, inputs, outputs):
    """As an implementation in few bits does; random rows have no element of eight times their mean square."""
    outputs["y"].copy_(norm(inputs["x"], inputs["weight"], inputs["eps"], most=8.0))


def takes_no_maximum(problem, inputs, outputs):
    """A loss of exponentials that were not shifted."""
    x, valid = inputs["logits"], inputs["target"] != -100
    lse = x.exp().sum(1).log() * valid
    target = x.gather(1, inputs["target"].long().where(valid, 0)[:, None])[:, 0]
    outputs["lse"].copy_(lse)
    outputs["loss"].copy_((lse - target) * valid + inputs["z_loss"] * lse.square())


SCREENED = [
    (forgets_the_tail, COLUMN_SUM, "y: relative error"),
    (leaves_the_last_element, COLUMN_SUM, "1 elements of y were not written"),
    (writes_behind_the_output, COLUMN_SUM, "memory around y was written to"),
    (writes_behind_rows, SWIGLU, "memory around y was written to"),
    (writes_to_its_input, SWIGLU, "the input gate or memory around it was written to"),
    (adds_to_what_was_there, COLUMN_SUM, "83 elements of y were not written"),
    (reads_behind_its_input, COLUMN_SUM, "y: 83 elements are not finite where the reference is"),
    (Wavers(rows=251), COLUMN_SUM, "two runs on the same inputs differ in 1 elements of y"),
]
CONFIRMED = [
    (is_wrong_from(256), SWIGLU, "bucket: y: relative error"),
    (is_wrong_from(129), SWIGLU, "smallest of the bucket: y: relative error"),
    (overflows, NORM, "large magnitudes: y: relative error"),
    (takes_no_maximum, LOSS, "large magnitudes: loss: 13 elements are not finite where the reference is"),
    (forgets_eps, NORM, "zeros: y: 2573 elements are not finite where the reference is"),
    (saturates, NORM, "one-hot rows: y: relative error"),
    (drops_nan, SWIGLU, "nan in gate: y: 1 elements are finite where the reference is not"),
    (spreads_nan_to_the_next_row, SWIGLU, "nan in gate: y: 1 elements are not finite where the reference is"),
    (clamps_infinity, SWIGLU, "infinity in gate: y: 1 elements are finite where the reference is not"),
    (Wavers(rows=256), COLUMN_SUM, "repeat: two runs on the same inputs differ in 1 elements of y"),
]


def wrong_ones(found):
    return pytest.mark.parametrize(("run", "spec", "reason"), found, ids=[case[2] for case in found])


@wrong_ones(SCREENED)
def test_wrong_kernels_that_the_screening_finds(run, spec, reason):
    problem = PROBLEMS[spec]
    check = battery_of(spec, problem).screen(spec.generic(problem), run)
    assert not check.passed
    assert check.reason.startswith(reason)


def test_a_composite_without_a_kernel_of_its_parts_says_so():
    spec = spec_named("fused_linear_cross_entropy")
    problem = spec.problem(rows=64, hidden=32, vocabulary=50, dtype="float32")
    with pytest.raises(CannotRun, match=r"a kernel that fused_linear_cross_entropy launches at rows=.*tune that first"):
        battery_of(spec, problem).screen(spec.generic(problem), lambda *_: None)


@wrong_ones(CONFIRMED)
def test_wrong_kernels_that_only_one_case_of_the_battery_finds(run, spec, reason):
    problem = PROBLEMS[spec]
    battery = battery_of(spec, problem)
    assert battery.screen(spec.generic(problem), run).passed
    check = battery.confirm(spec.generic(problem), run)
    assert not check.passed
    assert check.reason.startswith(reason)
    assert [case["passed"] for case in check.cases] == [True] * (len(check.cases) - 1) + [False]
    assert reason.startswith(check.cases[-1]["case"])


def test_a_candidate_that_changes_inputs_leaves_the_next_one_right_ones():
    problem = PROBLEMS[SWIGLU]
    battery, config = battery_of(SWIGLU, problem), SWIGLU.generic(problem)
    for _ in range(2):
        assert not battery.screen(config, writes_to_its_input).passed
        assert battery.confirm(config, functools.partial(interpret, SWIGLU, config)).passed


def test_a_problem_that_need_not_repeat_is_not_held_to_it():
    spec = spec_named("attention_backward")
    problem = sized(spec).but(deterministic=False)
    runs = []

    def run(problem, inputs, outputs):
        found = spec.reference(**inputs, causal=False, windowed=False, capped=False, packed=False)
        runs.append(problem)
        return tuple((found[name] * (1 + 1e-7 * len(runs))).float() for name in ("dq", "dk", "dv"))

    kept = battery_of(spec, problem.but(deterministic=True)).screen(spec.generic(problem), run)
    assert "two runs on the same inputs differ" in kept.reason
    assert battery_of(spec, problem).screen(spec.generic(problem), run).passed


def test_references_are_computed_once_for_all_candidates_or_anew_by_a_frugal_battery(monkeypatch):
    """But for the random case, which screens all candidates."""
    problem, config = PROBLEMS[SWIGLU], SWIGLU.generic(PROBLEMS[SWIGLU])
    run, computed = functools.partial(interpret, SWIGLU, config), []
    for name in ("cases", "adversarial"):
        monkeypatch.setattr(
            f"tilekern.tuning.verify.{name}.expected_results",
            lambda *given: computed.append(given) or SWIGLU.reference(**given[2]),
        )
    keeps, frugal = (battery_of(SWIGLU, problem, Room.of("cpu", keeps=keeps)) for keeps in (True, False))
    first = keeps.confirm(config, run)
    count = len(computed)
    assert count > 10
    assert keeps.confirm(config, run) == first
    assert len(computed) == count
    assert frugal.confirm(config, run) == first
    computed.clear()
    assert frugal.confirm(config, run) == first
    assert 5 < len(computed) < count


def test_problems_of_a_family_share_their_cases_until_there_is_no_room():
    small, large = (
        NORM.problem(rows=rows, columns=83, dtype="float16", weight_dtype="float16") for rows in (1024, 4096)
    )
    other = SWIGLU.problem(rows=1024, columns=83, dtype="bfloat16")
    kept, room = Kept(), Room(1 << 26, 1 << 40)
    first = kept.values(NORM, small, "cpu", room)
    assert kept.values(NORM, large, "cpu", room) is first
    # What the first one holds is more than a quarter of another room.
    tight = Room(first.bytes, 1 << 40)
    crowded = kept.values(SWIGLU, other, "cpu", tight)
    assert kept.values(SWIGLU, other, "cpu", tight) is crowded
    assert kept.values(NORM, small, "cpu", room) is not first


def test_after_a_failure_the_next_candidate_passes_every_case(monkeypatch):
    """Whether a case was wrong for it or could not even be made: the next candidate is not let off."""
    problem, config = PROBLEMS[SWIGLU], SWIGLU.generic(PROBLEMS[SWIGLU])
    battery, run = battery_of(SWIGLU, problem), functools.partial(interpret, SWIGLU, config)
    with monkeypatch.context() as patch:
        patch.setattr(ValueCases, "_tails", lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            battery.confirm(config, run)
    assert not battery.confirm(config, drops_nan).passed
    check = battery.confirm(config, run)
    assert check.passed
    assert [case["case"] for case in check.cases] == [
        case["case"] for case in battery_of(SWIGLU, problem).confirm(config, run).cases
    ]


@pytest.mark.nightly
def test_cases_about_values_are_run_once_for_the_same_code_in_problems_that_share_them():
    """Those at the edges of the bucket, and the two at full size, are run for each."""
    kept, ran = Kept(), []

    def run(problem, inputs, outputs):
        ran.append(problem["rows"])
        interpret(SWIGLU, SWIGLU.generic(problem), problem, inputs, outputs)

    checks = {}
    for rows, code in ((1024, "one"), (2048, "one"), (2048, "other"), (2048, None)):
        problem = SWIGLU.problem(rows=rows, columns=83, dtype="bfloat16")
        battery = Battery(SWIGLU, problem, 4, "cpu", kept=kept)
        ran.clear()
        checks[rows, code] = battery.confirm(SWIGLU.generic(problem), run, code=code)
        values = [size for size in ran if size not in (rows, rows // 2 + 1)]
        assert bool(values) == ((rows, code) != (2048, "one"))
        assert ran[-4:] == [rows, rows // 2 + 1, rows, rows]
    assert checks[2048, "one"] == checks[2048, "other"] == checks[2048, None]


def test_a_failure_is_known_for_the_same_code_too():
    kept, problem = Kept(), PROBLEMS[SWIGLU]
    first, second = (Battery(SWIGLU, problem, 4, "cpu", kept=kept) for _ in range(2))
    failed = first.confirm(SWIGLU.generic(problem), drops_nan, code="one")
    assert not failed.passed
    assert second.confirm(SWIGLU.generic(problem), lambda *_: pytest.fail("it ran"), code="one") == failed


def test_other_launches_come_between_the_two_runs_that_must_agree():
    problem, config = PROBLEMS[COLUMN_SUM], COLUMN_SUM.generic(PROBLEMS[COLUMN_SUM])
    order = []

    def run(problem, inputs, outputs):
        order.append("run")
        interpret(COLUMN_SUM, config, problem, inputs, outputs)

    check = battery_of(COLUMN_SUM, problem).confirm(config, run, lambda: order.append("others"))
    assert check.passed
    assert order[-3:] == ["run", "others", "run"]
    assert check.cases[-1] == {"case": "repeat", "sizes": "rows=256", "passed": True}


def test_a_check_names_every_case_with_its_sizes_and_figures():
    problem, config = PROBLEMS[SWIGLU], SWIGLU.generic(PROBLEMS[SWIGLU])
    check = battery_of(SWIGLU, problem).confirm(config, functools.partial(interpret, SWIGLU, config))
    assert [(case["case"], case["sizes"]) for case in check.cases] == [
        ("random", "rows=251"), ("tails", "rows=255"), ("large magnitudes", "rows=251"), ("zeros", "rows=251"),
        ("one-hot rows", "rows=251"), ("nan in gate", "rows=251"), ("infinity in gate", "rows=251"),
        ("nan in up", "rows=251"), ("infinity in up", "rows=251"), ("bucket", "rows=256"),
        ("smallest of the bucket", "rows=129"), ("repeat", "rows=256"),
    ]  # fmt: skip
    assert check.relative_error == max(case["relative_error"] for case in check.cases[:-1])
    assert 1e-4 < check.relative_error < 4e-3


def test_what_infinity_changes_and_leaves_finite_must_be_what_a_large_number_makes_it():
    """A score of minus infinity takes no share from the others; a reference says NaN where its query sees no key."""
    spec = spec_named("attention_dkdv_apart")
    sizes = {"batch": 1, "queries": 71, "keys": 71, "heads": 1, "kv_heads": 1, "head_dim": 8}
    problem = sized(spec, "bfloat16", **sizes).but(causal=True, windowed=True, capped=False, packed=False)
    values = ValueCases(spec, problem, "cpu", Room.of("cpu"))
    values._small = problem
    case = next(case for case in values.all() if case.name == "infinity in k, lse, delta")
    outputs = {name: torch.full_like(x, math.nan, dtype=torch.float32) for name, x in case.expected.items()}
    interpret(spec, spec.generic(problem).but(tile_m=16, tile_n=16), problem, case.inputs, outputs)
    finite = outputs["dk"].isfinite() & ~case.expected["dk"].isfinite()
    battery = battery_of(spec, problem)
    assert bool(finite.any())
    assert not judge(outputs, case.expected, spec.tolerance(problem), case.leeway).passed
    assert battery._check(case, outputs, "").passed
    changed = case.limits()["dk"].plain != values._unpoisoned[1]["dk"]
    place = tuple((finite & changed).nonzero()[0])
    outputs["dk"][place] = values._unpoisoned[1]["dk"][place] + 1.0
    assert not battery._check(case, outputs, "").passed


def rounds_once(problem, inputs, outputs):
    """Attention of a query, whose exponentials' arguments are a product less the largest one, rounded together."""
    factor = float(torch.tensor(inputs["scale"] * math.log2(math.e)))
    q, keys, values = (inputs[name].float() for name in ("q", "keys", "values"))
    seen = torch.arange(keys.shape[2]) < inputs["lengths"][:, None, None, None]
    scores = (q @ keys.mT).masked_fill(~seen, -math.inf)
    most = scores.amax(-1, keepdim=True) * factor
    weights = torch.exp2((scores.double() * factor - most).float())
    outputs["out"].copy_(weights @ values.where(seen.mT, 0) / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize("sizes", [{"kv_heads": 8, "keys": 1024}, {"kv_heads": 1, "keys": 16}], ids=str)
def test_a_kernel_may_round_the_argument_of_an_exponential_once(sizes):
    """As GPUs do: with large scores the weight of the largest is no longer 1, and overflows in the end."""
    spec = spec_named("decode_attention")
    problem = sized(spec, "bfloat16", **sizes)
    check = battery_of(spec, problem).confirm(spec.generic(problem), rounds_once)
    assert check.passed, check.reason


def cases_of(spec, problem, room):
    battery = battery_of(spec, problem, room)
    return {case.name: case for case in (*battery.values.all(), *battery.edges)}


def test_what_costs_too_much_at_full_size_is_checked_at_a_smaller_one_and_says_so():
    """As for attention, whose reference writes scores for each pair of queries and keys."""
    spec = spec_named("attention_forward")
    problem = sized(spec, "float32", tokens=512).but(batch=1, heads=1, kv_heads=1)
    cases = cases_of(spec, problem, Room(1 << 22, 1 << 40))
    bucket, least = cases["bucket"], cases["smallest of the bucket"]
    assert 32 <= bucket.problem["queries"] == bucket.problem["keys"] < 512
    assert least.problem["queries"] == bucket.problem["queries"] // 2 + 1
    assert bucket.note == least.note == "the reference costs too much at full size"
    assert cases["zeros"].problem["queries"] < 255
    assert battery_of(spec, problem, Room(1, 1)).edges[0].problem["queries"] == 1
    flops = spec.flops(problem) // 5
    cheaper = cases_of(spec, problem, Room(1 << 40, flops))
    assert cheaper["bucket"].problem["queries"] == 128


def test_what_costs_much_however_few_rows_there_are_is_checked_with_many():
    """A vocabulary's weights' gradient is as large for one row."""
    spec = spec_named("fused_linear_cross_entropy")
    problem = spec.problem(rows=512, hidden=64, vocabulary=4096, dtype="bfloat16")
    values = battery_of(spec, problem, Room(1 << 24, 1 << 40)).values.all()
    assert next(case for case in values if case.name == "zeros").problem["rows"] >= 61


def test_large_draws_are_no_larger_than_float32_and_the_dtype_carry():
    found = {}
    for dtype in ("bfloat16", "float16"):
        for name in ("rms_norm_forward", "swiglu_forward", "attention_forward"):
            problem = sized(spec_named(name), dtype, tokens=251)
            cases = battery_of(spec_named(name), problem, Room(1 << 40, 1 << 40)).values.all()
            large = next(case for case in cases if case.name == "large magnitudes")
            found[name, dtype] = max(float(x.abs().max()) for x in large.inputs.values() if isinstance(x, torch.Tensor))
            assert all(bool(x.isfinite().all()) for x in large.expected.values())
    assert found["rms_norm_forward", "bfloat16"] > 2**30
    assert 2**10 < found["rms_norm_forward", "float16"] < 65504
    assert 2**4 < found["swiglu_forward", "float16"] < 2**8
    assert 8 < found["attention_forward", "bfloat16"] < 2**12
