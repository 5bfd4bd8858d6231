"""Calls that a library serves well run a kernel only where a measured record says that it is faster."""

import msgspec
import pytest
from marks import needs_compiler
from one_record import GPU, H200, PROBLEM, SIZES, SPEC

import tilekern
from tilekern import cache
from tilekern.runtime import dispatch

pytestmark = needs_compiler


def test_without_a_record_nothing_is_compiled_counted_or_said(root, recwarn):
    assert dispatch.tuned_plan_for(SPEC, GPU, *SIZES) is None
    assert dispatch.tuned_plan_for(SPEC, GPU, *SIZES) is None
    assert set(tilekern.stats()["swiglu_forward"].values()) == {0}
    assert not list(root.rglob("swiglu_forward/*"))
    assert not recwarn.list


@pytest.mark.parametrize("provenance", ["default", "predicted", "measured"])
def test_only_a_measurement_takes_the_library_s_place(filled, provenance):
    found = dispatch.find(SPEC, SPEC.bucketed(PROBLEM), H200)
    figures = {"measurement": {"median_us": 9.0}} if provenance == "measured" else {"prediction": {"time_us": 9.0}}
    record = msgspec.structs.replace(found.record, provenance=provenance, **figures)
    cache.Store(filled).write(record, {one.sha256: found.load(name) for name, one in record.artifacts.items()})
    dispatch.forget()
    plan = dispatch.tuned_plan_for(SPEC, GPU, *SIZES)
    assert (plan is not None) == (provenance == "measured")
    assert dispatch.tuned_plan_for(SPEC, GPU, *SIZES) is plan
    assert dispatch.plan_for(SPEC, GPU, *SIZES) is not None


def test_a_new_record_counts_once_plans_are_forgotten(root, compiled):
    assert dispatch.tuned_plan_for(SPEC, GPU, *SIZES) is None
    found = dispatch.find(SPEC, SPEC.bucketed(PROBLEM), H200, layers=[cache.FolderLayer(compiled, "compiled")])
    record = msgspec.structs.replace(found.record, provenance="measured", measurement={"median_us": 9.0})
    cache.Store(root).write(record, {one.sha256: found.load(name) for name, one in record.artifacts.items()})
    assert dispatch.tuned_plan_for(SPEC, GPU, *SIZES) is None
    dispatch.forget()
    assert dispatch.tuned_plan_for(SPEC, GPU, *SIZES) is not None
