"""The service's status over real HTTP: what it says, to whom, and what it keeps to itself."""

import http.client
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from service_samples import OTHER, get, status, until, want
from tuning_samples import H200, SMALL

from tilekern import __version__
from tilekern.errors import InputError
from tilekern.tuning.serve.access import COOKIE, Access, access_for
from tilekern.tuning.serve.board import Board
from tilekern.tuning.serve.server import MOST_CONNECTIONS, StatusServer, listen
from tilekern.tuning.serve.watched import PREDICTED, WatchedCache

pytestmark = pytest.mark.processes

TOOLKIT = {"key": "tileiras-1-cuda_tile-2", "tileiras": "1", "cuda_tile": "2"}
TOKEN = "correct-horse-battery-staple"
PATHS = ("", "status", "healthz", "nowhere")
EMPTY = {"waiting": 0, "failed": 0, "elsewhere": 0, "unknown": 0}


def board() -> Board:
    return Board(H200, TOOLKIT, PREDICTED, 30.0)


@contextmanager
def serving(shown: Board, access: Access, host: str = "127.0.0.1"):
    server = StatusServer(shown, listen(host, 0), access)
    server.start()
    try:
        yield server.url.replace("0.0.0.0", "127.0.0.1")
    finally:
        server.stop()


@pytest.fixture
def shown():
    return board()


@pytest.fixture
def url(shown):
    with serving(shown, Access(None, is_loopback=True)) as found:
        yield found


@pytest.fixture
def guarded(shown):
    """What other machines reach, with a token."""
    with serving(shown, Access(TOKEN, is_loopback=False), "0.0.0.0") as found:
        yield found


def test_a_cache_whose_name_is_no_text_is_shown(shown, url):
    root = os.fsdecode(b"/caches/\xff \xc3\xbc")
    shown.queue([root], [])
    assert [os.fsencode(cache["root"]) for cache in status(url)["caches"]] == [os.fsencode(root)]


def test_the_status_of_a_service_that_has_just_begun(url):
    known = status(url)
    assert known.pop("uptime_s") >= 0
    assert known.pop("started").endswith("+00:00")
    assert isinstance(known.pop("process"), int)
    assert known == {
        "schema": 1,
        "version": __version__,
        "host": socket.gethostname(),
        "gpu": {**H200.describe(), "here": False},
        "toolkit": TOOLKIT,
        "publishes": "predicted",
        "poll_s": 30.0,
        "state": "starting",
        "error": None,
        "caches": [],
        "queue": [],
        "batch": None,
        "history": [],
        "totals": {"passes": 0, "published": 0, "failed": 0, "tuning_s": 0.0},
    }


def test_the_queue_is_that_of_the_cache_with_its_costs(url, shown, tmp_path):
    want(tmp_path, SMALL)
    want(tmp_path, OTHER, "B200")
    shown.queue([str(tmp_path)], WatchedCache(tmp_path, H200, TOOLKIT["key"], PREDICTED).queue())
    known = status(url)
    assert known["caches"] == [{"root": str(tmp_path), **EMPTY, "waiting": 1, "elsewhere": 1}]
    first, second = known["queue"]
    assert (first["kernel"], first["problem"], first["state"]) == (SMALL[0], dict(SMALL[1]), "waiting")
    assert first["cost_s"] == pytest.approx(first["misses"] * first["lost_us"] * 1e-6, rel=1e-3)
    assert first["basis"] == "roofline"
    assert (second["state"], second["why"]) == ("elsewhere", "not for this GPU: wanted on B200")


def test_progress_is_that_of_the_batch_at_work(url, shown):
    shown.tell("compile", 3, 10)
    assert status(url)["batch"] is None, "nothing is at work"
    shown.put(batch={"cache": "c", "items": [], "stage": "plan", "done": 0, "of": 0})
    shown.tell("compile", 3, 10)
    assert status(url)["batch"] == {"cache": "c", "items": [], "stage": "compile", "done": 3, "of": 10}


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_the_headers(url, path):
    code, headers, _ = get(url + path)
    assert code == (404 if path == "nowhere" else 200)
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", PATHS)
def test_there_is_only_get(url, path, method):
    code, headers, _ = get(url + path, method)
    assert (code, headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200), ("localhost:8417", 200), ("LOCALHOST:1", 200), ("127.0.0.1", 200), ("127.1.2.3:99", 200),
        ("[::1]:8417", 200), ("[::1]", 200),
        ("attacker.example", 421), ("attacker.example:8417", 421), ("localhost.attacker.example", 421), ("", 421),
        ("192.168.1.1:8417", 421), ("127.0.0.1.attacker.example", 421), ("0.0.0.0:8417", 421),
    ],
)  # fmt: skip
def test_on_loopback_only_names_of_this_machine_are_answered(url, host, code):
    """A page whose name was turned to 127.0.0.1 sends its own name."""
    for path in PATHS[:3]:
        assert get(url + path, Host=host)[0] == code


def test_a_host_that_is_missing_or_twice_there_is_refused(url):
    for lines in (b"", b"Host: localhost\r\nHost: attacker.example\r\n", b"Host: attacker.example\r\nHost: a\r\n"):
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))) as raw:
            raw.sendall(b"GET /status HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n")
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.split()[1] in (b"400", b"421"), answer[:200]


@pytest.mark.parametrize("path", ["", "status", "nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Basic {TOKEN}"}, {"Authorization": TOKEN}, {"Authorization": "Bearer \u00e9"},
        {"Cookie": f"{COOKIE}={TOKEN}"}, {"Cookie": f"{COOKIE}="}, {"Cookie": f"{COOKIE}=x"}, {"Cookie": "=;;"},
    ],
    ids=repr,
)  # fmt: skip
def test_without_the_token_nothing_is_said(guarded, path, headers):
    code, answered, body = get(guarded + path, **headers)
    assert (code, answered["www-authenticate"]) == (401, "Bearer")
    assert TOKEN.encode() not in body
    assert b"H200" not in body


def test_with_the_token_everything_is_shown(guarded):
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert status(guarded, Authorization=f"{scheme} {TOKEN}")["gpu"]["name"] == "H200"
    code, _, body = get(guarded, Authorization=f"Bearer {TOKEN}")
    assert code == 200
    assert b"Queue" in body


def test_a_probe_needs_no_token_and_learns_nothing(guarded):
    assert get(f"{guarded}healthz")[::2] == (200, b"ok\n")


def test_the_page_takes_the_token_once_and_hides_it_in_a_cookie(guarded):
    code, headers, body = get(f"{guarded}?token={TOKEN}")
    assert (code, headers["location"], body) == (303, "/", b"")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    named = cookie.partition(";")[0]
    assert get(guarded, Cookie=named)[0] == 200
    assert status(guarded, Cookie=f"other=1; {named}")["gpu"]["name"] == "H200"
    assert get(f"{guarded}?token=wrong-wrong-wrong-wrong")[0] == 401
    assert get(f"{guarded}?token={TOKEN}", "POST")[0] == 405
    for path in ("status", "nowhere"):
        assert get(f"{guarded}{path}?token={TOKEN}")[0] == 401, "a token in an address is for the page alone"


def test_a_cookie_is_good_for_one_run_of_the_service(shown):
    with serving(shown, Access(TOKEN, is_loopback=False)) as one:
        named = get(f"{one}?token={TOKEN}")[1]["set-cookie"].partition(";")[0]
    with serving(shown, Access(TOKEN, is_loopback=False)) as other:
        assert get(f"{other}status", Cookie=named)[0] == 401


def test_a_token_on_loopback_is_asked_for_too(shown):
    with serving(shown, Access(TOKEN, is_loopback=True)) as url:
        assert get(f"{url}status")[0] == 401
        assert get(f"{url}status", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(f"{url}status", Authorization=f"Bearer {TOKEN}", Host="attacker.example")[0] == 421


def test_a_repr_tells_no_key():
    assert "key" not in repr(Access(None, is_loopback=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_token(monkeypatch, host):
    monkeypatch.delenv("TILEKERN_SERVE_TOKEN", raising=False)
    found = access_for(host, None)
    assert (found.token, found.is_loopback) == (None, True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_any_other_host_needs_one(monkeypatch, tmp_path, host):
    monkeypatch.delenv("TILEKERN_SERVE_TOKEN", raising=False)
    with pytest.raises(InputError, match="set TILEKERN_SERVE_TOKEN or give --token-file"):
        access_for(host, None)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert access_for(host, tmp_path / "token").is_token(TOKEN)
    monkeypatch.setenv("TILEKERN_SERVE_TOKEN", TOKEN)
    assert not access_for(host, None).is_loopback


@pytest.mark.parametrize("token", ["", "short", " " * 20, "\u00e9" * 20])
def test_a_token_that_is_too_weak_is_refused(monkeypatch, tmp_path, token):
    monkeypatch.delenv("TILEKERN_SERVE_TOKEN", raising=False)
    (tmp_path / "token").write_text(token)
    with pytest.raises(InputError, match="at least 16 ASCII characters"):
        access_for("0.0.0.0", tmp_path / "token")


def test_slow_and_many_clients_hold_up_neither_each_other_nor_the_loop(url, shown):
    port = int(url.rsplit(":", 1)[1].strip("/"))
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
    for each in idle:
        each.sendall(b"GET /status HT")
    shown.put(history=[{"time": str(n), "problem": {"rows": n}} for n in range(200)])
    stop = threading.Event()
    longest = 0.0

    def loop():
        nonlocal longest
        while not stop.is_set():
            began = time.thread_time()
            shown.tell("compile", 1, 2)
            longest = max(longest, time.thread_time() - began)

    worker = threading.Thread(target=loop)
    worker.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: len(status(url)["history"]), range(64)))
    finally:
        stop.set()
        worker.join()
        for each in idle:
            each.close()
    assert found == [200] * 64
    assert longest < 0.02


def test_connections_are_kept_open_for_the_page(url):
    connection = http.client.HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")), timeout=30)
    for _ in range(3):
        connection.request("GET", "/status")
        assert json.loads(connection.getresponse().read())["schema"] == 1
    connection.close()


def test_those_who_ask_nothing_keep_nobody_out_for_long(url):
    host, port = url.removeprefix("http://").strip("/").split(":")
    with ExitStack() as idle:
        opened = (socket.create_connection((host, int(port))) for _ in range(MOST_CONNECTIONS))
        connections = [idle.enter_context(each) for each in opened]
        connections[0].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        until(lambda: get(f"{url}healthz")[0] == 503)
        until(lambda: get(f"{url}healthz")[0] == 200)
        assert all(each.recv(1) == b"" for each in connections), "and was closed"


def test_a_websocket_is_answered_as_any_request(url, capfd):
    asked = http.client.HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")), timeout=30)
    asked.request("GET", "/healthz", headers={
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    })  # fmt: skip
    assert asked.getresponse().status == 200
    asked.close()
    assert capfd.readouterr().err == ""


def test_it_stops_though_clients_are_there(shown):
    server = StatusServer(shown, listen("127.0.0.1", 0), Access(None, is_loopback=True))
    server.start()
    host, port = server.url.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        assert get(f"http://{host}:{port}/healthz")[0] == 200
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 15
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)))
