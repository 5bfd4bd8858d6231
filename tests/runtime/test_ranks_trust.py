"""Ranks under TILEKERN_TRUST=signed, ranks that lie, and a process that is no rank and writes to the store.

Real processes with gloo throughout; each situation says what a rank that cannot be believed does.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import needs_compiler
from msgspec.structs import replace
from one_record import H200, PROBLEM
from rank_jobs import DEFAULT, OTHER, fill, go_through, record
from torch.distributed import PrefixStore, TCPStore

from tilekern import cache
from tilekern.cache.keys import signature_path
from tilekern.cache.records import record_of
from tilekern.cache.trust.policy import read_signatures
from tilekern.cache.trust.signing import SigningKey, generate_key
from tilekern.runtime.ranks.election import Status
from tilekern.runtime.ranks.held import Held, packed, unpacked
from tilekern.runtime.ranks.peers import Peers
from tilekern.runtime.ranks.snapshot import Snapshot

RANKS, TIMEOUT_S = 3, 8
ASKS = [(50, 48), (50, 64)]

pytestmark = [
    pytest.mark.processes,
    needs_compiler,
    pytest.mark.xdist_group("ranks"),
]


class Home:
    """Caches, keys and settings of a job."""

    def __init__(self, folder, compiled):
        self.folder, self.compiled, self.situations = folder, compiled, []
        for name in "ab":
            generate_key(folder / name)
        self.keys = {name: SigningKey(folder / name) for name in "ab"}
        for names in ("", "a", "b", "ab"):
            lines = [f"ed25519 {self.keys[name].public_key} {name}\n" for name in names]
            (folder / f"roots-{names}").write_text("".join(lines))

    def signed(self, name, **columns):
        """A cache whose record of ``c48`` columns, and so on, is signed by the keys that the value names."""
        root = self.folder / name
        for column, keys in columns.items():
            self.sign(root, *record(self.compiled, int(column[1:])), keys)
        root.mkdir(exist_ok=True)
        return str(root)

    def sign(self, root, made, blobs, keys):
        path = cache.Store(root).write(made, blobs)
        data = path.read_bytes()
        for key in keys:
            file = root / signature_path(hashlib.sha256(data).hexdigest(), self.keys[key].public_key)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.keys[key].sign(data))

    def pack(self, name, root):
        """Return a cache's contents as a pack."""
        held, signatures = [], {}
        for entry, data in cache.Store(root).read_entries():
            digest = hashlib.sha256(data).hexdigest()
            held.append((entry.record, {name: cache.Store(root).read_blob(name) for name in entry.record.digests}))
            signatures[digest] = read_signatures(Path(root), digest)
        cache.write_pack(self.folder / name, held, signatures)
        return str(self.folder / name)

    def empty(self, count=RANKS - 1):
        root = self.folder / "empty"
        root.mkdir(exist_ok=True)
        return [str(root)] * count

    def env(self, roots="a", settings="settings"):
        return {
            "TILEKERN_TRUST": "signed",
            "TILEKERN_TRUST_ROOTS": str(self.folder / f"roots-{roots}"),
            "XDG_CONFIG_HOME": str(self.folder / settings),
        }

    def give(self, name, roots, **more):
        self.situations.append({"name": name, "roots": roots, "asks": [ASKS] * RANKS, **more})


def malformed(compiled):
    """What a rank says of its own making: which time that it says anything in that way, and how that is refused."""
    status = json.loads(Status(H200, None, "fallback", False, "5" * 64, [], "d" * 64, "d" * 64).to_bytes())
    held = Held(*record(compiled), {})
    whole = packed([held])
    text, start = held.record.data, 8 + int.from_bytes(whole[:8], "big")
    head = json.loads(whole[8:start])

    def framed(head, rest):
        data = json.dumps(head).encode()
        return len(data).to_bytes(8, "big") + data + rest

    altered = bytearray(whole)
    altered[-1] ^= 1
    newer = text.replace(b'"schema": 4', b'"schema": 5')
    statuses = [b"", b"\xff\xfe", b"[]", b"[" * 8000, json.dumps(status | {"policy": "panic"}).encode(),
                json.dumps(status | {"target": status["target"] | {"sm_count": "1"}}).encode()]  # fmt: skip
    contents = {
        "nothing": b"", "a head without an end": (2**62).to_bytes(8, "big") + whole[8:], "no head": bytes(20),
        "a list": framed([], b""), "other words": framed({"records": 5, "blobs": "x"}, b""),
        "less than nothing": framed(head | {"blobs": [-1, 1]}, text),
        "a size too large": framed(head | {"blobs": [2**60]}, text),
        "sizes that do not add up": whole + b"?", "a blob that was altered": bytes(altered), "no record": packed([]),
        "a record that is none": framed({"records": [{"size": 3, "signatures": {}}], "blobs": []}, b"\0\0\0"),
        "signatures of another type": framed({"records": [{"size": 0, "signatures": [5]}], "blobs": []}, b""),
        "another version's": framed({"records": [{"size": len(newer), "signatures": {}}], "blobs": []}, newer),
        "another record's": packed([Held(*record(compiled, 80), {})]),
    }  # fmt: skip
    for at, said in enumerate(statuses):
        yield f"status {at}", 1, "gather", 1, said, "what rank 1 says of itself is not a status"
    yield "a status too long", 1, "gather", 1, bytes(2**14 + 1), "rank 1 cannot say which kernels it would run: 16386 b"
    yield "an index that is cut", 0, "broadcast", 1, bytes(33), "the index of the rank that leads is damaged"
    yield "an index of one record twice", 0, "broadcast", 1, bytes(64), "the index of the rank that leads is damaged"
    yield (
        "an index of what nobody has",
        0,
        "broadcast",
        1,
        bytes(32),
        "rank 0 cannot take over the records of rank 0: 1 of 1",
    )
    yield "flags too few", 1, "gather", 2, b"", "rank 1 cannot say which records it lacks: 0 bytes must be "
    yield "flags too many", 1, "gather", 3, bytes(2), "rank 1 cannot take over the records of rank 0: 2 bytes must be "
    yield "another digest in the end", 1, "gather", 4, bytes(32), "rank 1 holds other records than rank 0 after"
    for name, said in contents.items():
        yield f"contents: {name}", 0, "broadcast", 2, said, "rank 1 cannot take over the records of rank 0: "


@pytest.fixture(scope="module")
def lies(compiled):
    return {name: rest for name, *rest in malformed(compiled)}


@pytest.fixture(scope="module")
def situations(compiled, lies, tmp_path_factory):
    """Each situation's outcome by rank; one job goes through all of them."""
    home = Home(tmp_path_factory.mktemp("trust"), compiled)
    both = home.signed("both", c48="a", c64="a")
    home.give("trusted by all", [both, *home.empty()], env=home.env())
    home.give("one trusts nobody", [both, *home.empty()], env=home.env(), env_of={"2": home.env("")})
    home.give("one trusts another", [home.signed("other", c48="ab", c64="a"), *home.empty()],
              env=home.env(), env_of={"2": home.env("b")})  # fmt: skip
    own = home.folder / "own"
    home.sign(own, *record(compiled, created="2026-08-01T12:00:00+00:00"), "b")
    home.give("one has it from whom it trusts", [home.signed("one", c48="a"), *home.empty(1), str(own)],
              env=home.env(), env_of={"2": home.env("b")})  # fmt: skip
    sealed, made = home.folder / "sealed", [record(compiled, columns) for columns in (48, 64)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in home.env("").items():
            patch.setenv(name, value)
        for each in made:
            cache.Store(sealed).write(*each)
    home.give("sealed by the user of all", [str(sealed), *home.empty()], env=home.env(""))
    home.give("sealed by the user of some", [str(sealed), *home.empty()], env=home.env(""),
              env_of={"2": home.env("", "another")})  # fmt: skip
    home.give("altered by the leader", [both, *home.empty()], env=home.env(), do={"0": ["alters_what_it_holds"]})
    pack = home.pack("signed.pack", both)
    home.give(
        "trusted from a pack",
        home.empty(RANKS),
        env=home.env(),
        env_of={"0": home.env() | {"TILEKERN_CACHE_PATH": pack}},
    )
    filled = fill(home.folder / "filled", compiled, 48)
    roots = [filled, *home.empty()]
    home.give("one keeps less", roots, do={"1": ["keeps_less"]})
    home.give("one mishears itself", roots, policies=["compile", "fallback", "compile"],
              do={"1": ["hears_another_s_words_as_its_own"]})  # fmt: skip
    home.give("a status without end", roots, do={"2": ["says_that_it_will_say_a_lot", 1]})
    home.give("an index without end", [roots[1], roots[0], roots[1]],
              do={"0": ["has_gpu", None], "1": ["says_that_it_will_say_a_lot", 2]})  # fmt: skip
    for name, (rank, method, call, said, _) in lies.items():
        home.give(name, roots, do={str(rank): ["says", method, call, said.hex()]})
    home.give("after all that", roots)
    home.give(
        "no collective on the CPU", roots, do={str(rank): ["has_no_backend_for_the_cpu"] for rank in range(RANKS)}
    )
    home.give("no way to one another", roots, do={str(rank): ["cannot_be_reached"] for rank in range(RANKS)})
    return go_through(home.folder, home.situations, RANKS, TIMEOUT_S)


def configs(outcome):
    return [run and run[0] for run in outcome["runs"]]


D = DEFAULT.key
# By situation: the configs that run on all ranks, how many records each received, and how many were not trusted.
TAKEN = {
    "trusted by all": ([D, D], [0, 2, 2], 0),
    "trusted from a pack": ([D, D], [0, 2, 2], 0),
    # A seal counts where its user's settings are.
    "sealed by the user of all": ([D, D], [0, 2, 2], 0),
    # The same kernel from whom a rank trusts is as good.
    "one has it from whom it trusts": ([D, None], [0, 1, 0], 0),
    "one trusts another": ([D, None], [0, 1, 1], 1),
    "one trusts nobody": ([None, None], [0, 0, 0], 2),
    "sealed by the user of some": ([None, None], [0, 0, 0], 2),
    "altered by the leader": ([None, None], [0, 0, 0], 2),
    # Where the job has no collective on the CPU, too, and after all that ranks have said.
    "after all that": ([D, None], [0, 1, 1], 0),
    "no collective on the CPU": ([D, None], [0, 1, 1], 0),
}


@pytest.mark.parametrize("name", TAKEN)
def test_only_records_that_each_rank_trusts_are_taken_over(situations, name):
    found, (expected, received, untrusted) = situations[name], TAKEN[name]
    for one in found:
        assert one["runs"] == found[0]["runs"]
        assert configs(one) == expected
        assert one["agreed"]["untrusted"] == untrusted
        told = [text for text in one["said"] if "does not trust" in text]
        assert len(told) == bool(untrusted)
        assert all(f"{untrusted} of the " in text for text in told)
        # No group is left behind.
        assert one["groups"] == 1
    assert [one["agreed"]["received"] for one in found] == received
    assert len({one["agreed"]["digest"] for one in found}) == len({one["digest"] for one in found}) == 1
    assert not name.startswith("trusted") or {*map(str, (one["said"] for one in found))} == {"[]"}


@pytest.mark.parametrize(
    ("name", "rank"), [("one trusts nobody", 2), ("sealed by the user of some", 2), ("altered by the leader", 1)]
)
def test_a_record_that_one_rank_does_not_trust_is_a_miss_on_all(situations, name, rank):
    found = situations[name]
    for one in found:
        assert "records of rank 0 run on no rank, swiglu_forward for rows=64,columns=48" in str(one["said"])
    assert f"which rank {rank} does not trust: no trust root signed it" in str(found[rank]["said"])


def is_refused_alike(found, words):
    assert len({one["error"] for one in found}) == 1
    assert len(found) == RANKS
    error = found[0]["error"]
    assert error.startswith(f"RanksDiffer: {words}"), error
    assert error.isprintable()
    assert len(error) < 500
    assert max(one["seconds"] for one in found) < TIMEOUT_S


def test_a_malformed_message_ends_all_ranks_with_one_line(situations, lies):
    for name, (*_, words) in lies.items():
        is_refused_alike(situations[name], words)
    # 2^62 bytes, and as many as the real status or index has.
    is_refused_alike(situations["a status without end"], "rank 2 cannot say which kernels it would run: 46116860184")
    is_refused_alike(situations["an index without end"], "rank 1 cannot say what it has: 46116860184")


def test_a_rank_goes_by_its_own_words_and_not_by_what_comes_back_of_them(situations):
    """Else its verdict would be that all compile, which its own policy forbids."""
    for one in situations["one mishears itself"]:
        assert configs(one) == [DEFAULT.key, None]
        assert any("all use fallback" in said for said in one["said"])


def test_ranks_that_hold_other_records_in_the_end_stop(situations):
    is_refused_alike(situations["one keeps less"], "rank 1 holds other records than rank 0 after they were exchanged")


def test_ranks_that_cannot_reach_one_another_are_told_what_to_set(situations):
    for one in situations["no way to one another"]:
        assert one["error"].startswith(
            "RanksDiffer: the ranks cannot reach one another over gloo; set GLOO_SOCKET_IFNAME"
        )


def test_no_value_is_read_from_the_store_that_others_can_write():
    assert ".get(" not in inspect.getsource(Peers)


@pytest.mark.nightly
def test_a_process_that_is_not_a_rank_cannot_have_ranks_go_on_alone(compiled, tmp_path):
    """It may say that all have come; they still wait for what each says."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    for key, value in {"all": b"\xff" * 99, "here/0": b"", "here/1": b"", "come": b"70"}.items():
        PrefixStore("0/", store).set(f"tilekern/1/{key}", value)
    roots = [fill(tmp_path / "0", compiled, 48), fill(tmp_path / "1", compiled)]
    given = {"name": "attacked", "roots": roots, "asks": [[(50, 48)]] * 2}
    found = go_through(tmp_path, [given], 2, TIMEOUT_S, f"store://127.0.0.1:{store.port}")["attacked"]
    assert [configs(one) for one in found] == [[DEFAULT.key]] * 2


def test_records_come_out_of_bytes_as_they_went_in(compiled):
    made, blobs = record(compiled)
    older = {name: replace(artifact, bytecode=None) for name, artifact in made.artifacts.items()}
    text = replace(made, schema=3, artifacts=older).to_json().replace('"schema": 3', '"schema":  3')
    contents = text[: text.rindex(',\n "sha256": ')]
    text = f'{contents},\n "sha256": "{hashlib.sha256(contents.encode()).hexdigest()}"\n}}\n'
    other = record_of(text.encode())
    held = [
        Held(made, blobs, {"name.sig": b"\0\xff"}),
        Held(replace(made, problem=dict(PROBLEM.but(columns=64))), blobs, {}),
    ]
    assert unpacked(packed(held)) == held
    [back] = unpacked(packed([Held(other, blobs, {})]))
    assert back.record.data == other.data != other.to_json().encode()


@pytest.fixture(scope="module")
def sound(compiled):
    return packed([Held(*record(compiled), {"a.sig": b"1"})])


@given(data=st.data())
def test_bytes_that_were_changed_give_whole_records_or_an_error(sound, data):
    whole = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(whole), 6000) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    with contextlib.suppress(cache.CacheError):
        for one in unpacked(bytes(whole)):
            assert all(hashlib.sha256(blob).hexdigest() == name for name, blob in one.blobs.items())
            assert one.record.digests == one.blobs.keys()


def test_a_head_without_end_is_refused_before_it_is_parsed(sound, monkeypatch):
    length = int.from_bytes(sound[:8], "big")
    for claimed in (2**63, len(sound) + 1):
        with pytest.raises(cache.Corrupt, match=f"the head has {claimed} bytes"):
            unpacked(claimed.to_bytes(8, "big") + sound[8:])
    monkeypatch.setattr("tilekern.runtime.ranks.held._LARGEST_HEAD", length)
    assert unpacked(sound)
    monkeypatch.setattr("tilekern.runtime.ranks.held._LARGEST_HEAD", length - 1)
    with pytest.raises(cache.Corrupt, match=f"may have {length - 1}"):
        unpacked(sound)


def test_a_record_has_the_path_that_it_says_and_no_two_share_one(compiled):
    one, other = Held(*record(compiled), {}), Held(*record(compiled, 64), {})
    snapshot = Snapshot([other, one])
    for held in (one, other):
        assert (
            snapshot.read_record(H200.key, held.record.toolkit["key"], *held.place[1:2], held.record.problem)
            == held.record
        )
    assert Snapshot([dataclasses.replace(one, signatures={"a.sig": b"1", "b.sig": b"2"})]).signatures("a") == {
        "a.sig": b"1"
    }
    with pytest.raises(cache.Corrupt, match="there are two records of swiglu_forward for rows=64,columns=48"):
        Snapshot([one, Held(*record(compiled, config=OTHER), {})])
    with pytest.raises(cache.Missing, match="1 of 2 records did not come along"):
        Snapshot([one]).having([one.identity, other.identity])
