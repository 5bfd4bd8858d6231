"""Packs and servers of files, for the tests of what ships packs."""

import contextlib
import hashlib
import http.server
import threading

from cache_samples import B200, put

from tilekern.cache import PackLayer, Store, write_pack

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


def has_both(path):
    """Return whether a cache or pack has the two records of :func:`make_pack`."""
    if path.is_dir():
        return sum(1 for entry in Store(path).entries() if entry.record) == 2
    return PackLayer(path).targets() == ["sm_100-b200-148", "sm_90-h200-132"]


def carried(cli, pack, url, cache):
    """Push a pack twice and pull it twice, which moves it once; return what the first push says."""
    pushed = cli.json("push", pack, url)
    assert (pushed["pushed"], pushed["sha256"], pushed["records"]) == (True, sha256(pack), 2)
    assert cli.json("push", pack, url)["pushed"] is False
    pulled = cli.json("pull", url, "--cache-dir", cache)
    assert (pulled["downloaded"], pulled["installed"], pulled["sha256"]) == (True, 2, sha256(pack))
    assert has_both(cache)
    assert cli.json("pull", url, "--cache-dir", cache)["downloaded"] is False
    return pushed


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
