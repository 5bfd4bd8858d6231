"""Places elsewhere that hold a pack: a registry's tag, a repository of the hub, a file of any filesystem of fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeGuard

from tilekern.cache import CacheError, Missing
from tilekern.cache_tools.shared.packs import Contents

_EXAMPLES = "oci://registry.example.com/team/kernels:h200, hf://team/kernels/h200.pack or s3://bucket/h200.pack"


class Remote(Protocol):
    """One place that holds at most one pack. Its credentials come from where its own tools keep them.

    The methods raise what the libraries behind them raise; :func:`failures_of` makes one line of it.
    """

    def digest(self) -> str | None:
        """The sha256 that the place states of its pack, with nothing of it downloaded; None where it states none.

        Raises:
            Missing: there is no pack.
        """
        ...

    def download(self, path: Path) -> None:
        """Write what is there into a new file.

        Raises:
            Missing: there is no pack.
        """
        ...

    def upload(self, pack: Contents) -> str:
        """Put a pack there in place of what is there; where it can be found from now on, as exactly as can be said."""
        ...


def open_remote(url: str, plain_http: bool = False) -> Remote:
    """The place that a URL names.

    Args:
        url: ``oci://``, ``hf://``, or any that fsspec knows.
        plain_http: talk to the registry by HTTP; one on this machine always is.

    Raises:
        CacheError: the URL is not that of a pack, or a package that its place needs is not installed.
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
    """Whatever a library raises while it talks to a place, as one line that names the place.

    Raises:
        Missing: there is nothing.
        CacheError: anything else.
    """
    try:
        yield
    except CacheError:
        raise
    except FileNotFoundError as error:
        if _is_unreachable(error.__cause__):
            raise CacheError(f"cannot connect to {url}: {_one_line(error.__cause__)}") from None
        raise Missing(f"there is no {url} ({_one_line(error.__cause__ or error)})") from None
    except ImportError as error:
        # fsspec's own words name what its other filesystems need, and no module.
        install = "pip install 'tilekern[ship]'" if error.name else _one_line(error)
        raise CacheError(f"{url} needs what is not installed here: {install}") from None
    except Exception as error:  # noqa: BLE001 (each filesystem and each client has exceptions of its own)
        raise CacheError(f"{url}: {_one_line(error) or type(error).__name__}") from None


def _is_unreachable(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether the system's calls failed behind an error, and no server answered that there is nothing."""
    if isinstance(error, TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
