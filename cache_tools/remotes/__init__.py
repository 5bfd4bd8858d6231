"""Remote places of packs: a registry's tag, a repository of the hub, a file of any filesystem of fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeGuard

from tilekern.cache import CacheError, Missing
from tilekern.cache_tools.shared.packs import Contents

_EXAMPLES = "oci://registry.example.com/team/kernels:h200, hf://team/kernels/h200.pack or s3://bucket/h200.pack"


class Remote(Protocol):
    """A place of at most one pack. Credentials are those that its own tools keep.

    Methods raise the errors of the libraries behind them (:func:`failures_of`), and Missing if there is no pack.
    """

    def digest(self) -> str | None:
        """Return the sha256 that the place states for its pack, without downloading it; None if it states none."""
        ...

    def download(self, path: Path) -> None:
        """Write the pack into a new file."""
        ...

    def upload(self, pack: Contents) -> str:
        """Upload a pack, replacing an older one; return its URL, as exact as possible."""
        ...


def open_remote(url: str, plain_http: bool = False) -> Remote:
    """Return the place that a URL names.

    Args:
        url: ``oci://``, ``hf://``, or any that fsspec knows.
        plain_http: whether to use HTTP for a registry; always so for one on this machine.

    Raises:
        CacheError: the URL is not that of a pack, or a package that it needs is not installed.
    """
    scheme, colon, rest = url.partition("://")
    if not (scheme and colon and rest):
        raise CacheError(f"{url!r} is not a URL; give one such as {_EXAMPLES}")
    if plain_http and scheme != "oci":
        raise CacheError(f"--plain-http is for oci:// alone, got {url}")
    with failures_of(url):
        if scheme == "oci":
            from tilekern.cache_tools.remotes.oci import OciTag

            return OciTag(url, plain_http)
        if scheme == "hf":
            from tilekern.cache_tools.remotes.hub import HubFile

            return HubFile(url)
        from tilekern.cache_tools.remotes.filesystem import FsspecFile

        return FsspecFile(url)


@contextmanager
def failures_of(url: str) -> Iterator[None]:
    """Turn whatever a library raises in the block into a Missing or another CacheError, one line that names the URL."""
    try:
        yield
    except CacheError:
        raise
    except FileNotFoundError as error:
        if _is_unreachable(error.__cause__):
            raise CacheError(f"cannot connect to {url}: {_one_line(error.__cause__)}") from None
        raise Missing(f"there is no {url} ({_one_line(error.__cause__ or error)})") from None
    except ImportError as error:
        # An error of fsspec names the package for its filesystem, and no module.
        install = "pip install 'tilekern[ship]'" if error.name else _one_line(error)
        raise CacheError(f"{url} needs a package that is not installed: {install}") from None
    except Exception as error:  # noqa: BLE001 (each filesystem and each client has exceptions of its own)
        raise CacheError(f"{url}: {_one_line(error) or type(error).__name__}") from None


def _is_unreachable(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether an error comes from a failed system call, and not from a server's answer."""
    if isinstance(error, TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
