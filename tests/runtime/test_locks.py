"""A lock of the whole process is free in a forked child, unless the thread that forks holds it."""

import os
import signal
import threading

import pytest

from tilekern.runtime.locks import ForkLock

LIMIT_S = 20


def ends(work):
    """Return whether a forked child reaches the end of a function."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def take(lock):
    with lock:
        pass


@pytest.mark.processes
def test_a_lock_that_another_thread_holds_is_free_in_the_child():
    lock, held, end = ForkLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            end.wait(LIMIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT_S)
    assert ends(lambda: take(lock))
    end.set()
    thread.join()
    take(lock)


@pytest.mark.processes
def test_the_thread_that_forks_goes_on_with_what_it_holds():
    lock = ForkLock()
    with lock:
        with lock:
            assert ends(lambda: take(lock))
        child = os.fork()
    # Parent and child both come here, each with a lock of its own that was held.
    if child == 0:
        take(lock)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("path", ["tilekern.runtime.dispatch:_state.lock", "tilekern.runtime.dispatch:_watch._lock"])
def test_lookups_use_fork_locks(path):
    module, _, names = path.partition(":")
    found = __import__(module, fromlist=["_"])
    for name in names.split("."):
        found = getattr(found, name)
    assert isinstance(found, ForkLock)
