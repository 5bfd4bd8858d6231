"""Atheris on one reader: ``python reader_fuzzer.py READER SECONDS FOLDER``; it ends with 0 where nothing was found.

A reader may raise a CacheError or an InputError of one line and nothing else. What a reader of the cache accepts must
be what it writes; a checkpoint that is accepted must have all bytes of its tensors.
"""

import contextlib
import hashlib
import json
import math
import shutil
import sys
import warnings
import zipfile
from pathlib import Path

import atheris
from msgspec.structs import replace

with atheris.instrument_imports(include=["tilekern.cache", "tilekern.cache_tools.commands.pull", "tilekern.inference"]):
    from tilekern.cache import (
        CacheError,
        PackLayer,
        Record,
        Store,
        clear_wanted,
        install_pack,
        note_misses,
        note_wanted,
        parse_problem_key,
        problem_key,
        read_misses,
        read_wanted,
        write_pack,
    )
    from tilekern.cache.keys import Address, check_digest, parse_path, signature_path
    from tilekern.cache.records import decode_record
    from tilekern.cache.trust.policy import read_signatures, read_trust_roots
    from tilekern.cache.trust.signing import SigningKey, check_signature, generate_key, is_signed
    from tilekern.cache_tools.commands.pull import was_pulled
    from tilekern.errors import InputError
    from tilekern.inference.architectures import architecture_of
    from tilekern.inference.checkpoints import open_checkpoint
    from tilekern.inference.host_tensors import ITEM_BYTES
    from tilekern.inference.json_files import read_json
    from tilekern.inference.steps import angles_of
    from tilekern.inference.weights import sources_of

from cache_samples import H200, PROBLEM, find, make, sealed

RECORD, BLOBS = make(b"aligned", b"generic")
PROCESS = "0123456789abcdef"
SIGNED = b"the bytes of a record"


def record(data, folder):
    """A record's file, at its own address and at none; what was changed also with the digest that fits it."""
    with contextlib.suppress(ValueError):
        data = sealed(data.decode()).encode()
    for address in (RECORD.address, None):
        found = allowed(decode_record, data, address)
        if found is not None:
            assert found.address == RECORD.address
            assert Record.from_json(found.to_json()) == found


def key(data, folder):
    """A problem's key, and the path of a record."""
    text = data.decode(errors="replace")
    problem = allowed(parse_problem_key, text)
    assert problem is None or problem_key(problem) == text
    address = allowed(parse_path, text.split("/"))
    assert address is None or (isinstance(address, Address) and ".." not in address.path.parts)


def pack(data, folder):
    """A pack's file, read in place and unpacked."""
    path, unpacked = folder / "fuzzed.pack", folder / "unpacked"
    path.write_bytes(data)
    hit = find([PackLayer(path)])
    assert hit is None or {hit.load(variant) for variant in hit.record.artifacts} <= set(BLOBS.values())
    shutil.rmtree(unpacked, ignore_errors=True)
    installed = allowed(install_pack, path, Store(unpacked))
    assert unpacked.exists() == bool(installed)


def wanted(data, folder):
    """A file of the wanted list; the name that it has says nothing of what is in it."""
    place = folder / "v1" / "wanted" / f"{'0' * 64}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    for item in read_wanted(folder):
        assert item["problem"] == parse_problem_key(problem_key(item["problem"]))
        assert json.dumps(item)


def misses(data, folder):
    """A process's counts of misses."""
    place = folder / "v1" / "wanted" / f"{PROCESS}.misses"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    assert all(isinstance(name, str) and count > 0 for name, count in read_misses(folder).items())


def signature(data, folder):
    """The file of a signature: one that counts has the form of one, and no other bytes than the signed ones."""
    digest = hashlib.sha256(SIGNED).hexdigest()
    place = folder / signature_path(digest, public_key(folder))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    found = read_signatures(folder, digest)
    assert found in ({}, {public_key(folder): data})
    assert allowed(check_signature, data) in (None, data)
    if is_signed(public_key(folder), SIGNED, data):
        assert found
        assert not is_signed(public_key(folder), SIGNED + b" ", data)


def roots(data, folder):
    """Trust roots, and a private key."""
    path = folder / "roots"
    path.write_bytes(data)
    path.chmod(0o600)
    for root in allowed(lambda: list(read_trust_roots(path))) or ():
        assert check_digest("a key", root.public_key)
    key = allowed(SigningKey, path)
    assert key is None or is_signed(key.public_key, SIGNED, key.sign(SIGNED))


def pulled(data, folder):
    """Read the note of a pull; no pack counts as pulled, since no record is here."""
    place = folder / "pulled" / f"{'0' * 64}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    assert not was_pulled(Store(folder), "0" * 64) or json.loads(data)["records"] in ([], {}, "")


def public_key(folder):
    """Return the public part of the key that signed the seeds."""
    return (folder.parent / "seeds" / "key.pem.pub").read_text()


def allowed(read, *arguments):
    """Return the result of a reader, or None if it refuses with one line."""
    try:
        return read(*arguments)
    except (CacheError, InputError) as error:
        message = str(error)
    assert "\n" not in message, message
    return None


def safetensors(data, folder):
    """A file of safetensors."""
    return checkpoint(folder / "model.safetensors", data)


def index(data, folder):
    """The index of two shards."""
    for path in (folder.parent / "seeds").glob("shard-*"):
        shutil.copyfile(path, folder / path.name)
    (folder / "model.safetensors.index.json").write_bytes(data)
    return checkpoint(folder)


def torch_file(data, folder):
    """A file of torch.save."""
    return checkpoint(folder / "model.pt", data)


def state_dict(data, folder):
    """The pickle in such a file, whose checksum fits."""
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("a/data.pkl", data)
        for number in range(4):
            archive.writestr(f"a/data/{number}", bytes(24))
    return checkpoint(folder / "model.pt")


def config(data, folder):
    """A config.json: the architecture, its angles, and where its weights come from."""
    (folder / "config.json").write_bytes(data)
    found = allowed(read_json, folder / "config.json")
    architecture = None if found is None else allowed(architecture_of, found)
    if architecture is None:
        return False
    angles_of(architecture, 3, "float16")
    allowed(sources_of, architecture, {})
    return True


def checkpoint(path, data=None):
    """Open a checkpoint, whose file is first written where ``data`` is given; if it opens, its tensors are whole."""
    if data is not None:
        path.write_bytes(data)
    opened = allowed(open_checkpoint, path)
    if opened is None:
        return False
    with opened:
        for name, tensor in opened.tensors.items():
            assert name.isprintable()
            assert len(bytes(tensor.data)) == math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
    return True


def checkpoint_seeds(folder):
    """Return valid files of checkpoints for the fuzzer to start from, by reader."""
    import safetensors.torch
    import torch

    folder.mkdir()
    # Storages of 24 bytes, as state_dict() has them.
    tensors = {
        "a": torch.ones(2, 3),
        "b": torch.arange(3),
        "c": torch.arange(3)[1:1],
        "d": torch.ones(3, dtype=torch.float64),
    }
    for number, names in enumerate(("ab", "cd")):
        safetensors.torch.save_file({name: tensors[name] for name in names}, folder / f"shard-{number}.safetensors")
    model = torch.nn.Linear(1, 6).state_dict()
    documents = [tensors, model, {"model": model, "args": {"layers": 2, "rate": 1e-3, "sizes": [1, (2, None)]}}]
    for number, document in enumerate(documents):
        torch.save(document, folder / f"model-{number}.pt", pickle_protocol=2 + number)
    files = sorted(folder.glob("model-*.pt"))
    sizes = {"vocab_size": 97, "n_embd": 48, "n_head": 3, "n_layer": 2, "n_positions": 64}
    of_llama = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "eos_token_id": [2, 3],
    }  # fmt: skip
    stretched = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    configs = [
        {"model_type": "gpt2", **sizes},
        {"model_type": "llama", **of_llama, "rope_parameters": stretched},
        {"model_type": "qwen3", **of_llama, "head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ]
    places = {name: f"shard-{number}.safetensors" for number, names in enumerate(("ab", "cd")) for name in names}
    return {
        "safetensors": [path.read_bytes() for path in sorted(folder.glob("shard-*"))],
        "index": [json.dumps({"metadata": {}, "weight_map": places}).encode()],
        "torch_file": [path.read_bytes() for path in files],
        "config": [json.dumps(config).encode() for config in configs],
        "state_dict": [zipfile.ZipFile(path).read(f"{path.stem}/data.pkl") for path in files],
    }


def cache_seeds(folder):
    """Return valid files of a cache for the fuzzer to start from, by reader."""
    write_pack(folder / "sample.pack", [(RECORD, BLOBS)])
    note_wanted(folder, RECORD.kernel, PROBLEM, H200, "no record")
    (item,) = (folder / "v1" / "wanted").iterdir()
    note_misses(folder, PROCESS, {item.stem: 3})
    (folder / "key.pem.pub").write_text(generate_key(folder / "key.pem"))
    key = SigningKey(folder / "key.pem")
    found = {
        "signature": [key.sign(SIGNED)],
        "roots": [f"# ours\n\ned25519 {key.public_key} build team\n".encode(), (folder / "key.pem").read_bytes()],
        "pulled": [
            json.dumps({"schema": 1, "records": [str(RECORD.address.path)]}).encode(),
            b'{"schema": 1, "records": []}',
        ],
        "record": [
            RECORD.to_json().encode(),
            replace(RECORD, schema=3).to_json().encode(),
            b'{"schema": 99}',
        ],
        "key": [RECORD.address.problem_key.encode(), str(RECORD.address.path).encode()],
        "pack": [(folder / "sample.pack").read_bytes()],
        "wanted": [item.read_bytes()],
        "misses": [item.with_name(f"{PROCESS}.misses").read_bytes()],
    }
    clear_wanted(folder)
    return found


OF_THE_CACHE = {read.__name__: read for read in (record, key, pack, wanted, misses, signature, roots, pulled)}
OF_CHECKPOINTS = {read.__name__: read for read in (safetensors, index, torch_file, state_dict, config)}


def main(reader, seconds, folder):
    warnings.simplefilter("ignore")
    corpus, scratch = Path(folder) / "corpus", Path(folder) / "scratch"
    read, seeds = (OF_THE_CACHE | OF_CHECKPOINTS)[reader], checkpoint_seeds if reader in OF_CHECKPOINTS else cache_seeds
    corpus.mkdir()
    scratch.mkdir()
    for number, data in enumerate(seeds(Path(folder) / "seeds")[reader]):
        assert reader in OF_THE_CACHE or read(data, scratch), f"seed {number} is refused"
        (corpus / str(number)).write_bytes(data)

    def run(data):
        read(data, scratch)

    options = [f"-max_total_time={seconds}", "-seed=1", "-max_len=16384", "-rss_limit_mb=2048", "-timeout=20"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={folder}/", str(corpus)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
