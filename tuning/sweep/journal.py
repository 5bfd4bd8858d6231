"""Journals of JSON lines: appended line by line, read in steps, whole after a kill at any moment.

- An append is one write with ``O_APPEND``, so lines of two processes never mix.
- A writer that finds a torn last line, left by a kill in the middle of a write, begins on a fresh one. Readers skip it,
  and any other that is not whole. Where another journal was appended to it, they take the line that follows it.
- A line outlives the process at once. It outlives a crash of the machine once it is synced, which is at most
  every second and at the end of a stage: a sync for each of some ten thousand lines would cost more than the seconds
  of work that it saves.
- The last line of a key stands, and keys name what a line is about, not who wrote it. Two machines' journals become
  one by appending the one to the other.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilekern.cache import CacheError
from tilekern.cache.files import handed_on, open_regular, open_to_append
from tilekern.errors import InputError

Line = dict[str, Any]
SYNC_EVERY_S = 1.0
# Ten times what the largest sweep writes; others may have put the file there.
LARGEST_JOURNAL = 2**28
_LONGEST_LINE = 2**20
# Beginnings of an object that are tried behind a torn line.
_MOST_BEGINNINGS = 100


class Journal:
    """A file of JSON objects, one a line, each about the thing that its field ``key`` names; threads may share it.

    Args:
        path: the file; it need not exist.
        key: the field that says what a line is about; lines without it are skipped.
        merge: what stands where a key has a line and another one follows: the newer one unless given.
        is_whole: whether a line has all that it must; others are skipped. It gets none without the key.
    """

    def __init__(
        self, path: Path, key: str, merge: Callable[[Line, Line], Line] = lambda _before, line: line,
        is_whole: Callable[[Line], bool] = lambda _line: True,
    ) -> None:  # fmt: skip
        self.path, self._key, self._merge, self._is_whole = path, key, merge, is_whole
        self._latest: dict[str, Line] = {}
        # How far it was read, and the line before that place, by which it is known again.
        self._offset, self._last = 0, b""
        self._synced_at = 0.0
        self._dirty = False
        self._lock = threading.RLock()

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Append lines in one write.

        Raises:
            OSError: they cannot be written, or only in part, as on a full disk.
        """
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines).encode()
        # Others may write it only if they may write its folder, whatever the umask is.
        mode = 0o644 | handed_on(self.path.parent)
        with self._lock:
            descriptor = open_to_append(self.path, mode)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    text = b"\n" + text
                if os.write(descriptor, text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._dirty = True
                if time.monotonic() - self._synced_at > SYNC_EVERY_S:
                    self._sync(descriptor)
            finally:
                os.close(descriptor)

    def sync(self) -> None:
        """Sync the lines that this object appended."""
        with self._lock:
            if self._dirty:
                descriptor = open_to_append(self.path, 0o644)
                try:
                    self._sync(descriptor)
                finally:
                    os.close(descriptor)

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self._synced_at, self._dirty = time.monotonic(), False

    def latest(self) -> dict[str, Line]:
        """Return the newest line of each key, in the order of writing; only new lines are read.

        If the file is not the one that was read before plus new lines, it is read from its start.

        Raises:
            InputError: it is there and cannot be read: it is not a regular file, too large, or closed to this user.
        """
        with self._lock:
            self._read_on()
            return dict(self._latest)

    def _read_on(self) -> None:
        try:
            descriptor, _ = open_regular(self.path, LARGEST_JOURNAL)
        except (FileNotFoundError, NotADirectoryError):
            self._forget()
            return
        except CacheError as error:
            raise InputError(f"{error}; a journal is a readable file") from None
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}; a journal is a readable file") from None
        with open(descriptor, "rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            for text in iter(functools.partial(file.readline, _LONGEST_LINE), b""):
                # A last line without an end is taken if it is whole, and read again with the next lines.
                if text.endswith(b"\n") or len(text) == _LONGEST_LINE:
                    self._offset, self._last = self._offset + len(text), text
                self._take(text.removesuffix(b"\n"))

    def _forget(self) -> None:
        self._latest, self._offset, self._last = {}, 0, b""

    def _take(self, text: bytes) -> None:
        line = _parsed(text) if text else None
        if isinstance(line, dict) and isinstance(line.get(self._key), str) and self._is_whole(line):
            before = self._latest.pop(line[self._key], None)
            self._latest[line[self._key]] = line if before is None else self._merge(before, line)


def _parsed(text: bytes) -> Any:
    """Return the content of a line, or of the part behind a torn line without an end; None if there is none."""
    start = 0
    for _ in range(_MOST_BEGINNINGS):
        try:
            return json.loads(text[start:])
        except ValueError:  # torn by a kill
            start = text.find(b'{"', start + 1)
        except RecursionError:  # not written by tilekern
            break
        if start < 0:
            break
    return None
