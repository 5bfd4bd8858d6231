import json

import pytest
from cache_samples import make, outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from tilekern.cache import CacheError, Corrupt, Record, UnknownSchema

RECORD, _ = make()
TEXT = RECORD.to_json()


def changed(**changes):
    return json.dumps({**json.loads(TEXT), **changes})


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
        Record.from_json(changed(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000, TEXT[:-20]])
def test_what_is_no_json_object_is_corrupt(text):
    with pytest.raises(Corrupt):
        Record.from_json(text)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_corrupt(number):
    with pytest.raises(Corrupt, match="is no number"):
        Record.from_json(TEXT.replace("37.8", number))


def test_another_schema_is_told_apart_from_corruption():
    with pytest.raises(UnknownSchema, match="schema 2"):
        Record.from_json('{"schema": 2, "anything": "else"}')


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes", object()])
def test_what_json_cannot_hold_is_not_written(value):
    record, _ = make(config={"occupancy": value})
    with pytest.raises(CacheError, match="rms_norm"):
        record.to_json()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.binary(min_size=0, max_size=3))
def test_a_changed_byte_gives_a_record_or_an_error(place, replacement):
    data = TEXT.encode()
    text = (data[:place] + replacement + data[place + 1 :]).decode(errors="replace")
    record, error = outcome(lambda: Record.from_json(text))
    assert record if error is None else "\n" not in error
