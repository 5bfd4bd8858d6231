"""A job that looks a record up in a cache, and may stop on its way until it is told to go on.

``reading_job.py ROOT STOP``: stops ``inside`` the lookup, between the record and its artifacts, or ``after`` it. Says
``stopped``, waits for a line, and prints what it has of the record in the end: the aligned artifact, or ``miss``.
"""

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cache"))
from cache_samples import find

from tilekern.cache import FolderLayer


def say(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def stop():
    say("stopped")
    sys.stdin.readline()


class Stopping(FolderLayer):
    stopped = False

    def read_blob(self, sha256):
        if not self.stopped:
            self.stopped = True
            stop()
        return super().read_blob(sha256)


def main(root, where):
    kind = Stopping if where == "inside" else FolderLayer
    hit = find([kind(root, "user", writable=True)])
    if where == "after":
        stop()
    if hit is None:
        say("miss")
        return
    data = hit.load("aligned")
    assert hashlib.sha256(data).hexdigest() == hit.record.artifacts["aligned"].sha256
    say(data.decode())


main(*sys.argv[1:])
