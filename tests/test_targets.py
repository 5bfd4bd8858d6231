"""The GPUs that are known, and the names that people give them."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from environments import environment

from tilekern import targets
from tilekern.errors import InputError
from tilekern.targets import KNOWN, here, resolve

every_target = pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.key)


@every_target
def test_a_target_is_found_by_its_name_and_key(target):
    for name in (target.name, target.name.lower(), target.name.upper(), target.key):
        assert resolve(name) is target


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("B200", "sm_100-b200-148"),
        ("h100", "sm_90-h100_80gb_hbm3-132"),
        ("H200", "sm_90-h200-132"),
        ("a100", "sm_80-a100_sxm4_80gb-108"),
        ("rtx5090", "sm_120-geforce_rtx_5090-170"),
        ("RTX 5090", "sm_120-geforce_rtx_5090-170"),
        ("sm_80", "sm_80-a100_sxm4_80gb-108"),
        ("sm_90", "sm_90-h200-132"),
        ("sm_100", "sm_100-b200-148"),
        ("sm_103", "sm_103-b300-148"),
        ("sm_120", "sm_120-geforce_rtx_5090-170"),
        ("SM_121", "sm_121-gb10-48"),
    ],
)
def test_names_that_people_give(name, expected):
    assert resolve(name).key == expected


@pytest.mark.parametrize("name", ["", "H300", "sm_70", "sm90x", "NVIDIA", "sm_90-h200-131"])
def test_an_unknown_gpu_is_named_with_the_known_ones(name):
    with pytest.raises(InputError, match=r"unknown GPU .*known: .*H200.*sm_100.*auto") as caught:
        resolve(name)
    assert repr(name) in str(caught.value)


def test_auto_without_a_gpu_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert here() is None
    with pytest.raises(InputError, match="no CUDA GPU; name the target, for example --gpu B200"):
        resolve("auto")


def _with_gpu(monkeypatch, name, major, minor, sm_count):
    properties = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=sm_count,
        L2_cache_size=1 << 20,
        max_threads_per_multi_processor=1536,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


@every_target
def test_the_gpu_here_is_the_known_one(monkeypatch, target):
    _with_gpu(monkeypatch, f"NVIDIA {target.name}", *divmod(target.capability, 10), target.sm_count)
    assert here() is target
    assert resolve("auto") is target


def test_an_unlisted_gpu_has_a_key_of_its_own_and_its_arch_s_limits(monkeypatch):
    _with_gpu(monkeypatch, "NVIDIA H20", 9, 0, 78)
    found = here()
    assert found.key == "sm_90-h20-78"
    assert found.arch == "sm_90"
    assert found.l2_bytes == 1 << 20
    assert found.threads == 1536
    assert found.shared_bytes == resolve("H200").shared_bytes


def test_a_slice_of_a_known_gpu_is_another_target(monkeypatch):
    _with_gpu(monkeypatch, "NVIDIA H200", 9, 0, 60)
    assert here().key == "sm_90-h200-60"
    assert here().memory_gbs < resolve("H200").memory_gbs


def test_keys_are_names_of_folders_and_all_different():
    keys = [target.key for target in KNOWN]
    assert len(set(keys)) == len(keys)
    for target in KNOWN:
        assert all(character.isalnum() or character in "_-" for character in target.key)
        assert target.key == target.key.lower()
        assert target.describe()["key"] == target.key


@every_target
def test_the_figures_are_those_of_a_gpu(target):
    assert target.arch == f"sm_{target.capability}"
    assert 40 <= target.sm_count <= 200
    assert 100 <= target.copy_gbs < target.memory_gbs <= 10000
    assert target.shared_bytes >= 100 << 10
    assert target.threads in (1536, 2048)
    assert target.registers == 65536
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.sm_count = 1


@pytest.mark.parametrize("driver", ["in the kernel", "a library", None])
def test_where_there_is_no_driver_torch_is_not_asked(monkeypatch, driver):
    def load(name):
        if driver != "a library":
            raise OSError(name)

    h200 = resolve("H200")
    _with_gpu(monkeypatch, "NVIDIA H200", *divmod(h200.capability, 10), h200.sm_count)
    monkeypatch.setattr(targets.os.path, "exists", lambda path: path.startswith("/proc") and driver == "in the kernel")
    monkeypatch.setattr(targets.ctypes, "CDLL", load)
    assert here() is h200, "torch is loaded"
    monkeypatch.setattr(targets, "sys", SimpleNamespace(modules={}))
    assert here() is (h200 if driver else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.skipif(targets._has_driver(), reason="the CUDA driver is installed here")
def test_torch_is_not_loaded_to_find_no_gpu():
    code = "import sys; from tilekern.targets import here; print(here(), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == "None False\n"
