"""The rules of imports, and the cost of `import tilekern`."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rooms import HEIGHT

import tilekern

ROOT = Path(__file__).parents[1]
# Two rooms of tilekern stand at the top of the repository, behind links, which rglob does not go through.
CLOSED = ("tuning", "cache_tools")
ROOMS_APART = [f"tilekern.{folder}" for folder in CLOSED]
FILES = sorted(path for folder in ("tilekern", *CLOSED) for path in (ROOT / folder).rglob("*.py"))
# Doors that show what a whole program of tilekern's makes of a job, and the command that does so for one lookup.
SEES_TUNING = ("tilekern.tune", "tilekern.doctor")
TOOLS = "tilekern.cache_tools"
# Of what lies above the cache, cache tools use what is named here: to explain a lookup, and to check variables.
TOOLS_MAY = {
    f"{TOOLS}.shared.installed": {"tilekern.kernels", "tilekern.compile.toolchain", "tilekern.spec"},
    f"{TOOLS}.commands.why": {"tilekern.runtime.dispatch"},
    f"{TOOLS}.commands.pack": {"tilekern.runtime.switches"},
    f"{TOOLS}.cli": {"tilekern.runtime.settings"},
    TOOLS: {"tilekern.spec.source"},
}
LEAVES = {"tilekern.spec", "tilekern.errors", "tilekern.warning"}
# `from tilekern import __version__` and the like are attributes of the package, not files of a room.
ATTRIBUTES = {"tilekern.__version__"}
COMPILING = re.compile(r"\bexport_kernel\(|cuda\.tile\._compile|--gpu-name|\bcute\.compile\(")
# The compiler beside cuTile's; the rest of tilekern knows backends, whichever they are.
COMPILER = re.compile(r"CuteKernel|cute_compiler|CuTe DSL|cutlass|\"cute\"")
CACHE_NEEDS = {"filelock", "msgspec", "platformdirs", "tilekern"}
# What one file of the cache imports inside functions, from an extra.
CACHE_EXTRAS = {"tilekern.cache.trust.signing": {"cryptography"}}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("tilekern", *parts) if parts[0] in CLOSED else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports(path, *, everywhere=True):
    """Dotted names that a file imports; those at the top level alone where not ``everywhere``."""
    return [name for name, is_inside in imported(path) if everywhere or not is_inside]


@functools.cache
def imported(path):
    """The names that a file imports, but for types, each with whether that is inside of a function."""
    text, found = path.read_text(encoding="utf-8"), []

    def look(statements, is_inside):
        for node in statements:
            if isinstance(node, ast.Import):
                found.extend((alias.name, is_inside) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                found.extend((named(node.module, alias.name), is_inside) for alias in node.names)
            elif not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
                is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                for field in ("body", "orelse", "handlers", "finalbody", "cases"):
                    look(getattr(node, field, ()), is_inside or is_function)

    if "import" in text:
        look(parsed(path).body, False)
    return found


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def named(module, name):
    full = f"{module}.{name}"
    return full if full in MODULES or full in ATTRIBUTES else module


def under(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def within(*prefixes):
    """The modules below these names; of the closed rooms those alone that are named themselves."""
    closed = [room for room in ROOMS_APART if not any(under(prefix, [room]) for prefix in prefixes)]
    return [name for name in MODULES if under(name, prefixes) and not under(name, closed)]


def strangers(modules, known, *, everywhere=True):
    """Yield a line for each unknown top-level package that modules import."""
    for module in modules:
        for name in imports(MODULES[module], everywhere=everywhere):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in known:
                yield f"{module} imports {name}"


def room_of(name):
    return name.split(".")[1] if "." in name else ""


@functools.cache
def by_name(path):
    """The modules that a file imports by a name that stands in its text."""
    if not re.search("import_module|__import__", path.read_text(encoding="utf-8")):
        return []
    calls = (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call))
    texts = [
        ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func).endswith(("import_module", "__import__"))
    ]
    return [name for name in MODULES for text in texts if re.search(rf"\b{re.escape(name)}(?![\w.])", text)]


def test_imports_run_downwards():
    """Imports by name too; only the package's own lazy names lead upwards."""
    wrong = []
    for module, path in MODULES.items():
        height = HEIGHT.get(room_of(module))
        assert height is not None or module == "tilekern", f"{module} stands in no room"
        ours = [name for name in (*imports(path), *by_name(path)) if name not in ATTRIBUTES and "." in name]
        wrong += [
            f"{module} imports {name}"
            for name in ours
            if under(name, ["tilekern"]) and module != "tilekern" and room_of(name) != room_of(module)
            and HEIGHT[room_of(name)] >= height
        ]  # fmt: skip
    assert not wrong


def test_no_modules_import_each_other():
    """Directly or through others, inside functions or out of them."""
    left = {
        module: {name for name in (*imports(path), *by_name(path)) if name in MODULES} - {module, "tilekern"}
        for module, path in MODULES.items()
        if module != "tilekern"
    }
    while free := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in free}
    assert not {module: needs & left.keys() for module, needs in left.items()}


def test_cache_tools_need_the_cache_and_little_else():
    for module in within(TOOLS):
        allowed = {TOOLS, "tilekern.cache", *LEAVES, *TOOLS_MAY[TOOLS], *TOOLS_MAY.get(module, ())}
        ours = [name for name in imports(MODULES[module]) if under(name, ["tilekern"]) and name not in ATTRIBUTES]
        assert not [f"{module} imports {name}" for name in ours if not under(name, allowed)]


STEPS = ["tilekern.ops", "tilekern.patch"]


@pytest.mark.parametrize(
    ("rooms", "closed"),
    [
        pytest.param(["tilekern"], ROOMS_APART, id="a training job loads neither tuner nor cache tools"),
        pytest.param(ROOMS_APART, STEPS, id="tools use no ops and patches, but to trace a step"),
    ],
)
def test_rooms_are_closed_to_others(rooms, closed):
    doors = [*SEES_TUNING, "tilekern.tuning.plan"]
    found = {name: imports(MODULES[name]) for name in within(*rooms) if not under(name, doors)}
    assert not [f"{module} imports {name}" for module in found for name in found[module] if under(name, closed)]


def test_nothing_imports_the_rooms_at_the_top_by_their_folders():
    """In a checkout that would be another module with other classes, and elsewhere a user's own ``tuning``."""
    here = [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    named = [path for path in here if re.search(rf"(import|from) +({'|'.join(CLOSED)})\b", path.read_text())]
    assert not [f"{path} imports {name}" for path in named for name in imports(path) if under(name, CLOSED)]


@pytest.mark.parametrize(
    "module", ["tilekern.tuning.options", "tilekern.tuning.preflight", "tilekern.tuning.serve.loop"]
)
@pytest.mark.processes
def test_modules_that_may_plan_do_not_load_torch(module):
    assert "torch" not in run(f"import sys, {module}; print(*sys.modules)")


def test_the_cache_needs_the_standard_library_and_a_parser_alone():
    assert not list(strangers(within("tilekern.cache"), CACHE_NEEDS, everywhere=False))
    for module in within("tilekern.cache"):
        assert not list(strangers([module], CACHE_NEEDS | CACHE_EXTRAS.get(module, set())))


# The rooms that work without torch; beside the classes of CuTe DSL, which a compiler imports, and a mode of torch's.
CORE_ROOMS = (
    "spec",
    "errors",
    "warning",
    "compile",
    "cache",
    "kernels",
    "runtime",
    "arrays",
    "inference",
    "generate",
)
APART = ["tilekern.kernels.cute", "tilekern.runtime.ordinary"]
CORE = sorted(name for name in MODULES if room_of(name) in CORE_ROOMS and not under(name, APART))


def test_the_core_loads_no_extra_when_it_is_imported():
    known = {"cuda", "filelock", "msgspec", "platformdirs", "tilekern"}
    assert not list(strangers(CORE, known, everywhere=False))


def test_kernels_import_torch_inside_functions_only():
    in_cute = within("tilekern.kernels.cute")
    kernels = [module for module in within("tilekern.kernels") if module not in in_cute]
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
    names = (
        "attention_keys", "attention_keys_wide", "attention_queries", "heads", "losses", "ring", "rows", "sharing",
        "sums", "warpgroups", "words",
    )  # fmt: skip
    assert importers == {f"tilekern.kernels.cute.{name}" for name in names}


def test_the_lowest_files_need_the_standard_library_alone():
    assert not list(strangers(within(*LEAVES), {"tilekern"}, everywhere=False))


def test_one_package_compiles_and_one_file_knows_the_launcher():
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if not under(module, ["tilekern.compile"]):
            assert not COMPILING.search(text), f"{module} compiles; tilekern.compile does"
        if not under(module, ["tilekern.compile", "tilekern.kernels", "tilekern.spec"]):
            assert not COMPILER.search(text), f"{module} names a compiler; ask its backend (tilekern.compile.backend)"
        if module != "tilekern.runtime.launcher":
            assert "def _compile(self, signature" not in text, f"{module} has the launcher's hook"


def test_thresholds_of_capabilities_stand_in_one_table():
    compared = re.compile(r"capability *[<>=]=|capability *[<>] *\d|\d *<=? *(target\.|self\._)?capability")
    wrong = [name for name, path in MODULES.items() if compared.search(path.read_text(encoding="utf-8"))]
    assert wrong == ["tilekern.spec.targets"]


def test_every_module_says_what_it_is_for():
    assert not [module for module, path in MODULES.items() if not ast.get_docstring(parsed(path))]


def run(code, *flags):
    ran = subprocess.run([sys.executable, *flags, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.mark.parametrize(
    "module",
    ["tilekern", "tilekern.cache", "tilekern.spec", "tilekern.spec.targets", "tilekern.errors", "tilekern.spec.source",
     "tilekern.doctor", "tilekern.generate"],
)  # fmt: skip
@pytest.mark.processes
def test_light_modules_load_nothing_heavy(module):
    loaded = run(f"import sys, {module}; print(*sys.modules)")
    assert module in loaded
    for heavy in ("torch", "cuda.tile", "transformers", "numpy", "rich", "click"):
        assert heavy not in loaded


@pytest.mark.processes
def test_importing_tilekern_takes_less_than_50_ms():
    """Measure processor time, which other processes of a busy machine do not lengthen."""
    code = "import time; started = time.process_time(); import tilekern; print(time.process_time() - started)"
    assert min(float(run(code)[0]) for _ in range(5)) < 0.05


@pytest.mark.processes
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


def test_tests_on_a_gpu_import_what_other_tests_define():
    """They do not run here, so a name that moved would be found on a GPU only."""
    tests = {path.stem: path for path in (ROOT / "tests").rglob("*.py")}
    wrong = []
    for path in (ROOT / "tests" / "gpu").glob("*.py"):
        for node in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)):
            if node.module in tests:
                text = "\n".join(re.findall(r"^[^\s#].*", tests[node.module].read_text(), re.M))
                missing = [alias.name for alias in node.names if not re.search(rf"\b{alias.name}\b", text)]
                wrong += [f"{path.name}: {node.module}.{name}" for name in missing]
            elif node.module.startswith("test_"):
                wrong.append(f"{path.name}: {node.module}")
    assert not wrong
