"""What a declaration makes: the text of the shipped ops, and ops of other forms than theirs."""

import dataclasses
import inspect
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import cuda.tile as ct
import pytest
import torch
from op_samples import SHIPPED, SIZES, WITH_ARRAYS, assert_near, laid_out
from torch.autograd import forward_ad

from tilekern import ops
from tilekern.kernels import rms_norm as rms_norm_kernels
from tilekern.ops import writing
from tilekern.ops.operation import DECLARED, GENERATED, generated_file, operation
from tilekern.ops.registration import Rows
from tilekern.runtime import dispatch
from tilekern.runtime.plans import Plan
from tilekern.spec import DTYPES, Array, Config, Dimension, Implementation, ScalarParameter, outputs_of, parameters_of

ROOT = Path(__file__).parents[2]
ConstBool, ConstInt = ct.Constant[bool], ct.Constant[int]
every_op = pytest.mark.parametrize("op", SHIPPED.values(), ids=SHIPPED)


@every_op
def test_the_code_is_what_the_declaration_makes(op):
    path = generated_file(op)
    assert path.exists(), f"{path.name} is missing; `python -m tilekern.ops.writing` writes it"
    assert writing.module_of(op) == path.read_text(), "`python -m tilekern.ops.writing` writes it anew"


def test_every_file_is_of_an_op():
    assert {path.stem for path in GENERATED.glob("*.py")} == set(SHIPPED)


def test_a_function_says_where_it_stands():
    """For break points, tracebacks and whoever looks it up."""
    path = generated_file(DECLARED["rms_norm"])
    function = ops.rms_norm.functions["plans_of"]
    assert inspect.getsourcefile(function) == str(path)
    assert inspect.getsource(function) in path.read_text()


def test_nothing_is_written_where_ops_are_used():
    code = "import sys, tilekern.ops; print(*(name for name in sys.modules if name.startswith('tilekern.ops.writing')))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.split() == []


def nameless(parameters):
    """Parameters by all but their names: an op may call an array otherwise than the device function."""
    return [x if isinstance(x, ScalarParameter) else dataclasses.replace(x, name="") for x in parameters]


@pytest.mark.parametrize("op", WITH_ARRAYS, ids=lambda op: op.name)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_arrays_are_those_of_the_device_function(op, direction):
    spec = getattr(op, direction)
    said = op.flags | (op.backward_flags if direction == "backward" else {})
    values = {d.name: SIZES.get(d.name, 16) for d in spec.dimensions}
    values |= {name: flag == "True" for name, flag in said.items()}
    kinds = [d.name for d in spec.dimensions if d.kind == "dtype"]
    for first in range(3):
        values |= {name: DTYPES[(first + number) % 3] for number, name in enumerate(kinds)}
        problem = spec.problem(**{d.name: values[d.name] for d in spec.dimensions})
        assert nameless(spec.parameters(problem)) == nameless(spec.device(problem, spec.generic(problem)).parameters)
        assert list(outputs_of(spec.arrays)(problem, 3).values()) == list(spec.outputs(problem, 3).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_rows_say_where_memory_is_and_what_is_in_it(dtype):
    x = torch.arange(12).to(dtype).view(2, 3, 2)
    said = Rows(x, (6, 2)).__cuda_array_interface__
    assert said["data"] == (x.data_ptr(), False)
    assert said["shape"] == (6, 2)
    kind, size = said["typestr"][1], int(said["typestr"][2:])
    assert size == x.element_size()
    assert kind == ("V" if dtype == torch.bfloat16 else "i" if dtype == torch.int32 else "f")


def test_a_tangent_of_what_is_seen_as_rows_is_refused():
    plan = Plan(None, Config(), 1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            plan.launch(0, Rows(dual, (2, 3)))


# An op that reads its result in the backward, keeps another one, and may be given a vector that gets no gradient.
ROWS = ("rows", "columns")
X, SCALE = Array("x", "dtype", ROWS), ScalarParameter("scale", "float32")
DIMENSIONS = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))


@ct.kernel
def softmax_forward(x, bias, y, lse, scale, columns: ConstInt, biased: ConstBool):
    for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
        tile = ct.load(x, (row, 0), (1, columns)).astype(ct.float32) * scale
        if ct.static_eval(biased):
            tile = tile + ct.reshape(ct.load(bias, (0,), (columns,)).astype(ct.float32), (1, columns))
        top = ct.max(tile, axis=1, keepdims=True)
        shares = ct.exp(tile - top)
        total = ct.sum(shares, axis=1, keepdims=True)
        ct.store(y, (row, 0), (shares / total).astype(y.dtype))
        ct.store(lse, (row,), ct.reshape(top + ct.log(total), (1,)))


@ct.kernel
def softmax_backward(dy, y, dx, scale, columns: ConstInt):
    for row in range(ct.bid(0), y.shape[0], ct.num_blocks(0)):
        slope = ct.load(dy, (row, 0), (1, columns)).astype(ct.float32)
        share = ct.load(y, (row, 0), (1, columns)).astype(ct.float32)
        pull = slope - ct.sum(slope * share, axis=1, keepdims=True)
        ct.store(dx, (row, 0), (scale * share * pull).astype(dx.dtype))


# Several results: one for each row, and one for all.
@ct.kernel
def moments_forward(x, mean, power, columns: ConstInt):
    total = ct.zeros((1,), ct.float32)
    for row in range(x.shape[0]):
        tile = ct.reshape(ct.load(x, (row, 0), (1, columns)).astype(ct.float32), (columns,))
        ct.store(mean, (row,), ct.sum(tile, axis=0, keepdims=True) / columns)
        total = total + ct.sum(tile * tile, axis=0, keepdims=True)
    ct.store(power, (0,), total)


@ct.kernel
def moments_backward(dmean, dpower, x, dx, columns: ConstInt):
    for row in range(x.shape[0]):
        tile = ct.load(x, (row, 0), (1, columns)).astype(ct.float32)
        even = ct.reshape(ct.load(dmean, (row,), (1,)), (1, 1)) / columns
        ct.store(dx, (row, 0), (even + 2.0 * tile * ct.reshape(ct.load(dpower, (0,), (1,)), (1, 1))).astype(dx.dtype))


@ct.kernel
def scaled(x, scale, y, columns: ConstInt):
    for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
        ct.store(y, (row, 0), (ct.load(x, (row, 0), (1, columns)) * scale).astype(y.dtype))


def spec(name, function, arrays, *constants):
    """A spec that can be interpreted and has no more to it."""

    def implement(problem, config):
        values = tuple((constant, problem[constant]) for constant in ("columns", *constants))
        return Implementation(
            function, parameters_of(arrays, (), problem), values, lambda *_: 1 if "moments" in name else 3
        )

    return dataclasses.replace(
        rms_norm_kernels.FORWARD, name=name, implement=implement, default=lambda *_: Config(),
        dimensions=(*DIMENSIONS, *(Dimension(constant, "flag") for constant in constants)), arrays=arrays,
    )  # fmt: skip


def by_torch(dy, y, bias, scale):
    return scale * y * (dy - (dy * y).sum(-1, keepdim=True))


@operation(
    spec(
        "probe_softmax_forward", softmax_forward,
        (
            X, Array("bias", "float32", ("columns",)), Array("y", "dtype", ROWS, "output"),
            Array("lse", "float32", ("rows",), "output"), SCALE,
        ),
        "biased",
    ),
    spec(
        "probe_softmax_backward", softmax_backward,
        (Array("dy", "dtype", ROWS), Array("y", "dtype", ROWS), Array("dx", "dtype", ROWS, "output"), SCALE),
    ),
    ungraded=("bias",), flags={"biased": "bias is not None"}, kept=("lse",), reads=("y", "bias"),
    fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)),
    fallback_backward=by_torch, rest=lambda x, *_: (x.new_full(x.shape[:-1], torch.nan, dtype=torch.float32),),
)  # fmt: skip
def probe_softmax(x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
    """The softmax of ``scale * x + bias``."""
    return (scale * x + (0 if bias is None else bias)).softmax(-1).to(x.dtype)


@operation(
    spec(
        "probe_moments_forward", moments_forward,
        (X, Array("mean", "float32", ("rows",), "output"), Array("power", "float32", (), "output")),
    ),
    spec(
        "probe_moments_backward", moments_backward,
        (
            Array("dmean", "float32", ("rows",)), Array("dpower", "float32", ()), X,
            Array("dx", "dtype", ROWS, "output"),
        ),
    ),
    fake=lambda x: (x.new_empty(x.shape[:-1], dtype=torch.float32), x.new_empty((), dtype=torch.float32)),
)  # fmt: skip
def probe_moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of each row, and the sum of all squares."""
    return x.float().mean(-1), x.float().square().sum()


def doubled(name, **options):
    """An op of a forward kernel alone."""
    arrays = (X, SCALE, Array("y", "dtype", ROWS, "output"))

    def probe(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    return operation(spec(f"{name}_forward", scaled, arrays), name=name, **options)(probe)


probe_formula = doubled("probe_formula")
probe_gradient = doubled("probe_gradient", fallback_backward=lambda dy, scale: dy * scale)

PROBES = {
    "gradient of the formula": (probe_formula, lambda x: (x,), lambda x: (2 * x,), {"scale": 2.0}),
    "gradient in torch": (probe_gradient, lambda x: (x,), lambda x: (2 * x,), {"scale": 2.0}),
    "softmax": (probe_softmax, lambda x: (x,), lambda x: ((2 * x).softmax(-1),), {"scale": 2.0}),
    "biased": (
        probe_softmax, lambda x: (x, torch.linspace(-1, 1, 16)),
        lambda x: ((2 * x + torch.linspace(-1, 1, 16)).softmax(-1),), {"scale": 2.0},
    ),
    "moments": (probe_moments, lambda x: (x,), lambda x: (x.mean(-1), x.square().sum()), {}),
}  # fmt: skip
every_probe = pytest.mark.parametrize(("probe", "given", "reference", "scalars"), PROBES.values(), ids=PROBES)


def gradient_of(call, x):
    results = call(x)
    results = results if isinstance(results, tuple) else (results,)
    slopes = [torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype) for y in results]
    return [*results, *torch.autograd.grad(results, x, slopes)]


@every_probe
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (0, 16)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_ops_of_other_forms_are_right(probe, given, reference, scalars, shape, layout, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    x = laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(0)), layout).requires_grad_()
    counted = dispatch.counters(f"{probe.__name__}_forward")
    before = counted.launches, counted.fallbacks
    found = gradient_of(lambda x: probe(*given(x), **scalars), x)
    served = kernel and x.numel() > 0
    assert (counted.launches, counted.fallbacks) == (before[0] + served, before[1] + (not served))
    for got, wanted in zip(found, gradient_of(reference, x.detach().double().requires_grad_()), strict=True):
        assert_near(got, wanted, 1e-5)


@every_probe
def test_ops_of_other_forms_can_be_traced(probe, given, reference, scalars):
    torch._dynamo.reset()
    x = torch.randn(2, 3, 16, requires_grad=True)
    compiled = torch.compile(lambda x: probe(*given(x), **scalars), fullgraph=True, backend="aot_eager", dynamic=True)
    wanted = gradient_of(lambda x: probe(*given(x), **scalars), x)
    torch.testing.assert_close(gradient_of(compiled, x), wanted)
    arguments = (*given(x), *([None] if probe is probe_softmax and len(given(x)) == 1 else []), *scalars.values())
    torch.library.opcheck(getattr(torch.ops.tilekern, probe.__name__).default, arguments)


def test_what_the_backward_does_not_read_is_not_saved():
    x = torch.randn(3, 16, requires_grad=True)
    for probe, saved in ((probe_formula, [(3, 16)]), (probe_gradient, []), (probe_moments, [(3, 16)])):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            probe(x, *([2.0] if probe is not probe_moments else []))
        assert [tuple(x.shape) for x in kept] == saved


def test_what_is_kept_is_not_given_to_the_caller_but_to_torch():
    x = torch.randn(3, 16)
    y, lse = torch.ops.tilekern.probe_softmax.default(x, None, 1.0)
    assert torch.equal(probe_softmax(x), y)
    torch.testing.assert_close(lse, x.logsumexp(-1))


def test_a_gradient_that_no_kernel_makes_is_the_formulas():
    x, bias = torch.randn(3, 16), torch.zeros(16, requires_grad=True)
    before = dispatch.counters("probe_softmax_forward").fallbacks
    (gradient,) = torch.autograd.grad(probe_softmax(x, bias)[:, 0].sum(), bias)
    (wanted,) = torch.autograd.grad((x + bias).softmax(-1)[:, 0].sum(), bias)
    torch.testing.assert_close(gradient, wanted)
    assert dispatch.counters("probe_softmax_forward").fallbacks == before + 1
    with torch.no_grad():
        probe_softmax(x, bias)
    assert dispatch.counters("probe_softmax_forward").fallbacks == before + 1


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^probe_softmax: bias must have the shape \[16\], got \[15\]$"):
        probe_softmax(torch.ones(3, 16), torch.ones(15))
    with pytest.raises(ValueError, match=r"^probe_moments: x must have the shape \[..., columns\], got \[\]$"):
        probe_moments(torch.ones(()))


def test_tracebacks_show_the_text():
    def broken(*given, **options):
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilekern.interpreter.launch", broken)
        with pytest.raises(ZeroDivisionError) as caught:
            probe_moments(torch.ones(3, 16))
    lines = "".join(traceback.format_tb(caught.value.__traceback__))
    assert 'File "<tilekern op probe_moments>"' in lines
    assert "forward_plan.launch(" in lines


def test_an_op_can_be_pickled():
    for op in (ops.rms_norm, ops.rope, probe_softmax):
        assert pickle.loads(pickle.dumps(op)) is op


def test_an_op_is_its_formula_to_whoever_looks_at_it():
    assert probe_softmax.__doc__ == "The softmax of ``scale * x + bias``."
    assert probe_softmax.__module__ == __name__
    assert probe_softmax.__annotations__["scale"] is float
    assert probe_softmax.__defaults__ == (None, 1.0)


def test_calls_that_are_left_to_other_ops():
    def otherwise(*given):
        return given

    def probe_left(
        x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0, mode: str = "a"
    ) -> torch.Tensor:
        return scale * x + bias

    op = operation(
        spec("probe_left_forward", scaled, (X, Array("bias", "float32", ("columns",)), SCALE, Y)), options=("mode",),
        unless='mode != "a" or bias is None', otherwise=otherwise,
    )(probe_left)  # fmt: skip
    x, bias = torch.randn(3, 16), torch.randn(16)
    assert op(x) == (x, None, 1.0, "a")
    assert op(x, bias, 2.0, "b") == (x, bias, 2.0, "b")
    assert writing.text_of(DECLARED["probe_left"]).count("otherwise(") == 1
    arguments = torch.ops.tilekern.probe_left.default._schema.arguments
    assert [(x.name, str(x.type)) for x in arguments] == [("x", "Tensor"), ("bias", "Tensor"), ("scale", "float")]


def test_constants_stand_for_vectors_that_are_missing():
    def probe_shifted(x: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        return scale * x + bias

    arrays = (X, Array("bias", "float32", ("columns",)), SCALE, Y)
    op = operation(spec("probe_shifted_forward", scaled, arrays), constants={"bias": 2.0})(probe_shifted)
    x, bias = torch.randn(3, 16, dtype=torch.float64), torch.randn(16)
    torch.testing.assert_close(op(x, scale=3.0), 3 * x + 2)
    torch.testing.assert_close(op(x, bias, 3.0), 3 * x + bias)
    arguments = torch.ops.tilekern.probe_shifted.default._schema.arguments
    assert [(x.name, str(x.type)) for x in arguments] == [("x", "Tensor"), ("bias", "Tensor"), ("scale", "float")]


def test_what_ranks_have_parts_of_comes_before_what_all_have():
    def probe_turned(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + bias + residual

    arrays = (X, Array("bias", "dtype", ("columns",)), Array("residual", "dtype", ROWS), Y)
    with pytest.raises(TypeError, match="probe_turned: tensors of the shape of x must come first"):
        operation(spec("probe_turned_forward", scaled, arrays), gathered=1)(probe_turned)


Y, DY, DX = (Array(name, "dtype", ROWS, role) for name, role in (("y", "output"), ("dy", "input"), ("dx", "output")))


def declared(forward=(X, Y), backward=(DY, X, DX), **options):
    """An op of x, which is never registered if its declaration is wrong."""
    specs = spec("probe_wrong", None, forward), spec("probe_wrong_backward", None, backward)

    def probe_wrong(x: torch.Tensor) -> torch.Tensor:
        return x

    return operation(*specs, **options)(probe_wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": (Y,)}, "no array is called x"),
        ({"forward": (X, Array("plans", "dtype", ROWS, "output"))}, "plans has another meaning in an op's text"),
        (
            {"forward": (X, Array("y", "dtype", ("width",), "output")), "find": print, "launch": print},
            "no argument says what width of y is, so fake must be given",
        ),
        ({"reads": ("y",), "backward": ()}, "x is not saved; give fallback_backward, or name it in reads"),
        ({"sums": ("x",)}, r"must have one scratch array \[blocks, ...\]"),
        ({"flags": {}, "forward": (Array("x", "float32", ROWS), Y)}, "what dtype of"),
        ({"kernel": print}, "unexpected keyword argument 'kernel'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declarations_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        declared(**options)


def test_arguments_of_other_types_are_refused():
    def probe_listed(x: torch.Tensor, sizes: list) -> torch.Tensor:
        return x

    with pytest.raises(TypeError, match=r"probe_listed: the type of sizes must be one of torch\.Tensor, "):
        operation(rms_norm_kernels.FORWARD, rms_norm_kernels.BACKWARD)(probe_listed)
