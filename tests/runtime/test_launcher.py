"""The choice of a stored variant for arguments, on cuda.tile's own constraint objects."""

import inspect
from importlib import metadata

import cuda.tile as ct
import pytest
from cuda.tile.compilation import ArrayConstraint, ConstantConstraint, ScalarConstraint
from spec_samples import alike, compiled

from tilekern.compile.cutile import constraint
from tilekern.compile.toolchain import assumptions
from tilekern.errors import NoVariant, TilekernError
from tilekern.kernels import rms_norm, spec_named
from tilekern.runtime import plans
from tilekern.runtime.launcher import PrebuiltKernel, Variant, implies, without_constants
from tilekern.runtime.plans import may_depend
from tilekern.spec import ALIGNED, GENERIC
from tilekern.spec.targets import KNOWN

SPEC = spec_named("rms_norm_forward")
PROBLEM = SPEC.problem(rows=64, columns=64, dtype="bfloat16", weight_dtype="bfloat16")
IMPLEMENTATION = SPEC.implement(PROBLEM, SPEC.generic(PROBLEM))
STRONG, PLAIN = (assumptions(IMPLEMENTATION, variant) for variant in (ALIGNED, GENERIC))


def array(ndim=2, dtype=ct.bfloat16, **changes):
    """Return the launcher's constraint of a contiguous, aligned array with a last axis that 16 divides."""
    stated = {
        "index_dtype": ct.int32,
        "stride_lower_bound_incl": 0,
        "alias_groups": (),
        "may_alias_internally": False,
        "stride_constant": [None] * (ndim - 1) + [1],
        "stride_divisible_by": [16] * (ndim - 1) + [1],
        "shape_divisible_by": [1] * (ndim - 1) + [16],
        "base_addr_divisible_by": 16,
    }
    return ArrayConstraint(dtype, ndim, **stated | changes)


def arguments(x=None, **others):
    """The arguments of a launch with ``x`` in the place of the first."""
    weight, eps = others.get("weight", array(1)), others.get("eps", ScalarConstraint(ct.float32))
    return [x or array(), weight, array(), eps]


def kernel(*names):
    """A kernel with the named variants, whose cubins are their names."""
    known = {ALIGNED: STRONG, GENERIC: PLAIN}
    variants = [Variant(name, f"{name}_symbol", known[name], name.encode) for name in names]
    return PrebuiltKernel(rms_norm.rms_norm_forward, variants)


class Signature:
    def __init__(self, parameters):
        self.parameters = tuple(parameters)


def chosen(parameters, *names):
    return kernel(*names or (ALIGNED, GENERIC))._compile(Signature(parameters), None, (9, 0))


@pytest.mark.parametrize("spec", compiled(), ids=lambda spec: spec.name)
@pytest.mark.parametrize("size", [64, 80, 100])
def test_aligned_implies_generic_and_never_the_reverse(spec, size):
    problem = alike(spec, size, "bfloat16")
    implementation = spec.device(problem, spec.generic(problem))
    strong, plain = (assumptions(implementation, variant) for variant in (ALIGNED, GENERIC))
    seen = {ALIGNED: [constraint(a) for a in strong], GENERIC: [constraint(a) for a in plain]}
    assert implies(seen[ALIGNED], strong)
    assert implies(seen[ALIGNED], plain)
    assert implies(seen[GENERIC], plain)
    assert not implies(seen[GENERIC], strong)


def test_the_strongest_variant_that_the_arguments_allow_is_taken():
    assert chosen(arguments()) == (b"aligned", "aligned_symbol", None, ())


# Arguments in the place of an array, and the variant that they take; none where no variant allows them.
ARGUMENTS = {
    "base by 2": (array(base_addr_divisible_by=2), GENERIC),
    "base by 8": (array(base_addr_divisible_by=8), GENERIC),
    "row stride": (array(stride_divisible_by=[1, 1]), GENERIC),
    "row stride by 4": (array(stride_divisible_by=[4, 1]), GENERIC),
    "row stride 100": (array(stride_constant=[100, 1], stride_divisible_by=1), GENERIC),
    "expanded": (array(stride_constant=[0, 1], stride_divisible_by=1, base_addr_divisible_by=2), GENERIC),
    "last stride unknown": (array(stride_constant=None, stride_divisible_by=16), GENERIC),
    "transposed": (array(stride_constant=[1, 64], stride_divisible_by=1), GENERIC),
    "last stride 2": (array(stride_constant=[None, 2], stride_divisible_by=[16, 1]), GENERIC),
    "extent": (array(shape_divisible_by=1), GENERIC),
    "extent by 8": (array(shape_divisible_by=[16, 8]), GENERIC),
    "no bound": (array(stride_lower_bound_incl=None, base_addr_divisible_by=2), GENERIC),
    "base by 32": (array(base_addr_divisible_by=32), ALIGNED),
    "base by 512": (array(base_addr_divisible_by=512), ALIGNED),
    "stride by 8": (array(stride_divisible_by=[8, 1]), ALIGNED),
    "stride 64": (array(stride_constant=[64, 1], stride_divisible_by=1), ALIGNED),
    "extent by 32": (array(shape_divisible_by=[1, 32]), ALIGNED),
    "rows by 16": (array(shape_divisible_by=16), ALIGNED),
    "no alias": (array(alias_groups=()), ALIGNED),
    "bound 1": (array(stride_lower_bound_incl=1), ALIGNED),
    "int64 index": (array(index_dtype=ct.int64), None),
    "elements share memory": (array(may_alias_internally=True), None),
    "negative strides": (array(stride_lower_bound_incl=-1), None),
    "one negative stride": (array(stride_lower_bound_incl=[-4, 0], stride_constant=None), None),
    "float16": (array(dtype=ct.float16), None),
    "float32": (array(dtype=ct.float32), None),
    "rank 1": (array(ndim=1), None),
    "rank 3": (array(ndim=3), None),
    "scalar": (ScalarConstraint(ct.bfloat16), None),
    "constant": (ConstantConstraint(3), None),
}


@pytest.mark.parametrize(("x", "variant"), ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("place", [0, 2])
def test_arguments_take_the_strongest_variant_that_allows_them(x, variant, place):
    parameters = arguments()
    parameters[place] = x
    if variant is not None:
        assert chosen(parameters)[0] == variant.encode()
    if variant != ALIGNED:
        with pytest.raises(NoVariant, match="rms_norm_forward: none of the variants aligned") as caught:
            chosen(parameters, *([ALIGNED] if variant else []))
        assert isinstance(caught.value, TilekernError)


def test_scalars_are_told_apart_by_dtype():
    with pytest.raises(NoVariant):
        chosen(arguments(eps=ScalarConstraint(ct.int32)))
    with pytest.raises(NoVariant):
        chosen(arguments(eps=ConstantConstraint(1e-6)))


def test_a_wrong_number_or_order_of_arguments_raises():
    right = arguments()
    for wrong in (right[:-1], [*right, ConstantConstraint(1)], [], right[::-1]):
        with pytest.raises(NoVariant):
            chosen(wrong)


def test_a_launch_passes_no_constants():
    assert implies(arguments(), without_constants(STRONG))
    assert not implies(arguments(), STRONG)
    constants = [ConstantConstraint(value) for _, value in IMPLEMENTATION.constants]
    with pytest.raises(NoVariant):
        chosen([*arguments(), *constants])


def test_a_cubin_is_loaded_only_when_it_is_chosen():
    loaded = []
    variants = [
        Variant(ALIGNED, "a", STRONG, lambda: loaded.append("aligned") or b"a"),
        Variant(GENERIC, "g", PLAIN, lambda: loaded.append("generic") or b"g"),
    ]
    made = PrebuiltKernel(rms_norm.rms_norm_forward, variants)
    made._compile(Signature(arguments(array(base_addr_divisible_by=2))), None, (9, 0))
    assert loaded == ["generic"]


@pytest.mark.parametrize("spec", compiled(), ids=lambda spec: spec.name)
def test_a_prebuilt_kernel_of_every_function_can_be_made(spec):
    problem = alike(spec, 64, "float32", flags=True)
    function = spec.device(problem, spec.generic(problem)).function
    made = PrebuiltKernel(function, [])
    with pytest.raises(NoVariant, match=f"^{function._pyfunc.__name__}: "):
        made._compile(Signature([]), None, (9, 0))


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)
def test_dependent_launch_is_for_kernels_that_wait_on_gpus_that_can(target):
    spec = spec_named("column_sum")
    problem = spec.problem(rows=64, columns=64, dtype="float32")
    waiting = spec.device(problem, spec.generic(problem))
    assert may_depend(waiting, target) == (target.capability >= 90)
    assert not may_depend(IMPLEMENTATION, target)


class TestTheContractWithCudaTile:
    """What tilekern relies on that cuda-tile does not promise. A new version of it must pass these first."""

    def test_the_version_of_cuda_tile_is_the_reviewed_one(self):
        major, minor = map(int, metadata.version("cuda-tile").split(".")[:2])
        assert (1, 7) <= (major, minor) < (1, 8)

    def test_a_kernel_is_a_dispatcher_that_asks_a_method_for_its_cubin(self):
        assert "TileDispatcher" in [base.__name__ for base in ct.kernel.__mro__]
        parameters = inspect.signature(ct.kernel._compile).parameters
        assert list(parameters) == ["self", "signature", "context", "compute_capability"]
        assert parameters["compute_capability"].default is None
        assert list(inspect.signature(PrebuiltKernel._compile).parameters) == list(parameters)

    def test_the_method_returns_cubin_symbol_library_and_providers(self):
        source = inspect.getsource(ct.kernel._compile)
        assert "return result.cubin, kernel_sig.symbol, None, tuple(" in source
        cubin, symbol, library, providers = chosen(arguments())
        assert isinstance(cubin, bytes)
        assert isinstance(symbol, str)
        assert library is None
        assert providers == ()

    def test_a_kernel_gives_its_python_function(self):
        assert inspect.isfunction(rms_norm.rms_norm_forward._pyfunc)

    def test_a_kernel_says_which_of_its_parameters_are_constants(self):
        annotations = rms_norm.rms_norm_forward._annotated_function.parameter_annotations
        assert [one.constant for one in annotations] == [a["kind"] == "constant" for a in STRONG]

    def test_launch_can_be_dependent(self):
        assert "programmatic_dependent_launch" in (ct.launch.__doc__ or "") + str(inspect.signature(ct.launch))

    def test_a_library_that_replaces_launch_does_not_reach_tilekern(self, monkeypatch):
        """TileGym does so on import, with a function without dependent launches."""
        monkeypatch.setattr(ct, "launch", lambda *_: pytest.fail("the other's launch"))
        monkeypatch.setattr(plans, "_ct_launch", plans._ct_launch)
        with pytest.raises(TypeError, match="kernel"):
            plans._ct_launch(0, (1,), None, (), programmatic_dependent_launch=True)

    def test_constraints_have_the_fields_that_are_read(self):
        for name in ("dtype", "ndim", "index_dtype", "stride_lower_bound_incl", "may_alias_internally"):
            assert hasattr(array(), name)
        assert array().shape_divisible_by == (1, 16)
        assert array().stride_constant == (None, 1)
        assert array().stride_divisible_by[0] == 16
        assert array().base_addr_divisible_by == 16
        assert array().dtype.name == "bfloat16"

    def test_a_signature_of_the_front_end_is_judged_as_one_of_the_launcher(self):
        from cuda.tile.compilation import CallingConvention, KernelSignature

        stated = [constraint(a) for a in without_constants(STRONG)]
        signature = KernelSignature(stated, CallingConvention.cutile_python_v1())
        assert kernel(ALIGNED)._compile(signature, None)[1] == "aligned_symbol"
