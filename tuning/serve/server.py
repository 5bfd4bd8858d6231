"""The service's HTTP server: the status as JSON and as a page, in a thread of its own, for reading alone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilekern.errors import InputError
from tilekern.tuning.serve.access import Access, Guard
from tilekern.tuning.serve.board import Board
from tilekern.tuning.serve.page import PAGE

# How long open connections are waited for at the end.
_GRACE_S = 2
_STARTS_WITHIN_S = 30.0
# More connections than this at once are answered with 503; one that brings no request is closed after a while, so that
# those who have nothing to ask keep nobody out for long.
MOST_CONNECTIONS, _ASKS_WITHIN_S = 256, 5.0


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, before anything else is begun.

    Raises:
        InputError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(found[4][:2], family=found[0])
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}; give another --listen") from None


class _Impatient(H11Protocol):
    """A connection that is closed where it has brought no whole request in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._closing = self.loop.call_later(_ASKS_WITHIN_S, self._close_unasked)

    def _close_unasked(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing.cancel()
        super().connection_lost(exc)


class StatusServer:
    """Serves a board.

    Args:
        board: what to show.
        listening: the socket to serve on; closed at the end.
        access: who may see it.
    """

    def __init__(self, board: Board, listening: socket.socket, access: Access) -> None:
        async def status(_: Request) -> Response:
            # In ASCII: the name of a folder may hold bytes that are no text.
            return Response(json.dumps(board.document(), allow_nan=False), media_type="application/json")

        async def page(_: Request) -> Response:
            return HTMLResponse(PAGE)

        async def health(_: Request) -> Response:
            return PlainTextResponse("ok\n")

        routes = [Route("/", page), Route("/status", status), Route("/healthz", health)]
        # Addresses with a token in them must reach no log.
        config = uvicorn.Config(
            Guard(Starlette(routes=routes), access), access_log=False, log_level="error", log_config=None,
            server_header=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S,
            limit_concurrency=MOST_CONNECTIONS, http=_Impatient, ws="none",
        )  # fmt: skip
        self._server, self._socket = uvicorn.Server(config), listening
        self._thread = threading.Thread(target=self._serve, name="tilekern status", daemon=True)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def start(self) -> None:
        """Serve from now on."""
        self._url = self.url
        self._thread.start()

    def stop(self) -> None:
        """Serve no more; returns when open answers are sent or their time is over."""
        self._server.should_exit = True
        self._thread.join(_GRACE_S + _STARTS_WITHIN_S)
        self._socket.close()
