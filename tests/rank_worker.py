"""One rank of a job that has an H200 which is not there: agrees with the others in one situation after the other.

    python rank_worker.py MEET RANK RANKS TIMEOUT_S SITUATIONS

SITUATIONS is a JSON file with a list; each has a ``name``, the cache ``roots`` of the ranks, and perhaps ``env`` and
``do`` for single ranks. One JSON line comes out for each.
"""

import datetime
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path

import torch
from one_record import GPU, SPEC

import tilekern
from tilekern import cache, dispatch, ranks, warning
from tilekern.errors import TilekernError
from tilekern.targets import resolve


def vanish_at_first_blob(root):
    """The cache goes when the first blob has been read."""
    before = cache.FolderLayer.read_blob

    def read_blob(layer, sha256):
        found = before(layer, sha256)
        shutil.rmtree(root, ignore_errors=True)
        return found

    cache.FolderLayer.read_blob = read_blob
    return lambda: setattr(cache.FolderLayer, "read_blob", before)


def is_h100(_):
    """This rank's GPU is another one of the arch."""
    before, dispatch.here = dispatch.here, lambda _device=None: resolve("H100")
    return lambda: setattr(dispatch, "here", before)


def is_b200(_):
    """This rank's GPU is one of another arch."""
    before, dispatch.here = dispatch.here, lambda _device=None: resolve("B200")
    return lambda: setattr(dispatch, "here", before)


def has_no_gpu(_):
    before, dispatch.here = dispatch.here, lambda _device=None: None
    return lambda: setattr(dispatch, "here", before)


def has_no_compiler(_):
    before, ranks.toolkit = ranks.toolkit, lambda: None
    return lambda: setattr(ranks, "toolkit", before)


def has_other_sources(_):
    before, ranks.__version__ = ranks.__version__, "another"
    return lambda: setattr(ranks, "__version__", before)


def vanishes_after(root):
    """The cache goes when the ranks have agreed."""
    agree = ranks.agree

    def then():
        done = agree()
        shutil.rmtree(root)
        return done

    ranks.agree = then
    return lambda: setattr(ranks, "agree", agree)


def dies(_):
    """Only when all are up: rank 0 takes the store along, which the others need until then."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.wait([f"up/{rank}" for rank in range(torch.distributed.get_world_size())])
    os._exit(0)


def run_by(sizes):
    """What a call of these sizes runs by: the config, the artifacts, and who is asked for them; or None."""
    plan = dispatch.plan_for(SPEC, GPU, *sizes, torch.bfloat16)
    if plan is None:
        return None
    return plan.config.key, sorted(len(variant.load()) for variant in plan._kernel._variants)


def situation(given, rank):
    root = given["roots"][rank]
    os.environ["TILEKERN_CACHE_DIR"] = root
    os.environ["TILEKERN_ON_MISS"] = given.get("policies", ["fallback"] * 9)[rank]
    dispatch.agree_on(None)
    warning._said.clear()
    undo = globals()[given["do"][str(rank)]](root) if str(rank) in given.get("do", {}) else (lambda: None)
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
    return found | {"said": [str(w.message) for w in said], "wanted": len(cache.read_wanted(Path(root)))}


def main():
    meet, rank, count, timeout_s, path = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    dispatch.here = lambda _device=None: resolve("H200")
    torch.distributed.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=count, timeout=datetime.timedelta(seconds=timeout_s)
    )
    torch.distributed.distributed_c10d._get_default_store().set(f"up/{rank}", "")
    for given in json.loads(Path(path).read_text()):
        print(json.dumps({"name": given["name"], **situation(given, rank)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
