"""Who may import whom, and what `import tilekern` costs."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilekern

ROOT = Path(__file__).parents[1]
# Two rooms of tilekern stand at the top of the repository, behind links, which rglob does not go through.
CLOSED = ("tuning", "cache_tools")
ROOMS_APART = [f"tilekern.{folder}" for folder in CLOSED]
FILES = sorted(path for folder in ("tilekern", *CLOSED) for path in (ROOT / folder).rglob("*.py"))
# What the files of a room may import of tilekern and its friends; the longest matching prefix counts. Imports run
# downwards only: patch, ops, composites, kernels and dispatch, cache and launcher and toolchain, spec and targets and
# errors.
LEAVES = {"tilekern.spec", "tilekern.targets", "tilekern.errors", "tilekern.warning", "tilekern.requirements"}
RUNTIME, RANKS, TRACING = "tilekern.runtime", "tilekern.runtime.ranks", "tilekern.tracing"
TOOLS = "tilekern.cache_tools"
DIGESTS = "tilekern.source.digests"
MAY_IMPORT = {
    "tilekern": {"tilekern"},
    "tilekern.errors": set(),
    "tilekern.warning": {"tilekern.errors"},
    "tilekern.locks": set(),
    "tilekern.points": set(),
    "tilekern.space": {"tilekern.points", "tilekern.targets"},
    "tilekern.spec": {"tilekern.points", "tilekern.space", "tilekern.targets"},
    "tilekern.targets": {"tilekern.errors"},
    "tilekern.requirements": {"tilekern.warning"},
    "tilekern.devices": {"tilekern.targets"},
    "tilekern.source.syntax": set(),
    "tilekern.source.reachability": {"tilekern.source.syntax"},
    "tilekern.source.whole_modules": {"tilekern.source.reachability"},
    "tilekern.source": {"tilekern.source"},
    "tilekern.cubin": set(),
    "tilekern.cache": {"tilekern.cache", "tilekern.warning"},
    "tilekern.garbage": set(),
    "tilekern.frontend": LEAVES | {"tilekern.garbage"},
    "tilekern.cute_compiler": LEAVES | {"tilekern.cubin", "tilekern.garbage"},
    "tilekern.toolchain": LEAVES | {"tilekern.cubin", "tilekern.frontend", "tilekern.cute_compiler"},
    "tilekern.launcher": LEAVES,
    "tilekern.rebinding": set(),
    "tilekern.interpreter": {"tilekern.errors", "tilekern.interpreter", "tilekern.rebinding"},
    "tilekern.kernels": LEAVES | {"tilekern.kernels"},
    "tilekern.kernels.cute": LEAVES | {"tilekern.kernels", "tilekern.rebinding"},
    "tilekern.composites": LEAVES | {"tilekern.kernels", "tilekern.composites"},
    RUNTIME: set(),
    TRACING: set(),
    f"{RUNTIME}.libraries": LEAVES,
    "tilekern.driver": LEAVES | {"tilekern.launcher"},
    f"{RUNTIME}.plans": LEAVES | {"tilekern.driver", "tilekern.interpreter", "tilekern.launcher"},
    f"{RUNTIME}.records": LEAVES | {"tilekern.cache", "tilekern.toolchain", DIGESTS},
    f"{RUNTIME}.provisional": LEAVES | {"tilekern.cache", "tilekern.locks", "tilekern.settings", f"{RUNTIME}.plans"},
    f"{RANKS}.held": {"tilekern.cache"},
    f"{RANKS}.snapshot": LEAVES | {"tilekern.cache", "tilekern.kernels", f"{RANKS}.held", DIGESTS},
    f"{RUNTIME}.defaults": LEAVES | {"tilekern.cache", f"{RUNTIME}.records", DIGESTS},
    f"{RANKS}.agreement": LEAVES | {"tilekern.cache", "tilekern.toolchain", f"{RUNTIME}.defaults", f"{RANKS}.snapshot"},
    f"{RUNTIME}.dispatch": LEAVES
    | {f"tilekern.{name}" for name in ("cache", "driver", "interpreter", "launcher", "locks", "toolchain")}
    | {DIGESTS}
    | {f"{RUNTIME}.{name}" for name in ("defaults", "libraries", "plans", "provisional", "ranks.agreement", "records")},
    f"{RUNTIME}.counting": {"tilekern.kernels", f"{RUNTIME}.dispatch"},
    f"{RANKS}.peers": LEAVES,
    f"{RANKS}.verdict": LEAVES | {"tilekern.cache"},
    f"{RANKS}.exchange": LEAVES
    | {"tilekern.cache", *(f"{RANKS}.{name}" for name in ("agreement", "held", "peers", "snapshot"))},
    f"{RANKS}.comparing": {"tilekern"},
    f"{RUNTIME}.warmup": {"tilekern"},
    f"{TRACING}.ordinary": set(),
    f"{TRACING}.recorder": LEAVES
    | {"tilekern.cache", f"{RUNTIME}.dispatch", f"{RUNTIME}.plans", f"{TRACING}.ordinary"},
    f"{TRACING}.stepping": LEAVES | {"tilekern.ops", "tilekern.patch"},
    "tilekern.ops": LEAVES | {"tilekern.composites", "tilekern.kernels", "tilekern.ops", f"{RUNTIME}.dispatch"},
    "tilekern.losses": {"tilekern.ops"},
    "tilekern.layers": {"tilekern.ops", "tilekern.patch"},
    "tilekern.trl": LEAVES | {"tilekern.ops"},
    "tilekern.patch": {"tilekern"},
    "tilekern.awaiting": set(),
    "tilekern.implementation": {"tilekern.awaiting", "tilekern.patch"},
    "tilekern.switches": {"tilekern.errors"},
    "tilekern.settings": {"tilekern.errors", "tilekern.switches"},
    "tilekern.startup": {"tilekern.awaiting", "tilekern.errors", "tilekern.settings", "tilekern.warning"},
    "tilekern.run": {"tilekern"},
    "tilekern.liger": {"tilekern"},
    "tilekern.tune": {"tilekern"},
    "tilekern.doctor": {"tilekern"},
    # Of the ops and the patches, tuning's plan/ alone: to trace a step.
    "tilekern.tuning": {"tilekern"},
    # What explains a lookup of a job must ask what the job asks.
    f"{TOOLS}.shared.here": LEAVES | {"tilekern.cache", "tilekern.kernels", "tilekern.toolchain"},
    # It is copied beside a tilekern that is not there before, so it imports by name.
    f"{TOOLS}.shared.hub_kernel": set(),
    f"{TOOLS}.commands.why": {"tilekern.cache", "tilekern.warning", f"{RUNTIME}.dispatch", TOOLS},
    TOOLS: {TOOLS, DIGESTS} | {f"tilekern.{name}" for name in ("cache", "errors", "settings", "warning")},
}
# `from tilekern import __version__` and the like are attributes of the package, not files of a room.
ATTRIBUTES = {"tilekern.__version__"}
COMPILING = re.compile(r"\bexport_kernel\(|cuda\.tile\._compile|--gpu-name|\bcute\.compile\(")
CACHE_NEEDS = {"filelock", "msgspec", "platformdirs", "tilekern"}
# What one file of the cache imports inside functions, from an extra.
CACHE_EXTRAS = {"tilekern.cache.trust.signing": {"cryptography"}}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("tilekern", *parts) if parts[0] in CLOSED else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def imports(path, *, everywhere=True):
    """Dotted names that a file imports; those at the top level alone where not ``everywhere``."""
    return list(imported(path, everywhere))


def imported(path, everywhere):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    inside = set()
    if not everywhere:
        functions = (
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )
        inside = {id(inner) for node in functions for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in typing_only or id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (named(node.module, alias.name) for alias in node.names)


def named(module, name):
    full = f"{module}.{name}"
    return full if full in MODULES or full in ATTRIBUTES else module


def under(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def rule_of(name, rules):
    return max((prefix for prefix in rules if under(name, [prefix])), key=len)


def within(*prefixes):
    """The modules below these names; of the closed rooms those alone that are named themselves."""
    closed = [room for room in ROOMS_APART if not any(under(prefix, [room]) for prefix in prefixes)]
    return [name for name in MODULES if under(name, prefixes) and not under(name, closed)]


def strangers(modules, known, *, everywhere=True):
    """What modules import at the first level of names that is not known, as lines that say who imports what."""
    for module in modules:
        for name in imports(MODULES[module], everywhere=everywhere):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in known:
                yield f"{module} imports {name}"


def test_imports_run_downwards():
    wrong = []
    for module, path in MODULES.items():
        allowed = {"tilekern"}
        if module != "tilekern":
            allowed = MAY_IMPORT[rule_of(module, set(MAY_IMPORT) - {"tilekern"})]
        ours = [name for name in imports(path) if under(name, ["tilekern"]) and name not in ATTRIBUTES]
        wrong += [f"{module} imports {name}" for name in ours if not under(name, allowed)]
    assert not wrong


STEPS = ["tilekern.ops", "tilekern.patch", "tilekern.tracing.stepping"]


@pytest.mark.parametrize(
    ("rooms", "closed"),
    [
        pytest.param(["tilekern"], ROOMS_APART, id="a training job loads neither tuner nor cache tools"),
        pytest.param(ROOMS_APART, STEPS, id="tools use no ops and patches, but to trace a step"),
    ],
)
def test_rooms_are_closed_to_others(rooms, closed):
    doors = ["tilekern.tune", "tilekern.doctor", "tilekern.tuning.plan"]
    found = {name: imports(MODULES[name]) for name in within(*rooms) if not under(name, doors)}
    assert not [f"{module} imports {name}" for module in found for name in found[module] if under(name, closed)]


def test_nothing_imports_the_rooms_at_the_top_by_their_folders():
    """In a checkout that would be another module with other classes, and elsewhere a user's own ``tuning``."""
    here = [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert not [f"{path} imports {name}" for path in here for name in imports(path) if under(name, CLOSED)]


@pytest.mark.parametrize(
    "module", ["tilekern.tuning.options", "tilekern.tuning.preflight", "tilekern.tuning.serve.tuner"]
)
def test_what_may_plan_loads_no_torch_before_it_does(module):
    assert "torch" not in run(f"import sys, {module}; print(*sys.modules)")


def test_the_cache_needs_the_standard_library_and_a_parser_alone():
    assert not list(strangers(within("tilekern.cache"), CACHE_NEEDS, everywhere=False))
    for module in within("tilekern.cache"):
        assert not list(strangers([module], CACHE_NEEDS | CACHE_EXTRAS.get(module, set())))


def test_kernels_import_torch_inside_functions_only():
    in_cute = within("tilekern.kernels.cute")
    kernels = [module for module in within("tilekern.kernels", "tilekern.composites") if module not in in_cute]
    assert not list(strangers(kernels, {"cuda", "tilekern"}, everywhere=False))
    assert not list(strangers(kernels, {"cuda", "tilekern", "torch"}))
    assert not list(strangers(in_cute, {"cuda", "cutlass", "tilekern"}))


@pytest.mark.slow
def test_kernels_of_cute_dsl_are_imported_to_compile_alone():
    importers = {
        module
        for module, path in MODULES.items()
        if any(name.startswith("tilekern.kernels.cute.") for name in imports(path))
    }
    names = ("heads", "long_rows", "losses", "pairs", "positions", "ring", "rows", "sharing", "sums", "turns", "words")
    assert importers == {f"tilekern.kernels.cute.{name}" for name in names}


def test_the_lowest_files_need_the_standard_library_alone():
    assert not list(strangers(sorted(LEAVES | {"tilekern.source.digests"}), {"tilekern"}, everywhere=False))


def test_one_file_compiles_and_one_knows_the_launcher():
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if module not in ("tilekern.toolchain", "tilekern.frontend", "tilekern.cute_compiler"):
            assert not COMPILING.search(text), f"{module} compiles; tilekern.toolchain does"
        if module != "tilekern.launcher":
            assert "def _compile(self, signature" not in text, f"{module} has the launcher's hook"


def test_every_module_says_what_it_is_for():
    assert not [module for module, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))]


def run(code, *flags):
    ran = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    "module",
    ["tilekern", "tilekern.cache", "tilekern.spec", "tilekern.targets", "tilekern.errors", "tilekern.source.digests",
     "tilekern.doctor"],
)  # fmt: skip
def test_what_only_looks_loads_nothing_heavy(module):
    loaded = run(f"import sys, {module}; print(*sys.modules)")
    assert module in loaded
    for heavy in ("torch", "cuda.tile", "transformers", "numpy", "rich", "click"):
        assert heavy not in loaded


def test_importing_tilekern_takes_less_than_50_ms():
    """Of the processor's time, which other processes of a busy machine do not lengthen."""
    code = "import time; started = time.process_time(); import tilekern; print(time.process_time() - started)"
    assert min(float(run(code)[0]) for _ in range(5)) < 0.05


def test_listing_a_cache_never_loads_torch(tmp_path):
    code = (
        "import sys; from tilekern.cache_tools.__main__ import main\n"
        "sys.argv = ['cache_tools', 'ls', '--cache-dir', sys.argv[1], '--json']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "print(*(name for name in ('torch', 'cuda.tile', 'transformers') if name in sys.modules), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.strip() == ""


@pytest.mark.parametrize("name", tilekern.__all__)
def test_every_public_name_resolves(name):
    assert getattr(tilekern, name) is not None
    assert name in dir(tilekern)


def test_a_name_that_is_not_there_raises():
    with pytest.raises(AttributeError, match="module 'tilekern' has no attribute 'aply'"):
        tilekern.aply  # noqa: B018
