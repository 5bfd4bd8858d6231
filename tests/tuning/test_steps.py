"""The steps that are traced: lengths that belong together, and unknown values."""

import pytest

from tilekern.errors import InputError
from tilekern.tuning.options import PLAN_OPTIONS, PlanRequest
from tilekern.tuning.plan.steps import Steps


def given(**changes):
    return dict.fromkeys(PLAN_OPTIONS) | {"models": (), "plans": (), "problems": ()} | changes


@pytest.mark.parametrize(
    ("tokens", "sequences", "found"),
    [
        ([2048, 8192], [], [(1, 2048), (1, 8192)]),
        ([2048, 8192], [2048, 4096], [(1, 2048), (4, 2048), (2, 4096)]),
        ([2048, 2048], [], [(1, 2048)]),
    ],
)
def test_steps_are_made_of_whole_sequences(tokens, sequences, found):
    assert Steps(tokens, sequences).batches() == found


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokens": [2048, 8192], "sequence": [4096]}, "--tokens 2048: no step of --tokens 2048,8192 is made of whole"),
        ({"tokens": [4096], "sequence": [4096, 3000]}, "--sequence 3000: no step"),
        ({"tokens": [4096], "sequence": [0]}, "--sequence 0: a token count is from 1 to"),
        ({"tokens": [0]}, "--tokens 0: a token count is from 1 to"),
        ({"tokens": [1 << 40]}, "from 1 to"),
        ({"dtype": ["int8"]}, "unknown dtype 'int8'; known: bfloat16, float16, float32"),
        ({"tp": 0}, "--tp 0: the tensor-parallel degree is a whole number from 1 on"),
        ({"tp": "2"}, "--tp '2': the tensor-parallel degree is a whole number from 1 on"),
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'; known: adamw, none"),
    ],
)
def test_what_is_not_known_or_does_not_go_together_is_named(values, words):
    with pytest.raises(InputError, match=words):
        Steps(**values)


def test_a_request_takes_its_lists_apart():
    request = PlanRequest.of(given(models=("qwen3-8b",), tokens="64, 128", ops="rope,swiglu", packed=True, tp=2))
    assert request.steps == Steps([64, 128], ops=["rope", "swiglu"], packed=True, tp=2)
    assert PlanRequest.of(given(models=("qwen3-8b",))).steps == Steps()


@pytest.mark.parametrize(
    ("changes", "option"), [({"tokens": "64"}, "--tokens"), ({"packed": True}, "--packed"), ({"tp": 2}, "--tp")]
)
def test_a_plan_has_its_own_sizes(changes, option):
    with pytest.raises(InputError, match=f"^{option} describes the steps of a model, and a plan has its own sizes"):
        PlanRequest.of(given(plans=("wanted",), **changes))
