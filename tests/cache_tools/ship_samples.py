"""Packs, servers of files, and the command line in one call, for the tests of what ships packs."""

import contextlib
import hashlib
import http.server
import json
import threading

from cache_samples import B200, put

from tilekern.cache import PackLayer, Store, write_pack
from tilekern.cache_tools.__main__ import main

URL_OF_NOTHING = "http://127.0.0.1:1/nothing.pack"


def make_pack(folder, *contents, name="kernels.pack", **changes):
    """A pack of two records, one of them for a B200."""
    root = folder / f"cache of {name}"
    put(root, *(contents or (b"aligned" * 300, b"generic" * 300)), **changes)
    put(root, *(contents or (b"aligned" * 200,)), target=B200, **changes)
    store = Store(root)
    whole = [(entry.record, {d: store.read_blob(d) for d in entry.record.digests}) for entry in store.entries()]
    write_pack(folder / name, whole)
    return folder / name


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def records(root):
    return sorted(str(entry.path.relative_to(root)) for entry in Store(root).entries() if entry.record)


def has_both(path):
    """Whether a cache or pack has the two records of :func:`make_pack`."""
    if path.is_dir():
        return len(records(path)) == 2
    return PackLayer(path).targets() == ["sm_100-b200-148", "sm_90-h200-132"]


class Commands:
    """The command line, with what it printed."""

    def __init__(self, capsys):
        self._capsys = capsys

    def __call__(self, *arguments):
        code = main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    def json(self, *arguments):
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    def refused(self, *arguments, says=()):
        code, out, err = self(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("tilekern: ")
        assert err.count("\n") == 1
        for words in [says] if isinstance(says, str) else says:
            assert words in err, err


@contextlib.contextmanager
def served(handler):
    """A server on this machine; its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
