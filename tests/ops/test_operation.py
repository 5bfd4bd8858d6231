"""Code made from declarations: the text of the shipped ops, and ops of other forms."""

import dataclasses
import inspect
import pickle
import traceback

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

ConstBool, ConstInt = ct.Constant[bool], ct.Constant[int]
every_op = pytest.mark.parametrize("op", SHIPPED.values(), ids=SHIPPED)


@every_op
def test_the_code_is_what_the_declaration_makes(op):
    path = generated_file(op)
    assert path.exists(), f"{path.name} is missing; `python -m tilekern.ops.writing` writes it"
    assert writing.module_of(op) == path.read_text(), "`python -m tilekern.ops.writing` writes it anew"


def test_every_file_is_of_an_op():
    assert {path.stem for path in GENERATED.glob("*.py")} == set(SHIPPED)


def test_a_generated_function_has_its_source_file():
    """For break points, tracebacks and whoever looks it up."""
    path = generated_file(DECLARED["rms_norm"])
    function = ops.rms_norm.functions["plans_of"]
    assert inspect.getsourcefile(function) == str(path)
    assert inspect.getsource(function) in path.read_text()


def test_the_writer_is_imported_only_where_a_text_is_made():
    """Ops that are checked in need none of it."""
    imports = "from tilekern.ops.writing import"
    found = [
        line for path in GENERATED.parent.glob("*.py") for line in path.read_text().splitlines() if imports in line
    ]
    assert found == ["    from tilekern.ops.writing import text_of"]


def nameless(parameters):
    """Parameters by all but their names: an op may call an array otherwise than the device function."""
    return [x if isinstance(x, ScalarParameter) else dataclasses.replace(x, name="") for x in parameters]


@pytest.mark.parametrize(
    ("op", "direction"),
    [(op, way) for op in WITH_ARRAYS for way in ("forward", *["backward"][: op.backward is not None])],
    ids=lambda x: getattr(x, "name", x),
)
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


ROWS = ("rows", "columns")
X, SCALE = Array("x", "dtype", ROWS), ScalarParameter("scale", "float32")
Y, DY, DX = (Array(name, "dtype", ROWS, role) for name, role in (("y", "output"), ("dy", "input"), ("dx", "output")))
DIMENSIONS = (Dimension("rows", "bucketed"), Dimension("columns", "exact"), Dimension("dtype", "dtype"))


@ct.kernel
def scaled(x, scale, y, columns: ConstInt):
    for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
        ct.store(y, (row, 0), (ct.load(x, (row, 0), (1, columns)) * scale).astype(y.dtype))


def spec(name, function, arrays):
    """A spec that can be interpreted and has no more to it."""

    def implement(problem, config):
        values = (("columns", problem["columns"]),)
        return Implementation(function, parameters_of(arrays, (), problem), values, lambda *_: 3)

    return dataclasses.replace(
        rms_norm_kernels.FORWARD, name=name, implement=implement, default=lambda *_: Config(), dimensions=DIMENSIONS,
        arrays=arrays,
    )  # fmt: skip


def doubled(name, **options):
    """An op of a forward kernel alone."""

    def probe(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Scale all numbers."""
        return x * scale

    return operation(spec(f"{name}_forward", scaled, (X, SCALE, Y)), name=name, **options)(probe)


probe_formula = doubled("probe_formula")
probe_gradient = doubled("probe_gradient", fallback_backward=lambda dy, scale: dy * scale)
every_probe = pytest.mark.parametrize("probe", [probe_formula, probe_gradient], ids=["formula", "torch"])


def gradient_of(call, x):
    y = call(x)
    return [y, *torch.autograd.grad(y, x, torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype))]


@every_probe
@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (0, 16)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "spread"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.filterwarnings("ignore::tilekern.errors.TilekernWarning")
def test_without_a_backward_kernel_gradients_are_torch_s(probe, shape, layout, kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("TILEKERN_INTERPRET", "0")
    x = laid_out(torch.randn(shape, generator=torch.Generator().manual_seed(0)), layout).requires_grad_()
    counted = dispatch.counters(f"{probe.functions['__op__']}_forward")
    before = counted.launches, counted.fallbacks
    found = gradient_of(lambda x: probe(x, 2.0), x)
    served = kernel and x.numel() > 0
    assert (counted.launches, counted.fallbacks) == (before[0] + served, before[1] + (not served))
    for got, wanted in zip(found, gradient_of(lambda x: 2 * x, x.detach().double().requires_grad_()), strict=True):
        assert_near(got, wanted, 1e-5)


@every_probe
@pytest.mark.share(2)
def test_ops_without_a_backward_kernel_can_be_traced(probe):
    torch._dynamo.reset()
    x = torch.randn(2, 3, 16, requires_grad=True)
    compiled = torch.compile(lambda x: probe(x, 2.0), fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(gradient_of(compiled, x), gradient_of(lambda x: probe(x, 2.0), x))
    torch.library.opcheck(getattr(torch.ops.tilekern, probe.functions["__op__"]).default, (x, 2.0))


def test_what_the_backward_does_not_read_is_not_saved():
    x = torch.randn(3, 16, requires_grad=True)
    for probe, saved in ((probe_formula, [(3, 16)]), (probe_gradient, [])):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            probe(x, 2.0)
        assert [tuple(x.shape) for x in kept] == saved


def test_tracebacks_show_the_text():
    def broken(*given, **options):
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilekern.interpreter.launch", broken)
        with pytest.raises(ZeroDivisionError) as caught:
            probe_formula(torch.ones(3, 16))
    lines = "".join(traceback.format_tb(caught.value.__traceback__))
    assert 'File "<tilekern op probe_formula>"' in lines
    assert "forward_plan.launch(" in lines


def test_an_op_can_be_pickled():
    for op in (ops.rms_norm, ops.rope):
        assert pickle.loads(pickle.dumps(op)) is op


def test_an_op_is_its_formula_to_whoever_looks_at_it():
    assert probe_formula.__doc__ == "Scale all numbers."
    assert probe_formula.__module__ == __name__
    assert probe_formula.__annotations__["scale"] is float
    assert probe_formula.__defaults__ == (1.0,)


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


def test_what_ranks_have_parts_of_comes_before_what_all_have():
    def probe_turned(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + bias + residual

    arrays = (X, Array("bias", "dtype", ("columns",)), Array("residual", "dtype", ROWS), Y)
    with pytest.raises(TypeError, match="probe_turned: tensors of the shape of x must come first"):
        operation(spec("probe_turned_forward", scaled, arrays), gathered=1)(probe_turned)


def declared(forward=(X, Y), backward=(DY, X, DX), **options):
    """An op of x, which is never registered if its declaration is wrong."""
    specs = spec("probe_wrong", None, forward), spec("probe_wrong_backward", None, backward)

    def probe_wrong(x: torch.Tensor) -> torch.Tensor:
        return x

    def probe_optional(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x

    optional = any(array.name == "bias" for array in forward)
    return operation(*specs, **options)(probe_optional if optional else probe_wrong)


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
        ({"forward": (X, Array("bias", "dtype", ("columns",)), Y)}, "bias may be None, so launch must be given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declarations_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        declared(**options)


def test_arguments_of_other_types_are_refused():
    def probe_listed(x: torch.Tensor, sizes: list) -> torch.Tensor:
        return x

    with pytest.raises(TypeError, match=r"probe_listed: the type of sizes must be one of Tensor, "):
        operation(rms_norm_kernels.FORWARD, rms_norm_kernels.BACKWARD)(probe_listed)
