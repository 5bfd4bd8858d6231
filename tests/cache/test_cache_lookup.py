import hashlib
import os
import warnings

import msgspec
import pytest
from cache_samples import (
    B200,
    H100,
    H200,
    PROBLEM,
    SAME,
    SOURCE,
    blob_file,
    changed,
    changing,
    find,
    make,
    make_classed,
    put,
    toolkit,
)

from tilekern.cache import (
    CacheError,
    FolderLayer,
    PackLayer,
    Store,
    UnknownSchema,
    default_layers,
    hits,
    user_root,
    write_pack,
)


def layer(root, name="user", writable=True):
    return FolderLayer(root, name, writable)


def test_a_lookup_in_empty_layers_is_a_miss(tmp_path):
    trace = []
    assert find([layer(tmp_path), layer(tmp_path / "none")], trace=trace) is None
    assert [(step.target_key, step.outcome) for step in trace] == [
        (H200["key"], "no_records"),
        (H200["key"], "no_records"),
        ("sm_90-*", "no_records"),
    ]
    assert find([]) is None


OTHER_SPACE = {"space_digest": "0" * 64}
NEAR = {"problem": {**PROBLEM, "rows": 4096}}
RELATIVE = {"target": H100}
OLD, NEWER, NEWEST = ({"toolkit": toolkit(version)} for version in ("13.1.0", "13.9.1", "13.10.0"))
UNMEASURED = {"provenance": "default", "measurement": None}


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        pytest.param([{}], [{}], "0.0", id="the earlier layer"),
        pytest.param([RELATIVE], [NEAR], "1.0", id="the exact target before an earlier layer"),
        pytest.param([NEAR], [{}], "1.0", id="the own bucket before an earlier layer"),
        pytest.param([OTHER_SPACE, OLD], [], "0.1", id="a fresh record before the installed toolkit"),
        pytest.param([OTHER_SPACE], [OTHER_SPACE], "0.0", id="the earlier layer of two other spaces"),
        pytest.param([OTHER_SPACE, NEAR, RELATIVE], [], "0.0", id="the own bucket and exact target before freshness"),
        pytest.param([OTHER_SPACE], [UNMEASURED], "0.0", id="a measured record before a fresh default"),
        pytest.param([NEWER, NEWEST, {}], [], "0.2", id="the installed toolkit"),
        pytest.param([NEWER, NEWEST, OLD], [], "0.1", id="the newest toolkit by number"),
    ],
)
def test_which_of_several_records_serves(tmp_path, first, second, winner):
    for place, records in enumerate((first, second)):
        for number, changes in enumerate(records):
            put(tmp_path / str(place), f"{place}.{number}".encode(), **changes)
    hit = find([layer(tmp_path / "0", "0"), layer(tmp_path / "1", "1")])
    assert (hit.load("aligned").decode(), hit.layer.name) == (winner, winner[0])
    changes = (first, second)[int(winner[0])][int(winner[2])]
    assert (hit.exact_bucket, hit.exact_target, hit.fresh) == (
        "problem" not in changes,
        "target" not in changes,
        "space_digest" not in changes,
    )


def test_a_record_whose_blob_is_missing_does_not_serve(tmp_path):
    put(tmp_path / "a", b"aligned", **OTHER_SPACE)
    blob_file(tmp_path / "a", b"aligned").unlink()
    put(tmp_path / "b", **UNMEASURED)
    assert find([layer(tmp_path / "a", "a"), layer(tmp_path / "b", "b")]).layer.name == "b"


def test_another_arch_never_serves(tmp_path):
    put(tmp_path, target=B200)
    assert find([layer(tmp_path)]) is None
    assert find([layer(tmp_path)], target_key="sm_10-x-1", arch="sm_10") is None


@pytest.mark.parametrize(
    ("there", "wanted", "found"),
    [
        ([1024, 8192], 4096, 8192),
        ([1024, 8192], 2048, 1024),
        ([1024, 4096], 2048, 4096),
        ([64], 65536, 64),
        ([3, 1000], 900, 1000),
    ],
)
def test_the_nearest_bucket_and_the_larger_of_two(tmp_path, there, wanted, found):
    for rows in there:
        put(tmp_path, problem={**PROBLEM, "rows": rows})
    hit = find([layer(tmp_path)], {**PROBLEM, "rows": wanted})
    assert (hit.record.problem["rows"], hit.exact_bucket) == (found, False)


def test_exact_dimensions_are_never_approximated(tmp_path):
    put(tmp_path)
    assert find([layer(tmp_path)], {**PROBLEM, "columns": 4095}) is None
    assert find([layer(tmp_path)], {**PROBLEM, "dtype": "float16", "rows": 1}) is None
    assert find([layer(tmp_path)], {"rows": 1, "columns": 4096}) is None


def test_stale_records_are_passed_over(tmp_path):
    put(tmp_path / "a", source_digest="0" * 64)
    trace = []
    assert find([layer(tmp_path / "a")], trace=trace) is None
    assert (trace[0].outcome, trace[0].problem) == ("stale", PROBLEM)
    put(tmp_path / "b")
    assert find([layer(tmp_path / "a"), layer(tmp_path / "b", "b")]).layer.name == "b"


def test_a_record_of_another_space_serves_until_a_fresh_one_is_there(tmp_path):
    put(tmp_path / "a", b"dated", **OTHER_SPACE)
    layers, trace = [layer(tmp_path / "a", "a"), layer(tmp_path / "b", "b")], []
    hit = find(layers, trace=trace)
    assert (hit.load("aligned"), hit.fresh) == (b"dated", False)
    assert [(step.layer, step.outcome) for step in trace] == [("a", "dated"), ("b", "no_records"), ("a", "taken")]
    assert str(trace[0]).endswith("kept for later, not known to be the best: the space has changed since")
    assert str(trace[-1]).endswith("taken, not known to be the best: the space has changed since")
    put(tmp_path / "b", b"fresh")
    hit = find(layers)
    assert (hit.load("aligned"), hit.fresh) == (b"fresh", True)


@pytest.mark.parametrize(("provenance", "winner"), [("measured", "b"), ("predicted", "a"), ("default", "a")])
def test_a_measured_record_is_preferred_to_a_fresh_unmeasured_one(tmp_path, provenance, winner):
    put(tmp_path / "a", **OTHER_SPACE)
    put(tmp_path / "b", provenance=provenance)
    trace = []
    assert find([layer(tmp_path / "a", "a"), layer(tmp_path / "b", "b")], trace=trace).layer.name == winner
    outcomes = ["dated", "taken"] if winner == "b" else ["dated", "weaker", "taken"]
    assert [step.outcome for step in trace] == outcomes


def test_the_others_come_after_the_best_and_nothing_is_read_before_it_is_asked_for(tmp_path):
    put(tmp_path / "a", b"dated", **OTHER_SPACE)
    put(tmp_path / "b", b"weaker", provenance="predicted")
    put(tmp_path / "c", b"fresh")
    put(tmp_path / "c", b"older toolkit", toolkit=toolkit("13.1.0"))
    put(tmp_path / "c", b"near", problem={**PROBLEM, "rows": 4096})
    put(tmp_path / "c", b"relative", target=H100)
    found = hits(
        "rms_norm", PROBLEM, bucketed=["rows"], target_key=H200["key"], arch="sm_90", toolkit_key="tileiras-13.4.92",
        source=SOURCE, layers=[layer(tmp_path / name, name) for name in "abc"],
    )  # fmt: skip
    assert next(found).load("aligned") == b"fresh"
    blob_file(tmp_path / "c", b"near").unlink()
    names = [hit.load("aligned") for hit in found]
    assert names == [b"older toolkit", b"dated", b"weaker", b"relative"]


@pytest.mark.parametrize("place", ["record", "blob", "folder"])
def test_unreadable_files_are_passed_over_with_one_warning(tmp_path, place):
    """Links in a circle are what even root cannot read."""
    record = put(tmp_path / "a", b"aligned")
    unreadable = {"record": record, "blob": blob_file(tmp_path / "a", b"aligned"), "folder": record.parents[2]}[place]
    unreadable.rename(tmp_path / "moved")
    unreadable.symlink_to(unreadable)
    put(tmp_path / "b", b"other")
    layers = [layer(tmp_path / name, name) for name in "ab"]
    what = "cannot list" if place == "folder" else "a record of rms_norm is passed over: cannot read"
    with pytest.warns(UserWarning, match=f"{what} {unreadable}: Too many levels of symbolic links"):
        assert find(layers).load("aligned") == b"other"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(layers).layer.name == "b"


def test_another_schema_is_passed_over_in_silence_and_left_alone(tmp_path):
    path = put(tmp_path)
    path.write_text('{"schema": 99}')
    trace = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find([layer(tmp_path)], trace=trace) is None
    assert path.read_text() == '{"schema": 99}'
    assert trace[0].outcome == "unknown_schema"


@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty", "fields", "misplaced"])
def test_a_bad_record_is_set_aside_reported_once_and_a_miss(tmp_path, damage):
    path = put(tmp_path / "a")
    text = path.read_text()
    other = changed(make()[0], kernel="swiglu")
    path.write_text(
        {"truncate": text[:500], "garbage": "\0" * 50, "empty": "", "fields": "{}", "misplaced": other}[damage]
    )
    put(tmp_path / "b")
    layers = [layer(tmp_path / "a", "a"), layer(tmp_path / "b", "b")]
    trace = []
    with pytest.warns(RuntimeWarning, match="is bad and was set aside") as caught:
        hits = [find(layers, trace=trace), find(layers)]
    assert [hit.layer.name for hit in hits] == ["b", "b"]
    assert len(caught) == 1
    assert [(step.layer, step.outcome) for step in trace] == [("a", "bad"), ("b", "taken")]
    assert "passed over" in str(trace[0])
    assert not path.exists()
    assert path.with_name(path.name + ".bad").exists()


@pytest.mark.parametrize("content", [b"aligne", b"Aligned", b"", b"aligned and more"])
def test_a_bad_blob_is_set_aside_reported_once_and_a_miss(tmp_path, content):
    put(tmp_path / "a", b"aligned")
    blob = blob_file(tmp_path / "a", b"aligned")
    blob.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="is bad and was set aside") as caught:
        hits = [find([layer(tmp_path / "a")]) for _ in range(2)]
    assert hits == [None, None]
    assert len(caught) == 1
    assert not blob.exists()
    put(tmp_path / "a", b"aligned")
    assert find([layer(tmp_path / "a")]).load("aligned") == b"aligned"


def test_the_disk_is_asked_for_all_blobs_before_one_is_read(tmp_path, monkeypatch):
    put(tmp_path, b"one", b"two")
    calls = []

    def noting(name, call):
        def noted(*arguments):
            calls.append(name)
            return call(*arguments)

        return noted

    for name in ("posix_fadvise", "read"):
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    assert find([layer(tmp_path)]).load("generic") == b"two"
    first = calls.index("posix_fadvise")
    assert calls[first : first + 3] == ["posix_fadvise", "posix_fadvise", "read"]


@pytest.mark.parametrize("fault", ["missing", "folder", "other bytes", "not to be read"])
def test_a_fault_of_either_blob_is_named_and_leaves_no_file_open(tmp_path, fault):
    for place, content in enumerate((b"one", b"two")):
        root = tmp_path / str(place)
        put(root, b"one", b"two")
        blob, trace = blob_file(root, content), []
        blob.unlink()
        if fault == "folder":
            blob.mkdir()
        elif fault != "missing":
            blob.write_bytes(b"changed")
            blob.chmod(0 if fault == "not to be read" else 0o644)
        before = len(os.listdir("/proc/self/fd"))
        with warnings.catch_warnings(action="ignore"):
            assert find([layer(root)], trace=trace) is None
        assert (trace[0].outcome, blob.name in trace[0].detail) == ("bad", True)
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_steps_are_the_whole_way_of_a_lookup(tmp_path):
    put(tmp_path / "a", problem={**PROBLEM, "rows": 1}, source_digest="0" * 64)
    put(tmp_path / "b", target=H100)
    trace = []
    hit = find([layer(tmp_path / "a", "a"), layer(tmp_path / "b", "b")], trace=trace)
    here, there, tools = H200["key"], H100["key"], toolkit()["key"]
    assert [(*step[:3], step.problem and step.problem["rows"], step.outcome) for step in trace] == [
        ("a", here, tools, 8192, "not_there"),
        ("b", here, None, None, "no_records"),
        ("a", here, tools, 1, "stale"),
        ("a", there, None, None, "no_records"),
        ("b", there, tools, 8192, "taken"),
    ]
    assert (hit.layer.name, hit.exact_target) == ("b", False)
    assert str(trace[-1]) == f"b: {there}/{tools}/rows=8192,columns=4096,dtype=bfloat16: taken"


def test_a_record_that_is_removed_while_it_is_read_is_a_plain_miss(tmp_path):
    put(tmp_path, b"old")
    store, trace = Store(tmp_path), []
    in_between = changing(tmp_path, lambda: store.collect_garbage(store.remove(store.entries())))
    assert find([in_between], trace=trace) is None
    assert trace[0].outcome == "not_there"


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(tmp_path):
    put(tmp_path, b"old")
    store = Store(tmp_path)

    def replace():
        put(tmp_path, b"new")
        blob_file(tmp_path, b"old").unlink()

    assert find([changing(tmp_path, replace)]).load("aligned") == b"new"
    assert [entry.record.digests for entry in store.entries()] == [{hashlib.sha256(b"new").hexdigest()}]


def test_a_layer_that_is_not_writable_is_left_as_it_is(tmp_path):
    path = put(tmp_path)
    path.write_text("{")
    with pytest.warns(RuntimeWarning, match="is bad: "):
        assert find([layer(tmp_path, writable=False)]) is None
    assert path.read_text() == "{"


def test_the_default_layers_in_their_order(tmp_path, monkeypatch):
    pack = tmp_path / "some.pack"
    write_pack(pack, [make()])
    site = tmp_path / "site"
    for folder in ("prebuilt_kernels", "prebuilt_kernels-1.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "prebuilt_kernels/__init__.py").write_text("raise RuntimeError('must not be imported')")
    write_pack(site / "prebuilt_kernels/h200.pack", [make()])
    (site / "prebuilt_kernels-1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: prebuilt-kernels\nVersion: 1\n"
    )
    entries = "[tilekern.prebuilt]\nours = prebuilt_kernels\nlost = no_such_package\n"
    (site / "prebuilt_kernels-1.dist-info/entry_points.txt").write_text(entries)
    (tmp_path / "shared").mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path / "user"))
    items = [str(tmp_path / "shared"), str(tmp_path / "gone"), "", str(pack)]
    monkeypatch.setenv("TILEKERN_CACHE_PATH", os.pathsep.join(items))
    with pytest.warns(RuntimeWarning) as caught:
        layers = default_layers()
    assert sorted(word for c in caught for word in ("gone", "no_such_package") if word in str(c.message)) == [
        "gone",
        "no_such_package",
    ]
    assert [one.name for one in layers][:4] == ["user", str(tmp_path / "shared"), "some.pack", "ours:h200"]
    assert [getattr(one, "package", None) for one in layers[1:4]] == [None, None, "prebuilt-kernels"]
    assert find([layers[3]]).load("aligned")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gone.*")
        warnings.filterwarnings("ignore", message=".*no_such_package.*")
        default_layers()


def test_records_of_a_package_for_other_kernels_are_named_once_with_what_pip_does(tmp_path, monkeypatch):
    pack, later = tmp_path / "a.pack", tmp_path / "later.pack"
    write_pack(pack, [make(), make(problem={**PROBLEM, "rows": 1024})])
    write_pack(later, [make()])
    layers = [PackLayer(path, path.stem, "package", f"acme-{path.stem}") for path in (pack, later)]
    monkeypatch.setattr(layers[1], "read_record", _of_a_later_tilekern)
    assert find(layers[:1])
    assert find([PackLayer(pack)], source="0" * 64) is None, "a pack that is not a package's says nothing"
    with pytest.warns(RuntimeWarning) as caught:
        assert [find(layers, {**PROBLEM, "rows": rows}, source="0" * 64) for rows in (8192, 1024)] == [None] * 2
    assert [str(one.message) for one in caught] == [
        f"acme-{name} has records for other versions of their kernels, which are not used; "
        f"update it: pip install -U acme-{name}"
        for name in ("a", "later")
    ]


def _of_a_later_tilekern(*_):
    raise UnknownSchema("schema 5 was written by another version of tilekern")


def test_the_user_cache_is_the_platforms_unless_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tmp_path))
    assert user_root() == tmp_path
    monkeypatch.delenv("TILEKERN_CACHE_DIR")
    assert user_root().name == "tilekern"
    monkeypatch.setenv("TILEKERN_CACHE_DIR", "")
    assert user_root().name == "tilekern"


def test_a_pack_is_a_layer(tmp_path):
    record, blobs = make()
    write_pack(tmp_path / "a.pack", [(record, blobs), make(problem={**PROBLEM, "rows": 2}, target=H100)])
    pack = PackLayer(tmp_path / "a.pack")
    assert pack.targets() == ["sm_90-h100-132", "sm_90-h200-132"]
    assert pack.toolkits("sm_90-h200-132") == ["tileiras-13.4.92"]
    assert pack.problems("sm_90-h200-132", "tileiras-13.4.92", "rms_norm") == [PROBLEM]
    hit = find([layer(tmp_path / "empty"), pack])
    assert hit.load("generic") == blobs[record.artifacts["generic"].sha256]


@pytest.mark.processes
def test_a_forked_child_reads_the_pack_for_itself(tmp_path):
    write_pack(tmp_path / "a.pack", [make()])
    pack = PackLayer(tmp_path / "a.pack")
    assert find([pack])
    child = os.fork()
    if child == 0:
        os._exit(0 if all(find([pack]) for _ in range(50)) else 1)
    assert all(find([pack]) for _ in range(50))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("content", [b"", b"PK", b"no zip" * 100])
def test_a_bad_pack_is_reported_once_and_empty(tmp_path, content):
    path = tmp_path / "bad.pack"
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match=r"bad\.pack") as caught:
        hits = [find([PackLayer(path)]) for _ in range(2)]
    assert hits == [None, None]
    assert len(caught) == 1


def test_the_invariant_mode_prefers_a_record_with_a_class_that_can_be_loaded(tmp_path):
    """The user's cache has none, the next one has lost its artifact, the last one has both."""
    put(tmp_path / "user", b"own")
    for name in ("broken", "whole"):
        Store(tmp_path / name).write(*make_classed())
    blob_file(tmp_path / "broken", SAME).unlink()
    layers = [FolderLayer(tmp_path / name, name) for name in ("user", "broken", "whole")]
    assert find(layers).layer.name == "user"
    trace = []
    assert find(layers, invariant=True, trace=trace).load("invariant") == SAME
    assert [(step.layer, step.outcome) for step in trace] == [
        ("user", "classless"), ("broken", "classless"), ("whole", "taken"),
    ]  # fmt: skip
    assert "there is no" in trace[1].detail
    assert find(layers[:2], invariant=True).layer.name == "user", "without a class the order is as ever"
    # A class of another bucket comes before the problem's own record without one, and one of another GPU does not.
    far = PROBLEM | {"rows": 64}
    for name, changes in (("bucket", {"problem": far}), ("gpu", {"target": H100})):
        record, blobs = make_classed()
        Store(tmp_path / name).write(msgspec.structs.replace(record, **changes), blobs)
        others = [layers[0], FolderLayer(tmp_path / name, name)]
        assert find(others).layer.name == "user"
        assert find(others, invariant=True).layer.name == ("bucket" if name == "bucket" else "user")
    found = find(layers[1:2], trace=trace)
    assert "taken, without its invariant kernel: there is no" in trace[-1].detail
    with pytest.raises(CacheError, match="there is no"):
        found.load("invariant")
