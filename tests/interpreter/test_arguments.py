"""The interpreter takes the arguments that some variant of a cubin takes, and no others."""

import cuda.tile as ct
import pytest
import torch

from tilekern.compile.toolchain import assumptions
from tilekern.interpreter import InterpreterError
from tilekern.interpreter.arguments import Parameters
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.runtime.launcher import implies
from tilekern.spec import GENERIC, ArrayParameter, ScalarParameter

SPEC = spec_named("rms_norm_forward")
SIZES = (4, 64, torch.bfloat16, torch.float32)
X = torch.randn(4, 64, dtype=torch.bfloat16)


def given(**changes):
    known = {"x": X, "weight": torch.ones(64, dtype=torch.float32), "y": torch.empty_like(X, dtype=torch.float32)}
    return tuple((known | {"eps": 1e-6} | changes).values())


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")
    return dispatch.plan_for(SPEC, torch.device("cpu"), *SIZES)


@pytest.mark.parametrize("x", [X, X[:, ::2].repeat(1, 2), torch.randn(64, 4).bfloat16().t(), X.new_empty(8, 64)[::2]])
def test_any_strides_are_taken(plan, x):
    plan.launch(0, *given(x=x))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": X.half()}, r"x is torch.float16 of rank 2, and must be torch.bfloat16 of rank 2"),
        ({"weight": torch.ones(64, dtype=torch.bfloat16)}, r"weight is torch.bfloat16 of rank 1, and must be .*32"),
        ({"weight": torch.ones(1, 64)}, r"weight is torch.float32 of rank 2, and must be torch.float32 of rank 1"),
        ({"weight": 1.0}, "weight is of float, and must be a tensor"),
        ({"x": X[:1].expand(4, 64)}, r"x has elements that share memory, shape \(4, 64\), strides \(0, 1\)"),
        ({"eps": 1}, r"eps is int32 \(1\), and must be float32"),
        ({"eps": torch.tensor(1e-6)}, "eps is Tensor .*, and must be float32"),
        ({"more": 1.0}, "takes 4 arguments, got 5"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused_by_name(plan, changes, words):
    launches = plan.launches
    with pytest.raises(InterpreterError, match=f"^rms_norm_forward.* {words}"):
        plan.launch(0, *given(**changes))
    assert plan.launches == launches


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "int64"])
@pytest.mark.parametrize("other", ["bfloat16", "float16", "float32", "float64", "int32", "int64", "bool"])
def test_dtypes_are_checked_as_by_the_launcher(dtype, other):
    from cuda.tile.compilation import ArrayConstraint

    seen = ArrayConstraint(
        ct.bool_ if other == "bool" else getattr(ct, other), 1, index_dtype=ct.int32, stride_lower_bound_incl=0,
        alias_groups=(), may_alias_internally=False, stride_constant=[1], stride_divisible_by=1, shape_divisible_by=1,
        base_addr_divisible_by=1,
    )  # fmt: skip

    class Alone:
        backend = "cutile"
        parameters, constants = (ArrayParameter("x", dtype, 1),), ()

    allowed = implies([seen], assumptions(Alone, GENERIC))
    try:
        Parameters("kernel", Alone.parameters).check([torch.zeros(2, dtype=getattr(torch, other))])
    except InterpreterError:
        assert not allowed
    else:
        assert allowed


@pytest.mark.parametrize(("value", "dtype"), [(1.0, "float32"), (1, "int32"), (True, "bool_")])
def test_a_number_is_of_its_own_type(value, dtype):
    for taken in ("float32", "int32"):
        parameters = Parameters("kernel", [ScalarParameter("s", taken)])
        if taken == dtype:
            parameters.check([value])
        else:
            with pytest.raises(InterpreterError, match=f"s is {dtype}"):
                parameters.check([value])
