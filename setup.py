"""Notes the kernels' source digests in a wheel; all else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithDigests(build_py):
    """Copies the package, then notes the digests of the kernels that were copied."""

    def run(self):
        """Build; what an editable install leaves where it is gets no notes, as its sources change."""
        super().run()
        if not self.editable_mode:
            self.note_digests(Path(self.build_lib).resolve())

    def note_digests(self, root):
        """Have the copied package work out its own digests: it imports nothing but the standard library for that."""
        sys.path.insert(0, str(root))
        from tilekern.spec.source import NOTES, note_digests, spec_modules

        note_digests(spec_modules(root), NOTES)


# pip makes text files of the links of a ZIP, and would build a wheel without them and say nothing.
LINKS = ("tilekern/tuning", "tilekern/cache_tools")
if not all(Path(__file__).parent.joinpath(link).is_dir() for link in LINKS):
    raise SystemExit(f"{' and '.join(LINKS)} are links, which this copy of the sources has lost; take git's or a tar")

setup(cmdclass={"build_py": BuildWithDigests})
