"""On a GPU: what is set in torch, what is kept beside graphs and pools, and what the launcher says of arguments."""

import pytest
import torch
from contract import CASES, Drawn, is_the_same_under_defaults
from gpu_processes import ended

from tilekern import ops
from tilekern.compile.toolchain import assumptions
from tilekern.interpreter import InterpreterError
from tilekern.interpreter.arguments import Parameters
from tilekern.kernels import rms_norm, spec_named
from tilekern.kernels.families.placeholders import placeholder
from tilekern.ops import registration
from tilekern.runtime.launcher import PrebuiltKernel, implies
from tilekern.spec import GENERIC, ArrayParameter


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_defaults_of_a_user_change_no_result(case, monkeypatch):
    """Among them calls without the arrays that a kernel may have, whose placeholders have no memory."""
    monkeypatch.setattr(registration, "_rows", {})
    given = {
        name: x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for name, x in case.given(Drawn()).items()
    }
    is_the_same_under_defaults(case, given)


def test_a_row_of_a_pool_is_not_kept(monkeypatch):
    monkeypatch.setattr(registration, "_rows", {})
    x, pool = torch.randn(4, 64, device="cuda"), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        registration.constant_row(x, 1.0)
    assert not registration._rows
    kept = registration.constant_row(x, 1.0)
    assert registration.constant_row(x, 1.0) is kept


def test_a_row_of_a_capture_is_not_kept(monkeypatch):
    monkeypatch.setattr(registration, "_rows", {})
    x, graph = torch.randn(4, 64, device="cuda"), torch.cuda.CUDAGraph()
    ops.rms_norm(x, torch.ones(64, device="cuda"))
    with torch.cuda.graph(graph):
        y = ops.rms_norm(x, None)
    assert not registration._rows
    graph.replay()
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


@pytest.mark.slow
def test_layers_are_captured_by_reduce_overhead():
    """With placeholders (attention, cross entropy) that cudagraph trees would count among the pool's tensors."""
    weight = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(64, (32,), device="cuda")

    @torch.compile(mode="reduce-overhead")
    def layer(x):
        x = x + ops.attention(*[ops.rms_norm(x, None).view(1, 32, 2, 64)] * 3).view(32, 128)
        return ops.fused_linear_cross_entropy(x, weight, target)

    for number in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.full((32, 128), 0.1 * number, device="cuda", dtype=torch.bfloat16).requires_grad_()
        layer(x).backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
@pytest.mark.parametrize("made", ["plain", "turned", "expanded", "float64", "bool", "placeholder", "rows"])
def test_the_interpreter_judges_arguments_as_the_launcher_does(made, dtype):
    from cuda.tile._cext import get_parameter_constraints_from_pyargs
    from cuda.tile.compilation import CallingConvention

    x = torch.zeros(4, 64, device="cuda", dtype=getattr(torch, dtype))
    given = {
        "plain": x, "turned": x.t(), "expanded": x[:1].expand(4, 64), "float64": x.double(), "bool": x.bool(),
        "placeholder": placeholder(2, x.dtype, x.device), "rows": registration.Rows(x, (4, 64)),
    }[made]  # fmt: skip

    class Alone:
        backend = "cutile"
        parameters, constants = (ArrayParameter("x", dtype, 2),), ()

    kernel = PrebuiltKernel(rms_norm.rms_norm_forward, [])
    others = torch.zeros(64, device="cuda"), x, 1.0
    seen = get_parameter_constraints_from_pyargs(kernel, (given, *others), CallingConvention.cutile_python_v1())
    allowed = implies(seen[:1], assumptions(Alone, GENERIC))
    if made in ("placeholder", "rows"):
        assert allowed
        return
    try:
        Parameters("kernel", Alone.parameters).check([given])
    except InterpreterError:
        assert not allowed
    else:
        assert allowed


def test_scalars_are_what_their_python_types_are():
    from cuda.tile._cext import get_parameter_constraints_from_pyargs
    from cuda.tile.compilation import CallingConvention

    spec = spec_named("rms_norm_forward")
    x, kernel = torch.zeros(4, 64, device="cuda"), PrebuiltKernel(rms_norm.rms_norm_forward, [])
    for value, dtype in ((1.0, "float32"), (1, "int32"), (True, "bool_")):
        *_, scalar = get_parameter_constraints_from_pyargs(
            kernel, (x, x[0], x, value), CallingConvention.cutile_python_v1()
        )
        assert scalar.dtype.name == dtype
    assert spec.arrays[-1].dtype == "float32"


def test_torch_finds_a_context_in_the_first_backward_of_a_process(tmp_path):
    """Nothing of torch's runs in autograd's thread before the product, and cuBLAS warns where there is no context."""
    script = tmp_path / "first.py"
    script.write_text(
        "import torch\nfrom tilekern import ops\n"
        "x, w = (torch.randn(512, 512, device='cuda', dtype=torch.bfloat16).requires_grad_() for _ in range(2))\n"
        "y = ops.rms_norm(x @ w, None)\n"
        "y.backward(torch.ones_like(y))\n"
    )
    done = ended(script, start=["-W", "error::UserWarning"])
    assert done.returncode == 0, done.stderr
