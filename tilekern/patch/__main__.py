"""``python -m tilekern.patch``: the table with the status and the digests of what is installed.

``python -m tilekern.patch FOLDER ...`` prints the digests of unpacked transformers releases instead (the folder that
holds ``transformers/``), which are read and not imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilekern.patch import list_patches
from tilekern.patch.digests import digest_in
from tilekern.patch.installed import transformers_version
from tilekern.patch.registry import patches


def main(folders: list[str]) -> int:
    """Print one line for each patch; returns the exit code, 2 where a folder holds no release."""
    if not folders:
        sys.stdout.write(f"transformers {transformers_version()}\n")
        for found in list_patches():
            line = f"{found.status:9} {found.patch.op:{_width()}} {found.digest} {found.patch.target} {found.reason}"
            sys.stdout.write(line.rstrip() + "\n")
    for folder in folders:
        try:
            sys.stdout.write(_of_release(Path(folder)))
        except OSError as error:
            sys.stderr.write(f"{folder}: no unpacked transformers release: {error}\n")
            return 2
    return 0


def _width() -> int:
    return max(len(patch.op) for patch in patches())


def _of_release(folder: Path) -> str:
    lines = [f"{folder}\n"]
    for patch in patches():
        text = (folder / f"{patch.module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for path, known in ((patch.attribute, patch.digests), *patch.relies_on):
            try:
                digest = digest_in(text, path)
                lines.append(f"{'known' if digest in known else 'changed':9} {patch.op:{_width()}} {digest} {path}\n")
            except ValueError as error:
                lines.append(f"{'missing':9} {patch.op:{_width()}} {error}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
