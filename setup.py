"""Notes the kernels' source digests in a wheel, and makes an sdist reproducible.

All else about the package is in pyproject.toml.
"""

import gzip
import os
import sys
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist


class BuildWithDigests(build_py):
    """Copies the package, then notes the digests of the kernels that were copied."""

    def run(self):
        """Build; what an editable install leaves where it is gets no notes, as its sources change."""
        super().run()
        if not self.editable_mode:
            self.note_digests(Path(self.build_lib).resolve())

    def note_digests(self, root):
        """Have the copied package work out its own digests: it imports nothing but the standard library for that."""
        # Its bytecode would be packed: with the temporary paths of this build, for this Python alone.
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(root))
        from tilekern.spec.source import NOTES, note_digests, spec_modules

        note_digests(spec_modules(root), NOTES)


class SdistOfADate(sdist):
    """Writes the same bytes from the same sources if SOURCE_DATE_EPOCH is set, as setuptools does for wheels only."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write a gztar with the time of SOURCE_DATE_EPOCH, and without the names and modes of whoever builds."""
        date = os.environ.get("SOURCE_DATE_EPOCH")
        if format != "gztar" or date is None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def dated(member):
            member.mtime, member.mode = int(date), 0o755 if member.mode & 0o100 else 0o644
            member.uid, member.gid, member.uname, member.gname = 0, 0, "root", "root"
            return member

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.GzipFile(path, "wb", mtime=int(date)) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
            tar.add(base_dir, filter=dated)
        return str(path)


# pip makes text files of the links of a ZIP, and would build a wheel without them and say nothing.
LINKS = ("tilekern/tuning", "tilekern/cache_tools")
if not all(Path(__file__).parent.joinpath(link).is_dir() for link in LINKS):
    raise SystemExit(f"{' and '.join(LINKS)} are links, which this copy of the sources has lost; take git's or a tar")

setup(cmdclass={"build_py": BuildWithDigests, "sdist": SdistOfADate})
