"""Requirements of a machine: version ranges, the driver, and a first launch if one is not met."""

import ctypes
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from environments import ROOT
from one_record import GPU, SIZES, SPEC

from tilekern.compile.cute_compiler import CuteDsl
from tilekern.doctor.machine import devices
from tilekern.errors import EXTRA_OF, CacheMiss, InputError, TilekernWarning
from tilekern.runtime import dispatch, requirements
from tilekern.runtime.requirements import (
    EXTRAS,
    LEAST_DRIVER,
    NEEDS,
    PYTHON,
    TILEIRAS,
    asked_by,
    driver_unmet,
    fits,
    unmet,
)
from tilekern.spec.targets import resolve
from tilekern.tuning.measure import gpu

with_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed, which compiles the driver's stub")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The stub of a driver, compiled."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("cuda_driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


@pytest.fixture
def fresh():
    """Forget checked requirements, before and after."""
    unmet.cache_clear()
    yield
    unmet.cache_clear()


@pytest.fixture
def driver(library, monkeypatch, fresh):
    """Have the stub be this machine's driver; a function says what it answers."""
    real = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *rest: real(library if name == "libcuda.so.1" else name, *rest))

    def says(**answers):
        for name, value in answers.items():
            monkeypatch.setenv(f"STUB_{name.upper()}", str(value))
        unmet.cache_clear()

    return says


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_ranges_are_those_of_the_project():

    def ranges(lines):
        return dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in lines)

    assert ranges(project()["dependencies"]) == NEEDS
    extras = project()["optional-dependencies"]
    assert {extra: ranges(extras[extra]) for extra in EXTRAS} == EXTRAS
    assert {name: extra for extra, names in EXTRAS.items() for name in names} == EXTRA_OF
    assert extras["all"] == [f"tilekern[{','.join(EXTRAS)}]"]
    assert project()["requires-python"] == PYTHON
    assert project()["optional-dependencies"]["cute"] == [f"{name}{wanted}" for name, wanted in CuteDsl.needs.items()]


def test_the_compiler_s_packages_are_asked_for_by_name_in_versions_that_cuda_tile_takes():
    """Of cuda-toolkit, which cuda-tile's own extra asks for, torch pins another version."""
    packages = [f"{name}{TILEIRAS}" for name in ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")]
    assert project()["optional-dependencies"]["compile"] == [*packages, "pyelftools>=0.31"]
    taken = asked_by("cuda-tile", "tileiras")["cuda-toolkit"]
    lowest, end = TILEIRAS.removeprefix(">=").split(",")
    assert fits(lowest, taken)
    assert end in taken.split(",")


@pytest.mark.parametrize("page", ["README.md", "docs/reference.md"])
def test_the_tables_of_requirements_have_the_ranges(page):
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", (ROOT / page).read_text(), re.M))
    assert rows["NVIDIA driver"].startswith(f"{LEAST_DRIVER} or newer")
    every = {**NEEDS, **EXTRAS["torch"], **EXTRAS["tools"], **EXTRAS["text"]}
    told = {"Python": PYTHON, **{name: every[name] for name in ("torch", "cuda-tile", "transformers")}, **CuteDsl.needs}
    if page != "README.md":
        told |= every | {"nvidia-cuda-tileiras": TILEIRAS}
    assert {name: rows[name].split(";")[0].strip(" `") for name in told} == told


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [
        ("1.7.0", ">=1.7,<1.8", True), ("1.8", ">=1.7,<1.8", False), ("1.6.9", ">=1.7,<1.8", False),
        ("2.13.0+cu130", ">=2.9", True), ("2.10.0a0+git", ">=2.9", True), ("6.0.0.dev0", ">=5,<6", False),
        ("0.17.2", "<0.19,>=0.18.2", False), ("0.18.2", "<0.19,>=0.18.2", True), ("1.7.3", "==1.7.*", True),
        ("1.8", "!=1.8", False), ("2", "<=2.0", True), ("2.0.1", ">2", True), ("unknown", ">=1", True), ("3", "", True),
    ],
)  # fmt: skip
def test_versions_and_ranges(version, wanted, expected):
    assert fits(version, wanted) is expected


def test_the_range_that_another_package_asks_for_is_read_of_its_extra(monkeypatch):
    lines = [
        "numpy>=1",
        'kernels<0.19,>=0.18.2; extra == "kernels"',
        'toolkit[a,b]<13.5; extra == "tile"',
        'x (>=2); extra == "tile"',
    ]
    monkeypatch.setattr(requirements.metadata, "requires", lambda _name: lines)
    assert asked_by("a", "kernels") == {"kernels": "<0.19,>=0.18.2"}
    assert asked_by("a", "tile") == {"toolkit": "<13.5", "x": ">=2"}
    assert asked_by("a", "none") == {}


def test_a_driver_is_named_by_its_release_and_its_cuda(tmp_path):
    proc = tmp_path / "version"
    proc.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Tue Apr  1 00:00:00 UTC 2025\nGCC version: x\n"
    )
    assert requirements.driver_release(proc) == "570.133.20"
    proc.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)\n")
    assert requirements.driver_release(proc) == "580.95.05"
    assert requirements.driver_release(tmp_path / "none") is None
    assert driver_unmet(12080, "570.133.20") == (
        "driver 570.133.20 serves CUDA 12.8, and kernels need CUDA 13.0: update the NVIDIA driver to r580 or newer"
    )
    assert driver_unmet(None, None) is driver_unmet(13000, "580.1") is driver_unmet(13010, None) is None


@with_cc
@pytest.mark.parametrize(("policy", "cuda"), [("compile", 12080), ("fallback", 12040), ("error", 12080)])
def test_an_old_driver_is_said_at_the_first_launch_and_the_model_s_own_op_runs(root, driver, monkeypatch, policy, cuda):
    monkeypatch.setattr(dispatch, "here", lambda _device=None: pytest.fail("nothing is looked up"))
    driver(cuda=cuda)
    dispatch.set_miss_policy(policy)
    said = rf"serves CUDA {cuda // 1000}\.{cuda % 1000 // 10}, and kernels need CUDA 13\.0: .*r580 or newer"
    if policy == "error":
        with pytest.raises(CacheMiss, match=said):
            dispatch.plan_for(SPEC, GPU, *SIZES)
        return
    with pytest.warns(TilekernWarning, match=f"{said}; until then the model's own ops run") as warned:
        assert [dispatch.plan_for(SPEC, GPU, rows, *SIZES[1:]) for rows in (50, 51)] == [None, None]
    assert len(warned) == 1


def test_a_cuda_tile_out_of_range_is_said_at_the_first_launch(fresh, monkeypatch):
    monkeypatch.setattr(requirements, "driver_cuda", lambda: None)
    monkeypatch.setattr(requirements, "installed", {"cuda-tile": "1.8.0"}.get)
    assert unmet() == "cuda-tile 1.8.0 is installed, and tilekern needs >=1.7,<1.8: pip install 'cuda-tile>=1.7,<1.8'"


def test_another_package_out_of_range_is_said_once_and_keeps_nothing_from_running(fresh, monkeypatch):
    monkeypatch.setattr(requirements, "driver_cuda", lambda: None)
    monkeypatch.setattr(requirements, "installed", {"torch": "2.8.0", "transformers": "5.24.0"}.get)
    with pytest.warns(TilekernWarning, match=r"^torch 2\.8\.0 is installed, and tilekern needs >=2\.9: pip") as warned:
        assert unmet() is unmet() is None
    assert len(warned) == 1


@with_cc
def test_nothing_is_measured_where_the_driver_launches_nothing(driver, monkeypatch):
    monkeypatch.setattr(gpu, "here", lambda: resolve("H200"))
    driver(cuda=13000)
    gpu.check_gpu(resolve("H200"))
    driver(cuda=12080)
    with pytest.raises(InputError, match=r"serves CUDA 12\.8, and kernels need CUDA 13\.0"):
        gpu.check_gpu(resolve("H200"))


@with_cc
def test_a_new_enough_driver_keeps_nothing_from_running(driver):
    driver(cuda=13000)
    assert unmet() is None


@with_cc
def test_the_driver_s_gpus_are_known_without_torch(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("torch is not asked"))
    driver(gpus=2)
    assert devices().gpus == (resolve("H200"),) * 2
    driver(name="NVIDIA H30", sms=90, gpus=1)
    (only,) = devices().gpus
    assert (only.key, only.shared_bytes, only.registers) == ("sm_90-h30-90", 200 << 10, resolve("H200").registers)
    assert only.memory_gbs == pytest.approx(4916.7, abs=0.1)
    driver(init=100)
    assert (devices().found, devices().gpus, devices().code) == (True, (), 100)
    assert devices().error == "error 100 (CUDA_ERROR_OF_A_STUB)"
