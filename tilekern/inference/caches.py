"""The caches of keys and values: room for the context of each sequence, or pages that sequences take as they grow.

Both serve the same steps. Layers append the keys and values of a prompt's tokens by ``append_to_cache``. One token of
each sequence appends its own and reads the others where they are, by ``token_attention``, or by ``decode_attention``
after the former. The attention of a prompt's tokens takes keys that follow one another, so those in pages are first
copied to a scratch of one layer by ``embedding``: as rows of a table.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from tilekern.arrays import Array
from tilekern.errors import InputError
from tilekern.inference.choice import numbers
from tilekern.inference.launches import Launches
from tilekern.spec import ITEM_BYTES, bucket, cdiv

if TYPE_CHECKING:
    from tilekern.inference.steps import Model

STATIC, PAGED = KINDS = ("static", "paged")
# Tokens of a page. Whole tiles of keys fill it in every config of attention, so sums have the order of a static cache;
# transformers' continuous batching has pages of as many, so records serve both.
PAGE = 256
# Kernels index an array's elements with 32 bits.
_MOST_ELEMENTS = (1 << 31) - 1


class Keys(Protocol):
    """The keys and values of some sequences, as a step uses them."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The dimensions of ``token_attention`` and ``decode_attention`` that say how they lie."""

    def of_layer(self, number: int) -> dict[str, Array]:
        """Return a layer's arrays, as these kernels and ``append_to_cache`` name them."""

    def read(self, launches: Launches, number: int) -> tuple[Array, Array]:
        """Return a layer's keys and values for ``attention_forward``, after the launches that this takes."""


class Cache(Protocol):
    """The keys and values of a batch."""

    @property
    def keys(self) -> Keys:
        """Those of all sequences, for a step of one token of each."""

    def fits(self, lengths: Sequence[int]) -> bool:
        """Return whether it can serve a batch of sequences that grow to these lengths."""

    def of(self, first: int, batch: int, count: int) -> Keys:
        """Return the first ``count`` keys of sequences from ``first`` on, for a step of several tokens."""

    def hold(self, counts: Sequence[int]) -> int:
        """Have room for this many keys of each sequence, of which one with 0 has ended.

        Returns:
            for how many more keys there is room in each of the others.

        Raises:
            InputError: too few pages are free; none was taken.
        """

    def end(self) -> None:
        """Give all room back; launches that are queued may still use it."""


class StaticKeys:
    """Keys and values of layers, each [batch, kv_heads, room, head_dim]."""

    def __init__(self, keys: list[Array], values: list[Array]) -> None:
        self._keys, self._values = keys, values
        self.sizes = {"keys": bucket(keys[0].shape[2]), "page_size": 1, "paged": False}

    @classmethod
    def new(cls, launches: Launches, model: Model, batch: int, room: int) -> StaticKeys:
        """Return arrays for ``room`` tokens of each sequence."""
        of = model.architecture
        return cls(*_arrays(launches, model, (batch, of.kv_heads, room, of.head_dim)))

    def of_layer(self, number: int) -> dict[str, Array]:
        """See :class:`Keys`."""
        return {"keys": self._keys[number], "values": self._values[number]}

    def read(self, launches: Launches, number: int) -> tuple[Array, Array]:  # noqa: ARG002 (it takes none)
        """See :class:`Keys`."""

        def tokens_first(x: Array) -> Array:
            (batch, heads, keys, size), (entry, head, key, _) = x.shape, x.strides
            return x.view((batch, keys, heads, size), (entry, key, head, 1))

        return tokens_first(self._keys[number]), tokens_first(self._values[number])

    def of(self, first: int, batch: int, count: int) -> StaticKeys:
        """Return the first ``count`` keys of some sequences."""

        def part(x: Array) -> Array:
            _, heads, _, size = x.shape
            return x.view((batch, heads, count, size), x.strides, first * x.strides[0])

        return StaticKeys([part(x) for x in self._keys], [part(x) for x in self._values])


class StaticCache:
    """A cache with room for the same number of tokens of each sequence; see :class:`Cache`."""

    def __init__(self, launches: Launches, model: Model, batch: int, room: int) -> None:
        """Reserve the memory."""
        self._batch, self._room = batch, room
        self.keys = StaticKeys.new(launches, model, batch, room)

    def fits(self, lengths: Sequence[int]) -> bool:
        """See :class:`Cache`."""
        return self._batch == len(lengths)

    def of(self, first: int, batch: int, count: int) -> StaticKeys:
        """See :class:`Cache`."""
        return self.keys.of(first, batch, count)

    def hold(self, counts: Sequence[int]) -> int:
        """See :class:`Cache`."""
        return self._room - max(counts)

    def end(self) -> None:
        """Do nothing: the room stays."""


class Pool:
    """Pages of keys and values, which the batches of a stream take and give back.

    Attributes:
        pages: how many there are.
        free: those that no sequence has.
        is_shared: whether all batches of an engine take from it, or one only.
        keys, values: of each layer, [pages, PAGE, kv_heads, head_dim].
    """

    def __init__(self, launches: Launches, model: Model, pages: int, *, is_shared: bool = False) -> None:
        """Reserve the memory.

        Raises:
            InputError: there are more pages than kernels index.
            DriverError: the GPU has too little memory.
        """
        of = model.architecture
        if pages > (most := _MOST_ELEMENTS // (PAGE * of.kv_heads * of.head_dim)):
            raise InputError(f"{pages} pages of {PAGE} tokens are wanted, and kernels index {most} of this model's")
        self.pages, self.free, self.is_shared = pages, [*range(pages)], is_shared
        self.keys, self.values = _arrays(launches, model, (pages, PAGE, of.kv_heads, of.head_dim))

    @classmethod
    def of_bytes(cls, launches: Launches, model: Model, size_bytes: int) -> Pool:
        """Return a pool for all batches of an engine, of the pages that a number of bytes has room for.

        Raises:
            InputError: it has room for none, or for more than kernels index.
            DriverError: the GPU has too little memory.
        """
        of = model.architecture
        page = 2 * of.layers * PAGE * of.kv_heads * of.head_dim * ITEM_BYTES[model.dtype]
        if type(size_bytes) is not int or size_bytes < page:
            raise InputError(
                f"cache_bytes must be a whole number from {page} on, which is a page of {PAGE} tokens, "
                f"got {size_bytes!r:.40}"
            )
        return cls(launches, model, size_bytes // page, is_shared=True)


class PagedKeys:
    """Keys and values in pages of a pool.

    ``table`` is int32 [batch, most pages], the pages of each sequence in order and -1 behind them. ``slots`` is int64
    [batch, keys], the row of the pool of each key that is read; None for a step of one token of each sequence.
    """

    def __init__(self, pool: Pool, table: Array, slots: Array | None = None) -> None:
        self._pool, self._table, self._slots = pool, table, slots
        self.sizes = {"keys": bucket(table.shape[1] * PAGE), "page_size": PAGE, "paged": True}

    def of_layer(self, number: int) -> dict[str, Array]:
        """See :class:`Keys`."""
        return {"keys": self._pool.keys[number], "values": self._pool.values[number], "table": self._table}

    def read(self, launches: Launches, number: int) -> tuple[Array, Array]:
        """See :class:`Keys`."""
        assert self._slots is not None
        (batch, keys), slots = self._slots.shape, self._slots.view((self._slots.shape[0] * self._slots.shape[1],))

        def copied(pages: Array) -> Array:
            count, _, heads, size = pages.shape
            columns, rows = heads * size, slots.shape[0]
            out = launches.array((rows, columns), pages.dtype)
            sizes = {"rows": rows, "columns": columns, "dtype": pages.dtype}
            launches.launch("embedding", sizes, ids=slots, weight=pages.view((count * PAGE, columns)), out=out)
            return out.view((batch, keys, heads, size))

        return copied(self._pool.keys[number]), copied(self._pool.values[number])


class PagedCache:
    """A cache whose sequences take pages of a pool; see :class:`Cache`."""

    def __init__(self, launches: Launches, pool: Pool, batch: int, room: int) -> None:
        """Make a cache of sequences of up to ``room`` tokens, which have no page yet."""
        self._launches, self._pool, self._most = launches, pool, cdiv(room, PAGE)
        self._table = launches.array((batch, self._most), "int32")
        self.keys = PagedKeys(pool, self._table)
        self._held: list[list[int]] = [[] for _ in range(batch)]

    def fits(self, lengths: Sequence[int]) -> bool:
        """See :class:`Cache`. A pool that all share fits: how many of its pages sequences need is seen as they grow."""
        has_pages = self._pool.is_shared or self._pool.pages >= pages_of(lengths)
        return len(self._held) == len(lengths) and has_pages

    def of(self, first: int, batch: int, count: int) -> PagedKeys:
        """See :class:`Cache`."""
        slots = array("q")
        for pages in self._held[first : first + batch]:
            rows = array("q", chain.from_iterable(range(page * PAGE, (page + 1) * PAGE) for page in pages))
            slots.extend(rows[:count])
        to = self._launches.array((batch, count), "int64")
        to.write(slots)
        return PagedKeys(self._pool, self._table.view((batch, self._most), offset=first * self._most), to)

    def hold(self, counts: Sequence[int]) -> int:
        """See :class:`Cache`."""
        wanted, free = [cdiv(count, PAGE) for count in counts], self._pool.free
        self._give_back(wanted)
        missing = sum(wanted) - sum(map(len, self._held))
        if missing > len(free):
            raise InputError(
                f"the cache has {self._pool.pages} pages of {PAGE} tokens, {len(free)} of them free, and {missing} "
                "more are wanted; load with more cache_bytes, or give fewer or shorter prompts"
            )
        for pages, count in zip(self._held, wanted, strict=True):
            pages.extend(free.pop() for _ in range(count - len(pages)))
        if missing:  # the row of a sequence that has ended may stay: without keys it is not read
            rows = [pages + [-1] * (self._most - len(pages)) for pages in self._held]
            self._table.write(numbers([*chain.from_iterable(rows)], "int32"))
        return min(len(pages) * PAGE - count for pages, count in zip(self._held, counts, strict=True) if count)

    def end(self) -> None:
        """See :class:`Cache`."""
        self._give_back([0] * len(self._held))

    def _give_back(self, counts: Sequence[int]) -> None:
        """Keep this many pages of each sequence."""
        for pages, count in zip(self._held, counts, strict=True):
            if pages[count:]:
                self._pool.free.extend(pages[count:])
                del pages[count:]


def new_cache(
    launches: Launches, model: Model, kind: str, room: int, lengths: Sequence[int], pool: Pool | None
) -> Cache:  # fmt: skip
    """Return a cache of a kind for a batch.

    Args:
        launches: where its arrays come from.
        model: the model.
        kind: one of :data:`KINDS`.
        room: the most tokens of a sequence.
        lengths: those that the sequences grow to.
        pool: whose pages it takes; None for pages of its own, as many as the lengths need.

    Raises:
        InputError: the lengths need more pages than kernels index.
        DriverError: the GPU has too little memory.
    """
    if kind == STATIC:
        return StaticCache(launches, model, len(lengths), room)
    return PagedCache(launches, pool or Pool(launches, model, pages_of(lengths)), len(lengths), room)


def keys_of_whole(launches: Launches, model: Model, batch: int, tokens: int) -> StaticKeys | None:
    """Return the keys of whole sequences, which no later step reads.

    None if a layer's projections are its keys as they are: without a norm of the heads and a rotation.
    """
    of = model.architecture
    if of.rotation is None and not of.heads_normed:
        return None
    return StaticKeys.new(launches, model, batch, tokens)


def pages_of(lengths: Sequence[int]) -> int:
    """Return how many pages sequences of these lengths fill."""
    return sum(cdiv(length, PAGE) for length in lengths)


def _arrays(launches: Launches, model: Model, shape: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
    """Return arrays of a shape for the keys of all layers, and for the values."""
    keys, values = ([launches.array(shape, model.dtype) for _ in range(model.architecture.layers)] for _ in range(2))
    return keys, values
