"""The commands that ship packs: wheel, push and pull."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from click.core import ParameterSource

from cache_tools.shared.options import as_json, cache_dir, with_age_filters, with_filters
from cache_tools.shared.packing import write_selected
from cache_tools.shared.selection import Selection
from cache_tools.shared.text import count, print_json, size
from tilekern.cache import PACK_SUFFIX, CacheError, Missing, Store
from tilekern.cache.keys import check_digest

plain_http = click.option(
    "--plain-http", is_flag=True, help="Talk to an OCI registry by HTTP; one on this machine always is."
)


@click.command()
@click.argument("out_dir", metavar="OUT_DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", required=True, help="The package's name, such as acme-kernels-h200.")
@click.option("--version", required=True, help="The package's version, such as 1.0.")
@click.option("--pack", "pack", type=click.Path(path_type=Path), help="This pack, instead of records of the cache.")
@with_filters
@with_age_filters
@cache_dir
@as_json
def wheel(
    out_dir: Path, name: str, version: str, pack: Path | None, store: Store, as_json: bool, **filters: Any
) -> None:
    """Make a wheel that brings records along: once it is installed by pip, every lookup finds them.

    The records are those that the filters choose, or a pack's. The same records give the same bytes, by the same
    setuptools.

    JSON: wheel, name, version, module, left_out, wheel_bytes, wheel_sha256, sha256 and bytes (of the pack in it),
    records, targets[], toolkits[].
    """
    from cache_tools.commands.wheel import build_wheel, parse_package
    from cache_tools.shared.contents import read_contents, sha256_of

    package, selection, left_out = parse_package(name, version), Selection(**filters), 0
    if pack and not selection.is_empty:
        raise CacheError("--pack takes a pack as it is, with no filters; leave one of them out")
    with TemporaryDirectory() as folder:
        if pack is None:
            pack = Path(folder, f"records{PACK_SUFFIX}")
            _, left_out = write_selected(store, pack, selection)
        contents = read_contents(pack)
        path = build_wheel(contents, package, out_dir)
    if as_json:
        made = {"wheel": str(path), "name": package.name, "version": package.version, "module": package.module}
        sizes = {"left_out": left_out, "wheel_bytes": path.stat().st_size, "wheel_sha256": sha256_of(path)}
        print_json(made | sizes | contents.document())
        return
    note = f"; {count(left_out, 'unreadable record')} left out" if left_out else ""
    click.echo(f"made {path} with {count(len(contents.records), 'record')}, {size(path.stat().st_size)}{note}")


@click.command()
@click.argument("file", metavar="FILE.pack", type=click.Path(path_type=Path))
@click.argument("url", metavar="URL")
@plain_http
@as_json
def push(file: Path, url: str, plain_http: bool, as_json: bool) -> None:
    """Put a pack where other machines pull it from.

    URL is a tag of an OCI registry (oci://registry.example.com/team/kernels:h200), a file in a repository of the
    Hugging Face hub (hf://team/kernels@main/h200.pack), or a file of any filesystem that fsspec knows
    (s3://bucket/h200.pack, file:///shared/h200.pack). Credentials are those of docker, of huggingface_hub, and of
    fsspec's filesystem.

    JSON: url, place (the URL of exactly what was pushed, where there is one), pushed (false where it was there), pack,
    sha256, bytes, records, targets[], toolkits[].
    """
    from cache_tools.remotes import failures_of, open_remote
    from cache_tools.shared.contents import read_contents

    contents = read_contents(file)
    remote = open_remote(url, plain_http)
    with failures_of(url):
        try:
            is_there = remote.digest() == contents.sha256
        except (Missing, FileNotFoundError):
            is_there = False
        place = url if is_there else remote.upload(contents)
    if as_json:
        pushed = {"url": url, "place": place, "pushed": not is_there, "pack": str(file)}
        print_json(pushed | contents.document())
    elif is_there:
        click.echo(f"{url} has this pack already, sha256 {contents.sha256}")
    else:
        click.echo(f"pushed {count(len(contents.records), 'record')}, {size(contents.size_bytes)}, to {place}")


@click.command()
@click.argument("url", metavar="URL")
@click.option("--out", metavar="FILE.pack", type=click.Path(path_type=Path), help="Keep the pack in a file instead.")
@click.option("--digest", "pinned", metavar="SHA256", help="Refuse any other pack than the one with this sha256.")
@plain_http
@cache_dir
@as_json
@click.pass_context
def pull(
    context: click.Context,
    url: str,
    out: Path | None,
    pinned: str | None,
    plain_http: bool,
    store: Store,
    as_json: bool,
) -> None:
    """Fetch a pack and put its records into the cache, once all are checked.

    URL is one that `push` takes, or an https:// one. A pack that is there already is not downloaded again.

    JSON: url, downloaded, sha256, cache_dir and installed (records written), or file.
    """
    if out and context.get_parameter_source("store") is ParameterSource.COMMANDLINE:
        raise CacheError("--out keeps the pack in a file and --cache-dir unpacks it; give one of them")
    if out and out.suffix != PACK_SUFFIX:
        raise CacheError(f"a pack's name must end in {PACK_SUFFIX}, got {out.name!r}")
    if pinned:
        check_digest("--digest", pinned)
    from cache_tools.commands.pull import Wanted, pull_into_cache, pull_to_file

    wanted = Wanted(url, pinned, plain_http)
    outcome = pull_to_file(wanted, out) if out else pull_into_cache(wanted, store)
    if as_json:
        came = {"url": url, "downloaded": outcome.downloaded, "sha256": outcome.sha256}
        print_json(
            came | ({"file": str(out)} if out else {"cache_dir": str(store.root), "installed": outcome.installed})
        )
    elif not outcome.downloaded:
        click.echo(f"{out or store.root} has this pack already, sha256 {outcome.sha256}")
    elif out:
        click.echo(f"pulled {out}, {size(out.stat().st_size)}, sha256 {outcome.sha256}")
    else:
        click.echo(f"pulled {count(outcome.installed, 'record')} into {store.root}, sha256 {outcome.sha256}")
