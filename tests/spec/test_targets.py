"""The GPUs that are known, and the names that people give them."""

import dataclasses
import subprocess
import sys
from ctypes.util import find_library
from types import SimpleNamespace

import pytest
import torch
from environments import environment

from tilekern.errors import InputError
from tilekern.spec import targets
from tilekern.spec.targets import LISTED, from_description, here, of_key, resolve

every_target = pytest.mark.parametrize("target", LISTED, ids=lambda target: target.key)


@every_target
def test_a_target_is_found_by_its_name_and_key(target):
    short = target.name.replace("GeForce ", "").replace("-", " ")
    for name in (target.name, target.name.lower(), target.name.upper(), f"NVIDIA {target.name}", short, target.key):
        assert resolve(name) is target
    assert from_description(target.describe_whole()) is target


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
        ("sm_103", "sm_103-b300_sxm6_ac-148"),
        ("B300", "sm_103-b300_sxm6_ac-148"),
        ("GH200", "sm_90-gh200_480gb-132"),
        ("H100-PCIe", "sm_90-h100_pcie-114"),
        ("A100 40GB", "sm_80-a100_sxm4_40gb-108"),
        ("RTX 4090 Laptop", "sm_89-geforce_rtx_4090_laptop_gpu-76"),
        ("RTX 6000 Ada", "sm_89-rtx_6000_ada_generation-142"),
        ("RTX PRO 6000 Max-Q", "sm_120-rtx_pro_6000_blackwell_max_q_workstation_edition-188"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sm_90-h100_80gb_hbm3_mig_1g_10gb-16"),
        ("H100 MIG 1g.20gb", "sm_90-h100_80gb_hbm3_mig_1g_20gb-26"),
        ("H200 MIG 3g.71gb", "sm_90-h200_mig_3g_71gb-60"),
        ("A100-SXM4-40GB MIG 2g.10gb", "sm_80-a100_sxm4_40gb_mig_2g_10gb-28"),
        ("B200 MIG 1g.23gb+me", "sm_100-b200_mig_1g_23gb_me-18"),
        ("sm_90-h300-131", "sm_90-h300-131"),
        ("SM_90-H200-132", "sm_90-h200-132"),
        ("sm_90:78", "sm_90-gpu-78"),
        ("sm_90:78,memory=4800,name=NVIDIA H20-4e", "sm_90-h20_4e-78"),
        ("sm_120", "sm_120-geforce_rtx_5090-170"),
        ("SM_121", "sm_121-gb10-48"),
    ],
)
def test_names_that_people_give(name, expected):
    assert resolve(name).key == expected


@pytest.mark.parametrize(
    "name",
    [
        "", "H300", "sm_70", "sm90x", "NVIDIA", "sm_90-h200", "B200 MIG 3g.90gb", "sm_90:0", "sm_90:7٨",
        "sm_90-h200-13٢", "H2Nvidia00", "H200é MIG 3g.71gb", "H200 MIG 3g.71gbé",
    ],
)  # fmt: skip
def test_an_unknown_gpu_is_named_with_the_known_ones(name):
    with pytest.raises(InputError, match=r"unknown GPU .*known: .*H200.*sm_100.*auto") as caught:
        resolve(name)
    assert repr(name) in str(caught.value)


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(InputError, match="gpu must be text, such as 'B200', got 3"):
        resolve(3)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("B20", "B200"), ("sm-09", "sm_90"), ("h100 80gb hbm", "H100 80GB HBM3"), ("H200é", "H200"), ("éH200", "H200"),
        ("H2é00", "H200"), ("H200!", "H200"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_nearly_one_is_suggested(name, meant):
    with pytest.raises(InputError, match=f"; did you mean {meant}\\?$"):
        resolve(name)


def test_auto_without_a_gpu_says_what_to_pass(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert here() is None
    with pytest.raises(InputError, match="no CUDA GPU; name the target, for example --gpu B200"):
        resolve("auto")


def _with_gpu(monkeypatch, name, major, minor, sm_count, **more):
    properties = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=sm_count,
        L2_cache_size=1 << 20,
        max_threads_per_multi_processor=1536,
        **more,
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
    _with_gpu(monkeypatch, "NVIDIA H30", 9, 0, 78)
    found = here()
    assert found.key == "sm_90-h30-78"
    assert found.arch == "sm_90"
    assert found.l2_bytes == 1 << 20
    assert found.threads == 1536
    assert found.shared_bytes == resolve("H200").shared_bytes


def test_an_unlisted_gpu_is_what_the_driver_says_of_it(monkeypatch):
    said = {"memory_clock_rate": 3201000, "memory_bus_width": 4096, "shared_memory_per_multiprocessor": 1 << 17}
    _with_gpu(monkeypatch, "NVIDIA H30", 9, 0, 90, **said)
    found = here()
    assert found.memory_gbs == pytest.approx(3277.8, abs=0.1)
    assert (found.shared_bytes, found.registers, found.l2_bytes) == (1 << 17, 65536, 1 << 20)
    again = from_description(found.describe_whole())
    assert again == found
    assert of_key(found.key) != found, "the key alone does not tell what the driver did"


def test_a_slice_has_its_share_of_the_memory_and_not_the_bus(monkeypatch):
    whole = resolve("H200")
    said = {"memory_clock_rate": 3201000, "memory_bus_width": 6144}
    _with_gpu(monkeypatch, "NVIDIA H200 MIG 2g.35gb", 9, 0, 32, **said)
    found = here()
    assert (found.key, found.memory_gbs) == ("sm_90-h200_mig_2g_35gb-32", whole.memory_gbs / 4)
    assert resolve(found.key).memory_gbs == found.memory_gbs
    assert resolve("H200 MIG 1g.35gb").memory_gbs == whole.memory_gbs / 4, "the double share of a slice of one part"
    assert resolve("H200 MIG 1g.18gb").memory_gbs == whole.memory_gbs / 8


@pytest.mark.parametrize("name", ["H200", "H100 PCIe", "H100 MIG 1g.10gb", "sm_90-mine-78", "sm_90:78,name=X 1"])
def test_messages_name_a_gpu_by_one_word_that_is_understood(name):
    target = resolve(name)
    assert " " not in target.option
    assert resolve(target.option).key == target.key


def test_a_gpu_is_named_by_its_figures():
    found = resolve("sm_90:78, memory=4000, l2=30, shared=100, name=H20 of mine")
    assert (found.arch, found.sm_count, found.name) == ("sm_90", 78, "H20 of mine")
    assert (found.memory_gbs, found.l2_bytes, found.shared_bytes) == (4000, 30 << 20, 100 << 10)
    assert from_description(found.describe_whole()) == found
    whole = "registers=32768,threads=1024,blocks=16,half=300,scalar=40"
    limits = resolve(f"sm_90:78,{whole}")
    assert (limits.registers, limits.threads, limits.blocks) == (32768, 1024, 16)
    assert (limits.half_tflops, limits.scalar_tflops) == (300, 40)
    assert from_description(limits.describe_whole()) == limits
    capped = resolve("sm_90:132,name=H200,half=700,memory=4000")
    assert capped.key == resolve("H200").key
    assert from_description(capped.describe_whole()) == capped, "a listed GPU keeps the limits that its user gave"
    assert resolve("sm_90:40").memory_gbs == resolve("sm_90:20").memory_gbs * 2
    assert resolve("sm_90:132").memory_gbs == resolve("sm_90").memory_gbs


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        (
            "speed=3",
            "is unknown; use memory, l2, shared, registers, threads, blocks, half, scalar or name, as in sm_90:",
        ),
        ("memory=fast", "is wrong; memory must be a whole number up to 999999, as in sm_90:78"),
        ("memory=0", "is wrong; memory must be a whole number"),
        ("name=--", "is wrong; name must be ASCII text of at most 60 characters"),
        ("name=H200é", "is wrong; name must be ASCII text"),
        ("memory=4٨", "is wrong; memory must be a whole number"),
        (f"name={'x' * 70}", "is wrong; name must be ASCII text of at most 60 characters"),
    ],
)
def test_a_wrong_figure_is_named_with_what_is_allowed(option, wrong):
    with pytest.raises(InputError) as caught:
        resolve(f"sm_90:78,{option}")
    assert f"{option!r} {wrong}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("sm_80", set()),
        ("sm_89", set()),
        ("sm_90", {"tma", "clusters", "dependent_launch", "wgmma"}),
        ("sm_100", {"tma", "clusters", "dependent_launch", "tensor_memory"}),
        ("sm_103", {"tma", "clusters", "dependent_launch", "tensor_memory"}),
        ("sm_120", {"tma", "clusters", "dependent_launch"}),
    ],
)
def test_capabilities_have_names(name, has):
    features = ("tma", "clusters", "dependent_launch", "wgmma", "tensor_memory")
    assert {feature for feature in features if getattr(resolve(name), f"has_{feature}")} == has


@pytest.mark.parametrize(
    "said",
    [{}, {"key": "x"}, {"key": "sm_90-mine-78", "figures": {"sm_count": 3}}, {"key": "sm_90-mine-78", "figures": [1]},
     {"key": "sm_90-mine-78", "figures": {"l2_bytes": "1"}}, {"key": "sm_90-mine-78", "figures": {"l2_bytes": -1}}],
)  # fmt: skip
def test_a_description_of_no_gpu_is_refused(said):
    with pytest.raises(InputError):
        from_description(said)


@pytest.mark.parametrize(
    ("gpu", "likest"),
    [
        ("H200 NVL", ["H200", "GH200", "H100 NVL", "H100", "H20", "H100 PCIe"]),
        ("GH200", ["H100 NVL", "H100", "H200", "H20", "H100 PCIe"]),
        ("H20-3e", ["H20", "H200", "H100 PCIe"]),
        ("H100 MIG 1g.10gb", ["H100 MIG 2g.20gb", "H100 PCIe", "H200"]),
        ("RTX 4090 D", ["RTX 4090", "RTX 6000 Ada", "L40S", "L4"]),
        ("A100", ["A100 80GB PCIe", "A100 40GB", "A30"]),
    ],
)
def test_other_gpus_come_in_the_order_of_their_likeness(gpu, likest):
    keys = [resolve(name).key for name in likest]
    assert sorted([*sorted(keys), "sm_90-of another form"], key=resolve(gpu).unlikeness)[:-1] == keys


def test_a_slice_of_a_known_gpu_is_another_target(monkeypatch):
    _with_gpu(monkeypatch, "NVIDIA H200", 9, 0, 60)
    assert here().key == "sm_90-h200-60"
    assert here().memory_gbs == pytest.approx(resolve("H200").memory_gbs * 60 / 132)


def test_keys_are_names_of_folders_and_all_different():
    keys = [target.key for target in LISTED]
    assert len(set(keys)) == len(keys)
    assert {"sm_90-h200-132", "sm_100-b200-148"} <= set(keys), "the packs of the wheel have these"
    for target in LISTED:
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
def test_torch_is_not_asked_without_a_driver(monkeypatch, driver):
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
@pytest.mark.skipif(find_library("cuda") is not None, reason="the CUDA driver is installed here")
@pytest.mark.processes
def test_torch_is_not_loaded_to_find_no_gpu():
    code = "import sys; from tilekern.spec.targets import here; print(here(), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert ran.stdout == "None False\n"
