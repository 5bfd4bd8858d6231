"""The command push: a pack to where other machines pull it from."""

from __future__ import annotations

from pathlib import Path

import click

from tilekern.cache import Missing
from tilekern.cache_tools.remotes import failures_of, open_remote
from tilekern.cache_tools.shared.contents import read_contents
from tilekern.cache_tools.shared.options import as_json, command, plain_http
from tilekern.cache_tools.shared.text import count, print_json, size
from tilekern.warning import tell


@command
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
        tell(f"{url} has this pack already, sha256 {contents.sha256}")
    else:
        tell(f"pushed {count(len(contents.records), 'record')}, {size(contents.size_bytes)}, to {place}")
