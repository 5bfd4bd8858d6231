"""The command push: put a pack where other machines pull it from."""

from __future__ import annotations

from pathlib import Path

import click

from tilekern.cache import Missing
from tilekern.cache_tools.remotes import failures_of, open_remote
from tilekern.cache_tools.shared.options import FILE, as_json, command, plain_http
from tilekern.cache_tools.shared.packs import read_contents
from tilekern.cache_tools.shared.printing import count, print_result, size


@command
@click.argument("file", metavar="FILE.pack", type=FILE)
@click.argument("url", metavar="URL")
@plain_http
@as_json
def push(file: Path, url: str, plain_http: bool, as_json: bool) -> None:
    """Put a pack where other machines pull it from.

    URL is a tag of an OCI registry (oci://registry.example.com/team/kernels:h200), a file in a repository of the
    Hugging Face hub (hf://team/kernels@main/h200.pack), or a file of any filesystem that fsspec knows
    (s3://bucket/h200.pack, file:///shared/h200.pack). Credentials are those of docker, huggingface_hub, and fsspec's
    filesystem.

    JSON: url, place (the exact URL of what was pushed, if there is one), pushed (false if it was there already), pack,
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
    document = {"url": url, "place": place, "pushed": not is_there, "pack": str(file), **contents.document()}
    text = f"pushed {count(len(contents.records), 'record')}, {size(contents.size_bytes)}, to {place}"
    print_result(document, as_json, f"{url} has this pack already, sha256 {contents.sha256}" if is_there else text)
