"""A file of any filesystem that fsspec knows. A digest lies beside the pack, as ``sha256sum`` writes it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tilekern.cache import PACK_SUFFIX, CacheError, Corrupt
from tilekern.cache.files import write_whole
from tilekern.cache_tools.shared.packs import Contents
from tilekern.cache_tools.shared.printing import progress_bar

DIGEST_SUFFIX = ".sha256"
_LARGEST_SUM = 2**12
# Of a pack whose size its place does not say.
_LARGEST_PACK = 2**34
_SUM = re.compile(rb"([0-9a-f]{64}) [ *][^\n]+\n?")


class FsspecFile:
    """A pack's file, and the file with its digest."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._path = url_to_fs(url)

    def digest(self) -> str | None:
        """The digest that lies beside the pack; raises as :meth:`tilekern.cache_tools.remotes.Remote.digest` says."""
        if self._fs.info(self._path).get("type") == "directory":
            raise CacheError(f"{self.url} is a folder; a pack is a file")
        if urlsplit(self.url).query:
            # A signed URL is of one file.
            return None
        try:
            with self._fs.open(self._path + DIGEST_SUFFIX, "rb") as file:
                text = file.read(_LARGEST_SUM)
        except FileNotFoundError:
            return None
        found = _SUM.fullmatch(text)
        if not found:
            raise Corrupt(f"{self.url}{DIGEST_SUFFIX} must be a line as sha256sum writes it, got {text[:60]!r}")
        return found[1].decode()

    def download(self, path: Path) -> None:
        """Write the file's bytes to ``path``; raises as :meth:`tilekern.cache_tools.remotes.Remote.download` says."""
        size = self._fs.info(self._path).get("size")
        with progress_bar("pulling", size) as moved:
            self._fs.get_file(self._path, str(path), callback=_Moved(moved, _LARGEST_PACK if size is None else size))

    def upload(self, pack: Contents) -> str:
        """Put the pack there, then its digest; the URL."""
        if not self._path.endswith(PACK_SUFFIX):
            raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {self.url}")
        if urlsplit(self.url).scheme in ("http", "https"):
            raise CacheError(f"{self.url} can be pulled from, not pushed to; push to where its server reads its files")
        sums = f"{pack.sha256}  {PurePosixPath(self._path).name}\n".encode()
        if isinstance(self._fs, LocalFileSystem):
            # Object stores show a file when it is whole; here another node may look at it while it is written.
            write_whole(Path(self._path), pack.path.read_bytes())
            write_whole(Path(self._path + DIGEST_SUFFIX), sums)
            return self.url
        with progress_bar("pushing", pack.size_bytes) as moved:
            self._fs.put_file(str(pack.path), self._path, callback=_Moved(moved))
        self._fs.pipe_file(self._path + DIGEST_SUFFIX, sums)
        return self.url


class _Moved(Callback):
    """Hands the bytes that fsspec counts on to a progress bar."""

    def __init__(self, moved: Callable[[int], object], largest: float = math.inf) -> None:
        super().__init__()
        self._moved, self._largest = moved, largest

    def relative_update(self, inc: int = 1) -> None:
        """``inc`` more bytes were moved.

        Raises:
            Corrupt: they are more than there are.
        """
        super().relative_update(inc)
        if self.value > self._largest:
            raise Corrupt(f"more bytes come than the {self._largest} that a pack there may have")
        self._moved(inc)
