"""One rank of a job that has an H200 which is not there: agrees with the others in one situation after the other.

    python rank_worker.py MEET RANK RANKS TIMEOUT_S SITUATIONS

MEET is where they meet, as torch.distributed has it, or ``store://HOST:PORT`` of a store that is up already. SITUATIONS
is a JSON file with a list; each has a ``name``, the cache ``roots`` of the ranks, and perhaps ``env`` for all ranks, or
``env_of`` and ``do`` for single ones. If it is ``kept``, the agreement before stays in force until they agree. The
wheel's packs are hidden, since reading them takes seconds. One JSON line comes out for each situation.
"""

import datetime
import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path

import torch
from msgspec.structs import replace
from one_record import GPU, SPEC
from rank_jobs import fill

import tilekern
from tilekern import cache, warning
from tilekern.errors import TilekernError
from tilekern.patch import comparing as ranks
from tilekern.runtime import dispatch
from tilekern.runtime.ranks.held import Held
from tilekern.runtime.ranks.peers import Peers
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec.targets import resolve


def swapped(owner, name, value):
    """Put something in the place of an attribute; gives what puts that back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def is_honest(_):
    return lambda: None


def vanish_at_first_blob(root):
    """The cache goes when the first blob has been read."""
    before = cache.FolderLayer.read_blob

    def read_blob(layer, sha256):
        found = before(layer, sha256)
        shutil.rmtree(root, ignore_errors=True)
        return found

    return swapped(cache.FolderLayer, "read_blob", read_blob)


def has_gpu(_, name):
    """This rank's GPU is another one, of the arch or not, or none."""
    return swapped(dispatch, "here", lambda _device=None: name and resolve(name))


def has_no_compiler(_):
    return swapped(ranks, "toolkit", lambda: None)


def has_other_sources(_):
    return swapped(ranks, "__version__", "another")


def vanishes_after(root):
    """The cache goes when the ranks have agreed."""
    agree = ranks.agree

    def then():
        done = agree()
        shutil.rmtree(root)
        return done

    return swapped(ranks, "agree", then)


def never_agrees(_):
    return swapped(ranks, "agree", lambda: None)


def publishes_when_agreed(root, compiled):
    """Rank 0 publishes a record after the ranks agreed; it counts when they agree again, and not before."""
    agree = ranks.agree

    def then():
        agree()
        assert run_by((50, 48)) is None
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            fill(Path(root), Path(compiled), 48)
        torch.distributed.barrier()
        assert dispatch.look_again() == 0
        time.sleep(0.5)
        assert run_by((50, 48)) is None, "found by a thread of one rank alone"
        return agree()

    return swapped(ranks, "agree", then)


def dies(_):
    """Only when all are up: rank 0 takes the store along, which the others need until then."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.wait([f"up/{rank}" for rank in range(torch.distributed.get_world_size())])
    os._exit(0)


def says(_, method, call, said):
    """This rank says something else, of its own making, the ``call``-th time that it says anything by ``method``."""
    before, calls = getattr(Peers, method), []

    def lie(peers, *arguments):
        calls.append(arguments)
        if len(calls) == call:
            at = 1 if method == "gather" else 0
            arguments = (*arguments[:at], bytes.fromhex(said), *arguments[at + 1 :])
        return before(peers, *arguments)

    return swapped(Peers, method, lie)


def says_that_it_will_say_a_lot(_, call):
    """This rank gives a size that no machine has, the ``call``-th time that it gives one."""
    before, calls = Peers._sizes, []

    def sizes(peers, own):
        calls.append(own)
        return before(peers, own + 2**62 * (len(calls) == call))

    return swapped(Peers, "_sizes", sizes)


def hears_another_s_words_as_its_own(_):
    before = Peers._gathered

    def gathered(peers, own):
        found = before(peers, own)
        found[peers.rank] = found[0]
        return found

    return swapped(Peers, "_gathered", gathered)


def alters_what_it_holds(_):
    """This rank's signed records name other artifacts than those that were signed."""
    before = ranks._snapshot

    def altered(target):
        return Snapshot(other(held) if held.signatures else held for held in before(target)._held.values())

    def other(held):
        names = {digest: hashlib.sha256(data + b"altered").hexdigest() for digest, data in held.blobs.items()}
        artifacts = {
            name: replace(one, sha256=names[one.sha256], size=one.size + 7)
            for name, one in held.record.artifacts.items()
        }
        blobs = {names[digest]: data + b"altered" for digest, data in held.blobs.items()}
        made = replace(held.record, artifacts=artifacts)
        digest = hashlib.sha256(made.data).hexdigest()
        return Held(made, blobs, {f"{digest}{name[64:]}": text for name, text in held.signatures.items()})

    return swapped(ranks, "_snapshot", altered)


def keeps_less(_):
    """This rank loses a record that all agreed on."""
    before = Snapshot.having
    return swapped(Snapshot, "having", lambda self, names, others=(): before(self, list(names)[1:], others))


def has_no_backend_for_the_cpu(_):
    """The world has no collective on the CPU, as with NCCL alone."""
    return swapped(torch.distributed, "get_backend_config", lambda: "cuda:nccl")


def cannot_be_reached(_):
    undo = has_no_backend_for_the_cpu(_)
    os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"

    def both():
        undo()
        del os.environ["GLOO_SOCKET_IFNAME"]

    return both


def run_by(sizes):
    """What a call of these sizes runs by: the config, the artifacts, and who is asked for them; or None."""
    plan = dispatch.plan_for(SPEC, GPU, *sizes, torch.bfloat16)
    if plan is None:
        return None
    return plan.config.key, sorted(len(variant.load()) for variant in plan._kernel.variants)


def situation(given, rank):
    root = given["roots"][rank]
    os.environ["TILEKERN_CACHE_DIR"] = root
    os.environ["TILEKERN_ON_MISS"] = given.get("policies", ["fallback"] * 9)[rank]
    env = given.get("env", {}) | given.get("env_of", {}).get(str(rank), {})
    os.environ.update(env)
    if not given.get("kept"):
        dispatch.agree_on(None)
    warning._said.clear()
    name, *arguments = given.get("do", {}).get(str(rank), ["is_honest"])
    undo = globals()[name](root, *arguments)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        started = time.monotonic()
        try:
            done = ranks.agree()
            runs = [run_by(sizes) for sizes in given["asks"][rank]]
            found = {"agreed": done and vars(done), "runs": runs, "digest": tilekern.cache_digest()}
        except TilekernError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        found["seconds"] = time.monotonic() - started
    undo()
    for name in env:
        del os.environ[name]
    found["groups"] = len(torch.distributed.distributed_c10d._world.pg_map)
    return found | {"said": [str(w.message) for w in said], "wanted": len(cache.read_wanted(Path(root)))}


def main():
    meet, rank, count, timeout_s, path = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    dispatch.here = lambda _device=None: resolve("H200")
    ranks.default_layers = lambda: [one for one in cache.default_layers() if not one.name.startswith("prebuilt:")]
    timeout = datetime.timedelta(seconds=timeout_s)
    where = {"init_method": meet}
    if meet.startswith("store://"):
        host, port = meet.removeprefix("store://").split(":")
        where = {"store": torch.distributed.TCPStore(host, int(port), is_master=False, timeout=timeout)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=count, timeout=timeout, **where)
    torch.distributed.distributed_c10d._get_default_store().set(f"up/{rank}", "")
    for given in json.loads(Path(path).read_text()):
        print(json.dumps({"name": given["name"], **situation(given, rank)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
