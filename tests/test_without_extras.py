"""tilekern with nothing but its declared dependencies: no torch, transformers, numpy, click and rich."""

import json
import re
import tomllib

import pytest
import tokenizers
from environments import ROOT, BarePython
from test_imports import CORE

from tilekern.errors import EXTRA_OF

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("bare python")]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return BarePython(tmp_path_factory.mktemp("bare"), project["dependencies"])


def printed(ran):
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_it_is_bare(bare):
    code = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n)]))"
    assert printed(bare.run("-c", code, *EXTRA_OF, "cuda.tile", "msgspec", "pytest")) == ["cuda.tile", "msgspec"]


def test_every_module_of_the_core_is_imported(bare):
    code = "import importlib, json, sys; print(json.dumps([importlib.import_module(n).__name__ for n in sys.argv[1:]]))"
    assert len(CORE) > 150
    assert printed(bare.run("-c", code, *CORE)) == CORE


def test_a_lookup_finds_the_record_of_a_pack_in_the_wheel(bare, tmp_path):
    code = """
import json
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.spec.targets import resolve
spec = spec_named("swiglu_forward")
problem = spec.problem(rows=4096, columns=12288, dtype="bfloat16")
found = dispatch.find(spec, problem, resolve("H200"))
print(json.dumps([found.record.provenance, found.exact_target, found.load("aligned")[:4].decode("latin-1")]))
"""
    assert printed(bare.run("-c", code, TILEKERN_CACHE_DIR=str(tmp_path))) == ["measured", True, "\x7fELF"]


NAMES = {
    "from tilekern import apply": "tilekern.apply needs torch",
    "import tilekern; tilekern.AdamW": "tilekern.AdamW needs torch",
    "import tilekern; tilekern.tune('qwen3-8b', gpu='H200')": "tilekern.tune needs",
    "import tilekern; tilekern.preflight('qwen3-8b', gpu='H200')": "tilekern.preflight needs",
    "import tilekern\nwith tilekern.trace(gpu='H200'): pass": "tilekern.trace needs torch",
    "from tilekern.ops import swiglu": "tilekern.ops needs torch",
    "from tilekern.patch import reset": "tilekern.patch needs torch",
    **{
        f"import tilekern.integrations.{name}": f"tilekern.integrations.{name} needs torch"
        for name in ("losses", "liger", "trl", "hub_layers")
    },
}


@pytest.mark.parametrize("code", NAMES)
def test_a_name_that_needs_an_extra_says_which(bare, code):
    ran = bare.run("-c", code)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"tilekern.errors.ExtraMissing: {NAMES[code]}")
    package = last.split(" needs ")[1].partition(",")[0]
    assert last.endswith(f"{package}, which is not installed: pip install 'tilekern[{EXTRA_OF[package]}]'")


def test_it_is_an_import_error_with_the_package_s_name(bare):
    code = "import json\ntry: from tilekern import apply\nexcept ImportError as error: print(json.dumps(error.name))"
    assert printed(bare.run("-c", code)) == "torch"
    code = "import json, tilekern; print(json.dumps([tilekern.__version__, sum(map(len, tilekern.stats().values()))]))"
    assert printed(bare.run("-c", code))[1] > 500


COMMANDS = {
    "tilekern.tune": ("qwen3-8b", "--gpu", "H200"),
    "tilekern.cache_tools": ("ls",),
    "tilekern.run": ("train.py",),
    "tilekern.generate": ("gpt2", "--ids", "1"),
    "tilekern.patch": (),
}


@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_line_without_its_extra_is_one_line_and_2(bare, module):
    ran = bare.run("-m", module, *COMMANDS[module])
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line == f"tilekern: python -m {module} needs click, which is not installed: pip install 'tilekern[tools]'"


def with_extras(folder, *extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return BarePython(folder, [*project["dependencies"], *more])


def test_a_command_line_with_click_says_that_torch_is_missing(tmp_path):
    python = with_extras(tmp_path, "tools")
    ran = python.run("-m", "tilekern.cache_tools", "ls", "--cache-dir", "empty")
    assert ran.returncode == 0, ran.stderr
    ran = python.run("-m", "tilekern.tune", "qwen3-8b", "--gpu", "H200", "--cache-dir", "cache")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.endswith(", which is not installed: pip install 'tilekern[torch]'")


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        (["tools"], r"--prompt needs tokenizers, which is not installed: pip install 'tilekern\[text\]'"),
        # With a prompt's ids, the driver or the empty file is next.
        (["tools", "text"], r"(?!.*needs)(?!.*pip install)[^\n]+"),
    ],
    ids=["without", "with"],
)
def test_text_needs_tokenizers_beside_click_and_nothing_else(tmp_path, extras, said):
    python, folder = with_extras(tmp_path, *extras), tmp_path / "gpt2"
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").touch()
    ran = python.run("-m", "tilekern.generate", "gpt2", "--prompt", "a")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.fullmatch(f"tilekern: {said}\n", ran.stderr), ran.stderr


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tools = project["optional-dependencies"]["tools"]
    return BarePython(tmp_path_factory.mktemp("tools"), [*project["dependencies"], *tools])


def planned(python, model, **variables):
    options = ("--engine", "--gpu", "H200", "--decode", "2", "--invariant", "--stages", "plan", "--sweep", "sweep")
    return python.run("-m", "tilekern.tune", model, *options, "--cache-dir", "cache", "--json", **variables)


def test_the_engine_is_planned_of_a_preset_a_folder_and_the_hub_s_cache(with_tools, tmp_path):
    snapshot, config = tmp_path / "models--org--name" / "snapshots" / ("0" * 40), {"model_type": "gpt2"}
    config |= {"n_layer": 3, "n_embd": 48, "n_head": 3, "vocab_size": 50257}
    for folder in (snapshot, snapshot.parents[1] / "refs"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(config))
    found = []
    for model in ("mingpt-nano", str(snapshot), "org/name"):
        assert printed(planned(with_tools, model, HF_HUB_CACHE=str(tmp_path)))["model"].endswith("-engine")
        found.append(json.loads((with_tools.folder / "sweep" / "sweep.json").read_text())["problems"])
    assert found[0] == found[1] == found[2]
    assert {"kernel": "advance", "problem": {"rows": 2}, "launches": 1} in found[0]


def test_a_hub_id_that_is_not_in_the_cache_is_one_line(with_tools, tmp_path):
    ran = planned(with_tools, "org/name", HF_HUB_CACHE=str(tmp_path))
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    cache = f"the Hugging Face cache {tmp_path}"
    assert line.startswith(f"tilekern: org/name is not in {cache}, and huggingface_hub is not installed; pass the path")


def test_the_doctor_names_the_extras_as_no_fault(bare, tmp_path):
    document = json.loads(bare.run("-m", "tilekern.doctor", "--json", TILEKERN_CACHE_DIR=str(tmp_path)).stdout)
    assert not [line for line in document["wrong"] if "pip install" in line or "cannot" in line]
    told = " ".join(bare.run("-m", "tilekern.doctor", TILEKERN_CACHE_DIR=str(tmp_path)).stdout.split())
    assert "without the extras torch, tools, text: pip install 'tilekern[torch,tools,text]'" in told


def test_the_doctor_of_a_model_names_the_extra_that_it_needs(bare, tmp_path):
    ran = bare.run("-m", "tilekern.doctor", "qwen3-8b", "--gpu", "H200", "--json", TILEKERN_CACHE_DIR=str(tmp_path))
    needed = "tracing a model needs click, which is not installed: pip install 'tilekern[tools]'"
    assert f"qwen3-8b cannot be traced: {needed}" in json.loads(ran.stdout)["wrong"]
