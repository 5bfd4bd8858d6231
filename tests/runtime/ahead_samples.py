"""What compile workers may do to a job that waits for them; a worker imports this module."""

import os
import time
from pathlib import Path

from tilekern.runtime.ahead import compile_item
from tilekern.runtime.workers.pool import Answer
from tilekern.spec import GENERIC

PATIENCE_S = 120


def generic_later(item, target, go_on):
    """The aligned variants at once, the generic ones when a file is there."""
    deadline = time.monotonic() + PATIENCE_S
    while item.variant == GENERIC and not Path(go_on).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return compile_item(item, target)


def no_generic(item, target):
    return Answer({"key": item.artifact}) if item.variant == GENERIC else compile_item(item, target)


def none(item, target):
    return Answer({"key": item.artifact})


def die(item, target):
    os._exit(7)


def hang(item, target, begun):
    Path(begun).touch()
    time.sleep(600)
