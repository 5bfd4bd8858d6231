"""A file in a repository of the Hugging Face hub, ``hf://OWNER/REPOSITORY[@REVISION]/PATH``, through huggingface_hub.

The hub keeps the sha256 of what it stores as a large file, which a pack is. Endpoint and token are those of
huggingface_hub: ``HF_ENDPOINT``, ``HF_TOKEN``, ``hf auth login``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.constants import REPO_TYPES_URL_PREFIXES
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars

from tilekern.cache import PACK_SUFFIX, CacheError, Missing
from tilekern.cache_tools.shared.packs import Contents


class HubFile:
    """A pack in a repository, at the newest commit of a revision."""

    def __init__(self, url: str) -> None:
        if not sys.stderr.isatty():
            disable_progress_bars()
        place = HfFileSystem().resolve_path(url)
        path = getattr(place, "path_in_repo", "")
        if not path.endswith(PACK_SUFFIX):
            raise CacheError(
                f"{url} must name a repository and a {PACK_SUFFIX} in it, such as hf://team/kernels/h200.pack"
            )
        self.url = url
        self._api = HfApi()
        self._repository = {"repo_id": place.repo_id, "repo_type": place.repo_type}
        self._path, self._revision = path, place.revision
        # The download uses the same commit as the digest before it.
        self._commit = place.revision

    def digest(self) -> str | None:
        """Return the sha256 that the hub keeps; raise Missing if there is no such file."""
        self._commit = self._api.repo_info(**self._repository, revision=self._revision).sha
        found = self._api.get_paths_info(**self._repository, paths=[self._path], revision=self._commit)
        if not found or not isinstance(found[0], RepoFile):
            raise Missing(f"there is no {self.url}")
        return found[0].lfs.sha256 if found[0].lfs else None

    def download(self, path: Path) -> None:
        """Write the file to ``path``."""
        with TemporaryDirectory(dir=path.parent) as folder:
            options = {"revision": self._commit, "local_dir": folder}
            Path(hf_hub_download(**self._repository, filename=self._path, **options)).rename(path)

    def upload(self, pack: Contents) -> str:
        """Commit the pack; return the URL with that commit."""
        commit = self._api.upload_file(
            **self._repository,
            path_or_fileobj=str(pack.path),
            path_in_repo=self._path,
            revision=self._revision,
            commit_message=f"{self._path}: {len(pack.records)} records for {', '.join(pack.targets)}",
        )
        prefix = REPO_TYPES_URL_PREFIXES.get(self._repository["repo_type"], "")
        return f"hf://{prefix}{self._repository['repo_id']}@{commit.oid}/{self._path}"
