"""token_attention on a GPU: blocks that end in any order leave the same bits, right ones, and counters of 0."""

import pytest
import torch
from gpu_samples import compiled

from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import compare, expected_results

SPEC = spec_named("token_attention")
SIZES = {"page_size": 1, "normed": False, "turned": False, "paged": False, "dtype": "bfloat16"}
MODELS = {
    "gpt2": {"kv_heads": 12, "keys": 500, "group": 1, "head_dim": 64},
    "qwen3, 3 sequences": {
        "kv_heads": 24, "keys": 3001, "group": 4, "head_dim": 128, "normed": True, "turned": True,
    },
    "llama, pages": {
        "kv_heads": 16, "keys": 1000, "group": 4, "head_dim": 128, "turned": True, "paged": True, "page_size": 256,
    },
}  # fmt: skip
LAUNCHES = 200

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")]


@pytest.mark.parametrize("name", MODELS)
def test_many_launches_in_a_row_are_right_and_have_the_same_bits(name):
    problem = SPEC.problem(**SIZES | MODELS[name])
    inputs = SPEC.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    inputs |= SPEC.variations["positions of their own"](problem, None, "cuda")
    expected, by_splits = expected_results(SPEC, problem, inputs), {}
    for config in SPEC.space.candidates(SPEC.bucketed(problem), here()):
        by_splits.setdefault(config["splits"], config)
    assert len(by_splits) > 3
    # The fewest blocks that share keys, and the most: a config takes two seconds to compile.
    for config in (by_splits[2], by_splits[max(by_splits)]):
        launch = compiled(SPEC, problem, config, here())
        first = launch(inputs)
        check = compare(SPEC, problem, first, expected)
        assert check.passed, (config, check.reason)
        # In place, and with nothing between them, so that blocks of two launches meet where they may.
        caches = {"new_keys": inputs["keys"], "new_values": inputs["values"]}
        outs = torch.empty(LAUNCHES, *first["out"].shape, dtype=first["out"].dtype, device="cuda")
        for out in outs:
            launch(inputs, first | caches | {"out": out})
        assert torch.equal(outs, first["out"].expand_as(outs)), config
        assert not inputs["counters"].any(), config
