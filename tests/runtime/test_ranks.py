"""Real processes with torch.distributed (gloo) and caches that differ: they run the same kernels all the same."""

import json
import socket
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import torch.distributed as dist
from marks import needs_compiler
from one_record import H200, PROBLEM, SPEC
from rank_jobs import DEFAULT, OTHER, fill, finish, go_through, record, start

from tilekern import cache
from tilekern.patch import comparing as ranks
from tilekern.runtime.ranks.held import Held, identity, packed, unpacked
from tilekern.runtime.ranks.snapshot import Snapshot
from tilekern.spec.source import source_digest
from tilekern.spec.targets import resolve

RANKS, TIMEOUT_S = 3, 8
# How much later than its time is up a group may say so on a busy machine; its own limit is half an hour.
LATE_S = 60

pytestmark = [
    pytest.mark.processes,
    needs_compiler,
    pytest.mark.xdist_group("ranks"),  # one worker of pytest's goes through the situations, and not each of the]
]


@pytest.fixture(scope="module")
def situations(compiled, tmp_path_factory):
    """Each situation's outcome by rank; one job goes through all of them."""
    home = tmp_path_factory.mktemp("ranks")
    listed = []

    def give(name, roots, asks=((50, 48), (50, 64)), **more):
        listed.append({"name": name, "roots": roots, "asks": more.pop("each", [asks] * RANKS)} | more)

    def alike(name, *columns):
        return [fill(home / name / str(rank), compiled, *columns) for rank in range(RANKS)]

    give("equal", alike("equal", 48, 64))
    give("differ", [
        fill(home / "differ" / "0", compiled, 48, 64),
        fill(home / "differ" / "1", compiled, 48, 64, config=OTHER),
        fill(home / "differ" / "2", compiled, 48, config=OTHER),
    ])  # fmt: skip
    beside = home / "beside.pack"
    cache.write_pack(beside, [record(compiled, 80, OTHER)])
    give("folders differ beside a pack", [
        fill(home / "beside" / "0", compiled, 48),
        fill(home / "beside" / "1", compiled, 48, config=OTHER),
        fill(home / "beside" / "2", compiled),
    ], [(50, 48), (50, 80)], env={"TILEKERN_CACHE_PATH": str(beside)})  # fmt: skip
    give("times differ", [
        fill(home / "times" / "0", compiled, 48),
        fill(home / "times" / "1", compiled, 48, created="2026-08-01T12:00:00+00:00", candidates=7),
        fill(home / "times" / "2", compiled, 48, runners_up=[{"config": {}, "median_us": 2.0}]),
    ], [(50, 48)])  # fmt: skip
    give("partly filled", [
        fill(home / "partly" / "0", compiled, 48, 64),
        fill(home / "partly" / "1", compiled, 48, 80),
        fill(home / "partly" / "2", compiled),
    ], [(50, 48), (50, 64), (50, 80)])  # fmt: skip
    give("leader has none", [fill(home / "none" / "0", compiled), *alike("nones", 48)[1:]])
    give("each asks for others", alike("others", 48, 64), each=[[(50, 48)], [(50, 64)], [(5000, 48), (50, 48)]])
    give("vanishes while it is read", alike("reading", 48, 64), do={"1": ["vanish_at_first_blob"]})
    give("vanish when agreed", alike("agreed", 48, 64), do={"0": ["vanishes_after"], "1": ["vanishes_after"]})
    damaged = alike("damaged", 48, 64)
    for blob in Path(damaged[1], "v1", "blobs").rglob("*"):
        if blob.is_file():
            blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    give("damaged", damaged)
    blocked = [fill(home / "blocked" / "0", compiled, 48), str(home / "blocked" / "1"), str(home / "blocked" / "2")]
    Path(blocked[1]).write_text("a file where the cache's folder should be")
    Path(blocked[2]).mkdir(mode=0o555)
    give("cannot be written", blocked)
    give("compile", [fill(home / "c" / "0", compiled), blocked[1], fill(home / "c" / "2", compiled)], [(50, 48)],
         policies=["compile"] * RANKS)  # fmt: skip
    give("one has no compiler", [fill(home / "n" / str(r), compiled) for r in range(RANKS)], [(50, 48)],
         policies=["compile"] * RANKS, do={"1": ["has_no_compiler"]})  # fmt: skip
    give("policies differ", alike("p"), policies=["error", "fallback", "compile"])
    give("the strictest is not rank 0's", alike("q"), policies=["compile", "fallback", "error"])
    empty = alike("again")
    give("one forbids to compile", empty, [(50, 48)], policies=["compile", "fallback", "compile"])
    give("none forbids it any more", empty, [(50, 48)], policies=["compile"] * RANKS, kept=True)
    give("another gpu of the arch", alike("h100", 48, 64), do={"1": ["has_gpu", "H100"]})
    give("another arch", alike("b200", 48, 64), do={"2": ["has_gpu", "B200"]})
    give("the first has no gpu", [fill(home / "g" / str(r), compiled, 48, config=(OTHER, DEFAULT, OTHER)[r])
         for r in range(RANKS)], each=[[], [(50, 48)], [(50, 48)]], do={"0": ["has_gpu", None]})  # fmt: skip
    give("a bad policy", alike("bad", 48), policies=["fallback", "panic", "fallback"])
    give("other sources", alike("sources", 48), do={"2": ["has_other_sources"]})
    give("never agreed", alike("never", 48), do={str(rank): ["never_agrees"] for rank in range(RANKS)})
    shared = fill(home / "published", compiled)
    give("agree again", [shared] * RANKS, [(50, 48)], env={"TILEKERN_LOOKUP_AGAIN_S": "0.05"},
         do={str(rank): ["publishes_when_agreed", str(compiled)] for rank in range(RANKS)})  # fmt: skip
    give("one dies", alike("dies", 48), do={"1": ["dies"]})
    return go_through(home, listed, RANKS, TIMEOUT_S)


def configs(outcome):
    """Return the configs that run for the calls of a rank."""
    return [run and run[0] for run in outcome["runs"]]


D = DEFAULT.key
# By situation: the configs that run on all ranks, how many records each received, and what of this is not so.
AGREED = {
    "differ": ([D, D], [0, 2, 2]),
    "folders differ beside a pack": ([D, OTHER.key], [0, 1, 1]),
    "vanishes while it is read": ([D, D], None),
    "vanish when agreed": ([D, D], None),
    "damaged": ([D, D], None),
    "another gpu of the arch": ([D, D], None),
    # Other times and dates are no difference.
    "times differ": ([D], [0, 0, 0]),
    # What rank 0 lacks is a miss on all, though rank 1 has it.
    "partly filled": ([D, D, None], None),
    "leader has none": ([None, None], None),
    # One cache cannot be written, one is none; they take part.
    "cannot be written": ([D, None], None),
    "compile": ([D], None),
    # Where one rank cannot compile none does.
    "one has no compiler": ([None], None),
    # A policy that others forced is not taken for one's own.
    "one forbids to compile": ([None], None),
    "none forbids it any more": ([D], None),
    # The worker makes sure that nothing is taken in between.
    "agree again": ([D], None),
}
WANTED = {"partly filled": 1, "differ": 0, "vanishes while it is read": 0, "vanish when agreed": 0, "damaged": 0}
SAID = {"one has no compiler": "not all ranks on sm_90 have the same compiler"}


@pytest.mark.parametrize("name", AGREED)
def test_all_ranks_run_what_rank_0_has(situations, name):
    found, (expected, received) = situations[name], AGREED[name]
    assert [configs(one) for one in found] == [expected] * RANKS
    for one in found:
        assert one["runs"] == found[0]["runs"]
        assert one["agreed"]["leader"] == 0
        assert one["wanted"] == WANTED.get(name, one["wanted"])
        assert any(SAID.get(name, "") in said for said in (*one["said"], ""))
        # What comes along comes along once and is small.
        assert max(one["agreed"]["sent_bytes"], one["agreed"]["received_bytes"]) < 100_000
    assert received is None or [one["agreed"]["received"] for one in found] == received
    assert len({one["agreed"]["digest"] for one in found}) == 1
    assert len({one["digest"] for one in found}) == 1
    assert name != "vanishes while it is read" or found[1]["agreed"]["received"] >= 1


@pytest.mark.nightly
def test_equal_caches_exchange_nothing_but_their_digests(situations):
    found = situations["equal"]
    assert [one["runs"] for one in found] == [found[0]["runs"]] * RANKS
    assert configs(found[0]) == [D] * 2
    for one in found:
        assert one["agreed"]["received"] == 0
        assert one["agreed"]["sent_bytes"] < 2000
        assert one["agreed"]["received_bytes"] < 4000
        assert one["said"] == []
    assert len({one["digest"] for one in found}) == len({one["agreed"]["digest"] for one in found}) == 1


def test_ranks_that_ask_for_other_problems_get_the_same_answers(situations):
    found = situations["each asks for others"]
    assert found[2]["runs"] == [found[0]["runs"][0]] * 2
    assert found[1]["runs"][0] is not None


def test_a_rank_on_another_arch_leads_itself_and_all_say_so(situations):
    found = situations["another arch"]
    assert [one["agreed"]["leader"] for one in found] == [0, 0, 2]
    assert found[0]["runs"] == found[1]["runs"]
    assert found[2]["runs"] == [None, None]
    assert all("the ranks have GPUs of sm_90, sm_100" in one["said"][0] for one in found)


def test_the_lowest_rank_with_a_gpu_leads(situations):
    none, *found = situations["the first has no gpu"]
    assert none["agreed"] is None
    assert [one["agreed"]["leader"] for one in found] == [1, 1]
    assert [one["runs"] for one in found] == [found[0]["runs"]] * 2
    assert configs(found[0]) == [D]


@pytest.mark.parametrize("name", ["policies differ", "the strictest is not rank 0's"])
def test_the_miss_policy_is_the_strictest(situations, name):
    for one in situations[name]:
        assert one["error"].startswith("CacheMiss:")
        assert any("the ranks on sm_90 have different miss policies" in said for said in one["said"])


# How all end at once, or where one dies within the group's time.
ENDS = {
    "a bad policy": "rank 1 cannot say which kernels it would run: TILEKERN_ON_MISS: unknown miss policy 'panic'",
    "other sources": "rank 2 runs another tilekern than rank 0",
    "one dies": "rank 1 did not come to agree on kernels within ",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_that_cannot_agree_ends_all_ranks(situations, name):
    dies = name == "one dies"
    assert len(situations[name]) == RANKS - dies
    for one in situations[name]:
        assert one["error"].startswith(f"RanksDiffer: {ENDS[name]}")
        assert one["seconds"] < TIMEOUT_S + LATE_S * dies


def test_ranks_that_never_agreed_are_told_so(situations):
    for one in situations["never agreed"]:
        assert "call tilekern.agree() on every rank when torch.distributed is up" in str(one["said"])


@pytest.mark.nightly
def test_rank_0_dying_with_the_store_that_ranks_meet_at_ends_the_others(compiled, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    roots = [fill(tmp_path / "0", compiled, 48), fill(tmp_path / "1", compiled, 48)]
    path = tmp_path / "situations.json"
    given = {"name": "dies", "roots": roots, "asks": [[], []], "do": {"0": ["dies"]}}
    path.write_text(json.dumps([given]))
    worker = Path(__file__).with_name("rank_worker.py")
    _, (said, errors, _) = finish(start(tmp_path, worker, 2, TIMEOUT_S, path, meet=meet))
    assert said, errors
    found = json.loads(said)
    assert found["error"].startswith("RanksDiffer: rank")
    assert found["seconds"] < TIMEOUT_S + LATE_S


# A rank without the wheel's packs, on an H200 that is not there.
RANK = """
import os, sys, torch, tilekern
from torch.distributed import init_process_group
from tilekern import cache
from tilekern.kernels import spec_named
from tilekern.runtime import dispatch
from tilekern.patch import comparing as ranks
from tilekern.spec.targets import resolve

dispatch.here = lambda _device=None: resolve("H200")
ranks.default_layers = lambda: [one for one in cache.default_layers() if not one.name.startswith("prebuilt:")]
meet, rank, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def plan():
    with torch.no_grad():
        return dispatch.plan_for(spec_named("swiglu_forward"), torch.device("cuda", 0), 50, 48, torch.bfloat16)


"""
APPLY = """
os.environ["TILEKERN_CACHE_DIR"] = sys.argv[4 + rank]
known, rounds = init_process_group, []
inner = ranks.agree
ranks.agree = lambda: rounds.append(inner())


def up(when):
    init_process_group("gloo", init_method=f"{meet}-{when}", rank=rank, world_size=count)


def judge():
    tilekern.apply()
    assert len(rounds) == 1 and rounds[0].ranks == 2, rounds
    print(plan().config.key, tilekern.cache_digest())
    tilekern.reset()
    assert torch.distributed.init_process_group is known and init_process_group is known
    torch.distributed.destroy_process_group()
    rounds.clear()


tilekern.apply()
assert init_process_group is not known, "the name that this script imported"
assert not rounds
up("before")
judge()
dispatch.forget()
up("after")
tilekern.apply()
judge()
"""


@pytest.mark.nightly
def test_apply_agrees_before_and_after_torch_distributed_is_up(compiled, tmp_path):
    roots = [fill(tmp_path / "0", compiled, 48), fill(tmp_path / "1", compiled, 48, config=OTHER)]
    ended = finish(start(tmp_path, RANK + APPLY, 2, *roots, modules="torch,transformers"))
    assert [code for _, _, code in ended] == [0, 0], ended
    assert ended[0][0] == ended[1][0]
    before, after = ended[0][0].splitlines()
    assert before == after
    assert before.startswith(DEFAULT.key)


def test_ranks_agree_when_torch_distributed_comes_up_under_any_of_its_names(tmp_path, monkeypatch):
    rounds, script, known = [], ModuleType("script"), dist.init_process_group
    script.init_process_group = known
    monkeypatch.setitem(sys.modules, "script", script)
    monkeypatch.setattr(ranks, "agree", lambda: rounds.append(dist.is_initialized()))
    try:
        ranks.agree_when_up()
        assert not rounds
        script.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
        ranks.agree_when_up()
        assert rounds == [True, True]
    finally:
        ranks.unarm()
        dist.destroy_process_group()
    assert dist.init_process_group is script.init_process_group is known


def test_without_torch_distributed_nothing_is_done():
    assert ranks.agree() is None


def test_a_snapshot_answers_as_the_layers_that_it_was_taken_from(compiled, tmp_path):
    fill(tmp_path / "0", compiled, 48, 64)
    fill(tmp_path / "1", compiled, 48, 80, config=OTHER)
    layers = [cache.FolderLayer(tmp_path / name, name) for name in "01"]
    [tools] = layers[0].toolkits(H200.key)
    snapshot = Snapshot.take("sm_90", layers, tools)
    for target in ("H200", "H100"):
        for rows, columns in ((64, 48), (512, 48), (64, 64), (1, 80), (64, 96)):
            options = {
                "bucketed": ["rows"], "target_key": resolve(target).key, "arch": "sm_90", "toolkit_key": tools,
                "source": source_digest(SPEC.module),
            }  # fmt: skip
            problem = dict(PROBLEM.but(rows=rows, columns=columns))
            there, here = (cache.lookup(SPEC.name, problem, layers=where, **options) for where in (layers, [snapshot]))
            assert (there and there.record) == (here and here.record)
            assert (there and there.exact_bucket) == (here and here.exact_bucket)
            if there:
                assert there.load("aligned") == here.load("aligned")
    assert len(snapshot) == 3


def test_an_identity_covers_what_runs_and_nothing_else(compiled):
    made, _ = record(compiled)
    assert identity(record(compiled, created="2026-08-01T12:00:00+00:00")[0]) == identity(made)
    assert identity(record(compiled, config=OTHER)[0]) != identity(made)
    assert identity(record(compiled, columns=64)[0]) != identity(made)


def test_an_identity_covers_the_kernel_of_the_invariant_mode(compiled):
    made, blobs = record(compiled)
    facts = {"config": dict(OTHER), "bits": "a", "generic": False, "median_us": 9.0}
    named = [
        msgspec.structs.replace(made, measurement={"invariant": facts | changed})
        for changed in ({}, {"median_us": 8.0}, {"bits": "b"})
    ]
    same, slower, other = map(identity, named)
    assert same == slower
    assert len({identity(made), same, other}) == 3
    lost = {"invariant": msgspec.structs.replace(made.artifacts["aligned"], sha256="0" * 64)}
    lacking = msgspec.structs.replace(named[0], artifacts=made.artifacts | lost)
    whole = Held(lacking, blobs | {"0" * 64: b""}, {})
    broken = Held(lacking, blobs, {})
    assert whole.identity != broken.identity
    [arrived] = unpacked(packed([broken]))
    assert (arrived.record, arrived.identity) == (lacking, broken.identity)
    with pytest.raises(cache.Corrupt, match="form in which ranks send them"):
        unpacked(packed([Held(lacking, {}, {})]))
