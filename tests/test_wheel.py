"""The wheel: what is in it, and that both command lines run from it with no checkout in sight."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import release
from environments import BarePython
from packaging.requirements import Requirement
from packaging.version import Version

import tilekern

# One worker of pytest's builds and installs the wheel for all tests.
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("wheel")]

ROOT = Path(__file__).parents[1]
# The two rooms of tilekern that stand at the top of the repository, behind links.
ROOMS = ("tuning", "cache_tools")
# Outside of the packages, so that torch is imported where they are gone.
ENTRY = "tilekern_startup.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the build leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    without = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("tilekern", *ROOMS, "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=without)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", ENTRY):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    # So that bytecode that the build makes is beside the sources, where it could come into the wheel.
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run([*command, "-w", folder, source], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel's contents, and a function that runs Python with it from elsewhere."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(command, check=True, capture_output=True)

    def run(*arguments, path=site):
        env = {k: v for k, v in os.environ.items() if not k.startswith("TILEKERN_")} | {"PYTHONPATH": str(path)}
        command = [str(argument) for argument in arguments]
        return subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False)

    run.site = site
    return run


def test_it_holds_the_packages_and_their_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tilekern", ENTRY}
    assert "tilekern/py.typed" in names
    for folder, above in (("tilekern", ""), *((room, "tilekern/") for room in ROOMS)):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{above}{path.relative_to(ROOT)}" in names
    # The data packages have all of them.
    packs = {str(path.relative_to(ROOT)) for path in (ROOT / "tilekern" / "prebuilt").glob("*.pack")}
    inside = {name for name in names if name.endswith(".pack")}
    assert {"tilekern/prebuilt/qwen3-8b-h200.pack", "tilekern/prebuilt/qwen3-8b-h100.pack"} <= inside < packs
    assert wheel.stat().st_size <= 10_000_000


def test_a_release_may_have_it(wheel):
    release.check_wheel(wheel, release.package_files(ROOT), tilekern.__version__)


def test_it_names_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_string(archive.read(info).decode())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["Version"] == tilekern.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_all("Classifier") == project["classifiers"]
    assert metadata["Keywords"] == ",".join(project["keywords"])
    plain = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    assert set(map(Requirement, plain)) == set(map(Requirement, project["dependencies"]))
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert not any("tileiras" in need for need in plain)
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_it_works_with_the_dependencies_in_its_metadata_alone(installed, tmp_path):
    (metadata,) = installed.site.glob("*.dist-info/METADATA")
    needs = [line for line in message_from_string(metadata.read_text()).get_all("Requires-Dist") if ";" not in line]
    python = BarePython(tmp_path, needs, installed.site)
    code = "from tilekern.kernels import all_specs; import tilekern.runtime.dispatch; print(len(all_specs()))"
    ran = python.run("-c", code)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 80
    assert "pip install 'tilekern[tools]'" in python.run("-m", "tilekern.tune", "qwen3-8b").stderr


def test_the_version_stands_in_one_place_and_is_above_the_newest_in_the_changelog():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert release.own_version(ROOT / "tilekern" / "__init__.py") == tilekern.__version__
    version = Version(tilekern.__version__)
    assert str(version) == tilekern.__version__
    released = [Version(name) for name in re.findall(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)]
    assert released == sorted(released, reverse=True)
    # Only a release's own commit has its version.
    assert version.is_devrelease or version == released[0]
    assert version >= released[0]


def test_it_is_what_is_imported(installed):
    code = "import tilekern.tuning.cli, tilekern.cache_tools as tools; print(tilekern.__file__, tools.__path__[0])"
    ran = installed(sys.executable, "-c", code)
    ours = installed.site / "tilekern"
    assert ran.stdout.split() == [str(ours / "__init__.py"), str(ours / "cache_tools")]


def test_modules_of_users_that_are_called_as_our_folders_are_theirs(installed, tmp_path):
    for name in ROOMS:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not yours')")
    path = os.pathsep.join([str(tmp_path), str(installed.site)])
    for arguments in (("-m", "tilekern.tune", "--help"), ("-m", "tilekern.cache_tools", "--help")):
        ran = installed(sys.executable, *arguments, path=path)
        assert ran.returncode == 0, ran.stderr
    ran = installed(sys.executable, "-c", "import tilekern; print(tilekern.preflight)", path=path)
    assert "preflight" in ran.stdout, ran.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_copy_of_the_sources_that_lost_its_links_builds_nothing(tmp_path, room):
    """As of a ZIP, of whose links pip makes text files."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", ENTRY):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tilekern").mkdir()
    for name in ROOMS:
        path = tmp_path / "tilekern" / name
        path.write_text(f"../{name}") if name == room else path.mkdir()
    ran = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "are links, which this copy of the sources has lost; take git's or a tar" in ran.stderr


@pytest.mark.parametrize(
    "arguments", [("-m", "tilekern.tune", "--help"), ("-m", "tilekern.cache_tools", "ls", "--cache-dir", "empty")]
)
def test_both_modules_run(installed, arguments):
    ran = installed(sys.executable, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("tilekern-tune", ["--help"], "Tune the kernels of one MODEL"),
        ("tilekern-cache", ["ls", "--cache-dir", "empty"], "there is no cache at empty yet"),
    ],
)
def test_both_console_scripts_run(installed, name, arguments, part):
    ran = installed(sys.executable, installed.site / "bin" / name, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert part in ran.stdout


def test_bad_input_ends_a_console_script_with_its_exit_code(installed):
    ran = installed(sys.executable, installed.site / "bin" / "tilekern-tune", "nothing", "--gpu", "B200")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "unknown command or model 'nothing'" in ran.stderr


@pytest.mark.nightly
def test_a_plan_can_be_made_from_it(installed):
    """Digests of the kernels' sources need the sources, which the wheel brings."""
    command = ("qwen3-0.6b", "--gpu", "B200", "--stages", "plan", "--cache-dir", "cache", "--json")
    ran = installed(sys.executable, "-m", "tilekern.tune", *command)
    assert ran.returncode == 0, ran.stderr
    code = (
        "from tilekern.kernels import all_specs; from tilekern.spec.source import source_digest as d\n"
        "print(*[d(spec.module) for spec in all_specs().values()])"
    )
    assert installed(sys.executable, "-c", code).stdout == installed(sys.executable, "-c", code, path=ROOT).stdout


def test_its_digests_are_noted_so_that_a_job_parses_nothing(installed, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))  # where a checkout keeps its own
    code = (
        "import ast\nfrom tilekern.kernels import all_specs\nfrom tilekern.spec.source import source_digest\n"
        "modules = [spec.module for spec in all_specs().values()]\ndel ast.parse\n"
        "for name in modules: print(source_digest(name))"
    )
    ran = installed(sys.executable, "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert len(set(ran.stdout.split())) > 40
    assert "has no attribute 'parse'" in installed(sys.executable, "-c", code, path=ROOT).stderr
