"""A composite runs by its kernels' records where it has none itself, and says so where it runs other kernels.

The records are those that ship for an H200; some are hidden, of kernels by their names.
"""

import dataclasses
import warnings
from importlib import import_module

import pytest
import torch
from one_record import GPU, H200, numbers
from torch._subclasses.fake_tensor import FakeTensorMode

from tilekern import cache
from tilekern.errors import CacheMiss, TilekernWarning
from tilekern.kernels import spec_named
from tilekern.kernels.skinny.linear import sizes
from tilekern.patch.report import report
from tilekern.runtime import dispatch
from tilekern.runtime.plans import LibraryPlan
from tilekern.runtime.ranks.agreement import Agreement
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec import Config

pytestmark = pytest.mark.usefixtures("root", "no_compiler")
ATTENTION, CROSS_ENTROPY, FEW_ROWS = (
    import_module(f"tilekern.ops.{name}") for name in ("attention", "fused_linear_cross_entropy", "few_rows")
)
BACKWARD = spec_named("attention_backward")
PIECES = ("attention_dkdv_kept", "attention_dq_kept", "attention_sums")
# Qwen3-8B's heads.
TOKENS, HEADS, KV_HEADS = 4096, 32, 8
KEPT = Config(implementation="kept")
ASKED = (1, TOKENS, TOKENS, HEADS, KV_HEADS, 128, True, False, False, False, torch.bfloat16, True)


@pytest.fixture
def hide(monkeypatch):
    """Hide the records of the named kernels."""
    real = dispatch._hits

    def hidden(*names):
        def hits(spec, *rest, **options):
            return iter(()) if spec.name in names else real(spec, *rest, **options)

        monkeypatch.setattr(dispatch, "_hits", hits)

    return hidden


def found(deterministic=True, tokens=TOKENS):
    """What a call of attention with gradients finds."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, tokens, n, 128, dtype=torch.bfloat16, device="cuda") for n in (HEADS, *[KV_HEADS] * 2)
        )
    return ATTENTION._find(True, q, k, v, None, None, None, True, None, None, None, None, None, deterministic)


def said(about):
    """What is warned of while ``about`` runs, and its result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = about()
    return result, [str(one.message) for one in caught if issubclass(one.category, TilekernWarning)]


def test_shipped_records_serve_all_of_it():
    plans, warned = said(found)
    assert plans.backward.config == KEPT
    assert not warned
    assert dispatch.stats()[BACKWARD.name] == numbers(hits=1)
    assert not dispatch.substitutes()


@pytest.mark.parametrize("invariant", [False, True])
def test_a_neighbours_config_that_has_no_room_here_is_not_taken(invariant):
    """Of 65536 tokens not even one query head's dS has the room that pieces may take; 32768 is the nearest bucket."""
    before = dispatch.set_invariant(on=invariant)
    try:
        plans, _ = said(lambda: found(tokens=65536))
    finally:
        dispatch.set_invariant(on=before)
    assert plans.backward.config == Config(implementation="kernels")
    assert dispatch.stats()[BACKWARD.name] == numbers(hits=1, nearest=1, substitutes=1)
    said_in_place = "its default implementation=kernels in place of implementation=apart of another bucket"
    assert dispatch.substitutes() == {BACKWARD.name: said_in_place}


def test_a_composite_without_a_record_runs_its_default_by_its_kernels_records(hide, root):
    hide(BACKWARD.name)
    plans, (warned,) = said(found)
    assert plans.backward.config == BACKWARD.default(BACKWARD.problem(**plans_problem()), H200) == KEPT
    assert isinstance(plans.backward, LibraryPlan)
    assert dispatch.stats()[BACKWARD.name] == numbers(misses=1, substitutes=1)
    assert [dispatch.stats()[name]["hits"] for name in PIECES[:2]] == [1, 1]
    assert "its default, implementation=kept, runs if its kernels have records; tune it with: python -m" in warned
    assert report(torch.nn.Linear(1, 1)).substitutes == {
        BACKWARD.name: "its default implementation=kept without a record"
    }
    assert f"{BACKWARD.name} runs its default implementation=kept without a record" in str(
        report(torch.nn.Linear(1, 1))
    )
    assert [wanted["kernel"] for wanted in cache.read_wanted(root)] == [BACKWARD.name]


def plans_problem():
    return dict(zip((d.name for d in BACKWARD.dimensions), (*ASKED[:10], "bfloat16", True), strict=True))


def test_it_is_found_once(hide, monkeypatch):
    hide(BACKWARD.name)
    said(found)
    monkeypatch.setattr(dispatch, "_resolve", None)
    assert said(found)[1] == []
    assert dispatch.stats()[BACKWARD.name] == numbers(misses=1, substitutes=1)


def test_a_record_that_comes_later_ends_the_substitute(hide):
    hide(BACKWARD.name)
    said(found)
    hide()
    assert dispatch.look_again() == 1
    assert not dispatch.substitutes()
    assert dispatch.stats()[BACKWARD.name] == numbers(hits=1, misses=1, substitutes=1)


def test_the_own_op_runs_by_the_policy(hide):
    hide(BACKWARD.name)
    dispatch.set_miss_policy("fallback")
    plans, warned = said(found)
    assert plans is None
    assert any(f"no cache holds {BACKWARD.name} for this model" in text for text in warned)
    dispatch.set_miss_policy("error")
    dispatch.forget()
    with pytest.raises(CacheMiss, match=BACKWARD.name):
        found()


def test_ranks_that_agreed_run_the_same_default(hide):
    hide(BACKWARD.name)
    dispatch.agree_on(Agreement(Snapshot({}), H200, "compile"))
    try:
        plan = dispatch.plan_for(BACKWARD, GPU, *ASKED)
    finally:
        dispatch.agree_on(None)
    assert plan.config == KEPT


def test_ranks_that_agreed_run_one_default_in_place_of_a_neighbours_config():
    """Of GPUs that differ in number of processors only."""
    asked = BACKWARD.problem(**plans_problem() | {"queries": 65536, "keys": 65536})
    hit = next(dispatch._hits(BACKWARD, BACKWARD.bucketed(asked), H200))
    seen = []

    def default(_problem, target):
        seen.append(target)
        return Config(implementation="kernels")

    spec = dataclasses.replace(BACKWARD, default=default)
    smaller = dataclasses.replace(H200, sm_count=20)
    dispatch.agree_on(Agreement(Snapshot({}), H200, "compile"))
    try:
        dispatch._allowed(spec, asked, smaller, hit, Config(implementation="apart"))
    finally:
        dispatch.agree_on(None)
    assert seen == [H200]


def test_a_head_s_composite_runs_by_its_kernel_and_else_the_own_op(hide):
    spec = spec_named("fused_linear_cross_entropy")
    with FakeTensorMode():
        rows, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (4096, 151936))
    options = CROSS_ENTROPY.LossOptions()
    hide(spec.name)
    plan, (warned,) = said(lambda: CROSS_ENTROPY._plan(rows, weight, options, loss=False, gradient=True))
    assert plan.config == spec.default(spec.problem(rows=4096, hidden=4096, vocabulary=151936, dtype="bfloat16"), H200)
    assert "runs if its kernels have records" in warned
    assert dispatch.stats()[spec.name] == numbers(misses=1, substitutes=1)
    assert spec.name in dispatch.substitutes()
    dispatch.forget()
    hide(spec.name, "cross_entropy_fused")
    plan, warned = said(lambda: CROSS_ENTROPY._plan(rows, weight, options, loss=False, gradient=True))
    assert plan is None
    assert any("no cache holds cross_entropy_fused" in text and "the model's own op runs" in text for text in warned)
    assert dispatch.stats()[spec.name]["fallbacks"] == 1
    assert not dispatch.substitutes()


def test_kernels_of_whole_heads_in_place_of_pieces_are_counted_and_said_once(hide):
    hide(*PIECES)
    plans, (warned,) = said(found)
    assert plans.backward.config == KEPT
    assert f"{BACKWARD.name} runs implementation=kernels in place of implementation=kept, since " in warned
    assert f"{PIECES[0]}, {PIECES[1]} have no plan: no cache holds {PIECES[0]} " in warned
    assert "own op" not in warned
    assert warned.endswith("tune it with: python -m tilekern.tune MODEL --gpu H200")
    assert dispatch.stats()[BACKWARD.name] == numbers(hits=1, substitutes=1)
    assert [dispatch.stats()[name]["misses"] for name in PIECES[:2]] == [1, 1]
    assert dispatch.substitutes() == {
        BACKWARD.name: f"implementation=kernels in place of implementation=kept, since {PIECES[0]}, {PIECES[1]} "
        "have no plan"
    }
    assert dispatch.reasons() == {}
    assert said(found)[1] == []


def test_a_later_lookup_with_pieces_ends_it(hide):
    hide(*PIECES)
    said(found)
    hide()
    assert dispatch.look_again() == 2
    found()
    assert not dispatch.substitutes()


@pytest.mark.parametrize("names", [(), (BACKWARD.name,)], ids=["record", "default"])
def test_the_own_op_is_said_where_it_runs(hide, names):
    hide(*PIECES, "attention_dkdv", *names)
    plans, warned = said(found)
    assert plans is None
    warned = [text for text in warned if f"no cache holds {BACKWARD.name} " not in text]
    assert len(warned) == 3
    assert all("; the model's own op runs; tune it with: " in text for text in warned)
    assert not dispatch.substitutes()


def test_sums_in_parts_whose_kernels_have_no_plan_run_by_cublas_which_is_said_once(hide):
    hide("skinny_parts", "skinny_join")
    spec, config = spec_named("skinny_linear"), Config(implementation="split", splits=4)
    given = sizes(8, 4096, 1024, torch.bfloat16, {"biased"})
    call = spec.implement(spec.problem(**given | {"dtype": "bfloat16"}), config)
    plan = LibraryPlan(call.bound(dispatch.plan_for), config)
    served, (warned,) = said(lambda: FEW_ROWS.planned(lambda *_: plan, GPU, tuple(given.values())))
    assert served is plan
    instead = f"implementation=cublas in place of {config.key}, since skinny_parts, skinny_join have no plan"
    assert f"{spec.name} runs {instead}: no cache holds skinny_parts " in warned
    assert "own op" not in warned
    assert dispatch.substitutes() == {spec.name: instead}
    assert dispatch.stats()[spec.name] == numbers(substitutes=1)
    with FakeTensorMode():
        x, weight, bias = (
            torch.empty(*n, dtype=torch.bfloat16, device=GPU) for n in ((8, 4096), (1024, 4096), (1024,))
        )
        (y,), warned = said(lambda: plan.run(0, (x, weight, weight, bias, bias), tuple))
    assert (y.shape, warned) == ((8, 1024), [])
