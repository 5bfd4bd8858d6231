import hashlib
import json

import pytest
from cache_samples import artifact, changed, make, outcome, sealed
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tilekern.cache import CacheError, Corrupt, Launch, Record, UnknownSchema
from tilekern.cache.records import decode_record

RECORD, _ = make()
TEXT = RECORD.to_json()
LAUNCH = {"block": [256, 1, 1], "cluster": 2, "cooperative": True, "shared_bytes": 4096}


def test_a_record_reads_back_as_it_was():
    assert Record.from_json(TEXT) == RECORD
    assert Record.from_json(TEXT).to_json() == TEXT
    assert list(Record.from_json(TEXT).problem) == list(RECORD.problem)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kernel": "../x"}, "kernel"),
        ({"kernel": 3}, "kernel"),
        ({"module": "a b"}, "module"),
        ({"problem": {"rows": 1.5}}, "problem"),
        ({"problem": {}}, "dimension"),
        ({"target": {"key": "sm_90-h200-132"}}, "target"),
        ({"target": {}}, "target"),
        ({"toolkit": {}}, "toolkit"),
        ({"source_digest": "abc"}, "source_digest"),
        ({"space_digest": "abc"}, "space_digest"),
        ({"space_digest": None}, "space_digest"),
        ({"best_kernel": {"config": {}}}, "measurement"),
        ({"best_kernel": {"config": [], "measurement": None, "check": None}}, "best_kernel"),
        ({"best_kernel": {"config": {}, "measurement": None, "check": None, "more": 1}}, "more"),
        ({"provenance": "guessed"}, "provenance"),
        ({"measurement": None}, "measurement"),
        ({"measurement": []}, "measurement"),
        ({"artifacts": {"aligned": {}}}, "artifacts"),
        ({"artifacts": {"aligned": 1}}, "artifacts"),
        ({"artifacts": {"../a": json.loads(TEXT)["artifacts"]["aligned"]}}, "variant"),
        ({"candidates": -1}, "candidates"),
        ({"candidates": True}, "candidates"),
        ({"runners_up": {}}, "runners_up"),
        ({"created": "yesterday"}, "created"),
        ({"created": "2026-08-01T12:00:00"}, "created"),
        ({"created": "2026-08-01T12:00:00+02:00"}, "created"),
        ({"extra": 1}, "extra"),
        ({"schema": "1"}, "schema"),
        ({"schema": None}, "schema"),
        ({"created_by": "\ud800"}, "not valid JSON"),
        ({"created_by": "\ud800 and more"}, "not valid JSON"),
    ],
)
def test_a_field_that_is_wrong_is_named(changes, named):
    with pytest.raises(Corrupt, match=named) as caught:
        Record.from_json(changed(RECORD, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000, TEXT[:-20]])
def test_a_text_that_is_not_a_json_object_is_corrupt(text):
    with pytest.raises(Corrupt):
        Record.from_json(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "1" * 5000, "0x10"])
def test_an_invalid_number_is_corrupt(number):
    with pytest.raises(Corrupt) as caught:
        Record.from_json(sealed(TEXT.replace("37.8", number)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [str(2**63), str(2**64), str(10**30), "-1e-300", "37.80000000000001"])
def test_a_number_reads_back_as_it_was_whatever_its_size(number):
    text = sealed(TEXT.replace("37.8,", f"{number},"))
    assert Record.from_json(text).to_json() == text


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_deep_nesting_is_corrupt_or_read_and_never_a_crash(depth):
    text = sealed(TEXT.replace("37.8,", f"{'[' * depth}{']' * depth},"))
    reason = outcome(lambda: Record.from_json(text))[1]
    # Python from 3.12 on reads as many in C, whatever sys.getrecursionlimit() says.
    assert (reason is None and depth == 1_000) or reason.startswith("not valid JSON: maximum recursion depth exceeded")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"size": 3500', '"size": 3500.0'),
        ('"size": 3500', '"size": true'),
        ('"size": 3500', '"size": -1'),
        ('"size": 3500', '"size": 268435457'),
        ('"size": 3500', '"length": 3500'),
        ('"sha256": "', '"sha256": "A'),
        ('"symbol": "rms_norm_kernel"', '"symbol": null'),
        ('"aligned": {', '"aligned": {"more": 1,'),
        ('"candidates": 24', '"candidates": 24.5'),
        ('"created_by": "', '"created_by": "\x00'),
        ('"created_by": "', '"created_by": "\udc80'),
        ('"schema": 4', '"schema": 3, /* a comment */ "x": 1'),
        ('"schema": 4', '"schema": 0'),
        ('{\n "schema"', '\ufeff{\n "schema"'),
    ],
)
def test_a_hostile_text_is_refused_in_one_line(old, new):
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    contents = text[: text.rindex(',\n "sha256": ')].encode(errors="surrogateescape")
    data = contents + f',\n "sha256": "{hashlib.sha256(contents).hexdigest()}"\n}}\n'.encode()
    with pytest.raises(Corrupt) as caught:
        decode_record(data, RECORD.address)
    assert "\n" not in str(caught.value)


def test_the_last_of_a_repeated_field_counts():
    text = sealed(TEXT.replace('"candidates": 24', '"candidates": 1,\n "candidates": 24'))
    assert Record.from_json(text) == RECORD


@pytest.mark.parametrize("schema", [1, 2, 99])
def test_another_schema_is_not_taken_for_corruption(schema):
    for text in (f'{{"schema": {schema}, "anything": "else"}}', changed(RECORD, schema=schema)):
        with pytest.raises(UnknownSchema, match=f"schema {schema} .* reads 3 and 4"):
            Record.from_json(text)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", object()])
def test_values_that_json_cannot_hold_are_not_written(value):
    record, _ = make(config={"occupancy": value})
    with pytest.raises(CacheError, match="rms_norm"):
        record.to_json()


@examples(300)
@given(st.integers(0, len(TEXT) - 1), st.binary(min_size=0, max_size=3))
def test_a_changed_byte_gives_an_error(place, replacement):
    data = TEXT.encode()
    text = (data[:place] + replacement + data[place + 1 :]).decode(errors="replace")
    record, error = outcome(lambda: Record.from_json(text))
    assert record if error is None else "\n" not in error
    assert record is None or text == TEXT


def test_a_sound_record_with_another_value_than_was_written_is_corrupt():
    changed_since = TEXT.replace('"occupancy": 4', '"occupancy": 2')
    assert changed_since != TEXT
    with pytest.raises(Corrupt, match="changed since it was written"):
        Record.from_json(changed_since)
    assert Record.from_json(sealed(changed_since)).config["occupancy"] == 2


@pytest.mark.parametrize(
    "text",
    [
        TEXT.removesuffix("\n"),
        TEXT + "\n",
        json.dumps(json.loads(TEXT)),
    ],
)
def test_the_digest_is_at_the_end(text):
    with pytest.raises(Corrupt, match="sha256"):
        Record.from_json(text)


def test_schema_3_has_no_bytecode():
    record = replace(RECORD, schema=3, artifacts={"aligned": artifact(b"x", bytecode="0" * 64)})
    with pytest.raises(Corrupt, match="a record of schema 3 has no bytecode"):
        Record.from_json(record.to_json())


def with_launch(**changes):
    aligned = json.loads(TEXT)["artifacts"]["aligned"]
    return changed(RECORD, artifacts={"aligned": {**aligned, "launch": {**LAUNCH, **changes}}})


def test_how_an_artifact_is_launched_reads_back_as_it_was():
    record = Record.from_json(with_launch())
    assert record.artifacts["aligned"].launch == Launch((256, 1, 1), 2, True, 4096)
    assert Record.from_json(record.to_json()) == record
    assert "launch" not in json.loads(TEXT)["artifacts"]["aligned"]


def test_an_artifact_names_its_compiler_if_it_is_not_the_toolkit():
    record = replace(RECORD, artifacts={"aligned": artifact(b"x", compiler="nvidia-cutlass-dsl 4.8.1")})
    text = record.to_json()
    assert json.loads(text)["artifacts"]["aligned"]["compiler"] == "nvidia-cutlass-dsl 4.8.1"
    assert Record.from_json(text) == record
    assert "compiler" not in json.loads(TEXT)["artifacts"]["aligned"]


@pytest.mark.parametrize(
    "changes",
    [
        {"block": [256]},
        {"block": 256},
        {"block": [0, 1, 1]},
        {"block": [1025, 1, 1]},
        {"block": [64, 64, 1]},
        {"cluster": 0},
        {"cluster": 2.0},
        {"cooperative": 1},
        {"shared_bytes": -1},
        {"shared_bytes": 2**40},
        {"stream": 0},
    ],
)
def test_a_launch_that_no_gpu_has_is_corrupt(changes):
    with pytest.raises(Corrupt, match=r"launch|block|stream"):
        Record.from_json(with_launch(**changes))
