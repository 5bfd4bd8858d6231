"""Checkpoints: files that safetensors and torch write are read as they were written, and wrong ones in one line."""

import functools
import json
import math
import mmap
import os
import pickle
import re
import struct
import sys
import tempfile
import tomllib
import zipfile
from collections import OrderedDict
from pathlib import Path

import huggingface_hub
import numpy
import pytest
import torch
from environments import ROOT, BarePython
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from tilekern.errors import InputError
from tilekern.inference import json_files
from tilekern.inference.checkpoints import open_checkpoint
from tilekern.inference.host_tensors import ITEM_BYTES
from tilekern.inference.json_files import read_json

SIZES = ((2, 3), (), (0, 4), (5,))
# Torch's own storages; torch.save writes the other dtypes in another form.
OF_STORAGES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"
)  # fmt: skip
# The package safetensors does not write the last one.
OF_SAFETENSORS = sorted(ITEM_BYTES.keys() - {"float8_e8m0fnu"})


def random(dtype, shape=(2, 3)):
    """A tensor of any bits; a bool is made of zeros and ones."""
    data = torch.randint(0, 2 if dtype == "bool" else 256, (math.prod(shape) * ITEM_BYTES[dtype],), dtype=torch.uint8)
    return data.view(getattr(torch, dtype)).reshape(shape)


def facts(tensor):
    data = (
        tensor.detach()
        .contiguous()
        .clone(memory_format=torch.contiguous_format)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data


def read(where):
    """Return dtype, shape and bytes of each tensor, in the checkpoint's order."""
    with open_checkpoint(where) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            assert tensor.name == name
            assert tensor.data.readonly
            assert tensor.data.c_contiguous
            assert isinstance(tensor.data.obj, mmap.mmap)
        return {name: (it.dtype, it.shape, bytes(it.data)) for name, it in checkpoint.tensors.items()}


def opened(folder):
    """The files below a folder that this process has open or mapped."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [line for line in (*files, *Path("/proc/self/maps").read_text().splitlines()) if str(folder) in line]


@pytest.fixture(autouse=True)
def nothing_is_left_open(tmp_path):
    yield
    if os.path.exists("/proc/self/maps"):
        assert not opened(tmp_path)


def refusal(where):
    with pytest.raises(InputError) as caught:
        open_checkpoint(where)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


class TestRightFiles:
    @pytest.mark.parametrize("dtype", OF_SAFETENSORS)
    def test_safetensors_of_each_dtype(self, tmp_path, dtype):
        tensors = {f"layer.{number}": random(dtype, shape) for number, shape in enumerate(SIZES)}
        save_file(tensors, tmp_path / "model.safetensors")
        assert read(tmp_path) == {name: facts(tensor) for name, tensor in tensors.items()}

    def test_safetensors_of_a_dtype_that_the_package_does_not_write(self, tmp_path):
        write(tmp_path, {"x": entry("F8_E8M0", [2], 0, 2)}, b"ab")
        assert read(tmp_path) == {"x": ("float8_e8m0fnu", (2,), b"ab")}

    @pytest.mark.parametrize("protocol", [2, 4, 5])
    def test_a_state_dict_of_each_dtype(self, tmp_path, protocol):
        tensors = {f"{dtype}.{i}": random(dtype, shape) for dtype in OF_STORAGES for i, shape in enumerate(SIZES)}
        torch.save(tensors, tmp_path / "pytorch_model.bin", pickle_protocol=protocol)
        found = read(tmp_path)
        assert found == {name: facts(tensor) for name, tensor in tensors.items()}
        assert list(found) == list(tensors)

    def test_a_module_s_state_dict_with_tied_weights_parameters_and_views(self, tmp_path):
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 5))
        model[2].weight = model[0].weight
        rows = torch.arange(12.0).view(4, 3)
        tensors = model.state_dict() | {
            "parameter": torch.nn.Parameter(rows),
            "view": rows[1:3],
            "flat": rows.T[:1, :1],
        }
        torch.save(OrderedDict(tensors), tmp_path / "model.pt")
        assert read(tmp_path) == {name: facts(tensor) for name, tensor in tensors.items()}
        torch.save(model.state_dict(keep_vars=True), tmp_path / "model.pt")
        assert read(tmp_path) == {name: facts(tensor) for name, tensor in model.state_dict().items()}

    def test_nanogpt_s_checkpoint(self, tmp_path):
        model = torch.nn.Linear(3, 4)
        groups = [{"params": [0, 1], "lr": 6e-4, "betas": (0.9, 0.95), "foreach": None, "fused": True}]
        moments = {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(4, 3)}}
        document = {
            "model": model.state_dict(),
            "optimizer": {"state": moments, "param_groups": groups},
            "model_args": {"n_layer": 12, "bias": False},
            "iter_num": 2**40,
            "best_val_loss": torch.tensor(2.5),
            "config": {"device": "cuda", "rate": 6e-4, "out": None},
        }
        torch.save(document, tmp_path / "ckpt.pt")
        assert read(tmp_path) == {name: facts(tensor) for name, tensor in model.state_dict().items()}

    def test_shards_in_the_order_of_files_then_of_bytes(self, tmp_path):
        tensors = {name: random("float32", (number + 1,)) for number, name in enumerate("abcd")}
        shards(tmp_path, {"model-1.safetensors": ["d", "b"], "model-2.safetensors": ["a", "c"]}, tensors)
        found = read(tmp_path)
        assert found == {name: facts(tensor) for name, tensor in tensors.items()}
        assert list(found) == [*read(tmp_path / "model-1.safetensors"), *read(tmp_path / "model-2.safetensors")]

    def test_the_index_alone_says_which_tensors_of_a_shard_count(self, tmp_path):
        tensors = {name: random("float32") for name in "ab"}
        shards(tmp_path, {"model-1.safetensors": ["a", "b"]}, tensors, left_out=["b"])
        assert list(read(tmp_path)) == ["a"]

    def test_the_config_and_the_folder(self, tmp_path):
        save_file({"x": random("int64")}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        for where in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
            with open_checkpoint(where) as checkpoint:
                assert (checkpoint.config, checkpoint.folder) == ({}, tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.config == {"model_type": "qwen3"}

    def test_a_closed_checkpoint_is_read_no_more_and_views_of_its_data_keep_the_file(self, tmp_path):
        tensor = random("uint8", (5,))
        save_file({"x": tensor}, tmp_path / "model.safetensors")
        checkpoint = open_checkpoint(tmp_path)
        assert opened(tmp_path)
        data = checkpoint.tensors["x"].data
        kept = numpy.frombuffer(data[1:], "uint8")
        checkpoint.close()
        checkpoint.close()
        assert kept.tolist() == tensor.tolist()[1:]
        with pytest.raises(ValueError, match="released"):
            data.tobytes()

    def test_no_tensors_padding_and_fields_of_the_future(self, tmp_path):
        assert read(written(tmp_path, b"{}   ")) == {}
        assert read(written(tmp_path, b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":[]}} \n', b"a")) == {
            "x": ("uint8", (1,), b"a")
        }


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def written(folder, header, data=b"", length=None):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def write(folder, header, data=bytes(8)):
    return written(folder, json.dumps(header).encode(), data)


def shards(folder, files, tensors, left_out=()):
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    places = {name: file for file, names in files.items() for name in names if name not in left_out}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


HEADERS = {
    "is not described as the format says: Expected `object`": {"x": [1]},
    "missing required field `shape`": {"x": {"dtype": "F32", "data_offsets": [0, 8]}},
    "dtype 'F4'; known are BOOL, U8": {"x": entry("F4")},
    "Expected `str`, got `int` - at `$.dtype`": {"x": entry(4)},
    "Expected `int` >= 0 - at `$.shape[0]`": {"x": entry(shape=[-2])},
    "Expected `int`, got `float` - at `$.shape[0]`": {"x": entry(shape=[2.0])},
    "Expected `int`, got `bool`": {"x": entry(shape=[2, True])},
    "length <= 64 - at `$.shape`": {"x": entry(shape=[1] * 65)},
    "Expected `int` <= 9223372036854775807 - at `$.shape[1]`": {"x": entry(shape=[0, 2**64])},
    "has 8 bytes, which are not those of F32 of shape [9223": {"x": entry(shape=[2**63 - 1] * 64)},
    "has 8 bytes, which are not those of F32 of shape [4294967296, 4294967297]": {"x": entry(shape=[2**32, 2**32 + 1])},
    "has -8 bytes": {"x": entry("U8", [8], 8, 0)},
    "Expected `array` of length 2, got 3": {"x": entry() | {"data_offsets": [0, 8, 8]}},
    "Expected `int` >= 0 - at `$.data_offsets[0]`": {"x": entry(start=-8, end=0)},
    "tensor 'x' leaves a hole before it: it starts at 1, and must at 0": {"x": entry(start=1, end=9)},
    "tensor 'y' overlaps another: it starts at 4, and must at 8": {"x": entry(), "y": entry(start=4, end=12)},
    "tensor 'y' leaves a hole": {"x": entry(), "y": entry(start=16, end=24)},
    "tensor 'y' overlaps another": {"x": entry(), "y": entry()},
    "and must have": {"x": entry(shape=[4], end=16)},
    "__metadata__ must map text to text": {"__metadata__": {"a": 1}, "x": entry()},
    "__metadata__ must map text to text: Expected `object`": {"__metadata__": [], "x": entry()},
    r"must be printable, got 'a\nb'": {"a\nb": entry()},
    r"must be printable, got '\ud800'": {"\ud800": entry()},
}


class TestWrongSafetensors:
    @pytest.mark.parametrize("message", HEADERS)
    def test_header(self, tmp_path, message):
        said = refusal(write(tmp_path, HEADERS[message]))
        assert message in said
        assert said.startswith(f"{tmp_path}/model.safetensors")

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (b'{"x": 1, "x": 2}', "the key 'x' appears twice"),
            (b'{"x":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "the key 'dtype' appears twice"),
            (b"[]", "must begin with {, got b'['"),
            (b" {}", "must begin with {, got b' '"),
            (b"", "must begin with {, got b''"),
            (b"{", "not valid JSON"),
            (b"{} {}", "not valid JSON"),
            (b'{"\xff": 1}', "not valid JSON"),
            (b'{"x": ' + b"[" * 100_000, "not valid JSON: maximum recursion depth"),
            (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
        ],
    )
    def test_json(self, tmp_path, header, message):
        assert message in refusal(written(tmp_path, header))

    @pytest.mark.parametrize("length", [3, 100_000_001, 2**63, 2**64 - 1])
    def test_length_of_the_header(self, tmp_path, length):
        assert f"its header would have {length} bytes" in refusal(written(tmp_path, b"{}", length=length))

    def test_every_file_that_is_cut_off(self, tmp_path):
        whole = save({"x": random("float32"), "y": random("int8")})
        path = tmp_path / "model.safetensors"
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            refusal(path)
        path.write_bytes(whole + b"\0")
        assert "copy or download it again" in refusal(path)

    def test_a_pointer_of_git_lfs(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        assert refusal(tmp_path) == f"{path} is only a pointer of Git LFS; get the file itself with `git lfs pull`"


class TestWrongShards:
    @pytest.mark.parametrize(
        "name",
        ["../a.safetensors", "/etc/a.safetensors", "b/a.safetensors", "b\\a.safetensors", "a.bin", "", "..", "a\0"],
    )
    def test_a_name_that_leaves_the_folder(self, tmp_path, name):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        message = f"{index} places tensor 'x' in {name!r}, which is not a .safetensors file of its folder"
        assert refusal(tmp_path) == message

    @pytest.mark.parametrize("document", [{}, {"weight_map": []}, {"weight_map": {"x": 1}}])
    def test_an_index_of_another_form(self, tmp_path, document):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
        assert "must map tensors to files in weight_map" in refusal(tmp_path)

    def test_a_missing_file_and_a_missing_tensor(self, tmp_path):
        tensors = {name: random("float32") for name in "abc"}
        shards(tmp_path, {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}, tensors)
        save_file({"a": tensors["a"]}, tmp_path / "model-1.safetensors")
        assert "model-1.safetensors has no tensor 'b', which model.safetensors.index.json" in refusal(tmp_path)
        (tmp_path / "model-2.safetensors").unlink()
        assert refusal(tmp_path).endswith("names files that are missing, 1 in all: model-2.safetensors")


def archive(path, data=None, storages=None, compression=zipfile.ZIP_STORED, **entries):
    """Write an archive by hand, of which all but the pickle may be compressed."""
    with zipfile.ZipFile(path, "w") as file:
        if data is not None:
            file.writestr("a/data.pkl", data)
        for name, content in ({f"data/{key}": value for key, value in (storages or {}).items()} | entries).items():
            file.writestr(f"a/{name}", content, compression)
    return path


class Global:
    """Pickles to a global of this name, called with these arguments."""

    def __init__(self, name, *arguments):
        self.name, self.arguments = name, arguments


class Storage:
    def __init__(self, length=4, kind="FloatStorage", key="0"):
        self.id = ("storage", Named("torch", kind), key, "cpu", length)


class Named:
    def __init__(self, module, name):
        self.text = f"c{module}\n{name}\n".encode()


def pickled(value):
    """Pickle with names of what need not be installed, and of wrong calls."""
    if isinstance(value, Global):
        called = Named(*value.name.rsplit(".", 1)).text
        return called + b"(" + b"".join(map(pickled, value.arguments)) + b"tR"
    if isinstance(value, Named):
        return value.text
    if isinstance(value, Storage):
        return pickled(value.id) + b"Q"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(pickled, value)) + b"t"
    if isinstance(value, dict):
        return b"}(" + b"".join(pickled(name) + pickled(item) for name, item in value.items()) + b"u"
    return pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"")


def tensor(storage=None, offset=0, shape=(4,), strides=(1,)):
    return Global("torch._utils._rebuild_tensor_v2", storage or Storage(), offset, shape, strides, False, None)


PICKLES = {
    "'a' lies outside of its storage of 16 bytes": {"a": tensor(offset=1)},
    "'b' lies outside": {"b": tensor(offset=-1)},
    "'c' lies outside of": {"c": tensor(shape=(2**62,), strides=(1,))},
    "'d' is transposed or has gaps": {"d": tensor(shape=(2, 2), strides=(1, 2))},
    "'e' is transposed or has gaps": {"e": tensor(shape=(2,), strides=(0,))},
    "'f' is transposed or has gaps": {"f": tensor(shape=(2,), strides=(1, 1))},
    "'g' has a wrong shape: Expected `int` >= 0": {"g": tensor(shape=(-1,))},
    "'h' has a wrong shape: Expected `int`, got `str`": {"h": tensor(shape=("1",))},
    "'i' has a wrong shape: Expected `array` of length <= 64": {"i": tensor(shape=(1,) * 65, strides=(1,) * 65)},
    "'j' has a storage of 16 bytes, which are not 5 of float32": {"j": tensor(Storage(5))},
    "'k' has a storage of 16 bytes, which are not 4 of float64": {"k": tensor(Storage(4, "DoubleStorage"))},
    "'l' needs the entry 'data/../data.pkl' of the archive, which is missing": {
        "l": tensor(Storage(key="../data.pkl"))
    },
    "'m' is int, which is not a named tensor; save model.state_dict() instead": {"m": 3},
    "7 is Tensor, which is not a named tensor": {7: tensor()},
    "'n' is Storage, which is not": {"n": Storage()},
    "'o' is 'torch.FloatStorage', which is not": {"o": Named("torch", "FloatStorage")},
    r"must be printable, got 'p\n'": {"p\n": tensor()},
    "holds tuple, which is not a state dict": (1, 2),
    "holds 'posix.system', which is not a plain tensor; save model.state_dict() instead": Global(
        "posix.system", "exit 1"
    ),
    "holds 'builtins.getattr', which": Global("builtins.getattr", {}, "clear"),
    "holds 'torch.QInt8Storage', which": {"q": tensor(Storage(kind="QInt8Storage"))},
    "wrong arguments of 'torch._utils._rebuild_parameter'": {"r": Global("torch._utils._rebuild_parameter", 1)},
    "wrong arguments of 'torch._utils._rebuild_tensor_v2'": {"s": tensor(shape=4)},
    "wrong arguments of 'collections.OrderedDict'": Global("collections.OrderedDict", 1),
    "wrong arguments of 'torch.FloatStorage'": Global("torch.FloatStorage", 2**40),
    "a reference from outside must be a storage": {"t": tensor(Storage(length="4"))},
}
OPCODES = {
    "the stack is too short": b"\x85.",
    "pop from empty list": b".",
    "pickle exhausted before seeing STOP": b"}",
    "expected 2147483647 bytes in a unicodestring4, but only 3 remain": b"X\xff\xff\xff\x7fab.",
    "only a list can be appended to": b"}Na.",
    "only a dict has items": b"]NNs.",
    "and their keys must be text": b"})Ns.",
    "only a dict has a state": b"]Nb.",
    "a global must be named by text": b"NN\x93.",
    "(the pickle opcode NEWOBJ)": b"ccollections\nOrderedDict\n)\x81.",
    "expected 1099511627776 bytes in a bytearray8, but only 0 remain": b"\x96" + (2**40).to_bytes(8, "little"),
    r"opcode b'\xff' unknown": b"\xff.",
    "holds tuple, which": b")" + b"\x85" * 100_000 + b".",
    "data.pkl is not a whole pickle of a state dict: 5": b"h\x05.",
}


class TestWrongStateDicts:
    def test_pickles_by_hand_can_be_right(self, tmp_path):
        data = struct.pack("4f", 1, 2, 3, 4)
        tensors = {"x": tensor(offset=1, shape=(3, 1), strides=(1, 7)), "y": tensor(shape=(0, 2), strides=(9, 9))}
        path = archive(tmp_path / "model.pt", pickled(tensors) + b".", {"0": data})
        assert read(path) == {"x": ("float32", (3, 1), data[4:]), "y": ("float32", (0, 2), b"")}
        # An entry of a memo far away, for which a list would take 32 GB.
        assert read(archive(path, b"}r\xff\xff\xff\xff.")) == {}

    @pytest.mark.parametrize("message", PICKLES)
    def test_pickle(self, tmp_path, message):
        said = refusal(archive(tmp_path / "model.pt", pickled(PICKLES[message]) + b".", {"0": bytes(16)}))
        assert message in said
        assert said.startswith(f"{tmp_path}/model.pt")

    @pytest.mark.parametrize("message", OPCODES)
    def test_opcodes(self, tmp_path, message):
        said = refusal(archive(tmp_path / "model.pt", OPCODES[message]))
        assert message in said
        assert said.startswith(f"{tmp_path}/model.pt")

    @pytest.mark.parametrize(
        ("value", "name"),
        [
            (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
            ({"x": numpy.ones(2)}, "numpy._core.multiarray._reconstruct"),
            ({"x": torch.ones(2, dtype=torch.uint16)}, "torch._utils._rebuild_tensor_v3"),
            ({"x": torch.ones(2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ],
        ids=["a model", "numpy", "another form", "sparse"],
    )
    def test_what_is_not_a_tensor_is_named(self, tmp_path, value, name):
        torch.save(value, tmp_path / "model.pt")
        advice = "which is not a plain tensor; save model.state_dict() instead"
        assert refusal(tmp_path) == f"{tmp_path}/model.pt holds {name!r}, {advice}"

    def test_a_transposed_tensor(self, tmp_path):
        torch.save({"x": torch.ones(2, 3).T}, tmp_path / "model.pt")
        assert refusal(tmp_path) == f"{tmp_path}/model.pt: 'x' is transposed or has gaps; save it with .contiguous()"

    def test_other_archives(self, tmp_path):
        path, data = tmp_path / "model.pt", pickled({"x": tensor()}) + b"."
        assert "needs the entry 'data/0' of the archive, which is missing" in refusal(archive(path, data))
        compressed = archive(path, data, {"0": bytes(16)}, zipfile.ZIP_DEFLATED)
        assert "'x' needs the entry 'data/0', which must not be compressed" in refusal(compressed)
        odd = pickled({"x": tensor(Storage(key="\n"))}) + b"."
        assert r"needs the entry 'data/\n', which must not be" in refusal(
            archive(path, odd, {"\n": bytes(16)}, zipfile.ZIP_DEFLATED)
        )
        assert "must have one data.pkl" in refusal(archive(path, None, {"0": bytes(16)}))
        assert "must have one data.pkl" in refusal(archive(path, data, **{"b/data.pkl": data}))
        assert "is big-endian" in refusal(archive(path, data, {"0": bytes(16)}, byteorder="big"))
        with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(archive(path, data), "a") as file:
            file.writestr("a/data.pkl", data)
        assert "no name twice" in refusal(path)
        torch.save({"x": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
        assert "is not a zip archive of torch.save, or is cut off" in refusal(path)

    def test_a_changed_pickle_and_every_file_that_is_cut_off(self, tmp_path):
        path = tmp_path / "model.pt"
        torch.save({"weight": random("float32")}, path)
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"weight", b"height", 1))
        assert "data.pkl has another checksum" in refusal(path)
        for length in range(0, len(whole), 7):
            path.write_bytes(whole[:length])
            refusal(path)


class TestPlaces:
    COMMIT = "0123456789abcdef" * 2 + "01234567"

    @pytest.fixture(autouse=True)
    def settings(self, tmp_path, monkeypatch):
        for name in ("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.chdir(tmp_path)

    def cached(self, hub, files=("model.safetensors", "config.json"), hub_id="Qwen/Qwen3-0.6B"):
        """A snapshot as the hub's client keeps it, with links to blobs."""
        repository = hub / f"models--{hub_id.replace('/', '--')}"
        for folder in ("blobs", "refs", f"snapshots/{self.COMMIT}"):
            (repository / folder).mkdir(parents=True)
        (repository / "refs" / "main").write_text(self.COMMIT)
        save_file({"x": random("float32")}, repository / "blobs" / "model.safetensors")
        (repository / "blobs" / "config.json").write_text('{"model_type": "qwen3"}')
        for name in files:
            (repository / "snapshots" / self.COMMIT / name).symlink_to(Path("../../blobs") / name)
        return repository / "snapshots" / self.COMMIT

    @pytest.mark.parametrize(
        ("variable", "value", "hub"),
        [
            ("HF_HUB_CACHE", "there", "there"),
            ("HF_HOME", "there", "there/hub"),
            ("XDG_CACHE_HOME", "there", "there/huggingface/hub"),
            ("HOME", "there", "there/.cache/huggingface/hub"),
        ],
    )
    def test_a_snapshot_is_found_by_the_variables_of_the_hub(self, tmp_path, monkeypatch, variable, value, hub):
        monkeypatch.delenv("HF_HUB_CACHE")
        monkeypatch.setenv(variable, str(tmp_path / value))
        folder = self.cached(tmp_path / hub)
        with open_checkpoint("Qwen/Qwen3-0.6B") as checkpoint:
            assert (checkpoint.folder, list(checkpoint.tensors)) == (folder, ["x"])
            assert checkpoint.config == {"model_type": "qwen3"}

    def test_an_id_without_an_organisation(self, tmp_path):
        self.cached(tmp_path / "hub", hub_id="gpt2")
        assert list(read("gpt2")) == ["x"]

    def test_what_is_missing_is_downloaded(self, tmp_path, monkeypatch):
        downloads = []

        def snapshot_download(hub_id, **options):
            downloads.append((hub_id, options))
            return str(self.cached(tmp_path / "downloaded", hub_id=hub_id))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        self.cached(tmp_path / "hub", files=["config.json"])
        assert list(read("Qwen/Qwen3-0.6B")) == ["x"]
        patterns = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*"]}
        assert downloads == [("Qwen/Qwen3-0.6B", {"cache_dir": tmp_path / "hub", **patterns})]

    def test_what_cannot_be_downloaded(self, tmp_path, monkeypatch):
        missing = f"Qwen/Qwen3-0.6B is neither a folder nor in the Hugging Face cache {tmp_path}/hub, and "
        advice = "; download it with `hf download Qwen/Qwen3-0.6B`, or pass a folder"

        def snapshot_download(hub_id, **options):
            raise OSError("no route\nto the hub")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        assert refusal("Qwen/Qwen3-0.6B") == f"{missing}the hub did not give it (no route){advice}"
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "huggingface_hub", None)
            assert refusal("Qwen/Qwen3-0.6B") == f"{missing}huggingface_hub is not installed{advice}"
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert refusal("Qwen/Qwen3-0.6B") == f"{missing}HF_HUB_OFFLINE is set{advice}"
        folder = self.cached(tmp_path / "hub", files=["config.json"])
        assert f"is not whole in the Hugging Face cache ({folder} has no weights; " in refusal("Qwen/Qwen3-0.6B")

    @pytest.mark.parametrize("commit", ["../../../../etc", "main", "", "\xff"])
    def test_a_branch_that_names_no_commit(self, tmp_path, monkeypatch, commit):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        self.cached(tmp_path / "hub")
        (tmp_path / "hub/models--Qwen--Qwen3-0.6B/refs/main").write_text(commit)
        assert "nor in the Hugging Face cache" in refusal("Qwen/Qwen3-0.6B")

    @pytest.mark.parametrize(
        "where", ["/not/there", "../model", "a/b/c", ".", "x" * 5000, "a\0b", Path("Qwen/Qwen3-0.6B")]
    )
    def test_neither_a_folder_nor_a_file(self, monkeypatch, where):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(
            InputError, match=r"is neither a folder nor|has no weights; they must be model\.safetensors, "
        ):
            open_checkpoint(where)

    def test_files_that_cannot_be_read(self, tmp_path):
        path = tmp_path / "model.safetensors"
        path.touch()
        assert refusal(tmp_path) == f"{path} is empty"
        path.unlink()
        os.mkfifo(path)
        assert "has no weights" in refusal(tmp_path)
        (tmp_path / "config.json").symlink_to("missing")
        archive(tmp_path / "model.pt", b"}.")
        assert refusal(tmp_path) == f"{tmp_path}/config.json is missing"


class TestReadJson:
    def test_an_object(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text('{"name": "Qwen", "theta": 1e6, "name": "Qwen3 é"}', encoding="utf-8")
        assert read_json(path) == read_json(str(path)) == {"name": "Qwen3 é", "theta": 1e6}

    @pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "[" * 100_000, "9" * 5000])
    def test_no_json(self, tmp_path, text):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(InputError, match=re.escape(f"{tmp_path}/a.json is not valid JSON: ")):
            read_json(tmp_path / "a.json")

    def test_no_object_no_file_and_too_large(self, tmp_path, monkeypatch):
        path = tmp_path / "a.json"
        with pytest.raises(InputError, match=r"a\.json is missing$"):
            read_json(path)
        with pytest.raises(InputError, match=r"is not a file$"):
            read_json(tmp_path)
        path.write_text("[1]")
        with pytest.raises(InputError, match=r"a\.json must be a JSON object, got list$"):
            read_json(path)
        monkeypatch.setattr(json_files, "LARGEST_JSON_BYTES", 2)
        with pytest.raises(InputError, match=r"a\.json is larger than 2 bytes"):
            read_json(path)


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(
    lambda name: name.isprintable() and name not in ("__metadata__", "model")
)
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(OF_STORAGES), SHAPES), max_size=6)


@given(TENSORS, st.sampled_from(["model.safetensors", "model.pt"]))
@examples(100)
def test_any_tensors_are_read_as_they_were_written(drawn, file):
    tensors = {name: random(dtype, shape) for name, (dtype, shape) in drawn.items()}
    with tempfile.TemporaryDirectory() as folder:
        (save_file if file.endswith("safetensors") else torch.save)(tensors, Path(folder) / file)
        assert read(folder) == {name: facts(tensor) for name, tensor in tensors.items()}


# Where bytes are put in, how many of the old ones they replace, and the bytes.
CHANGES = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 2, 8]), st.binary(max_size=9)), min_size=1, max_size=3
)


def changed(data, changes):
    for share, count, new in changes:
        at = round(share * len(data))
        data = data[:at] + new + data[at + count :]
    return data


SAMPLES = {"a": torch.ones(5, 2), "b": torch.arange(5), "c": torch.tensor(True).repeat(40)}


@functools.cache
def samples(kind):
    """The files of a checkpoint by name, one of which will be changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "model.safetensors":
            save_file(SAMPLES, folder / kind)
        elif kind.endswith("json"):
            shards(folder, {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}, SAMPLES)
        else:
            torch.save(SAMPLES, folder / "model.pt")
        if kind == "data.pkl":
            with zipfile.ZipFile(folder / "model.pt") as file:
                (folder / kind).write_bytes(file.read("model/data.pkl"))
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_unchanged_samples_are_right():
    data = samples("data.pkl")["data.pkl"]
    with tempfile.TemporaryDirectory() as folder:
        path = archive(Path(folder) / "model.pt", data, {str(key): bytes(40) for key in range(3)})
        assert read(path) == {name: (*facts(tensor)[:2], bytes(40)) for name, tensor in SAMPLES.items()}


@pytest.mark.parametrize("kind", ["model.safetensors", "model.pt", "data.pkl", "model.safetensors.index.json"])
@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@given(changes=CHANGES, is_cut=st.booleans())
@examples(300)
def test_changed_files_are_refused_in_one_line_or_read_whole(kind, changes, is_cut):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = samples(kind)
        data = changed(files[kind], changes)
        for file, content in (files | {kind: data[: round(changes[0][0] * len(data))] if is_cut else data}).items():
            (folder / file).write_bytes(content)
        if kind == "data.pkl":
            archive(folder / "model.pt", (folder / kind).read_bytes(), {str(key): bytes(40) for key in range(3)})
        try:
            found = read(folder)
        except InputError as error:
            message = str(error)
        else:
            message = ""
            assert all(len(data) == math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape, data in found.values())
            if kind in ("model.pt", "model.safetensors.index.json"):
                known = {name: facts(tensor)[:2] for name, tensor in SAMPLES.items()}
                assert {name: (dtype, shape) for name, (dtype, shape, _) in found.items()}.items() <= known.items()
        assert "\n" not in message
        assert not opened(folder)


@pytest.mark.processes
def test_checkpoints_are_read_with_the_declared_dependencies_alone(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"y": torch.ones(3)}, tmp_path / "model.pt")
    code = """
import sys
from tilekern.inference.checkpoints import open_checkpoint
for path in sys.argv[1:]:
    with open_checkpoint(path) as checkpoint:
        print(*((name, tensor.dtype, tensor.shape, len(tensor.data)) for name, tensor in checkpoint.tensors.items()))
"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (tmp_path / "bare").mkdir()
    ran = BarePython(tmp_path / "bare", project["dependencies"]).run(
        "-c", code, tmp_path / "model.safetensors", tmp_path / "model.pt"
    )
    assert ran.stdout.splitlines() == ["('x', 'float32', (2,), 8)", "('y', 'float32', (3,), 12)"], ran.stderr
