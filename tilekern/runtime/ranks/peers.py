"""Lets the ranks of a job exchange bytes step by step, once all of them have come.

The ranks meet at the store of the process group, which can name the missing ones. No value is read from the store,
since any process that reaches its port can write there. Messages go through a collective, as bytes: torch's exchange of
objects would unpickle, and so execute, what a peer sends.

The collective must not need a device that the job has not chosen yet. It runs on the CPU if the process group has a
backend for that, else on the device that ``init_process_group`` was given, else over a gloo group that is made for it
and destroyed afterwards. NCCL on the current device would be wrong if the job calls ``set_device`` later: all ranks of
a host would share the first GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tilekern.errors import RanksDiffer

if TYPE_CHECKING:
    import torch

# The share of the timeout that ranks other than 0 wait: rank 0 often holds the store, which they need to name the
# missing ones.
_OTHERS = 0.8
_LONGEST_TEXT = 300
_WELL, _ILL = b"+", b"-"


class Peers:
    """The ranks of the default process group; a context manager. All must make the same calls in the same order.

    Args:
        number: the number of the exchange, the same on all ranks.

    Attributes:
        rank: the rank of this process.
        ranks: the number of ranks.
        sent_bytes: bytes that this rank sent.
        received_bytes: bytes that it received.

    Raises:
        RanksDiffer: a rank did not come within the process group's timeout, or they cannot reach one another.
    """

    def __init__(self, number: int) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sent_bytes = self.received_bytes = 0
        self._store = dist.PrefixStore(f"tilekern/{number}", _get_default_store())
        self._made: Any = None

    def __enter__(self) -> Peers:
        self._meet()
        self._group, self._device = self._collective()
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        if self._made is not None:
            dist.destroy_process_group(self._made)

    def gather(self, what: str, said: bytes | Exception, largest: int) -> list[bytes]:
        """Collect a message, or an error, from each rank; ``what`` says what a rank with an error cannot do.

        Raises:
            RanksDiffer: on all ranks, if one of them sent an error or more than ``largest`` bytes.
        """
        own = _ILL + one_line(str(said)).encode() if isinstance(said, Exception) else _WELL + said
        sizes = self._sizes(len(own))
        _check(enumerate(sizes), max(largest, 4 * _LONGEST_TEXT) + 1, what)
        padded = self._gathered(own.ljust(max(sizes), b"\0"))
        found = [data[:size] for data, size in zip(padded, sizes, strict=True)]
        found[self.rank] = own  # not what came back of it
        self.sent_bytes += len(own)
        self.received_bytes += sum(map(len, found)) - len(own)
        for rank, data in enumerate(found):
            if not data.startswith(_WELL):
                raise RanksDiffer(f"rank {rank} cannot {what}: {one_line(data[1:].decode(errors='replace'))}")
        return [data[1:] for data in found]

    def broadcast(self, said: bytes | None, source: int, largest: int) -> bytes:
        """Send the message of the rank ``source`` to all; that of other ranks is ignored.

        Raises:
            RanksDiffer: on all ranks, if it has more than ``largest`` bytes.
        """
        import torch
        import torch.distributed as dist

        own = said if self.rank == source and said is not None else b""
        size = self._sizes(len(own))[source]
        _check([(source, size)], largest, "say what it has")
        if size == 0:
            return b""
        buffer = bytearray(own or size)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        there = tensor.to(self._device)
        dist.broadcast(there, source, group=self._group)
        tensor.copy_(there)
        if self.rank == source:
            self.sent_bytes += size
        else:
            self.received_bytes += size
        return bytes(buffer)

    def _sizes(self, own: int) -> list[int]:
        return [int.from_bytes(data, "big") for data in self._gathered(own.to_bytes(8, "big"))]

    def _gathered(self, own: bytes) -> list[bytes]:
        """Gather bytes of all ranks; each gives the same number, at least one."""
        import torch
        import torch.distributed as dist

        buffer = bytearray(own * self.ranks)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(self.ranks, -1)
        there = list(tensor.to(self._device, copy=True))
        dist.all_gather(there, there[self.rank].clone(), group=self._group)
        tensor.copy_(torch.stack(there))
        return [bytes(buffer[at : at + len(own)]) for at in range(0, len(buffer), len(own))]

    def _meet(self) -> None:
        """Wait until all ranks have come.

        Raises:
            RanksDiffer: one did not come in time; the message names it.
        """
        timeout = self._store.timeout * (1 if self.rank == 0 else _OTHERS)
        self._store.set(f"here/{self.rank}", b"")
        try:
            if self._store.add("come", 1) == self.ranks:
                self._store.set("all", b"")
            self._store.wait(["all"], timeout)
        except RuntimeError as error:
            late = [rank for rank in range(self.ranks) if not self._is_here(rank)]
            if late:
                raise RanksDiffer(
                    f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late[:8]))}{' and others' * (len(late) > 8)} did "
                    f"not come to agree on kernels within {timeout.total_seconds():g} s; every rank must call "
                    f"tilekern.apply, and be alive ({one_line(str(error)):.80})"
                ) from None

    def _is_here(self, rank: int) -> bool:
        try:
            return bool(self._store.check([f"here/{rank}"]))
        except RuntimeError:
            return False

    def _collective(self) -> tuple[Any, torch.device]:
        """Return the group and the device of its tensors."""
        import torch
        import torch.distributed as dist

        cpu = torch.device("cpu")
        if "cpu:" in dist.get_backend_config():
            return dist.group.WORLD, cpu
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None:
            return dist.group.WORLD, bound
        try:
            self._made = dist.new_group(backend="gloo", timeout=self._store.timeout)
        except (RuntimeError, ValueError) as error:
            raise RanksDiffer(
                "the ranks cannot reach one another over gloo; set GLOO_SOCKET_IFNAME to the network interface between "
                f"them, or give init_process_group a device_id ({one_line(str(error)):.120})"
            ) from None
        return self._made, cpu


def _check(sizes: Iterable[tuple[int, int]], largest: int, what: str) -> None:
    for rank, size in sizes:
        if size > largest:
            raise RanksDiffer(f"rank {rank} cannot {what}: {size} bytes are more than {largest}")


def one_line(text: str) -> str:
    """Return any text as one printable line."""
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    return " ".join(words)[:_LONGEST_TEXT]
