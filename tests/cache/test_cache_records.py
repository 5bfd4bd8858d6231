import json
from dataclasses import replace

import pytest
from cache_samples import changed, make, outcome, sealed
from hypothesis import given, settings
from hypothesis import strategies as st

from tilekern.cache import CacheError, Corrupt, Record, UnknownSchema

RECORD, _ = make()
TEXT = RECORD.to_json()
WITHOUT_DIGEST = replace(RECORD, schema=1).to_json()


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
        ({"problem": {"rows": 1.5}}, "rows"),
        ({"problem": {}}, "dimension"),
        ({"target": {"key": "sm_90-h200-132"}}, "target"),
        ({"target": {}}, "target"),
        ({"toolkit": {}}, "toolkit"),
        ({"source_digest": "abc"}, "source_digest"),
        ({"provenance": "guessed"}, "provenance"),
        ({"measurement": None}, "measurement"),
        ({"measurement": []}, "measurement"),
        ({"artifacts": {"aligned": {}}}, "aligned"),
        ({"artifacts": {"aligned": 1}}, "aligned"),
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
        ({"created_by": "\ud800"}, "surrogates"),
    ],
)
def test_a_field_that_is_wrong_is_named(changes, named):
    with pytest.raises(Corrupt, match=named) as caught:
        Record.from_json(changed(RECORD, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000, TEXT[:-20]])
def test_what_is_no_json_object_is_corrupt(text):
    with pytest.raises(Corrupt):
        Record.from_json(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_corrupt(number):
    with pytest.raises(Corrupt, match="is no number"):
        Record.from_json(sealed(TEXT.replace("37.8", number)))


def test_another_schema_is_told_apart_from_corruption():
    with pytest.raises(UnknownSchema, match="schema 3"):
        Record.from_json('{"schema": 3, "anything": "else"}')


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", object()])
def test_what_json_cannot_hold_is_not_written(value):
    record, _ = make(config={"occupancy": value})
    with pytest.raises(CacheError, match="rms_norm"):
        record.to_json()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.binary(min_size=0, max_size=3))
def test_a_changed_byte_gives_an_error_and_under_schema_1_perhaps_a_record(place, replacement):
    for written in (TEXT, WITHOUT_DIGEST):
        data = written.encode()
        text = (data[:place] + replacement + data[place + 1 :]).decode(errors="replace")
        record, error = outcome(lambda text=text: Record.from_json(text))
        assert record if error is None else "\n" not in error
        assert record is None or record.schema == 1 or text == TEXT


def test_a_sound_record_with_another_value_than_was_written_is_corrupt():
    changed_since = TEXT.replace('"occupancy": 4', '"occupancy": 2')
    assert changed_since != TEXT
    with pytest.raises(Corrupt, match="changed since it was written"):
        Record.from_json(changed_since)
    assert Record.from_json(sealed(changed_since)).config["occupancy"] == 2


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace('"schema": 2', '"schema": 1'),
        WITHOUT_DIGEST.replace('"schema": 1', '"schema": 2'),
        WITHOUT_DIGEST.replace('"schema": 1,', f'"schema": 1,\n "sha256": "{"0" * 64}",'),
        TEXT.removesuffix("\n"),
        TEXT + "\n",
        json.dumps(json.loads(TEXT)),
    ],
)
def test_a_digest_belongs_to_schema_2_alone_and_stands_at_its_end(text):
    with pytest.raises(Corrupt, match="sha256"):
        Record.from_json(text)


def test_a_record_of_schema_1_is_written_as_it_was_read():
    record = Record.from_json(WITHOUT_DIGEST)
    assert (record.schema, record.to_json()) == (1, WITHOUT_DIGEST)
    assert "sha256" not in json.loads(WITHOUT_DIGEST)
    assert replace(record, schema=2) == RECORD
