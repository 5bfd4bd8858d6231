"""A file of any filesystem that fsspec knows; beside the pack is a file with its digest, as ``sha256sum`` writes it."""

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
# The limit for a pack whose size is not stated.
_LARGEST_PACK = 2**34
_SUM = re.compile(rb"([0-9a-f]{64}) [ *][^\n]+\n?")


class FsspecFile:
    """A pack's file, and the file with its digest."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._path = url_to_fs(url)

    def digest(self) -> str | None:
        """Return the digest in the file beside the pack; None if there is none."""
        if self._fs.info(self._path).get("type") == "directory":
            raise CacheError(f"{self.url} is a folder; a pack is a file")
        if urlsplit(self.url).query:
            # A signed URL is valid for one file.
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
        """Write the file to ``path``."""
        size = self._fs.info(self._path).get("size")
        with progress_bar("pulling", size) as moved:
            self._fs.get_file(self._path, str(path), callback=_Moved(moved, _LARGEST_PACK if size is None else size))

    def upload(self, pack: Contents) -> str:
        """Upload the pack, then its digest; return the URL."""
        if not self._path.endswith(PACK_SUFFIX):
            raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {self.url}")
        if urlsplit(self.url).scheme in ("http", "https"):
            raise CacheError(f"{self.url} can be pulled from, not pushed to; push to where its server reads its files")
        sums = f"{pack.sha256}  {PurePosixPath(self._path).name}\n".encode()
        if isinstance(self._fs, LocalFileSystem):
            # Object stores show only complete files; here another node may read one while it is written.
            write_whole(Path(self._path), pack.path.read_bytes())
            write_whole(Path(self._path + DIGEST_SUFFIX), sums)
            return self.url
        with progress_bar("pushing", pack.size_bytes) as moved:
            self._fs.put_file(str(pack.path), self._path, callback=_Moved(moved))
        self._fs.pipe_file(self._path + DIGEST_SUFFIX, sums)
        return self.url


class _Moved(Callback):
    """Passes the numbers of bytes from fsspec to a progress bar."""

    def __init__(self, moved: Callable[[int], object], largest: float = math.inf) -> None:
        super().__init__()
        self._moved, self._largest = moved, largest

    def relative_update(self, inc: int = 1) -> None:
        """Count ``inc`` more bytes; raise Corrupt if there are more than the pack may have."""
        super().relative_update(inc)
        if self.value > self._largest:
            raise Corrupt(f"more bytes come than the {self._largest} that a pack there may have")
        self._moved(inc)
