import dataclasses

import pytest

import tilekern
from tilekern.kernels import all_specs, by_name, spec_named
from tilekern.runtime import dispatch


def test_a_name_that_occurs_twice_is_refused_with_both_places():
    first = spec_named("swiglu_forward")
    second = dataclasses.replace(first, module="tilekern.kernels.other")
    with pytest.raises(ValueError, match=r"is also in tilekern.kernels.swiglu; rename"):
        by_name([first, second])


def test_every_spec_is_found_by_its_name():
    assert all(spec_named(name) is spec and spec.name == name for name, spec in all_specs().items())


def test_stats_have_every_kernel_from_the_start(monkeypatch):
    monkeypatch.setattr(dispatch._state, "counters", {})
    assert list(tilekern.stats()) == sorted(all_specs())
    assert {count for counts in tilekern.stats().values() for count in counts.values()} == {0}
    dispatch.counters("swiglu_forward").misses += 1
    assert tilekern.stats()["swiglu_forward"]["misses"] == 1
