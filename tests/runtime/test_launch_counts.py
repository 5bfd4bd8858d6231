"""Launches count as long as the process lives, however their plan ends."""

import copy
import gc

import pytest

from tilekern.runtime.plans import Counters, Plan
from tilekern.spec import Config


class Owner:
    """What a plan is dropped with; in a cycle, by the search for garbage."""


@pytest.mark.parametrize("is_cycle", [False, True])
def test_launches_outlive_their_plan(is_cycle):
    counters, owner = Counters(), Owner()
    owner.plan = Plan(None, Config(), 1)
    owner.me = owner if is_cycle else None
    counters.add(owner.plan)
    owner.plan.launches = 3
    assert counters.launches == 3
    del owner
    gc.collect()
    assert counters.launches == 3
    assert not counters._plans


def test_a_copy_counts_nowhere():
    counters, plan = Counters(), Plan(None, Config(), 1)
    counters.add(plan)
    plan.launches = 3
    other = copy.copy(plan)
    other.launches += 5
    assert counters.launches == 3
    del other
    assert counters.launches == 3
