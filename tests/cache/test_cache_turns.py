"""Processes that would compile the same thing at once take turns, and none depends on its turn."""

import os
import threading
import time

import pytest

from tilekern.cache import turns
from tilekern.cache.turns import free_turn, turn

PATIENCE_S = 30


def others_turn(root, seconds=None):
    """Somebody else's turn, which ends after some seconds, or else when its function is called."""
    has_it, end = threading.Event(), threading.Event()

    def work():
        with turn(root, "a record"):
            has_it.set()
            end.wait(PATIENCE_S if seconds is None else seconds)

    thread = threading.Thread(target=work)
    thread.start()
    assert has_it.wait(PATIENCE_S)
    return lambda: (end.set(), thread.join())


def test_a_free_turn_needs_no_wait(tmp_path):
    with turn(tmp_path, "a record") as waited:
        assert not waited
        with turn(tmp_path, "another record") as waited_too:
            assert not waited_too
    assert list((tmp_path / "turns").iterdir()) == []


def test_the_second_waits_for_the_first_and_knows_of_it(tmp_path):
    others_turn(tmp_path, seconds=0.3)
    began = time.monotonic()
    with turn(tmp_path, "a record") as waited:
        assert waited
    assert 0.1 < time.monotonic() - began < PATIENCE_S


def test_a_wait_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "LONGEST_S", 0.2)
    end = others_turn(tmp_path)
    with turn(tmp_path, "a record") as waited:
        assert waited
    end()


@pytest.mark.parametrize("place", [None, "a file", "a link to nothing"])
def test_without_locks_every_process_has_a_turn(tmp_path, place):
    root = tmp_path / "root"
    if place == "a file":
        root.touch()
    elif place == "a link to nothing":
        root.mkdir()
        (root / "turns").symlink_to(tmp_path / "nowhere" / "else")
    for _ in range(2):
        with turn(root if place else None, "a record") as waited:
            assert not waited


@pytest.mark.processes
def test_a_child_that_is_forked_meanwhile_does_not_keep_the_turn(tmp_path):
    reading, writing = os.pipe()
    with turn(tmp_path, "a record"):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    began = time.monotonic()
    try:
        with turn(tmp_path, "a record") as waited:
            assert not waited
        assert time.monotonic() - began < turns.LONGEST_S / 2
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_an_error_within_a_turn_ends_it(tmp_path):
    with pytest.raises(ValueError, match="inside"), turn(tmp_path, "a record"):
        raise ValueError("inside")
    with turn(tmp_path, "a record") as waited:
        assert not waited


def test_a_turn_that_nobody_has_is_taken_and_another_s_is_not_waited_for(tmp_path):
    end = free_turn(tmp_path, "a record")
    assert end is not None
    assert free_turn(tmp_path, "a record") is None
    end()
    assert list((tmp_path / "turns").iterdir()) == []
    others_end = others_turn(tmp_path)
    assert free_turn(tmp_path, "a record") is None
    others_end()
    with turn(tmp_path, "a record") as waited:
        assert not waited


def test_who_waits_for_a_turn_that_was_taken_free_gets_it(tmp_path):
    end = free_turn(tmp_path, "a record")
    threading.Timer(0.2, end).start()
    with turn(tmp_path, "a record") as waited:
        assert waited


def test_without_locks_a_free_turn_is_taken(tmp_path):
    (tmp_path / "root").touch()
    for root in (None, tmp_path / "root"):
        free_turn(root, "a record")()
