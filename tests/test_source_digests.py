"""The two digests of a spec: what makes its artifacts invalid, what its winner uncertain, and what does neither."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from source_samples import forget

from tilekern.kernels import all_specs
from tilekern.source import digests as source
from tilekern.source import reachability
from tilekern.source.digests import digest_of_module, digests_of, note_digests
from tilekern.source.reachability import module_named, specs_of

ROOT = Path(__file__).parents[1]
KERNEL = '''"""A kernel."""

from __future__ import annotations

import functools

import cuda.tile as ct

from sample_kernels import shared
from sample_kernels.limits import FITS, of_tiles
from sample_kernels.shared import grid_of, load as read
from tilekern.spec import Config, Constraint, Dimension, Implementation, KernelSpec, Space, cdiv

_SCALE = 2.0
_UNUSED = 3.0
WIDTHS = (1024, 2048)


def _double(x, factor):
    """Twice x."""
    # a reason
    return x * factor * _SCALE


@ct.kernel
def twice(x, y):
    """A device function."""
    y[0] = _double(read(x), 2)


def _implement(problem, config):
    rows = problem["rows"]
    return Implementation(function=twice, parameters=shared.arrays(problem), constants=(("rows", rows),), grid=_grid)


def _grid(problem, sm_count):
    return grid_of(problem["rows"], sm_count)


def _axes(problem):
    return {"tile_n": [min(width, problem["rows"]) for width in WIDTHS]}


def _wide(problem, config, target):
    return config["tile_n"] >= 64


def _default(problem, target):
    return Config(tile_n=shared.power_of_two(problem["rows"]))


def _inputs(problem, generator, device):
    import torch

    return {"x": torch.randn(problem["rows"])}


def reference(x):
    return {"y": 2 * x}


SPEC = KernelSpec(
    name="twice",
    summary="y = 2 x",
    module=__name__,
    dimensions=(Dimension("rows", "exact"),),
    space=Space(_axes, (Constraint("a narrow tile starves", _wide), FITS, of_tiles("too many of them", _wide))),
    implement=_implement,
    default=_default,
    generic=lambda problem: Config(tile_n=128),
    inputs=_inputs,
    outputs=lambda problem, blocks: {"y": ((problem["rows"],), "float32")},
    reference=reference,
    bytes_moved=lambda problem: 8 * problem["rows"],
    flops=lambda problem: problem["rows"],
    result_dtype=lambda problem: "float32",
)

SPECS = (SPEC,)
'''
SHARED = '''"""What kernels share."""

import math


def load(x):
    return x[0]


def grid_of(rows, sm_count):
    return min(rows, sm_count)


def arrays(problem):
    return (problem["rows"],)


def power_of_two(n):
    return 1 << math.ceil(math.log2(n))


def unused():
    return load
'''
LIMITS = """from tilekern.spec import Constraint

_MOST = 4096
FITS = Constraint(f"at most {_MOST} elements fit", lambda problem, config, target: config["tile_n"] <= _MOST)


def of_tiles(reason, holds):
    return Constraint(reason, lambda problem, config, target: holds(problem, config, target))
"""
FACTORY = """
def _spec(name, function, most, **rest):
    space = Space(_axes, (Constraint(f"more than {most}", lambda p, c, t: c["tile_n"] <= most),))
    return KernelSpec(
        name=f"made_{name}", implement=lambda problem, config: _run(problem, function), space=space,
        default=_default, **rest
    )


def _run(problem, function):
    return Implementation(function=function, parameters=(), constants=(), grid=_grid)


FIRST = _spec("first", twice, 10, reference=reference)
SECOND = _spec("second", _double, 20, reference=reference)
"""


@pytest.fixture
def digests(tmp_path, monkeypatch):
    """Writes a package of kernels, and gives the digests of one of its specs."""
    package = tmp_path / "sample_kernels"
    package.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def digests(kernel=KERNEL, shared=SHARED, limits=LIMITS, name="twice", **more):
        texts = {"__init__": "", "kernel": kernel, "shared": shared, "limits": limits, **more}
        for module, text in texts.items():
            (package / f"{module}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        forget()
        found = digests_of("sample_kernels.kernel", name)
        return found.source, found.space

    yield digests
    forget()


def changed(text, old, new):
    assert text.count(old) == 1, old
    return text.replace(old, new)


NEITHER = [
    ('"""A kernel."""', '"""Another text."""'),
    ('    """Twice x."""\n    # a reason\n', ""),
    ("def _double(x, factor):", "def _double(\n    x,\n    factor,  # why\n):"),
    ("_UNUSED = 3.0\n", ""),
    ('summary="y = 2 x"', 'summary="twice x"'),
    ("torch.randn(", "torch.rand("),
    ('{"y": 2 * x}', '{"y": x + x}'),
    ("8 * problem", "4 * problem"),
    ('flops=lambda problem: problem["rows"]', "flops=lambda problem: 0"),
    ('result_dtype=lambda problem: "float32"', 'result_dtype=lambda problem: "bfloat16"'),
    ("a narrow tile starves", "narrow tiles starve the memory system"),
    ("too many of them", "there are too many"),
    ("SPECS = (SPEC,)\n", "SPECS = (SPEC,)\n\n\ndef another():\n    return twice\n"),
]
SOURCE = [
    ("_SCALE = 2.0", "_SCALE = 4.0"),
    ("x * factor", "x / factor"),
    ("_double(read(x), 2)", "_double(read(x), 3)"),
    ("@ct.kernel\n", "@ct.kernel(occupancy=2)\n"),
    ('(("rows", rows),)', '(("columns", rows),)'),
    ('grid_of(problem["rows"], sm_count)', 'grid_of(2 * problem["rows"], sm_count)'),
    ('Dimension("rows", "exact")', 'Dimension("rows", "bucketed")'),
    ("    implement=", "    unheard_of=_UNUSED,\n    implement="),
    ("load as read", "unused as read"),
]
SPACE = [
    ("WIDTHS = (1024, 2048)", "WIDTHS = (1024, 2048, 4096)"),
    ('config["tile_n"] >= 64', 'config["tile_n"] >= 32'),
    ('(Constraint("a narrow tile starves", _wide), ', "("),
    ("generic=lambda problem: Config(tile_n=128)", "generic=lambda problem: Config(tile_n=64)"),
    ('"tile_n": [min', '"tile_m": [1], "tile_n": [min'),
    ("    implement=", "    inputs_in_l2=True,\n    implement="),
]


@pytest.mark.parametrize(("old", "new"), NEITHER)
def test_words_checks_and_what_to_tune_count_for_nothing(digests, old, new):
    assert digests(changed(KERNEL, old, new)) == digests()


@pytest.mark.parametrize(("old", "new"), SOURCE)
def test_device_code_and_how_it_is_launched_make_artifacts_invalid_and_say_nothing_of_the_best(digests, old, new):
    (source_before, space_before), (now, space) = digests(), digests(changed(KERNEL, old, new))
    assert now != source_before
    assert space == space_before


@pytest.mark.parametrize(("old", "new"), SPACE)
def test_space_default_and_constraints_leave_artifacts_valid(digests, old, new):
    (source_before, space_before), (now, space) = digests(), digests(changed(KERNEL, old, new))
    assert now == source_before
    assert space != space_before


@pytest.mark.parametrize(
    ("module", "old", "new", "counts"),
    [
        ("shared", "return x[0]", "return x[1]", (True, False)),
        ("shared", 'return (problem["rows"],)', "return ()", (True, False)),
        ("shared", "math.ceil", "math.floor", (False, True)),
        ("shared", "return load", "return None", (False, False)),
        ("shared", '"""What kernels share."""', '"""Shared."""', (False, False)),
        ("limits", "_MOST = 4096", "_MOST = 2048", (False, True)),
        ("limits", "elements fit", "elements of a tile fit", (False, False)),
        ("limits", "return Constraint(reason, lambda", "return Constraint(reason.upper(), lambda", (False, True)),
    ],
)
def test_of_a_sibling_what_is_reached_counts_and_nothing_else(digests, module, old, new, counts):
    before = digests()
    after = digests(**{module: changed({"shared": SHARED, "limits": LIMITS}[module], old, new)})
    assert tuple(one != other for one, other in zip(before, after, strict=True)) == counts


def test_the_constraints_of_all_spaces_count(digests, monkeypatch):
    before = digests()
    space = module_named("tilekern.space")
    (statement,) = space.definitions["DANGEROUS"]
    monkeypatch.setitem(space.definitions, "DANGEROUS", [statement, statement])
    source._worked_out.cache_clear()
    digests_of.cache_clear()
    after = digests_of("sample_kernels.kernel", "twice")
    assert (after.source == before[0], after.space == before[1]) == (True, False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("shared.arrays(problem)", "getattr(shared, 'arrays')(problem)"),
        ("shared.arrays(problem)", "[*map(str, [shared])]"),
        ("shared.arrays(problem)", "globals()['shared'].arrays(problem)"),
        ("shared.arrays(problem)", "eval('shared.arrays')(problem)"),
    ],
)
def test_where_a_name_cannot_be_followed_all_that_it_may_lead_to_counts(digests, old, new):
    """``unused`` of the shared module is reached by none of the names."""
    kernel = changed(KERNEL, old, new)
    before, after = digests(kernel), digests(kernel, shared=changed(SHARED, "return load", "return None"))
    assert before[0] != after[0]


def test_a_name_that_may_have_come_by_a_star_leads_to_all_that_came_with_it(digests):
    kernel = changed(KERNEL, "import grid_of, load as read", "import *")
    kernel = changed(kernel, "read(x)", "load(x)")
    assert digests(kernel)[0] != digests(kernel, shared=changed(SHARED, "return load", "return None"))[0]


def test_statements_that_may_change_any_name_of_their_module_count(digests):
    before = digests()
    patched = f"{SHARED}\nfor name in ('load',):\n    globals()[name] = unused\n"
    assert digests(shared=patched)[0] != before[0]
    assert digests(KERNEL + "\ntwice.hints = {}\n")[0] != before[0]


def test_what_a_function_imports_counts(digests):
    kernel = changed(KERNEL, "x * factor", "x * factor * more()")
    kernel = changed(kernel, "    # a reason\n", "    from sample_kernels.extra import more\n\n")
    extra = "def more():\n    return 1\n\n\ndef other():\n    return 2\n"
    before = digests(kernel, extra=extra)
    assert digests(kernel, extra=extra.replace("return 1", "return 3"))[0] != before[0]
    assert digests(kernel, extra=extra.replace("return 2", "return 3")) == before


def test_a_class_that_is_named_as_text_counts(digests):
    """As that of a kernel in CuTe DSL, whose module is imported to compile alone."""
    kernel = changed(KERNEL, "_SCALE = 2.0\n", '_SCALE = 2.0\n_LOOPS = "sample_kernels.lazy:Loops"\n')
    kernel = changed(kernel, "parameters=shared.arrays(problem)", "parameters=_LOOPS")
    lazy = "import cutlass\n\n\nclass Loops:\n    unroll = 2\n\n\nclass Others:\n    unroll = 3\n"
    before = digests(kernel, lazy=lazy)
    assert digests(kernel, lazy=lazy.replace("unroll = 2", "unroll = 4"))[0] != before[0]
    assert digests(kernel, lazy=lazy.replace("unroll = 2", "unroll = 4"))[1] == before[1]
    assert digests(kernel, lazy=lazy.replace("unroll = 3", "unroll = 4")) == before


def test_a_local_name_is_not_the_module_s(digests):
    kernel = changed(KERNEL, "def _grid(problem, sm_count):\n", "def _grid(problem, sm_count):\n    _UNUSED = 1\n")
    before = digests(kernel)
    assert digests(kernel.replace("_UNUSED = 3.0", "_UNUSED = 5.0")) == before


def test_functions_that_call_each_other_count_once(digests):
    kernel = changed(KERNEL, "* _SCALE", "* _SCALE * _less(factor)")
    kernel = changed(kernel, "@ct.kernel\n", "def _less(n):\n    return n and _double(n - 1, n)\n\n\n@ct.kernel\n")
    before = digests(kernel)
    assert digests(kernel.replace("n - 1", "n - 2"))[0] != before[0]


def test_moving_a_function_to_a_sibling_changes_nothing(digests):
    before = digests()
    (function,) = [part for part in SHARED.split("\n\n\n") if part.startswith("def grid_of")]
    shared = f"{SHARED.replace(function, '')}\nfrom sample_kernels.grids import grid_of\n"
    assert digests(shared=shared, grids=function + "\n") == before
    kernel = changed(
        KERNEL, "import grid_of, load as read", "import load as read\nfrom sample_kernels.grids import grid_of"
    )
    assert digests(kernel, shared=shared, grids=function + "\n") == before


def test_how_a_sibling_is_imported_changes_nothing(digests):
    relative = changed(KERNEL, "from sample_kernels import shared", "from . import shared")
    relative = changed(relative, "from sample_kernels.shared import", "from .shared import")
    assert digests(relative) == digests()


def test_specs_that_a_function_makes_have_digests_of_their_own(digests):
    kernel = KERNEL + FACTORY
    first, second = (digests(kernel, name=f"made_{name}") for name in ("first", "second"))
    assert first[0] != second[0]
    assert first[1] != second[1]
    kernel = changed(KERNEL, "y[0] = _double", "y[1] = _double") + FACTORY
    assert digests(kernel, name="made_first")[0] != first[0]
    assert digests(kernel, name="made_second") == second
    kernel = KERNEL + changed(FACTORY, "_double, 20", "_double, 30")
    assert digests(kernel, name="made_first") == first
    assert digests(kernel, name="made_second") == (second[0], digests(kernel, name="made_second")[1])
    assert digests(kernel, name="made_second")[1] != second[1]
    assert digests(KERNEL + FACTORY.replace("reference=reference", "reference=_inputs"), name="made_first") == first


@pytest.mark.parametrize("star", ["", "*, "], ids=["positional", "keyword"])
def test_what_a_call_leaves_out_is_the_default(digests, star):
    written_out = [digests(KERNEL + FACTORY, name=f"made_{name}") for name in ("first", "second")]
    factory = changed(FACTORY, "most, **rest", f"{star}most=10, **rest")
    factory = changed(factory, "twice, 10,", "twice,")
    factory = changed(factory, "_double, 20,", "_double, most=20,")
    assert [digests(KERNEL + factory, name=f"made_{name}") for name in ("first", "second")] == written_out
    factory = changed(factory, "most=10", "most=30")
    first, second = (digests(KERNEL + factory, name=f"made_{name}") for name in ("first", "second"))
    assert (first[0] == written_out[0][0], first[1] == written_out[0][1]) == (True, False)
    assert second == written_out[1]


def test_a_name_may_be_that_of_a_function(digests):
    kernel = changed(KERNEL, "Space, cdiv", "Space, cdiv, name_of")
    assert digests(changed(kernel, 'name="twice"', "name=name_of(twice)")) == digests(kernel)
    factory = "\n\ndef _spec(function):\n    return KernelSpec(name=name_of(function))\n"
    digests(kernel + factory + "\n\nFIRST = _spec(_double)\nSECOND = _spec(read)\nTHIRD = _spec(lambda x: x)\n")
    assert set(specs_of(module_named("sample_kernels.kernel"))) == {"twice", "_double", "load"}


def test_a_spec_that_is_another_but_for_a_field_counts_by_that_field(digests):
    def with_field(field):
        kernel = changed(KERNEL, "import functools", "import dataclasses")
        kernel = changed(kernel, "SPEC = KernelSpec(", "SPEC = dataclasses.replace(KernelSpec(")
        return digests(changed(kernel, "\n)\n\nSPECS", f"\n), {field})\n\nSPECS"))

    source, space = digests(KERNEL)
    assert with_field("flops=None") == (source, space)
    others = [with_field(f"default=lambda problem, target: Config(tile_n={n})") for n in (1, 2)]
    assert [other[0] for other in others] == [source, source]
    assert len({space, *(other[1] for other in others)}) == 3


def test_a_spec_that_another_launches_counts_by_what_makes_it_valid(digests):
    kernel = changed(KERNEL, "function=twice", "function=twice if plan_for(part.SPEC) else None")
    kernel = changed(kernel, "from sample_kernels import shared", "from sample_kernels import part, shared")
    part = KERNEL.replace("twice", "part").replace("sample_kernels.limits", "sample_kernels.limits")
    before = digests(kernel, part=part)
    for old, new in SPACE + NEITHER:
        if old in part:
            assert digests(kernel, part=changed(part, old, new)) == before, old
    assert digests(kernel, part=changed(part, "x * factor", "x / factor"))[0] != before[0]
    kernel = kernel.replace("plan_for(part.SPEC)", "part.SPEC.default(problem, None)")
    before = digests(kernel, part=part)
    assert digests(kernel, part=changed(part, "shared.power_of_two", "int"))[0] != before[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("SPEC = KernelSpec(", "SPEC = functools.partial(KernelSpec)("),
        ("    implement=", "    **{},\n    implement="),
        ('name="twice"', 'name="".join(["twice"])'),
    ],
)
def test_a_spec_that_cannot_be_read_goes_by_all_of_its_module(digests, old, new):
    kernel = changed(KERNEL, old, new)
    before = digests(kernel)
    assert before[0] == before[1] == digest_of_module("sample_kernels.kernel")
    assert digests(kernel.replace("_UNUSED = 3.0", "_UNUSED = 4.0")) != before


def test_a_spec_that_has_moved_within_its_package_is_found_by_its_name(digests, tmp_path, monkeypatch):
    """Records name the module where it stood: a file that is gone, has become a package, or holds other specs."""
    before = digests()
    assert digests(kernel="", moved=KERNEL) == before
    (tmp_path / "sample_kernels" / "kernel.py").unlink()
    forget()
    assert digests_of("sample_kernels.kernel", "twice").module == "sample_kernels.moved"
    note_digests(["sample_kernels.moved"], tmp_path / "digests.json")
    monkeypatch.setattr(source, "NOTES", tmp_path / "digests.json")
    monkeypatch.setattr(reachability, "modules_within", lambda name: pytest.fail(f"{name} was searched"))
    forget()
    assert digests_of("sample_kernels.kernel", "twice").source == before[0]
    monkeypatch.setattr(reachability, "modules_within", lambda _: ())
    with pytest.raises(ModuleNotFoundError, match=r"other_kernels\.kernel is not at hand"):
        digests_of("other_kernels.kernel", "twice")


def test_a_spec_that_two_modules_have_goes_by_the_one_that_was_named(digests):
    before = digests()
    assert digests(kernel="", moved=KERNEL, copied=KERNEL) != before
    assert digests(moved=KERNEL) == before


def test_a_composite_counts_the_kernels_that_it_launches_and_is_found_where_records_say_that_it_stood():
    name = "fused_linear_cross_entropy"
    assert digests_of(f"tilekern.kernels.{name}", name).module == f"tilekern.composites.{name}"
    files = source._worked_out(f"tilekern.composites.{name}", name)[1]
    assert {f"tilekern.{file}" for file in ("composites.head", "kernels.cross_entropy.fused")} <= set(files)


def test_every_spec_of_the_kernels_can_be_read():
    for name, spec in all_specs().items():
        readable = specs_of(module_named(spec.module))
        assert name in readable, f"{name}: write its spec as docs/add-a-kernel.md says under Digests"
        found = digests_of(spec.module, name)
        assert len({found.source, found.space, found.whole}) == 3


def test_no_two_specs_have_a_digest_in_common():
    found = [digests_of(spec.module, name).source for name, spec in all_specs().items()]
    assert len(set(found)) == len(found)


def test_nothing_is_imported_to_read_the_sources():
    code = (
        "import sys; from tilekern.source.digests import digests_of\n"
        "print(digests_of('tilekern.kernels.attention.forward', 'attention_forward').source)\n"
        "print(*{name.split('.')[0] for name in sys.modules} & {'torch', 'cuda'})\n"
        "print(*(name for name in sys.modules if name.startswith('tilekern.kernels')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    here = digests_of("tilekern.kernels.attention.forward", "attention_forward")
    assert ran.stdout.split("\n") == [here.source, "", "", ""], ran.stderr


def test_noted_digests_hold_for_the_files_that_they_were_made_from_alone(digests, tmp_path, monkeypatch):
    before = digests()
    notes = tmp_path / "digests.json"
    note_digests(["sample_kernels.kernel"], notes)
    monkeypatch.setattr(source, "NOTES", notes)
    monkeypatch.setattr(reachability, "module_named", lambda name: pytest.fail(f"{name} was parsed"))
    assert digests() == before
    monkeypatch.undo()
    monkeypatch.setattr(source, "NOTES", notes)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert digests(shared=changed(SHARED, "return x[0]", "return x[1]"))[0] != before[0]
    assert digests() == before
