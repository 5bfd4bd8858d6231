"""advance: positions count on in place, sequences that have ended stay, and a step of several launches adds up."""

import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, configs, launched, seen_as

from tilekern.kernels import spec_named

SPEC = spec_named("advance")


@examples(40)
@given(data=st.data())
def test_steps_in_place_count_on_by_any_config_on_any_grid(data):
    before = data.draw(st.lists(st.one_of(st.integers(-3, 3), st.integers(0, 2**31 - 9)), min_size=1, max_size=300))
    steps = data.draw(st.integers(1, 3), label="steps")
    problem = SPEC.problem(rows=len(before))
    config = data.draw(st.sampled_from(configs(SPEC, problem)), label="config")
    blocks = data.draw(st.sampled_from([None, 1, 7, 50]), label="blocks")
    positions = seen_as(torch.tensor(before), data.draw(st.sampled_from(VIEWS)))
    results = {name: torch.empty(len(before), dtype=torch.int32) for name in ("places", "lengths")}
    for _ in range(steps):
        launched(SPEC, problem, config, {"positions": positions}, blocks, results | {"new_positions": positions})
    after = [n + steps if n >= 0 else n for n in before]
    assert positions.tolist() == after
    assert results["places"].tolist() == [max(n, -1) for n in after]
    assert results["lengths"].tolist() == [n + 1 if n >= 0 else 0 for n in after]
