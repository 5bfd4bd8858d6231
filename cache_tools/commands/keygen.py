"""The command keygen: make a key to sign with."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from tilekern.cache import CacheError
from tilekern.cache.files import write_whole
from tilekern.cache.trust.policy import user_trust_roots
from tilekern.cache.trust.signing import generate_key
from tilekern.cache_tools.shared.options import FILE, as_json, command
from tilekern.cache_tools.shared.printing import print_result


@command
@click.argument("file", metavar="FILE", type=FILE)
@click.option("--name", help="Name of the key's owner; default the file's name.")
@as_json
def keygen(file: Path, name: str | None, as_json: bool) -> None:
    """Make a key to sign with: FILE, for you alone, and FILE.pub, the line for others' trust roots.

    JSON: key, public_key, trust_root, trust_roots (the file where a line of yours counts).
    """
    public = Path(f"{file}.pub")
    for path in (file, public):
        if os.path.lexists(path):
            raise CacheError(f"{path} exists already, and a key is never overwritten; give another name")
    title = " ".join((name or file.stem).split())
    if not title or not title.isprintable():
        raise CacheError(f"--name must be printable and not empty, got {name or file.stem!r}")
    missing = [folder for folder in (file.parent, *file.parent.parents) if not os.path.exists(folder)]
    try:
        key = generate_key(file)
        line = f"ed25519 {key} {title}"
        try:
            write_whole(public, f"{line}\n".encode())
        except OSError as error:
            file.unlink()
            raise CacheError(f"cannot write {public}: {error.strerror}") from None
    except CacheError:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    roots = str(user_trust_roots())
    document = {"key": str(file), "public_key": key, "trust_root": line, "trust_roots": roots}
    text = f"wrote the private key {file}, and {public}, whose line others add to {roots}"
    print_result(document, as_json, text)
