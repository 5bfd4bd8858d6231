"""Every config of kernels that have a way of their own, compiled here: right, and with the same bits again."""

import pytest
import torch
from gpu_samples import compiled
from spec_samples import id_of

from tilekern.compile.cute_compiler import compiler
from tilekern.compile.toolchain import toolkit
from tilekern.kernels import all_specs, spec_named
from tilekern.kernels.attention import kept
from tilekern.kernels.attention.backward_problem import REFERENCES
from tilekern.kernels.grouped import product, weight_gradient
from tilekern.kernels.grouped.routing import VARIATIONS
from tilekern.kernels.matmul.product import sizes
from tilekern.kernels.matmul.space import is_tile
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import compare, expected_results

needs_compiler = pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
needs_cute = pytest.mark.skipif(compiler() is None, reason="nvidia-cutlass-dsl is not installed")


def drawn(spec, problem):
    return spec.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")


def each_config(spec, problem, is_chosen):
    """Each config of the space that is chosen, and how it is launched."""
    for config in filter(is_chosen, spec.space.candidates(spec.bucketed(problem), here())):
        yield config, compiled(spec, problem, config, here())


def assert_right(spec, problem, outputs, expected, *where):
    check = compare(spec, problem, outputs, expected)
    assert check.passed, (*where, check.reason)


def assert_same_bits(one, other, config):
    assert all(torch.equal(one[name], other[name]) for name in one), config


RINGS = [
    spec for spec in all_specs().values()
    if spec.follower and len(spec.space.beside) > 1 and "weight_dtype" in [each.name for each in spec.dimensions]
]  # fmt: skip
# Rows, columns, dtypes of rows and of weights: fewer rows than blocks, a ring's last round in part, tails.
ROWS = (
    (8192, 4096, "bfloat16", "bfloat16"), (100, 4096, "float16", "float32"), (1009, 2880, "bfloat16", "bfloat16"),
    (3001, 1000, "float32", "bfloat16"), (517, 8184, "bfloat16", "float32"),
)  # fmt: skip


@needs_cute
@pytest.mark.parametrize("spec", RINGS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(("rows", "columns", "dtype", "weight_dtype"), ROWS)
def test_rings_in_shared_memory(spec, rows, columns, dtype, weight_dtype):
    values = {"rows": rows, "columns": columns, "dtype": dtype, "weight_dtype": weight_dtype}
    problem = spec.problem(**{d.name: values.get(d.name, False) for d in spec.dimensions})
    inputs = drawn(spec, problem)
    expected = expected_results(spec, problem, inputs)
    for config, launch in each_config(spec, problem, lambda config: "stages" in config):
        found = [launch(inputs) for _ in range(2)]
        for outputs in found:
            assert_right(spec, problem, outputs, expected, config)
        assert_same_bits(*found, config)


FORWARD = spec_named("attention_forward")
# What the kernel of CuTe DSL has a way of its own for.
MASKS = (("causal",), ("causal", "windowed", "sinks"), ("windowed", "capped", "packed"))


def shifted(outputs):
    """Return outputs like these, of which out begins 16 bytes behind a multiple of 128: no place for a descriptor."""
    memory = torch.full((outputs["out"].numel() + 8,), torch.nan, dtype=outputs["out"].dtype, device="cuda")
    return {"out": memory[8:].view_as(outputs["out"]), "lse": torch.full_like(outputs["lse"], torch.nan)}


@needs_cute
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("flags", MASKS, ids="-".join)
def test_attention_by_tiles_of_queries(head_dim, flags):
    """Keys are loaded by descriptors, which the kernel writes to out, or by copies."""
    values = {"batch": 2, "queries": 777, "keys": 1000, "heads": 4, "kv_heads": 2, "head_dim": head_dim}
    values["dtype"] = "bfloat16"
    problem = FORWARD.problem(**{d.name: values.get(d.name, d.name in flags) for d in FORWARD.dimensions})
    inputs = drawn(FORWARD, problem)
    expected = expected_results(FORWARD, problem, inputs)
    for config, launch in each_config(FORWARD, problem, lambda config: config["implementation"] == "cute"):
        first = launch(inputs)
        again = launch(inputs, shifted(first))
        for outputs in (first, again):
            assert_right(FORWARD, problem, outputs, expected, config)
        assert_same_bits(first, again, config)


# Batch, queries, keys, heads, key heads: parts of tiles, queries that see nothing, keys of one head.
KEYS = ((1, 1, 1, 2, 1), (2, 130, 130, 4, 2), (1, 1000, 777, 4, 1), (2, 777, 1000, 3, 3))


@needs_cute
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("flags", [("causal",), ("apart",), ("causal", "capped")], ids="-".join)
@pytest.mark.parametrize("sizes", KEYS)
def test_gradients_of_keys_and_the_kept_gradients_of_scores(head_dim, flags, sizes):
    """dq of the kept ones, in float64, stands for them: it reads all that a query sees."""
    names = ("batch", "queries", "keys", "heads", "kv_heads")
    values = dict(zip(names, sizes, strict=True)) | {"head_dim": head_dim, "dtype": "bfloat16"}
    problem = kept.DKDV.problem(**{d.name: values.get(d.name, d.name in flags) for d in kept.DKDV.dimensions})
    inputs = drawn(kept.DKDV, problem)
    expected = expected_results(kept.DKDV, problem, inputs)
    masks = {name: problem[name] for name in ("causal", "packed")}
    dq = REFERENCES["queries"](**inputs, **masks, capped=problem["capped"], window=0, windowed=False)["dq"]
    for config, launch in each_config(kept.DKDV, problem, lambda config: config["implementation"] == "cute"):
        found = [launch(inputs) for _ in range(2)]
        for outputs in found:
            assert_right(kept.DKDV, problem, outputs, expected, config)
            given = {name: inputs[name] for name in ("k", "query_starts", "key_starts", "most_queries", "scale")}
            of_kept = kept.reference(outputs["kept"], **given, **masks)["dq"]
            assert (of_kept - dq).norm() <= 0.01 * dq.norm(), config
        assert all(torch.equal(found[0][name], found[1][name]) for name in ("dk", "dv")), config


def with_gaps(x):
    """The same rows, 16 bytes of NaN apart, so that few begin at a multiple of 128 bytes."""
    gap = 16 // x.element_size()
    return torch.cat([x, x.new_full((*x.shape[:-1], gap), torch.nan)], -1)[..., : x.shape[-1]]


@needs_cute
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("flags", [("causal",), ("apart",)], ids="-".join)
def test_descriptors_of_loads_in_rows_of_the_gradients_of_keys(head_dim, flags):
    """Where rows begin does not change the bits, nor does what was loaded before for the same results."""
    values = {"batch": 2, "queries": 264, "keys": 200, "heads": 4, "kv_heads": 2, "head_dim": head_dim}
    values["dtype"] = "bfloat16"
    problem = kept.DKDV.problem(**{d.name: values.get(d.name, d.name in flags) for d in kept.DKDV.dimensions})
    inputs, others = (drawn(kept.DKDV, problem) for _ in range(2))
    others["q"], others["v"] = -others["q"], 2 * others["v"]
    for config, launch in each_config(kept.DKDV, problem, lambda config: config["implementation"] == "cute"):
        right = launch(inputs)
        for gaps in ((), ("q", "k", "v", "dout"), ("dk", "dv", "q")):
            outputs = launch(others)
            outputs |= {name: with_gaps(outputs[name]) for name in gaps if name in outputs}
            launch(inputs | {name: with_gaps(inputs[name]) for name in gaps if name in inputs}, outputs)
            assert all(torch.equal(right[name], outputs[name]) for name in ("dk", "dv")), (config, gaps)


LINEAR, GRADIENT, MATMUL = map(spec_named, ("grouped_linear", "grouped_weight_gradient", "matmul"))
LAYER = (4093, 1024, 1536, 8, "bfloat16")
GROUPED = [
    (LINEAR, LINEAR.problem(**product.sizes(*LAYER, on)))
    for on in ((), ("inner_first", "biased", "partial"), ("gathered",), ("gathered", "biased", "partial"))
] + [(GRADIENT, GRADIENT.problem(**weight_gradient.sizes(*LAYER, on))) for on in ((), ("b_gathered",), ("a_gathered",))]


@needs_compiler
@pytest.mark.parametrize(("spec", "problem"), GROUPED, ids=id_of)
def test_grouped_products_of_every_routing(spec, problem):
    generator = torch.Generator("cuda").manual_seed(0)
    plain = spec.inputs(problem, generator, "cuda")
    routings = [plain, *(plain | vary(problem, generator, "cuda") for vary in VARIATIONS.values())]
    expected = [expected_results(spec, problem, inputs) for inputs in routings]
    for config, launch in each_config(spec, problem, is_tile):
        for inputs, right in zip(routings, expected, strict=True):
            first, again = launch(inputs), launch(inputs)
            assert_right(spec, problem, first, right, config)
            assert_same_bits(first, again, config)


@needs_compiler
@pytest.mark.parametrize("rows", [1009, 2048])
@pytest.mark.parametrize("on", [("a_transposed", "accumulated"), ("accumulated",), ("b_transposed", "accumulated")])
def test_products_add_in_place_what_they_add_elsewhere(on, rows):
    """The addend's memory is the result's, which the cubins were not told: ten times over."""
    problem = MATMUL.problem(**sizes(rows, 8192, 4096, "bfloat16", on))
    inputs = drawn(MATMUL, problem)
    for config, launch in each_config(MATMUL, problem, is_tile):
        elsewhere = launch(inputs, {"c": torch.full_like(inputs["addend"], torch.nan)})
        for _ in range(10):
            same = inputs["addend"].clone()
            assert_same_bits(elsewhere, launch(inputs | {"addend": same}, {"c": same}), config)
