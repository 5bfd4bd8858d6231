"""A process that writes records, for tests of several writers and of killed ones."""

import sys
from pathlib import Path

from cache_samples import make

from tilekern.cache import Store


def main(root: str, name: str, rounds: str) -> None:
    store = Store(Path(root))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number in range(int(rounds)):
        content = f"{name} {number}".encode() * 2000
        store.write(*make(content, b"shared" * 1000, candidates=number, created_by=name))


if __name__ == "__main__":
    main(*sys.argv[1:])
