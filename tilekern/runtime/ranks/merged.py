"""The layers of one machine as one layer, of whose packs only those records are read that lookups ask for.

Ranks whose packs are equal need not compare the records in them, of which those of a GPU have thousands. Folders are
taken as snapshots, since other processes write to them; a pack stays open, and what is in it does not change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from tilekern.cache import Hit, Layer, Missing, MissingRecord, PackLayer, Record, problem_key
from tilekern.cache.keys import Value
from tilekern.errors import RanksDiffer
from tilekern.kernels import all_specs
from tilekern.runtime.ranks.held import Place
from tilekern.runtime.ranks.snapshot import Snapshot, digest_of, found_at


class Merged:
    """Layers as one (:class:`tilekern.cache.Layer`), with the records for the GPUs of an arch.

    A problem has the one record that a lookup through the layers would find, from whichever toolkit.

    Args:
        arch: the arch.
        layers: the layers, first to last.
        toolkit_key: the toolkit installed here, or None.
        invariant: whether lookups are those of the invariant mode.

    Attributes:
        folders: the records of the folders before all packs.
    """

    def __init__(self, arch: str, layers: Sequence[Layer], toolkit_key: str | None, *, invariant: bool = False) -> None:
        self.name = "agreed"
        self._arch, self._toolkit_key, self._invariant = arch, toolkit_key, invariant
        is_pack = [isinstance(layer, PackLayer) for layer in layers]
        first = is_pack.index(True) if any(is_pack) else len(layers)
        self.folders = Snapshot.take(arch, layers[:first], toolkit_key, invariant=invariant)
        self._layers: list[PackLayer | Snapshot] = [self.folders]
        self._digests: list[str] = []
        self._found: dict[Place, Hit | None] = {}
        self._blobs: dict[str, bytes] = {}
        for layer in layers[first:]:
            if isinstance(layer, PackLayer):
                if any(map(self._is_ours, layer.targets())):
                    self._layers.append(layer)
                    self._digests.append(f"{layer.origin}/{layer.digest()}")
            else:
                taken = Snapshot.take(arch, [layer], toolkit_key, invariant=invariant)
                self._layers.append(taken)
                self._digests.append(f"folder/{taken.digest}")

    def __len__(self) -> int:
        return len(set(self._places()))

    @property
    def digest(self) -> str:
        """The digest of all that decides what lookups find, in hexadecimal, but for the sources of the kernels."""
        return digest_of([self.folders.digest, self.rest])

    @property
    def rest(self) -> str:
        """The digest of the same but for the folders before all packs."""
        return digest_of([self._arch, f"{self._toolkit_key}", f"{self._invariant}", *self._digests])

    def having(self, folders: Snapshot) -> Merged:
        """Return the layers with others in place of the folders before all packs."""
        other = copy.copy(self)
        other.folders, other._layers, other._found, other._blobs = folders, [folders, *self._layers[1:]], {}, {}
        return other

    def snapshot(self) -> Snapshot:
        """Return all records that lookups find, to compare them with those of other layers."""
        return Snapshot.take(self._arch, self._layers, self._toolkit_key, invariant=self._invariant)

    def targets(self) -> list[str]:
        """Return its target keys, sorted."""
        return sorted({key for layer in self._layers for key in layer.targets() if self._is_ours(key)})

    def toolkits(self, target_key: str) -> list[str]:
        """Return its toolkit keys for a target, sorted."""
        return sorted({key for layer in self._layers for key in layer.toolkits(target_key)})

    def problems(self, target_key: str, toolkit_key: str, kernel: str) -> list[dict[str, Value]]:
        """Return the problems that a layer has a record of; a record that no lookup takes may be the only one."""
        found = {
            problem_key(problem): problem
            for layer in self._layers
            for problem in layer.problems(target_key, toolkit_key, kernel)
        }
        return list(found.values())

    def read_record(self, target_key: str, toolkit_key: str, kernel: str, problem: dict[str, Value]) -> Record:
        """Return one record.

        Raises:
            MissingRecord: lookups find none, or one of another toolkit.
            RanksDiffer: a pack was written to meanwhile, which other ranks may have read before.
        """
        place = Place(target_key, kernel, problem_key(problem))
        if place not in self._found:
            self._found[place] = self._looked_up(place, problem)
        hit = self._found[place]
        if hit is None or hit.record.toolkit["key"] != toolkit_key:
            raise MissingRecord(f"the ranks agreed on no record of {kernel} for {place.problem_key}")
        return hit.record

    def read_blob(self, sha256: str) -> bytes:
        """Return one blob, which was read and checked with its record.

        Raises:
            Missing: no record with it was read.
        """
        if sha256 not in self._blobs:
            raise Missing(f"the ranks agreed on no blob {sha256}")
        return self._blobs[sha256]

    def signatures(self, record_sha256: str) -> dict[str, bytes]:
        """Return the signatures and seals of a record, by the names of their files."""
        return {name: text for layer in self._layers for name, text in layer.signatures(record_sha256).items()}

    def _is_ours(self, target_key: str) -> bool:
        return target_key.startswith(f"{self._arch}-")

    def _looked_up(self, place: Place, problem: dict[str, Value]) -> Hit | None:
        spec = all_specs().get(place.kernel)
        if spec is None:
            return None
        for layer in self._layers:
            if isinstance(layer, PackLayer) and layer.is_changed():
                raise RanksDiffer(
                    f"{layer.path} was written to after the ranks had agreed on what is in it: put another file in its "
                    "place, and call tilekern.agree() to use that"
                )
        hit = found_at(place, spec, problem, self._layers, self._toolkit_key, invariant=self._invariant)
        if hit is not None:
            self._blobs.update(hit.blobs)
        return hit

    def _places(self) -> Iterator[Place]:
        for layer in self._layers:
            if isinstance(layer, PackLayer):
                addresses = layer.addresses()
                yield from (Place(a.target_key, a.kernel, a.problem_key) for a in addresses if self._is_ours(a[0]))
            else:
                yield from layer.places
