"""The statuses of ranks and the verdict that each computes; no statement is believed unchecked."""

import contextlib
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilekern.cache import CacheError
from tilekern.errors import RanksDiffer
from tilekern.runtime.ranks.election import Status, verdict_on
from tilekern.spec.targets import KNOWN, resolve


def status(digest="a", gpu="H200", **changes):
    target = None if gpu is None else resolve(gpu)
    return replace(Status(target, "t-1", "compile", False, "5" * 64, ["cublas"], digest * 64, "e" * 64), **changes)


def test_the_lowest_rank_of_an_arch_leads_and_those_that_differ_follow():
    verdict = verdict_on([status(gpu=None), status("b"), status("b", "H100"), status("c"), status("d", "B200")])
    hopper, blackwell = verdict.groups["sm_90"], verdict.groups["sm_100"]
    assert (hopper.leader, hopper.members, hopper.target.name, hopper.differ) == (1, (1, 2, 3), "H200", True)
    assert (blackwell.leader, blackwell.members, blackwell.differ) == (4, (4,), False)
    assert len(verdict.notes) == 1


def test_folders_alone_may_differ():
    groups = verdict_on([status("b"), status("c"), status("b", "B200"), status("c", "B200", packs="f" * 64)]).groups
    assert [(each.differ, each.packs_differ) for each in groups.values()] == [(True, True), (True, False)]


@pytest.mark.parametrize("toolkits", [("t-1", "t-2"), ("t-1", None), (None, None)])
def test_a_miss_compiles_where_all_have_the_same_compiler(toolkits):
    verdict = verdict_on([status(toolkit=each) for each in toolkits])
    assert verdict.groups["sm_90"].policy == "fallback"
    assert verdict_on([status(), status()]).groups["sm_90"].policy == "compile"


@pytest.mark.parametrize("strictest", ["error", "fallback"])
@pytest.mark.parametrize("rank", range(3))
def test_the_strictest_policy_counts_for_all_ranks_of_an_arch(strictest, rank):
    statuses = [status(policy=strictest if at == rank else "compile") for at in range(3)]
    verdict = verdict_on([*statuses, status(gpu="B200")])
    assert [verdict.groups[arch].policy for arch in ("sm_90", "sm_100")] == [strictest, "compile"]
    assert any("have different miss policies" in note for note in verdict.notes)


def test_ranks_that_trust_others_run_nothing_together():
    with pytest.raises(RanksDiffer, match=r"^TILEKERN_TRUST of rank 2 is another than rank 0's"):
        verdict_on([status(signed=True), status(signed=True), status()])


def test_ranks_of_an_arch_that_have_other_libraries_run_nothing_together():
    """One would run a library's call, and the other the best kernel in its place."""
    both = status(libraries=["cublas", "cudnn"])
    with pytest.raises(RanksDiffer, match=r"^rank 2 has other libraries than rank 1 \(none and cublas, cudnn\)"):
        verdict_on([status(gpu=None), both, status(libraries=[])])
    assert len(verdict_on([both, status(gpu="B200")]).groups) == 2


@pytest.mark.parametrize("target", [None, *KNOWN])
def test_a_status_comes_back_as_it_was_said(target):
    said = status(target=target, toolkit=None, signed=True)
    assert Status.from_bytes(said.to_bytes()) == said
    assert len(said.to_bytes()) < 600


def test_an_unlisted_gpu_is_a_target_too():
    said = status(target=replace(resolve("H200"), name="H200 NVL MIG 1g.18gb (rev. 2)", memory_gbs=4800 * 114 / 132))
    assert Status.from_bytes(said.to_bytes()) == said


BAD = {
    "toolkit": [5, "../../etc", "a\nb", ""],
    "policy": ["panic", "COMPILE", None, ["compile"], {}],
    "signed": [0, "true", None],
    "packs": ["", "x" * 64, 5, None],
    "sources": ["", "x" * 64, 5, None],
    "digest": ["", "A" * 64, 5, None],
    "target": [5, "sm_90", [], {}, {"arch": "sm_90"}],
}
BAD_TARGET = {
    "name": [5, None, "a\nb", "\x1b[2J", "x" * 101],
    "arch": ["sm_90\n", "sm_90;rm", "90", "sm_", 90],
    "sm_count": [0, -1, "132", 1.5, True, 10**40, None],
    "memory_gbs": [0, -1.0, float("inf"), "1", None, 10**400],
    "shared_bytes": [0, 2**53, 1024],
    "copy_gbs": [1],
}


def changed(**changes):
    return json.dumps(json.loads(status().to_bytes()) | changes).encode()


@pytest.mark.parametrize(
    "said",
    [
        *(changed(**{name: value}) for name, values in BAD.items() for value in values),
        *(
            changed(target=asdict(resolve("H200")) | {name: value})
            for name, values in BAD_TARGET.items()
            for value in values
        ),
        changed(another="field"),
        changed().replace(b"4800", b"1e999"),
        changed().replace(b"4800", b"NaN"),
        changed().replace(b"4800", b"9" * 5000),
        *(b"", b"\xff", b"[]", b"{}", b"null", b"[" * 100_000, b'{"target":' * 5000),
    ],
)
def test_a_malformed_status_is_refused_in_one_line(said):
    with pytest.raises(CacheError) as caught:
        Status.from_bytes(said)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(name=st.sampled_from([*BAD, *BAD_TARGET]), value=JSON)
def test_any_bytes_are_a_status_or_refused(name, value):
    said = json.loads(status().to_bytes())
    (said if name in BAD else said["target"])[name] = value
    with contextlib.suppress(CacheError, RanksDiffer):
        verdict_on([Status.from_bytes(json.dumps(said).encode()), status()])
