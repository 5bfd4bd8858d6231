"""The cache of tuned kernels: keys, records, the store, layers, packs, the lookup and the wanted list.

Needs the standard library, msgspec and platformdirs alone, so that a cache can be read where neither torch nor a
compiler is.
"""

from tilekern.cache.entries import BlobFile, Entry, Garbage, Where
from tilekern.cache.errors import CacheError, Corrupt, Missing, MissingRecord, NoHome, UnknownSchema, Untrusted
from tilekern.cache.freshness import DATED, FRESH, NOT_FRESH, STALE, Freshness, freshness, why_better
from tilekern.cache.keys import Address, parse_problem_key, problem_key
from tilekern.cache.layers import FolderLayer, Layer, PackLayer
from tilekern.cache.lookup import Hit, Step, by_preference, hits, lookup
from tilekern.cache.packs.installing import Installed, install_pack, why_kept
from tilekern.cache.packs.pack import PACK_SUFFIX, Pack, checked_contents
from tilekern.cache.packs.writing import write_pack
from tilekern.cache.places import default_layers, user_root, user_root_if_any
from tilekern.cache.records import PROVENANCES, SCHEMA, Artifact, BestKernel, Launch, Record
from tilekern.cache.store import Store
from tilekern.cache.wanted import (
    clear_wanted,
    note_misses,
    note_wanted,
    read_misses,
    read_wanted,
    remove_wanted,
    sum_up_misses,
    wanted_name,
)

__all__ = [
    "DATED",
    "FRESH",
    "NOT_FRESH",
    "PACK_SUFFIX",
    "PROVENANCES",
    "SCHEMA",
    "STALE",
    "Address",
    "Artifact",
    "BestKernel",
    "BlobFile",
    "CacheError",
    "Corrupt",
    "Entry",
    "FolderLayer",
    "Freshness",
    "Garbage",
    "Hit",
    "Installed",
    "Launch",
    "Layer",
    "Missing",
    "MissingRecord",
    "NoHome",
    "Pack",
    "PackLayer",
    "Record",
    "Step",
    "Store",
    "UnknownSchema",
    "Untrusted",
    "Where",
    "by_preference",
    "checked_contents",
    "clear_wanted",
    "default_layers",
    "freshness",
    "hits",
    "install_pack",
    "lookup",
    "note_misses",
    "note_wanted",
    "parse_problem_key",
    "problem_key",
    "read_misses",
    "read_wanted",
    "remove_wanted",
    "sum_up_misses",
    "user_root",
    "user_root_if_any",
    "wanted_name",
    "why_better",
    "why_kept",
    "write_pack",
]
