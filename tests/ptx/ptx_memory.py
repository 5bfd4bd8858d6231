"""The memory of simulated blocks: tensors as global memory, and shared memory that knows who touched it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ptx_parser import SHARED_BASE, PtxError

_LINE = 16
_WORD = 4
# Nobody has touched a word or an element.
_NOBODY = -1
# What a word of shared memory has that neither nobody nor a copy of a number has filled.
_STORED, _MBARRIER = -2, -3
# The rank of a block in an address of a cluster's shared memory, of which 0 is the block's own.
_RANK_SHIFT = 24


class _Region:
    """The memory around some tensors, in whole lines of 16 bytes: views of it, and which bytes belong to an element."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start // _LINE * _LINE, -(-end // _LINE) * _LINE
        size = self.end - self.start
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.start))
        self.inside = np.zeros(size, np.uint8)
        # The bytes of an owner: those of the smallest element.
        self.unit = 8
        self.owners = np.empty(0, np.int32)
        self._tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Let the elements of a tensor be touched."""
        self._tensors.append(tensor)
        self._mark(tensor, self.inside)
        self.unit = min(self.unit, tensor.element_size())
        self.owners = np.full(len(self.bytes) // self.unit, _NOBODY, np.int32)

    @functools.cached_property
    def inside_each(self) -> list[Any]:
        """Return which bytes belong to an element of each tensor."""
        masks = [np.zeros(len(self.bytes), np.uint8) for _ in self._tensors]
        for tensor, mask in zip(self._tensors, masks, strict=True):
            self._mark(tensor, mask)
        return masks

    def _mark(self, tensor: torch.Tensor, mask: Any) -> None:
        item = tensor.element_size()
        strides = (*(stride * item for stride in tensor.stride()), 1)
        first = mask[tensor.data_ptr() - self.start :]
        np.lib.stride_tricks.as_strided(first, (*tensor.shape, item), strides)[...] = 0xFF


class GlobalMemory:
    """The memory of the tensors that a kernel is given; no access may fall outside of their elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._regions: list[_Region] = []
        there = sorted((t for t in tensors if t.numel()), key=lambda tensor: tensor.data_ptr())
        last: list[torch.Tensor] = []
        for tensor in [*there, None]:
            if last and (tensor is None or tensor.data_ptr() // _LINE * _LINE >= max(map(_end, last))):
                region = _Region(last[0].data_ptr(), max(map(_end, last)))
                for each in last:
                    region.add(each)
                self._regions.append(region)
                last = []
            last.append(tensor)
        self._starts = np.array([region.start for region in self._regions], np.int64)

    def load(self, addresses: Any, dtype: Any, count: int, blocks: Any, text: str) -> Any:
        """The ``count`` numbers at each address, [addresses, count]; ``blocks`` says whose threads read them."""
        values = np.empty((len(addresses), count), dtype)
        for region, chosen in self._chosen(addresses, text):
            index = _index(region, addresses[chosen], values.itemsize, count, text)
            owners = region.owners[_units(region, index, values.itemsize)]
            if ((owners != _NOBODY) & (owners != _column(blocks[chosen]))).any():
                raise PtxError(f"an element that another block stores is loaded: {text}")
            values[chosen] = region.bytes.view(dtype)[index]
        return values

    def store(self, addresses: Any, values: Any, blocks: Any, text: str) -> None:
        """Store a row of values at each address."""
        for region, chosen in self._chosen(addresses, text):
            index = _index(region, addresses[chosen], values.itemsize, values.shape[1], text)
            units = _units(region, index, values.itemsize)
            owners = region.owners[units]
            mine = np.broadcast_to(_column(blocks[chosen]), owners.shape)
            if ((owners != _NOBODY) & (owners != mine)).any():
                raise PtxError(f"an element that another block has stored is stored again: {text}")
            region.owners[units] = mine
            data = region.bytes.view(values.dtype)
            data[index] = values[chosen]
            if (data[index] != values[chosen]).any() or (region.owners[units] != mine).any():
                raise PtxError(f"two threads store different values in one element: {text}")

    def copied(self, address: int, size: int, text: str) -> Any:
        """The bytes that a bulk copy reads, which must be of one tensor and which no thread may store."""
        _check_lines(address, size, text)
        ((region, _),) = self._chosen(np.array([address]), text)
        start = address - region.start
        part = slice(start, start + size)
        if start + size > len(region.bytes) or not any(inside[part].all() for inside in region.inside_each):
            raise PtxError(f"{size} bytes at {address:#x} are not elements of one tensor: {text}")
        if (region.owners[start // region.unit : (start + size) // region.unit] != _NOBODY).any():
            raise PtxError(f"an element that a block stores is copied: {text}")
        return region.bytes[part]

    def _chosen(self, addresses: Any, text: str) -> list[tuple[_Region, Any]]:
        """The regions that are accessed, and by which of the addresses."""
        which = np.searchsorted(self._starts, addresses, "right") - 1
        if not len(which):
            return []
        if (which == which[0]).all():
            chosen = [(int(which[0]), slice(None))]
        else:
            chosen = [(int(n), which == n) for n in np.unique(which)]
        if chosen[0][0] < 0:
            raise PtxError(f"address {int(addresses.min()):#x} is outside of all tensors: {text}")
        return [(self._regions[n], those) for n, those in chosen]


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _column(x: Any) -> Any:
    return x[:, None]


def _aligned(addresses: Any, size: int, text: str) -> None:
    off = addresses % size != 0
    if off.any():
        raise PtxError(f"address {int(addresses[off][0]):#x} is not aligned to {size} bytes: {text}")


def _check_lines(address: int, size: int, text: str) -> None:
    if address % _LINE or size % _LINE:
        raise PtxError(f"{size} bytes at {address:#x} are not whole lines of {_LINE} bytes: {text}")


def _index(region: _Region, addresses: Any, item: int, count: int, text: str) -> Any:
    """The places of the numbers at some addresses, which must be aligned and inside."""
    _aligned(addresses, item * count, text)
    index = (addresses - region.start)[:, None] // item + np.arange(count)
    beyond = (index[:, -1] + 1) * item > len(region.bytes)
    if not beyond.any():
        inside = region.inside.view(f"u{item}")
        beyond = (inside[index] != np.iinfo(inside.dtype).max).any(axis=1)
    if beyond.any():
        raise PtxError(f"address {int(addresses[beyond][0]):#x} is outside of all tensors' elements: {text}")
    return index


def _units(region: _Region, index: Any, item: int) -> Any:
    """The places of the owners of some numbers, [addresses, owners]."""
    if item <= region.unit:
        return index * item // region.unit
    each = item // region.unit
    return (index[:, :, None] * each + np.arange(each)).reshape(len(index), -1)


def _words(places: Any, size: int) -> Any:
    """The words of so many bytes at each place."""
    return (places[:, None] + np.arange(0, max(size, 1), _WORD)) // _WORD


class _Touched:
    """Who wrote or read each word since a barrier: a thread's group, or several of them."""

    def __init__(self, words: int, several: int) -> None:
        self.group, self._several = np.full(words, _NOBODY, np.int32), several

    def by_others(self, words: Any, groups: Any) -> Any:
        """Return whether another group has touched a word."""
        there = self.group[words]
        return (there != _NOBODY) & (there != groups)

    def add(self, words: Any, groups: Any, several: Any) -> None:
        """Note that groups touch words, with the mark of several for each of them."""
        others = self.by_others(words, groups)
        self.group[words] = groups
        # Two groups may touch one word in one instruction.
        others |= self.group[words] != groups
        self.group[words[others]] = several[others]


class Who(NamedTuple):
    """Threads that access shared memory: their blocks, their warps in these, and their numbers in the cluster."""

    blocks: Any
    warps: Any
    threads: Any

    def at(self, n: int) -> Who:
        """One of them."""
        return Who(*(numbers[n : n + 1] for numbers in self))


class SharedMemory:
    """The shared memory of a cluster's blocks.

    Two accesses of a word, of which one writes, must have a barrier of their block between them if their threads are of
    two warps, and one of the cluster if they are of two blocks. Each access counts as before the barrier at which its
    thread arrives next, so those between an arrival at the cluster's barrier and the wait for it may go unseen.

    Words that a bulk copy fills must not have been touched since a barrier, by the thread that starts it either, nor
    stored by any thread ever: that would take a fence.proxy.async. From its start on only threads touch them that have
    seen its end.
    """

    def __init__(self, size: int, cluster: int, warps: int) -> None:
        self._limit, self._size, self._cluster = size, -(-size // _LINE) * _LINE, cluster
        self._bytes = np.zeros(cluster * self._size, np.uint8)
        self._written = np.zeros(cluster * self._size, np.uint8)
        words = cluster * self._size // _WORD
        # Groups of the first two are warps, the last number of a block for several of its warps; of the others blocks.
        self._groups = warps + 1
        self._by_warps = _Touched(words, 0), _Touched(words, 0)
        self._by_blocks = _Touched(words, 0), _Touched(words, 0)
        self._barriers = 0
        self._ended = np.zeros(cluster, bool)
        # Of each word: the number of the copy that fills it, or what else has.
        self._filled = np.full(words, _NOBODY, np.int32)
        self._copies: list[Callable[[Any], Any]] = []

    def address_in(self, address: Any, rank: Any) -> Any:
        """The address that another block's memory has in the cluster; of a block that is not there, one of nothing.

        LLVM may make it for threads that access nothing: the instruction is speculatable there.
        """
        rank = np.minimum(rank, np.uint32(self._cluster))
        return (address & np.uint32((1 << _RANK_SHIFT) - 1)) | ((rank + np.uint32(1)) << np.uint32(_RANK_SHIFT))

    def load(self, addresses: Any, dtype: Any, count: int, who: Who, text: str) -> Any:
        """The ``count`` numbers at each address, which ``who`` read."""
        index = self._touch(addresses, np.dtype(dtype).itemsize, count, who, False, text)
        written = self._written.view(f"u{np.dtype(dtype).itemsize}")
        if (written[index] != np.iinfo(written.dtype).max).any():
            raise PtxError(f"shared memory that nobody has written is read: {text}")
        return self._bytes.view(dtype)[index]

    def store(self, addresses: Any, values: Any, who: Who, text: str) -> None:
        """Store a row of values at each address."""
        index = self._touch(addresses, values.itemsize, values.shape[1], who, True, text)
        written = self._written.view(f"u{values.itemsize}")
        written[index] = np.iinfo(written.dtype).max
        data = self._bytes.view(values.dtype)
        data[index] = values
        if (data[index] != values).any():
            raise PtxError(f"two threads store different values in one element: {text}")

    def take_for_barriers(self, addresses: Any, size: int, who: Who, text: str) -> Any:
        """Take the words of mbarriers, which no thread may load or store; return their places."""
        _aligned(addresses, size, text)
        places = self.places(addresses, size, who, text)
        words = _words(places, size)
        if (self._filled[words] != _NOBODY).any() or len(np.unique(words)) < words.size:
            raise PtxError(f"an mbarrier is initialised twice, or where something else is: {text}")
        self._filled[words] = _MBARRIER
        return places

    def begin_copy(self, address: Any, size: int, who: Who, seen_by: Callable[[Any], Any], text: str) -> int:
        """Let a copy fill bytes of a block; ``seen_by`` tells of threads whether they have seen its end."""
        _check_lines(int(address[0]), size, text)
        (place,) = self.places(address, size, who, text).tolist()
        block = int(who.blocks[0])
        if place // self._size != block:
            raise PtxError(f"a copy fills the shared memory of another block: {text}")
        words = slice(place // _WORD, (place + size) // _WORD)
        filled = self._filled[words]
        if (filled < _NOBODY).any():
            raise PtxError(f"a copy fills an mbarrier, or what a thread has stored without a fence.proxy.async: {text}")
        self._check_seen(filled, np.repeat(who.threads, len(filled)), text)
        touched = [one.by_others(words, _NOBODY) for one in self._by_warps]
        touched += [one.by_others(words, block) for one in self._by_blocks]
        if np.any(touched):
            raise PtxError(f"a race for shared memory: no barrier is between an access and a copy: {text}")
        self._filled[words] = len(self._copies)
        self._copies.append(seen_by)
        return place

    def end_copy(self, place: int, values: Any) -> None:
        """Let the bytes of a copy come."""
        self._bytes[place : place + len(values)] = values
        self._written[place : place + len(values)] = 0xFF

    def block_barrier(self, block: int) -> None:
        """Order what the threads of a block did among themselves."""
        for touched in self._by_warps:
            touched.group[touched.group // self._groups == block] = _NOBODY

    def cluster_barrier(self, is_ordering: bool) -> None:
        """Order what all threads did, unless their arrival was relaxed."""
        self._barriers += 1
        if is_ordering:
            for touched in (*self._by_warps, *self._by_blocks):
                touched.group.fill(_NOBODY)

    def end(self, block: int, text: str) -> None:
        """Note that a block's threads have all ended, and its memory with them."""
        self._ended[block] = True
        for touched in self._by_blocks:
            groups = touched.group.reshape(self._cluster, -1)[block]
            if ((groups != _NOBODY) & (groups != block)).any():
                raise PtxError(f"a block ends while another may still access its shared memory: {text}")

    def places(self, addresses: Any, size: int, who: Who, text: str) -> Any:
        """Where bytes at some addresses are, once they are found to be inside."""
        rank = addresses >> _RANK_SHIFT
        target = np.where(rank == 0, who.blocks, rank - 1)
        offset = (addresses & ((1 << _RANK_SHIFT) - 1)) - SHARED_BASE
        if ((offset < 0) | (offset + size > self._limit) | (target < 0) | (target >= self._cluster)).any():
            raise PtxError(f"an address is outside of shared memory: {text}")
        remote = target != who.blocks
        if remote.any():
            if self._barriers == 0:
                raise PtxError(f"another block's shared memory is accessed, which may not have begun: {text}")
            if self._ended[target[remote]].any():
                raise PtxError(f"the shared memory of a block that has ended is accessed: {text}")
        return target * self._size + offset

    def _touch(self, addresses: Any, item: int, count: int, who: Who, is_store: bool, text: str) -> Any:
        """The places of the numbers at some addresses, once that access is found to be right."""
        _aligned(addresses, item * count, text)
        place = self.places(addresses, item * count, who, text)
        words = _words(place, item * count)
        blocks, warps, threads = (np.repeat(numbers, words.shape[1]) for numbers in who)
        words = words.reshape(-1)
        self._check_filled(words, threads, is_store, text)
        self._check(words, blocks, warps, is_store, text)
        return (place // item)[:, None] + np.arange(count)

    def _check_filled(self, words: Any, threads: Any, is_store: bool, text: str) -> None:
        """Hold an access to the copies and mbarriers in its words."""
        filled = self._filled[words]
        if (filled == _MBARRIER).any():
            raise PtxError(f"an mbarrier is loaded or stored: {text}")
        self._check_seen(filled, threads, text)
        if is_store:
            self._filled[words] = _STORED

    def _check_seen(self, filled: Any, threads: Any, text: str) -> None:
        """Raise unless threads have seen the ends of the copies that fill their words."""
        if not self._copies:
            return
        for n in np.unique(filled[filled >= 0]):
            if not self._copies[n](threads[filled == n]).all():
                raise PtxError(f"a thread has not seen the end of a copy into what it accesses: {text}")

    def _check(self, words: Any, blocks: Any, warps: Any, is_store: bool, text: str) -> None:
        """Hold an access to those since the last barriers, and note it."""
        groups = blocks * self._groups + warps
        several = blocks * self._groups + self._groups - 1
        pairs = [(self._by_warps, groups, several), (self._by_blocks, blocks, np.full_like(blocks, self._cluster))]
        for (writers, readers), mine, many in pairs:
            raced = writers.by_others(words, mine)
            if is_store:
                raced |= readers.by_others(words, mine)
            touched = writers if is_store else readers
            touched.add(words, mine, many)
            if is_store:
                raced |= touched.group[words] != mine
            if raced.any():
                raise PtxError(f"a race for shared memory: no barrier is between accesses of two warps: {text}")
