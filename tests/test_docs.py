"""The documentation runs: README, the pages of docs/, and what they say of files, names and messages.

A comment before a block of code says how it is run here; CONTRIBUTING.md lists these markers.
"""

import ast
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import environments
import pytest
import torch
from marks import needs_compiler
from warm_python import warm_python

import tilekern
from benchmarks.pages.readme import with_training
from benchmarks.results import read_folder
from tilekern import ops
from tilekern.cache import PROVENANCES, Record, Store
from tilekern.spec.targets import LISTED, resolve
from tilekern.tuning.plan.presets import PRESETS

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
PACKAGES = ("tilekern", "tuning", "cache_tools", "benchmarks")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = ROOT / "README.md"
DOCS = ROOT / "docs"
ARCHITECTURE = DOCS / "architecture.md"
SMALLER = " --ops swiglu --tokens 64"
SET_UP = "python3 -m venv .venv && .venv/bin/pip install -q torch==2.13.0 -e '.[all,compile]' && "
MARKERS = ("", "test: smaller", "test: set-up", "test: needs a GPU", "test: has results", "run")
_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def every_page(test):
    """Run a test on all pages, in the runs that take a share of the parameters too."""
    return pytest.mark.share(1)(_page(test))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the comment that stands before it."""

    marker: str
    language: str
    code: str


def blocks(page, language=None):
    found = re.findall(r"^(?:<!-- ([^\n]*?) -->\n)?```(\w+)\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(*parts) for parts in found if language in (None, parts[1])]


def pages_in_order():
    """README and the pages of docs/ in the order in which its list of them names them, which is that of a reader."""
    linked = re.findall(r"\]\((docs/[\w-]+\.md)\)", README.read_text().split("## Documentation")[1])
    return [README, *(ROOT / name for name in dict.fromkeys(linked))]


def runs_here(block):
    """Whether a block runs in the order of the pages; those of the worked example run in a copy of the tree."""
    return block.marker != "run" and not block.marker.startswith(("test: not here, ", "file: "))


def environment(tree=ROOT, **more):
    """Return a user's environment without pytest's or tilekern's settings; Python finds a tree first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environments.environment(tree, without=("TILEKERN_", "PYTEST_"), PATH=path, HF_HUB_OFFLINE="1", **more)


def bash(code, folder, env):
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def smaller(code):
    return re.sub(r"^(.*python -m tilekern\.tune .*)$", rf"\1{SMALLER}", code, flags=re.M)


@every_page
def test_every_block_is_of_a_known_kind(page):
    for block in blocks(page):
        assert block.language in ("bash", "python", "toml", "text"), block
        known = block.marker in MARKERS or block.marker.startswith(("test: not here, ", "file: "))
        assert known, block.marker
    assert page.read_text().count("```") == 2 * len(blocks(page))


def anchors(page):
    """The places of a page that a link can name, as GitHub makes them of its titles."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith("https://"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_readme_links_every_page():
    assert {README, *DOCS.glob("*.md")} == set(pages_in_order())


def test_the_site_is_built_and_each_link_and_anchor_in_it_leads_somewhere(tmp_path):
    pytest.importorskip("material", reason="pip install 'tilekern[docs]'")
    env = environment(NO_MKDOCS_2_WARNING="1")
    ran = bash(f"python -m mkdocs build --strict -f docs/mkdocs.yml -d {tmp_path}/site", ROOT, env)
    assert ran.returncode == 0, ran.stderr
    for page in PAGES:
        path = page.relative_to(ROOT).with_suffix("")
        assert (tmp_path / "site" / ("" if page == README else path) / "index.html").exists(), page


def test_the_readme_is_four_screens_long():
    assert len(README.read_text().splitlines()) <= 200


@needs_compiler
def test_the_commands_of_the_readme_run_and_each_problem_that_they_tune_has_a_winner(tmp_path):
    cache = tmp_path / "cache"
    with warm_python(environment(TILEKERN_CACHE_DIR=str(cache))) as env:
        output = run_the_pages([README], tmp_path, env)
    for part in ("qwen3-0.6b on B200", "predicted", "packed ", "unpacked "):
        assert part in output, output
    planned = {(problem["kernel"], json.dumps(problem["problem"])) for plan in cache.glob("sweeps/*/sweep.json")
               for problem in json.loads(plan.read_text())["problems"]}  # fmt: skip
    records = [entry.record for entry in Store(cache).entries()]
    assert planned == {(record.kernel, json.dumps(record.problem)) for record in records}
    assert len(planned) >= 2
    for record in records:
        assert record.config
        assert (record.target["name"], record.provenance) == ("B200", "predicted")


@needs_compiler
@pytest.mark.nightly
def test_the_commands_of_the_pages_run(tmp_path):
    """All of them in their order, in one folder, with one cache."""
    with warm_python(environment(TILEKERN_CACHE_DIR=str(tmp_path / "cache"))) as env:
        output = run_the_pages(pages_in_order(), tmp_path, env)
    for part in ("qwen3-0.6b on B200", "predicted", "qwen3-8b on B200", "qwen3-8b on H200", "carry sweep-h200",
                 "unpacked 2 records", "packed 2 records into qwen3-b200.pack", "0 broken, 0 stale",
                 "qwen3-b200.pack', '"):  # fmt: skip
        assert part in output, output


def run_the_pages(pages, folder, env):
    """Run the commands; what they print."""
    output = ""
    every = [(page.name, block) for page in pages for block in blocks(page, "bash") if runs_here(block)]
    for page, block in every:
        code, marker = block.code, block.marker
        if marker == "test: set-up":
            assert code.startswith(SET_UP)
            # Attention alone compiles for three minutes; a smaller command tunes below.
            code = code.removeprefix(SET_UP).replace(".venv/bin/", "").replace(" && ", " --dry-run\n", 1)
        if marker == "test: smaller":
            code = smaller(code)
        if marker == "test: has results":
            assert not (folder / "sweep-h200" / "results.pack").exists()
            stand_in = "python -m tilekern.tune qwen3-8b --gpu H200 --sweep sweep-h200 --cache-dir gpu-host"
            code = f"{stand_in}{SMALLER}\n{code}"
        ran = bash(code, folder, env)
        output += ran.stdout
        if marker == "test: needs a GPU":
            assert ran.returncode == 2, f"{page}: {code}\n{ran.stderr}"
            assert ran.stderr.count("\n") <= 2
            assert "GPU" in ran.stderr.splitlines()[-1]
        else:
            assert ran.returncode == 0, f"{page}: {code}\n{ran.stdout}\n{ran.stderr}"
    return output


PYTHON = """
import json, sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM

blocks, folder = json.load(open(sys.argv[1])), "Qwen/Qwen3-8B"
config = Qwen3Config(hidden_size=80, num_attention_heads=5, num_key_value_heads=1, head_dim=16, vocab_size=331,
                     intermediate_size=208, num_hidden_layers=2)
Qwen3ForCausalLM(config).save_pretrained(folder)
names, stepped = {}, False
for page, code in blocks:
    exec(compile(code, page, "exec"), names)
    if "model" in names and not stepped:
        ids, stepped = torch.arange(12).reshape(2, 6), True
        names["model"](input_ids=ids, labels=ids).loss.backward()
        counted = names["tilekern"].stats()
        for kernel in ("rms_norm_backward", "swiglu_backward_remake", "qk_norm_rope_forward"):
            assert counted[kernel]["launches"], counted
print("ran", len(blocks))
"""


def test_the_python_of_the_pages_runs(tmp_path):
    """All of it in one process, by the interpreter, on a tiny model that stands where the hub's would."""
    pages = [(page, block) for page in pages_in_order() for block in blocks(page, "python")]
    code = [(page.name, block.code) for page, block in pages if runs_here(block)]
    (tmp_path / "blocks.json").write_text(json.dumps(code))
    (tmp_path / "driver.py").write_text(PYTHON)
    env = environment(TILEKERN_INTERPRET="1", TILEKERN_CACHE_DIR=str(tmp_path / "cache"))
    ran = bash("python -W error::UserWarning:tilekern driver.py blocks.json", tmp_path, env)
    assert ran.returncode == 0, ran.stderr
    assert f"ran {len(code)}" in ran.stdout
    assert "swiglu" in ran.stdout


def test_a_package_brings_its_packs_along_as_its_page_says(tmp_path):
    (block,) = blocks(DOCS / "shipping.md", "toml")
    ((group, entries),) = tomllib.loads(block.code)["project"]["entry-points"].items()
    ((name, module),) = entries.items()
    (tmp_path / module).mkdir()
    (tmp_path / module / "h200.pack").touch()
    info = tmp_path / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")
    code = "from tilekern.cache import default_layers; print([layer.name for layer in default_layers()])"
    env = environment(f"{tmp_path}{os.pathsep}{ROOT}", TILEKERN_CACHE_DIR="cache")
    ran = bash(f'python -c "{code}"', tmp_path, env)
    assert f"{name}:h200" in ran.stdout, ran.stderr


def sources(packages=PACKAGES):
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def messages():
    """Every text in the code, with … for what is filled in."""
    for path in [*sources(PACKAGES[:3]), ROOT / "tilekern_startup.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_the_troubleshooting_table_are_those_of_the_code():
    table = (DOCS / "troubleshooting.md").read_text()
    quoted = [cell for row in re.findall(r"^\| (`.*?) \| ", table, re.M) for cell in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 20
    known = set(messages())
    for line in quoted:
        parts = line.split("…")
        pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
        # A pattern is slow to say no, so it is asked last.
        assert any(pattern.search(text) for text in known if all(part in text for part in parts)), line


def test_the_table_of_variables_is_complete():
    read = {name for path in sources(PACKAGES[:3]) for name in re.findall(r"TILEKERN_[A-Z_]+", path.read_text())}
    section = (DOCS / "reference.md").read_text().split("## Environment variables")[1].split("\n## ")[0]
    assert read == set(re.findall(r"^\| `(TILEKERN_[A-Z_]+)`", section, re.M))


def test_the_list_of_gpus_is_complete():
    section = (DOCS / "reference.md").read_text().split("## GPUs")[1].split("\n## ")[0]
    rows = {arch: cell.split(", ") for arch, cell in re.findall(r"^\| `(sm_\d+)` \| (.+) \|$", section, re.M)}
    assert rows == {arch: [gpu.name for gpu in LISTED if gpu.arch == arch] for arch in rows}
    assert sum(map(len, rows.values())) == len(LISTED)
    for example in re.findall(r"^\| (?:a|an) [^|]*\| ([^|]+) \|", section, re.M):
        for name in re.findall(r"`\"?([^`\"]+)\"?`", example):
            assert resolve(name).key


def test_the_pages_name_every_preset_op_public_name_and_command():
    from tilekern.cache_tools.cli import app

    reference, tuning = (DOCS / "reference.md").read_text(), (DOCS / "tuning.md").read_text()
    assert not [name for name in PRESETS if f"`{name}`" not in tuning]
    unlisted = [name for name in ops.__all__ if f"`{name}`" not in reference]
    assert not unlisted, "add them to the list under Ops in docs/reference.md"
    assert not [name for name in tilekern.__all__[1:] if f"`tilekern.{name}`" not in reference]
    used = "".join((DOCS / name).read_text() for name in ("cache.md", "shipping.md", "trust.md"))
    missing = [name for name in app.commands if f"`{name}`" not in used and f"cache_tools {name}" not in used]
    assert not missing


def test_the_signatures_of_the_reference_are_those_of_the_code(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["signatures.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DOCS / "signatures.py"), run_name="__main__")
    assert not ended.value.code, capsys.readouterr().err


def test_the_readme_has_the_table_that_the_results_make():
    text = README.read_text()
    assert with_training(text, read_folder(ROOT / "benchmarks" / "results")) == text


def test_the_two_scripts_fit_the_readme():
    script, door = ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"
    assert "torch==2.13.0" in SET_UP
    assert "torch==2.13.0" in script.read_text()
    assert os.access(door, os.X_OK)
    assert "tests/run.sh" in door.read_text()
    for path in (script, door):
        assert path.read_text().startswith("#!/usr/bin/env bash\n")
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"compile", "test"} <= set(extras)


def resolves(dotted):
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for name in parts[at:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@every_page
def test_names_and_files_that_a_page_mentions_exist(page):
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
    for text in quoted:
        if re.fullmatch(r"(tilekern|tuning|cache_tools)(\.\w+)+(\(.*\))?", text):
            name = text.partition("(")[0]
            assert name in ("tilekern.prebuilt", "tilekern.specs") or resolves(name), text
        elif re.fullmatch(r"(tilekern|tuning|cache_tools|tests|docs|benchmarks)/[\w/.]+", text):
            assert (ROOT / text).exists() or text == "tilekern/prebuilt/", text


def test_the_cache_s_forms_name_every_field_of_a_record():
    text = (DOCS / "cache-format.md").read_text()
    assert not [field for field in Record.__struct_fields__ if f"`{field}`" not in text]


def test_architecture_names_every_file_and_guard():
    text = ARCHITECTURE.read_text()
    for provenance in PROVENANCES:
        assert f"`{provenance}`" in text
    for path in [p for p in (ROOT / "tilekern").glob("*.py") if p.name not in ("__init__.py", "errors.py")]:
        assert f"`tilekern/{path.name}`" in text, path.name
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for guard in re.findall(r"`(test_\w+|Test\w+)`", text):
        assert re.search(rf"(def|class) {guard}\b", tests), guard


def test_architecture_names_every_file_that_uses_private_parts_of_cuda_tile():
    text = ARCHITECTURE.read_text().split("## Private parts of cuda-tile")[1]
    for path in sources(PACKAGES[:3]):
        if re.search(r"cuda\.tile\._|\._pyfunc|\"_pyfunc\"", path.read_text()):
            assert f"`{path.relative_to(ROOT)}`" in text, path


@needs_compiler
@pytest.mark.nightly
def test_the_worked_example_works_as_it_is_written(tmp_path):
    """In a copy of the tree without the files of the example: the page's are written, and the commands are run."""
    page = ROOT / "docs" / "add-a-kernel.md"
    without = shutil.ignore_patterns("__pycache__", "*.pack")
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    files = [block for block in blocks(page) if block.marker.startswith("file: ")]
    for block in files:
        path = tmp_path / block.marker.removeprefix("file: ")
        assert path.read_text() == block.code, f"{path.name} is not what the page shows"
        path.unlink()
    assert len(files) == 3
    # What stands on the example.
    standing = [*tmp_path.rglob("*fused_add_layer_norm*"), *(tmp_path / "tilekern/kernels/early").iterdir()]
    above = {path: path.read_bytes() for path in standing}
    for path in above:
        path.unlink()
    # The suite draws as many examples for these kernels as for all others; here a few show that the commands work.
    env = environment(tmp_path, TILEKERN_CACHE_DIR=str(tmp_path / "cache"), HYPOTHESIS_PROFILE="quick")
    known = "from tilekern import kernels, ops; print(*kernels.all_specs(), *ops.__all__)"
    without = bash(f'python -c "{known}"', tmp_path, env)
    assert "swiglu_forward" in without.stdout, without.stderr
    assert "layer_norm" not in without.stdout, "another file has a part of the example"
    for block in files:
        (tmp_path / block.marker.removeprefix("file: ")).write_text(block.code)
    for path, content in above.items():
        path.write_bytes(content)
    with warm_python(env) as env:
        run_the_example(page, tmp_path, env)


def run_the_example(page, folder, env):
    """Run the page's commands, whose tests must be as many as it needs."""
    for block in blocks(page, "bash"):
        assert block.marker == "run"
        ran = bash(block.code, folder, env)
        assert ran.returncode == 0, f"{block.code}\n{ran.stdout}\n{ran.stderr}"
        if "pytest" in block.code:
            passed = int(re.search(r"(\d+) passed", ran.stdout)[1])
            assert passed >= (30 if "test_all_specs" in block.code else 5), ran.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_texts_name_no_path_of_a_machine():
    for page in PAGES:
        assert not re.search(r"(?<![\w.<])/(home|root|work|tmp|Users)/", page.read_text()), page
