"""embedding: any config has the bits of torch's lookups and their sum; a number outside of its table gives zeros."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import VIEWS, configs, launched, resources_of, seen_as, sized

from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, DTYPES, GENERIC
from tilekern.spec.targets import resolve

SPEC = spec_named("embedding")
# Numbers outside of tables of fewer than 40 rows; the last ones look like a row to whoever reads 32 bits of them.
OUTSIDE = (-1, -100, 40, 2**31 - 1)
FAR = (*OUTSIDE, 2**32, -(2**32), 2**63 - 1)


@examples(80)
@given(data=st.data())
def test_any_config_on_any_grid_has_the_bits_of_torch_and_zeros_for_numbers_outside(data):
    rows, columns = data.draw(st.integers(1, 9), label="rows"), data.draw(st.integers(1, 600), label="columns")
    vocabulary, positions = (data.draw(st.integers(1, 39), label=name) for name in ("vocabulary", "positions"))
    dtype, positioned = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans(), label="positioned")
    problem = SPEC.problem(rows=rows, columns=columns, dtype=dtype, positioned=positioned)
    config = data.draw(st.sampled_from(configs(SPEC, problem)), label="config")
    blocks = data.draw(st.sampled_from([None, 1, 7, 50])) if config["schedule"] == "persistent" else None
    generator = torch.Generator().manual_seed(0)

    def numbers(name, least, outside, kind):
        each = st.one_of(st.integers(0, least - 1), st.sampled_from(outside))
        drawn = data.draw(st.lists(each, min_size=rows, max_size=rows), label=name)
        return seen_as(torch.tensor(drawn, dtype=kind), data.draw(st.sampled_from(VIEWS)))

    def table(size):
        drawn = torch.randn(size, columns, generator=generator).to(getattr(torch, dtype))
        # Row 0 is read in the place of a row that is not there.
        drawn[0, 0] = torch.nan
        return seen_as(drawn, data.draw(st.sampled_from(VIEWS)))

    inputs = {"ids": numbers("ids", vocabulary, FAR, torch.int64), "weight": table(vocabulary)}
    there = (inputs["ids"] >= 0) & (inputs["ids"] < vocabulary)
    expected = inputs["weight"][inputs["ids"].where(there, 0)]
    if positioned:
        place, added = numbers("positions", positions, OUTSIDE, torch.int32), table(positions)
        inputs |= {"positions": place, "position_weight": added}
        is_known = (place >= 0) & (place < positions)
        expected, there = expected + added[place.where(is_known, 0)], there & is_known
    else:
        # The interpreter refuses any access to them.
        inputs |= {"positions": torch.empty(0).int(), "position_weight": torch.empty(0, 0).to(inputs["weight"].dtype)}
    expected[~there] = 0
    found = launched(SPEC, problem, config, inputs, blocks)["out"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


FORMS = {"gpt2": (768, True), "llama": (4096, False), "gemma3": (2560, False), "tiny": (16, True)}


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.share(16)
def test_the_forms_of_models_spill_nothing(arch, form):
    target, (columns, positioned) = resolve(arch), FORMS[form]
    problem = sized(SPEC, "bfloat16", rows=8, columns=columns).but(positioned=positioned)
    for config, variant in ((SPEC.default(problem, target), ALIGNED), (SPEC.generic(problem), GENERIC)):
        made = compile_candidate(SPEC, SPEC.bucketed(problem), config, target, variant)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
