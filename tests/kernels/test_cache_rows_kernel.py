"""cache_rows: any config writes the rows behind the count, raises the count, and leaves the rest of the cache."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from spec_samples import configs, resources_of

from tilekern import interpreter
from tilekern.compile.toolchain import compile_candidate, toolkit
from tilekern.kernels import spec_named
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import INTERPRETED, resolve

SPEC = spec_named("cache_rows")
LAYOUTS = {"heads_first": (0, 1, 2, 3), "tokens_first": (0, 2, 1, 3), "reversed": (3, 2, 1, 0)}


@examples(60)
@given(data=st.data())
def test_rows_are_written_behind_the_count_by_any_config_on_any_grid(data):
    batch, heads, tokens, size = (data.draw(st.integers(1, most)) for most in (3, 5, 4, 20))
    room = data.draw(st.integers(tokens, 12), label="room")
    before = data.draw(st.integers(-2, room + 1), label="count")
    problem = SPEC.problem(rows=batch * tokens, kv_heads=heads, head_dim=size, dtype="float32")
    config = data.draw(st.sampled_from(configs(SPEC, problem)), label="config")
    order = LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)), label="layout")]
    k, v = torch.randn(2, *(((batch, heads, tokens, size))[axis] for axis in order)).permute(
        0, *(1 + order.index(axis) for axis in range(4))
    )
    cache, count = torch.full((2, batch, heads, room, size), torch.nan), torch.tensor([before])
    wanted = cache.clone()
    rows = range(max(0, before), min(room, before + tokens))
    for row in rows:
        wanted[..., row, :] = torch.stack((k, v))[..., row - before, :]

    way = SPEC.implement(problem, config)
    blocks = way.grid(problem, INTERPRETED.sm_count)
    if config["schedule"] == "persistent":
        blocks = data.draw(st.integers(1, 9), label="blocks")
    constants = (value for _, value in way.constants)
    interpreter.launch(way.function, (blocks,), (k, v, count, tokens, *cache, *constants), dependent=way.dependent)
    assert torch.equal(cache.nan_to_num(7e4), wanted.nan_to_num(7e4))
    assert count.item() == before + tokens


FORMS = {"llama": (32, 128), "qwen3": (8, 128), "phi3": (32, 96), "gemma3": (4, 256), "tiny": (2, 16)}


@pytest.mark.slow
@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.share(16)
def test_the_forms_of_models_spill_nothing(arch, form):
    target, (heads, size) = resolve(arch), FORMS[form]
    problem = SPEC.problem(rows=8, kv_heads=heads, head_dim=size, dtype="bfloat16")
    for config, variant in ((SPEC.default(problem, target), ALIGNED), (SPEC.generic(problem), GENERIC)):
        made = compile_candidate(SPEC, problem, config, target, variant)
        assert resources_of(SPEC, problem, made, target).stack_bytes == 0
