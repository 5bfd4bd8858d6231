"""Problems and configs: immutable, hashable, ordered mappings of names to plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Value = int | str | bool | None


class _Point(Mapping[str, Value]):
    """An immutable, hashable, ordered mapping; base of :class:`Problem` and :class:`Config`."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value] | None = None, **more: Value) -> None:
        self._values: dict[str, Value] = {**(values or {}), **more}
        self._hash = hash(frozenset(self._values.items()))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == other._values

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key})"

    def __reduce__(self) -> tuple[type, tuple[dict[str, Value]]]:
        return type(self), (self._values,)

    @property
    def key(self) -> str:
        """One line of text that names the point: ``rows=8192,columns=4096,dtype=bfloat16``."""
        return ",".join(f"{name}={value}" for name, value in self._values.items())

    def but(self, **changes: Value) -> Any:
        """The same point with some values changed."""
        return type(self)({**self._values, **changes})


class Problem(_Point):
    """The values that a spec is specialised for, in the order of the spec's dimensions."""

    __slots__ = ()


class Config(_Point):
    """One point of a search space: occupancy, tile shape, schedule and the like."""

    __slots__ = ()
