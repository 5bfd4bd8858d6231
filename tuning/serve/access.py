"""Access to the status: for this machine alone, or for those with the token; and what browsers may do with the page."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilekern.errors import InputError
from tilekern.tuning.serve.page import POLICY, SIGN_IN

VARIABLE = "TILEKERN_SERVE_TOKEN"
SHORTEST_TOKEN = 16
COOKIE = "tilekern_service"
_OPEN_PATH = "/healthz"
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """The rules of who may see the status.

    ``token`` is what a client must know, None on loopback where none was given; ``is_loopback`` says whether requests
    can only come from this machine. A cookie stands for the token in one run of the service and is not the token.
    """

    token: str | None
    is_loopback: bool
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def is_token(self, given: str) -> bool:
        """Whether a text is the token; takes the same time wherever it differs."""
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())

    @property
    def cookie(self) -> str:
        """The content of the page's cookie."""
        return hmac.new(self.key, b"page", hashlib.sha256).hexdigest()

    def is_cookie(self, given: str) -> bool:
        """Whether a text is the cookie's."""
        return hmac.compare_digest(given.encode(), self.cookie.encode())


def access_for(host: str, token_file: Path | None) -> Access:
    """Access to what is served on a host: for those with the token of a file or of ``TILEKERN_SERVE_TOKEN``, if any.

    Raises:
        InputError: the host can be reached from elsewhere and there is no token, the token is too short, or its file
            cannot be read.
    """
    is_loopback = _is_loopback(host)
    token: str | None = os.environ.get(VARIABLE, "").strip() or None
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"the token file {token_file} cannot be read: {error}") from None
    if token is None and not is_loopback:
        raise InputError(
            f"--listen {host} can be reached from other machines: set {VARIABLE} or give --token-file, "
            "or listen on 127.0.0.1"
        )
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii()):
        raise InputError(f"the token must have at least {SHORTEST_TOKEN} ASCII characters")
    return Access(token, is_loopback)


def _is_loopback(host: str) -> bool:
    """Whether every address of a host is this machine's own; an empty host is every address there is."""
    if not host:
        return False
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise InputError(f"--listen: {host!r} is not a known host: {error.strerror or error}") from None
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


class Guard:
    """Stands before the app: lets through who may, and puts the headers on every answer.

    Args:
        app: what is guarded.
        access: who may.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, with_headers)

    def _refusal(self, scope: MutableMapping[str, Any]) -> Response | None:
        """The answer to who may not; None for who may."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET\n", 405, {"Allow": "GET, HEAD"})
        # A page of another site whose name was turned to 127.0.0.1 still says its own name here (DNS rebinding).
        if self._access.is_loopback and not _is_own_name(headers.get("host", "")):
            return PlainTextResponse("this host is served as localhost alone\n", 421)
        if self._access.token is None or scope["path"] == _OPEN_PATH or self._knows_token(headers):
            return None
        return self._sign_in(scope)

    def _knows_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer" and self._access.is_token(given.strip())
        return is_bearer or self._access.is_cookie(_cookie(headers.get("cookie", "")))

    def _sign_in(self, scope: MutableMapping[str, Any]) -> Response:
        """The page takes the token in its address, once; anything else is told that one is missing."""
        challenge = {"WWW-Authenticate": "Bearer"}
        if scope["path"] != "/":
            return PlainTextResponse("this needs the service's token\n", 401, challenge)
        if not self._access.is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
            return HTMLResponse(SIGN_IN, 401, challenge)
        # The token leaves the address at once, for a cookie that scripts and other sites cannot use.
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, self._access.cookie, httponly=True, samesite="strict", path="/")
        return answer


def _is_own_name(host: str) -> bool:
    """Whether a Host header names this machine from within."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
