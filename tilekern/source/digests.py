"""The digests of a kernel's source: whether an artifact is valid today, and whether it is still known to be the best.

Two digests of a spec, of what its fields reach by name (:mod:`tilekern.source.reachability`):

    source   ``implement``: the device functions, arrays, constants, grid and hints; and the dimensions
    space    ``space`` with its constraints, ``default``, ``generic``

An artifact whose ``source`` is another is never used. One whose ``space`` alone is another runs as it did; some config
that could not be chosen then may be faster. What only says how to check and what to tell people (inputs, reference,
bytes, summaries, docstrings, comments, the words of constraints) is in neither.

To work digests out the source is parsed and never imported. A wheel has them noted beside the hashes of the files that
they were made from: where those are today's, so are the digests, and a job parses nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_name("source_digests.json")


@dataclass(frozen=True)
class Digests:
    """The digests of a kernel's source of today, in hexadecimal; ``module`` is where it stands."""

    module: str
    source: str
    space: str

    @property
    def whole(self) -> str:
        """The digest of the whole module, which records of schemas 1 and 2 carry in the place of the two."""
        return digest_of_module(self.module)


@functools.cache
def digests_of(module: str, kernel: str) -> Digests:
    """The digests of a spec, without importing its module.

    Where a module makes its specs in a way that cannot be read from the source, all of it counts in both.

    Args:
        module: dotted module name, for example ``tilekern.kernels.rms_norm``; records name the one where the spec
            stood, which may have moved within its packages since.
        kernel: the spec's name.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    module = _home(module, kernel)
    noted = _noted(_notes(NOTES)["specs"].get(module, {}).get(kernel))
    if noted is None:
        noted = _worked_out(module, kernel)[0]
    return Digests(module, noted["source"], noted["space"])


@functools.cache
def _home(module: str, kernel: str) -> str:
    """The module where a spec stands today; the one that was given where no other of its packages has the spec."""
    noted = _notes(NOTES)["specs"]
    if kernel in noted.get(module, {}):
        return module
    from tilekern.source.reachability import is_module, module_named, modules_within, roots_of, specs_of

    if is_module(module) and kernel in specs_of(module_named(module)):
        return module
    roots = roots_of(module)
    homes = [name for name, kernels in noted.items() if kernel in kernels and roots_of(name) == roots]
    found = (name for package in roots for name in modules_within(package))
    homes = homes or [name for name in found if kernel in specs_of(module_named(name))]
    return homes[0] if len(homes) == 1 else module


@functools.cache
def digest_of_module(name: str) -> str:
    """The sha256 of a module's code and of the sibling modules that it imports, without importing any of them.

    Raises:
        ModuleNotFoundError: there is no such module, or its source is not at hand.
    """
    noted = _noted(_notes(NOTES)["modules"].get(name))
    if noted is not None:
        return str(noted["digest"])
    from tilekern.source.whole_modules import digest_of_closure

    return digest_of_closure(name)


def spec_modules(folder: Path) -> list[str]:
    """The modules that may hold specs, of the tilekern in a folder."""
    from tilekern.source.reachability import SPEC_PACKAGES

    files = [file for name in SPEC_PACKAGES for file in folder.joinpath(*name.split(".")).rglob("[!_]*.py")]
    return sorted(".".join(file.relative_to(folder).with_suffix("").parts) for file in files)


def note_digests(names: Iterable[str], path: Path) -> None:
    """Write down the digests of modules and of their specs, and the hash of each file that counts in them.

    Raises:
        ModuleNotFoundError: as there.
    """
    from tilekern.source.reachability import module_named, specs_of
    from tilekern.source.whole_modules import closure, digest_of_closure

    modules: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    for name in names:
        modules[name] = {"digest": digest_of_closure(name), "files": closure(name)}
        for kernel in specs_of(module_named(name)):
            digests, files = _worked_out(name, kernel)
            specs.setdefault(name, {})[kernel] = {**digests, "files": files}
    all_files = {file for one in (modules, *specs.values()) for noted in one.values() for file in noted["files"]}
    notes = {"files": {file: _hash_of(file) for file in all_files}, "modules": modules, "specs": specs}
    path.write_text(json.dumps(notes, indent=1, sort_keys=True), encoding="utf-8")


def _noted(noted: dict[str, Any] | None) -> dict[str, Any] | None:
    """A note, if each file that counts in it is as it was then."""
    if noted is None:
        return None
    hashes = _notes(NOTES)["files"]
    return noted if all(_hash_of(file) == hashes[file] for file in noted["files"]) else None


@functools.cache
def _notes(path: Path) -> dict[str, Any]:
    """The digests that a wheel noted; nothing in a checkout."""
    if not path.exists():
        return {"files": {}, "modules": {}, "specs": {}}
    return dict(json.loads(path.read_text(encoding="utf-8")))


@functools.cache
def _worked_out(module: str, kernel: str) -> tuple[dict[str, str], list[str]]:
    """Both digests, and the modules whose source counts in them."""
    from tilekern.source.reachability import OF_FRESHNESS, Code, Walk, is_of_validity, module_named, specs_of

    read = module_named(module)
    fields = specs_of(read).get(kernel)
    if fields is None:
        from tilekern.source.whole_modules import closure

        return dict.fromkeys(("source", "space"), digest_of_module(module)), closure(module)
    space_of_all = module_named("tilekern.space")
    runs, chooses = Walk(), Walk(words=False)
    for role in sorted(fields):
        if is_of_validity(role):
            runs.visit(fields[role])
        elif role in OF_FRESHNESS:
            chooses.visit(fields[role])
    for statement in space_of_all.definitions["DANGEROUS"]:
        chooses.note(Code(statement, space_of_all))
    files = sorted({module} | runs.modules | chooses.modules)
    return {"source": runs.hexdigest, "space": chooses.hexdigest}, files


@functools.cache
def _hash_of(module: str) -> str:
    from tilekern.source.reachability import path_of

    return hashlib.sha256(path_of(module).read_bytes()).hexdigest()
