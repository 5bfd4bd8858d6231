"""The command wheel: make an installable package with a pack in it, which a lookup finds by its entry point."""

from __future__ import annotations

from pathlib import Path

import click

from tilekern.cache import CacheError, Store
from tilekern.cache_tools.shared.options import FILE, FOLDER, as_json, cache_dir, with_filters
from tilekern.cache_tools.shared.packs import packs_or_selected, sha256_of
from tilekern.cache_tools.shared.printing import count, note_left_out, print_result, size
from tilekern.cache_tools.shared.selection import Selection
from tilekern.cache_tools.shared.wheels import needs, write_wheel


@click.command()
@click.argument("out_dir", metavar="OUT_DIR", type=FOLDER)
@click.option("--name", required=True, help="The package's name, such as acme-kernels-h200.")
@click.option("--version", required=True, help="The package's version, such as 1.0.")
@click.option("--pack", type=FILE, help="This pack, instead of records of the cache.")
@with_filters()
@cache_dir
@as_json
def wheel(
    out_dir: Path, name: str, version: str, pack: Path | None, store: Store, selection: Selection, as_json: bool
) -> None:
    """Make a wheel of records: once pip has installed it, every lookup finds them.

    The records are those that the filters choose, or a pack's. The same records give the same bytes with the same
    setuptools.

    JSON: wheel, name, version, module, left_out, wheel_bytes, wheel_sha256, sha256 and bytes (of the pack in it),
    records, targets[], toolkits[].
    """
    name, version = _normalised(name, version)
    # Its folder among the installed packages, which no other package has.
    module = f"tilekern_packs_{name.replace('-', '_')}"
    with packs_or_selected([pack] if pack else [], store, selection) as ((contents,), left_out):
        path = write_wheel(contents, name, version, module, out_dir)
    size_bytes = path.stat().st_size
    document = {"wheel": str(path), "name": name, "version": version, "module": module, "left_out": left_out}
    document |= {"wheel_bytes": size_bytes, "wheel_sha256": sha256_of(path), **contents.document()}
    text = f"made {path} with {count(len(contents.records), 'record')}, {size(size_bytes)}{note_left_out(left_out)}"
    print_result(document, as_json, text)


def _normalised(name: str, version: str) -> tuple[str, str]:
    """Return a package's name and version as pip reads them; raise CacheError if pip would refuse one."""
    try:
        from packaging.utils import InvalidName, canonicalize_name
        from packaging.version import InvalidVersion, Version
    except ImportError:
        raise CacheError(needs("packaging")) from None
    try:
        package = canonicalize_name(name, validate=True)
        number = str(Version(version))
    except InvalidName:
        raise CacheError(
            f"--name must be letters, digits and single ones of -_. between them, such as acme-kernels, got {name!r}"
        ) from None
    except InvalidVersion:
        raise CacheError(f"--version must be one that pip knows, such as 1.0 or 2026.11, got {version!r}") from None
    if package == "tilekern":
        raise CacheError("--name tilekern would replace tilekern itself; choose another")
    return package, number
