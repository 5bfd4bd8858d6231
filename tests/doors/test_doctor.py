"""The doctor: what it tells of machines that lack this or that, and of caches and settings that are wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from environments import ROOT, environment
from marks import needs_compiler
from one_record import H200, PROBLEM, SPEC

from tilekern import __version__, cache
from tilekern.cache import CacheError, Store, Untrusted, write_pack
from tilekern.cache.layers import FolderLayer
from tilekern.compile import cutile, toolchain
from tilekern.doctor import machine
from tilekern.doctor.__main__ import main
from tilekern.doctor.machine import Devices
from tilekern.runtime import requirements
from tilekern.runtime.requirements import TILEIRAS
from tilekern.runtime.settings import SETTINGS
from tilekern.spec.targets import resolve
from tilekern.tuning.sweep.plan import PlanFile

DEFAULT_LAYERS = cache.default_layers


@pytest.fixture(autouse=True)
def sound(tmp_path, monkeypatch):
    """A machine without a GPU and with an empty cache, on which nothing is wrong."""
    for name in [name for name in os.environ if name.startswith("TILEKERN_") or name in machine._OTHER_VARIABLES]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "asked_by", lambda *_: {})
    monkeypatch.setattr(cache, "default_layers", _without_the_wheel)
    _with(monkeypatch, Devices(False))


def _without_the_wheel(*arguments, **options):
    """Reading all of its packs takes a second."""
    return [layer for layer in DEFAULT_LAYERS(*arguments, **options) if getattr(layer, "origin", None) != "wheel"]


def _with(monkeypatch, listed, cuda=None, release=None):
    """Have the driver list GPUs, serve a version of CUDA, and be of a release."""
    monkeypatch.setattr("tilekern.doctor.devices", lambda: listed)
    monkeypatch.setattr(machine, "here", lambda: None)
    monkeypatch.setattr(machine, "driver_cuda", lambda: cuda)
    monkeypatch.setattr(machine, "driver_release", lambda: release)
    monkeypatch.setattr(machine.os.path, "exists", lambda _: False)


def _has_only(monkeypatch, **versions):
    """Have other versions of packages be installed; None: not at all."""
    real = requirements.installed

    def installed(name):
        return versions[name] if name in versions else real(name)

    monkeypatch.setattr(requirements, "installed", installed)
    monkeypatch.setattr(machine, "installed", installed)


def run(capsys, *arguments, code):
    """The doctor's output as one line each, wrapped lines joined."""
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert err == ""
    return re.sub(r"\n {4,}", " ", out)


def wrong(capsys, *arguments):
    """Return the faults in the JSON document."""
    document = json.loads(run(capsys, *arguments, "--json", code=1))
    assert not document["ok"]
    return document["wrong"]


def test_a_sound_machine_exits_with_0(capsys):
    told = run(capsys, code=0)
    labels = [line.split()[0] for line in told.splitlines()]
    assert labels == ["tilekern", "GPU", "driver", "packages", "compiler", "caches", "settings", "nothing"]
    assert told.endswith("nothing is wrong\n")
    document = json.loads(run(capsys, "--json", code=0))
    assert (document["ok"], document["wrong"], document["gpus"], document["model"]) == (True, [], [], None)
    assert document["packages"]["cuda-tile"]["needs"] == ">=1.7,<1.8"


def test_the_report_names_a_gpu_its_key_and_its_records(capsys, monkeypatch):
    _with(monkeypatch, Devices(True, (resolve("H200"), resolve("H200"), resolve("H100"))), 13000, "580.95.05")
    monkeypatch.setattr(cache, "default_layers", DEFAULT_LAYERS)
    told = run(capsys, code=1)
    assert "GPU       0 to 1: H200 (sm_90, 132 SMs, 4,800 GB/s), key sm_90-h200-132 2: H100 80GB HBM3" in told
    assert "driver    580.95.05 serves CUDA 13.0" in told
    counted = r"the wheel's packs \(\d+ packs\): \d+ records for H200, \d+ for others of sm_90, \d+ for other GPUs"
    assert re.search(rf"{counted} \(\d+ measured", told)
    assert "is a build without CUDA: install one of https://pytorch.org" in told, "torch of the tests"


@pytest.mark.parametrize("as_json", [False, True])
def test_an_old_driver_is_named_with_the_one_that_would_do(capsys, monkeypatch, as_json):
    _with(monkeypatch, Devices(True, (resolve("B200"),)), 12080, "570.133.20")
    told = " ".join(wrong(capsys)) if as_json else run(capsys, code=1)
    assert "driver 570.133.20 serves CUDA 12.8, and kernels need CUDA 13.0: update the NVIDIA driver to r580" in told


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("transformers", None, "transformers is not installed: pip install 'tilekern[torch]'"),
        ("msgspec", None, "msgspec is not installed: pip install 'msgspec>=0.20'"),
        ("torch", "2.8.1+cu126", "torch 2.8.1+cu126 is installed, and tilekern needs >=2.9: pip install 'torch>=2.9'"),
        ("transformers", "4.57.1", "transformers 4.57.1 is installed, and tilekern needs >=5,<6"),
        ("cuda-tile", "1.8.0", "cuda-tile 1.8.0 is installed, and tilekern needs >=1.7,<1.8"),
        ("nvidia-cutlass-dsl", "4.9.0", "nvidia-cutlass-dsl 4.9.0 is installed, and tilekern needs >=4.8.1,<4.9"),
    ],
)
def test_a_package_out_of_range_is_named_with_what_to_install(capsys, monkeypatch, name, version, message):
    _has_only(monkeypatch, **{name: version})
    (text,) = wrong(capsys)
    assert text.startswith(message)


@pytest.mark.parametrize("version", ["13.2.86", "13.5.37"])
def test_a_compiler_out_of_range_is_named_with_what_to_install(capsys, monkeypatch, version):
    monkeypatch.setattr(toolchain, "toolkit", lambda: cutile.Toolkit(Path("tileiras"), version, "1.7.0"))
    wanted = f"tilekern needs {TILEIRAS}: pip install 'tilekern[compile]'"
    assert wrong(capsys) == [f"tileiras {version} is here, and {wanted}"]


def test_a_kernels_package_that_transformers_cannot_use_is_said_and_is_not_wrong(capsys, monkeypatch):
    _has_only(monkeypatch, kernels="0.17.2", transformers="5.24.0")
    asked = {"transformers": {"kernels": "<0.19,>=0.18.2"}}
    monkeypatch.setattr(machine, "asked_by", lambda name, _: asked.get(name, {}))
    told = " ".join(run(capsys, code=0).split())
    assert (
        "use_kernels=True is not available: transformers 5.24.0 needs kernels<0.19,>=0.18.2, and 0.17.2 is installed"
        in told
    )


def test_it_works_without_torch_which_is_an_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    _has_only(monkeypatch, torch=None, tokenizers=None)
    _with(monkeypatch, Devices(True, (resolve("H200"),)), 13000)
    told = run(capsys, code=0)
    assert "without the extras torch, text: pip install 'tilekern[torch,text]'" in told
    assert "key sm_90-h200-132" in told


@pytest.mark.parametrize("gone", ["tilekern.cache", "tilekern.compile.toolchain", "tilekern.runtime.provisional"])
def test_a_part_that_cannot_be_imported_leaves_the_others(capsys, monkeypatch, gone):
    monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.setenv("TILEKERN_LOOKUP_AGAIN_S", "5")
    if gone == "tilekern.runtime.provisional":
        assert "TILEKERN_LOOKUP_AGAIN_S=5" in run(capsys, code=0)
        return
    told = run(capsys, code=1)
    assert "cannot be inspected: ModuleNotFoundError" in told
    assert "settings  TILEKERN_CACHE_DIR=" in told


@pytest.mark.parametrize(
    ("visible", "listed", "message"),
    [
        (None, Devices(True, (), "error 100 (CUDA_ERROR_NO_DEVICE)", 100), None),
        ("", Devices(True, (), "error 100 (CUDA_ERROR_NO_DEVICE)", 100), None),
        ("-1", Devices(True, (), "error 100 (CUDA_ERROR_NO_DEVICE)", 100), None),
        (
            "7",
            Devices(True, (), "error 100 (CUDA_ERROR_NO_DEVICE)", 100),
            "CUDA_VISIBLE_DEVICES=7 names 1 GPUs, and the",
        ),
        (None, Devices(True, (), "error 999 (CUDA_ERROR_UNKNOWN)", 999), "the driver gives no GPU, error 999"),
        ("", Devices(True, (), "error 803 (SYSTEM_DRIVER_MISMATCH)", 803), "the driver gives no GPU, error 803"),
        (None, Devices(True, error="libcuda.so.1 is not a CUDA driver: x"), "the driver gives no GPU, libcuda.so.1 is"),
    ],
)
def test_an_unusable_gpu_is_wrong_unless_it_was_hidden(capsys, monkeypatch, visible, listed, message):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _with(monkeypatch, listed, 13000)
    if message is None:
        assert "GPU       none: the driver says error 100" in run(capsys, code=0)
    else:
        (text,) = wrong(capsys)
        assert text.startswith(message)


def test_indices_that_hide_those_behind_them_are_wrong_and_slices_are_not(capsys, monkeypatch):
    _has_only(monkeypatch, torch=None)
    _with(monkeypatch, Devices(True, (resolve("H200"),)), 13000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9,1")
    assert "CUDA_VISIBLE_DEVICES=0,9,1 names 3 GPUs, and the driver gives 1: " in wrong(capsys)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    run(capsys, code=0)


def test_a_gpu_that_is_too_old_for_any_kernel_is_said(capsys, monkeypatch):
    _has_only(monkeypatch, torch=None)
    _with(monkeypatch, Devices(True, (resolve("sm_75-t4-40"),)), 13000)
    assert "GPU 0 is of sm_75, and kernels run on sm_80 and newer" in wrong(capsys)[0]


def test_a_cache_full_of_junk_is_counted_and_left_as_it_is(capsys, monkeypatch, tmp_path):
    root = tmp_path / "cache"
    place = root / "v1" / H200.key / "tk" / "kernel"
    place.mkdir(parents=True)
    for number in range(9):
        (place / f"rows={number}.json").write_text("{")
    (root / "v1" / ".nfs01").touch()
    (root / "v1" / "dangling").symlink_to("nowhere")
    (tmp_path / "bad.pack").write_bytes(os.urandom(999))
    monkeypatch.setenv("TILEKERN_CACHE_PATH", os.pathsep.join((str(tmp_path / "bad.pack"), str(tmp_path / "no"))))
    before = sorted(root.rglob("*"))
    pack, path, bad = sorted(wrong(capsys, "--gpu", "H200"), key=lambda text: ("cannot be read" in text, text))
    assert sorted(root.rglob("*")) == before
    assert "bad.pack is not a pack" in pack
    assert path.startswith("TILEKERN_CACHE_PATH names")
    remedy = f"tune or unpack again; python -m tilekern.cache_tools verify {root} lists them"
    assert bad == f"9 records of {root} cannot be read: {remedy}", "the layer's warnings of each file are not repeated"
    assert "9 records for H200 (2 other files, 9 bad)" in run(capsys, "--gpu", "H200", code=1)


def test_a_bad_pack_and_a_missing_path_are_named(capsys, monkeypatch, tmp_path):
    (tmp_path / "bad.pack").write_bytes(os.urandom(999))
    monkeypatch.setenv("TILEKERN_CACHE_PATH", os.pathsep.join((str(tmp_path / "bad.pack"), str(tmp_path / "no"))))
    bad, missing = sorted(wrong(capsys), key=lambda text: "bad.pack" not in text)
    assert "bad.pack is not a pack" in bad
    assert missing.startswith("TILEKERN_CACHE_PATH names")


@needs_compiler
def test_untrusted_records_are_counted_and_explained_once(capsys, monkeypatch, compiled, tmp_path):
    shutil.copytree(compiled, tmp_path / "cache")
    assert "1 record for H200 (1 default)" in run(capsys, "--gpu", "H200", code=0)

    def refuse(*_):
        raise Untrusted("no trust root signed it")

    def fail(*_):
        raise CacheError("EIO")

    monkeypatch.setattr(FolderLayer, "read_record", refuse)
    (text,) = wrong(capsys, "--gpu", "H200")
    assert text.startswith("1 record of")
    assert text.endswith("rows=64,columns=48,dtype=bfloat16: no trust root signed it): see docs/trust.md")
    monkeypatch.setattr(FolderLayer, "read_record", fail)
    assert any("1 record of" in text and "cannot be read" in text for text in wrong(capsys, "--gpu", "H200"))


@needs_compiler
@pytest.mark.parametrize("is_gone", [True, False], ids=["missing", "damaged"])
def test_records_that_lost_an_artifact_are_wrong_with_the_command_that_lists_them(
    capsys, monkeypatch, compiled, tmp_path, is_gone
):
    root = tmp_path / "a cache"
    shutil.copytree(compiled, root)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(root))
    blob, *_ = Store(root).blobs()
    blob.path.unlink() if is_gone else blob.path.write_bytes(b"damaged")
    (text,) = wrong(capsys, "--gpu", "H200")
    remedy = f"tune or unpack again; python -m tilekern.cache_tools verify '{root}' lists them"
    assert text == f"1 record of {root} with artifacts that are missing or damaged: {remedy}"
    assert "1 record for H200 (1 default, 1 without artifacts)" in run(capsys, "--gpu", "H200", code=1)


def test_a_user_without_a_home_is_told_what_to_set(capsys, monkeypatch):
    monkeypatch.setattr(cache, "user_root", lambda: Path("~/.cache/tilekern"))
    (text,) = wrong(capsys)
    assert "this user has no home" in text
    assert text.endswith("set TILEKERN_CACHE_DIR to a folder of yours")

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "user_root", fail)
    (text,) = wrong(capsys)
    assert "Could not determine home directory" in text
    assert text.endswith("set TILEKERN_CACHE_DIR to a folder of yours")


@pytest.mark.parametrize("gpu", [("--gpu", "H200"), ()], ids=["named", "none here"])
def test_stale_records_are_wrong_with_the_command_that_mends_them(capsys, monkeypatch, compiled, tmp_path, gpu):
    shutil.copytree(compiled, tmp_path / "cache")
    monkeypatch.setattr("tilekern.cache_tools.shared.installed.digest_today", lambda _: "0" * 64)
    told = run(capsys, *gpu, code=1)
    assert "1 stale" in told
    assert "1 record stale, as the source of their kernels has changed" in told
    assert "python -m tilekern.tune refresh --same-code" in told


def _package(monkeypatch, site, compiled, wanted, gpu="H200"):
    """A GPU's data package of one record that is installed, for some versions of tilekern."""
    name = f"tilekern-packs-{gpu.lower()}"
    folder = site / name.replace("-", "_")
    info = site / f"{folder.name}-0.1.dist-info"
    for new in (folder, info):
        new.mkdir(parents=True)
    (folder / "__init__.py").touch()
    store = Store(compiled)
    (record,) = (entry.record for entry in store.entries())
    record = msgspec.structs.replace(record, target=resolve(gpu).describe())
    write_pack(folder / "records.pack", [(record, {sha256: store.read_blob(sha256) for sha256 in record.digests})])
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\nRequires-Dist: tilekern{wanted}\n"
    )
    (info / "entry_points.txt").write_text(f"[tilekern.prebuilt]\n{name} = {folder.name}\n")
    monkeypatch.syspath_prepend(str(site))


@needs_compiler
def test_a_data_package_of_another_version_is_wrong_with_what_pip_does(capsys, monkeypatch, compiled, tmp_path):
    _package(monkeypatch, tmp_path / "site", compiled, "<0.2,>=0.1")
    monkeypatch.setattr("tilekern.cache_tools.shared.installed.digest_today", lambda _: "0" * 64)
    stale, version = wrong(capsys, "--gpu", "H200")
    remedy = "pip install -U tilekern-packs-h200"
    assert version == f"tilekern-packs-h200 0.1 is for tilekern <0.2,>=0.1, and {__version__} is installed: {remedy}"
    assert stale == (
        f"tilekern-packs-h200 has records for other versions of their kernels, which are not used; update it: {remedy}"
    )


@needs_compiler
def test_a_data_package_of_this_version_is_listed_and_that_of_the_gpu_named_if_it_is_not_there(
    capsys, monkeypatch, compiled, tmp_path
):
    assert "more records that serve" not in run(capsys, "--gpu", "H200", code=0), "a checkout has all packs"
    notes = tmp_path / "source_digests.json"
    notes.touch()
    monkeypatch.setattr("tilekern.runtime.data_packages.NOTES", notes)
    assert "more records that serve H200: pip install tilekern-packs-h200" in run(capsys, "--gpu", "H200", code=0)
    assert "more records that serve" not in run(capsys, "--gpu", "L40S", code=0), "there is none"
    _package(monkeypatch, tmp_path / "site", compiled, f">={__version__}")
    told = run(capsys, "--gpu", "H200", code=0)
    assert "packs of tilekern-packs-h200: 1 record for H200 (1 default)" in told
    assert "more records that serve" not in told


@needs_compiler
@pytest.mark.parametrize(
    ("gpu", "there", "counted", "named"),
    [
        ("H200", "H100", "0 records for H200, 1 for others of sm_90", "tilekern-packs-h200"),
        ("H100", "H200", "0 records for H100 80GB HBM3, 1 for others of sm_90", "tilekern-packs-h100"),
        # As after `pip install --no-deps`: pip brings the H200's package along.
        ("H100", "H100", "1 record for H100 80GB HBM3 (1 default)", "tilekern-packs-h200"),
    ],
)
def test_with_one_of_two_packages_of_similar_gpus_its_records_serve_and_the_other_is_named(
    capsys, monkeypatch, compiled, tmp_path, gpu, there, counted, named
):
    monkeypatch.setattr("tilekern.runtime.data_packages.NOTES", tmp_path)
    _package(monkeypatch, tmp_path / "site", compiled, f">={__version__}", there)
    problems = [(SPEC.name, PROBLEM.but(columns=columns)) for columns in (48, 56)]
    PlanFile(tmp_path, "plan.json").write(resolve(gpu), "a step", problems, {})
    plan = str(tmp_path / "plan.json")
    told = run(capsys, plan, "--gpu", gpu, code=0)
    assert f"packs of tilekern-packs-{there.lower()}: {counted}" in told
    assert f"more records that serve {resolve(gpu).name}: pip install {named}" in told
    served = "exact" if gpu == there else "other gpu"
    assert f"on {resolve(gpu).name}: 2 problems: 1 {served}, 1 missing" in told
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "toolkit", lambda: None)
        _has_only(patch, **{"nvidia-cuda-tileiras": None})
        (text,) = wrong(capsys, plan, "--gpu", gpu)
    assert text.startswith(f"1 of 2 problems of {plan} have no record, and no compiler is installed, ")
    assert f"of the same op, run; pip install {named}, or on a machine with tilekern[compile] run " in text
    _package(monkeypatch, tmp_path / "other", compiled, f">={__version__}", "H100" if there == "H200" else "H200")
    assert "more records that serve" not in run(capsys, "--gpu", gpu, code=0)


def test_a_cache_that_is_a_file_is_wrong(capsys, tmp_path):
    (tmp_path / "cache").touch()
    (text,) = wrong(capsys)
    assert text.endswith("is not a folder; set TILEKERN_CACHE_DIR to a folder of yours")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TILEKERN_APLY", "1", "TILEKERN_APLY is not a setting of tilekern; did you mean TILEKERN_APPLY?"),
        ("TILEKERN_XYZ", "", "TILEKERN_XYZ is not a setting of tilekern; docs/reference.md lists the settings"),
        ("TILEKERN_APPLY", "rmsnorm", "TILEKERN_APPLY: 'rmsnorm' is not an op"),
        ("TILEKERN_ON_MISS", "foo", "TILEKERN_ON_MISS: unknown value 'foo'; known: compile, fallback, error"),
        ("TILEKERN_INTERPRET", "yes", "TILEKERN_INTERPRET: unknown value 'yes'; known: 0, 1"),
        ("TILEKERN_LOOKUP_AGAIN_S", "soon", "TILEKERN_LOOKUP_AGAIN_S must be a number of seconds"),
    ],
)
def test_a_setting_that_is_not_known_is_wrong(capsys, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    assert any(text.startswith(message) for text in wrong(capsys))


def test_settings_are_those_of_the_reference_and_secrets_are_not_shown(capsys, monkeypatch):
    section = (ROOT / "docs" / "reference.md").read_text().split("## Environment variables")[1].split("\n## ")[0]
    assert set(SETTINGS) == set(re.findall(r"^\| `(TILEKERN_[A-Z_]+)`", section, re.M))
    monkeypatch.setenv("TILEKERN_MY_TOKEN", "hidden-from-everybody")
    assert "hidden-from" not in run(capsys, code=1) + run(capsys, "--json", code=1)


def test_the_home_and_control_characters_are_not_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "cache\x1b[31m"))
    told = run(capsys, code=0)
    assert str(tmp_path) not in told
    assert "\x1b" not in told
    assert "TILEKERN_CACHE_DIR=~/cache?[31m" in told


@pytest.mark.parametrize("columns", ["60", "200"])
def test_it_fits_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TILEKERN_CACHE_DIR", "cache")
    assert main(["--gpu", "H200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 25, "one screen"
    assert max(map(len, lines)) <= int(columns)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "unknown model 'no-such-model': give a preset"),
        (["--gpu", "H300"], "unknown GPU 'H300'; known: "),
        (["--nothing"], "unrecognized arguments: --nothing"),
        (["qwen3-8b", "gpt2"], "unrecognized arguments: gpt2"),
        (["/no/such/config.json", "--gpu", "H200"], ""),
    ],
)
def test_bad_input_is_one_line_and_2(capsys, arguments, message):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"tilekern: {message}")
    assert err.count("\n") == 1


@needs_compiler
def test_the_report_on_a_model_has_the_share_of_its_launches(capsys, compiled, tmp_path):
    shutil.copytree(compiled, tmp_path / "cache")
    launches = {(SPEC.name, PROBLEM.but(columns=columns)): count for columns, count in ((48, 30), (56, 9), (64, 1))}
    PlanFile(tmp_path, "plan.json").write(H200, "a step", list(launches), {}, launches)
    told = run(capsys, str(tmp_path / "plan.json"), "--gpu", "H200", code=0)
    assert "75 % of 40 launches have a record: 30 exact; the other 10: swiglu_forward 10\n" in told
    document = json.loads(run(capsys, str(tmp_path / "plan.json"), "--gpu", "H200", "--json", code=0))
    assert document["model"]["share"]["percent"] == 75


def test_a_step_under_autocast_is_looked_up(capsys, tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields = {"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 1, "vocab_size": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    path = str(tmp_path / "config.json")
    main([path, "--gpu", "H200", "--autocast", "--json"])
    found = {item["kernel"]: item["problem"] for item in json.loads(capsys.readouterr().out)["model"]["problems"]}
    assert found["fused_add_rms_norm_forward"]["dtype"] == "float32"
    assert found["swiglu_forward"]["dtype"] == "bfloat16"


@needs_compiler
def test_the_report_on_a_model_is_that_of_a_preflight(capsys, monkeypatch, compiled, tmp_path):
    shutil.copytree(compiled, tmp_path / "cache")
    problems = [
        (SPEC.name, PROBLEM.but(rows=rows, columns=columns)) for rows, columns in ((64, 48), (128, 48), (64, 56))
    ]
    PlanFile(tmp_path, "plan.json").write(H200, "a step", problems, {})
    plan = str(tmp_path / "plan.json")
    told = run(capsys, plan, "--gpu", "H200", code=0)
    assert "on H200: 3 problems: 1 exact, 1 nearest, 1 missing" in told
    assert "swiglu_forward 1 exact, 1 nearest, 1 missing" in told
    assert json.loads(run(capsys, plan, "--gpu", "H200", "--json", code=0))["model"]["counts"]["missing"] == 1
    monkeypatch.setattr(toolchain, "toolkit", lambda: None)
    _has_only(monkeypatch, **{"nvidia-cuda-tileiras": None})
    (text,) = wrong(capsys, plan, "--gpu", "H200")
    assert "1 of 3 problems" in text
    assert f"python -m tilekern.tune {plan} --gpu H200" in text
    assert "not checked without a GPU; name the job's GPU by --gpu" in run(capsys, plan, code=0)


@pytest.mark.processes
def test_it_runs_as_a_module_in_a_pipe(tmp_path):
    command = [sys.executable, "-m", "tilekern.doctor", "--gpu", "B200"]
    cache = str(tmp_path / "caf\u00e9")
    more = {"TILEKERN_CACHE_DIR": cache, "NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment(**more), capture_output=True, text=True, check=False)
    assert (ran.returncode in (0, 1), ran.stderr) == (True, "")
    assert re.search(r"records for B200", ran.stdout)
    assert list(tmp_path.iterdir()) == []
