"""What every request passes: its token, its size, the headers of every answer."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshplan.cli.web.problems import MEDIA_TYPE, problem
from meshplan.cli.web.settings import Settings

# Paths that monitors ask without a token.
OPEN_PATHS = frozenset({"/healthz", "/livez"})
# What is read of a request that is refused anyway, so that its sender reads the answer.
MOST_REFUSED_BYTES, MOST_REFUSED_S = 256 * 1024**2, 10.0
# No script and no style but our own files, no frame, no guessing of types.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # a form of ours says so by its Origin; nobody else learns an address
    "cross-origin-resource-policy": "same-origin",
}


class TooLargeError(Exception):
    """The body is longer than the limit."""


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: what it guards.
        settings: token and limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on with a counted body and with :data:`HEADERS`."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._refusal(scope["path"], headers)
        if refused is not None:
            if headers.get("expect", "").lower() != "100-continue":  # who asks first sends nothing yet
                await _read_away(receive)
            await _answer(send, refused, schemes=_schemes(scope["path"]))
            return
        length, more = 0, True

        async def counted() -> Message:
            nonlocal length, more
            message = await receive()
            more = bool(message.get("more_body"))
            length += len(message.get("body", b""))
            if length > self.settings.most_body_bytes:
                raise TooLargeError
            return message

        try:
            await self.app(scope, counted, _with_headers(send))
        except TooLargeError:
            if more:
                await _read_away(receive)
            await _answer(send, self._too_large())

    def _refusal(self, path: str, headers: Headers) -> dict[str, Any] | None:
        token = self.settings.token
        given = _given_token(headers.get("authorization", ""))
        if token and path not in OPEN_PATHS and not hmac.compare_digest(given, token.encode()):
            return problem(401, "A token is needed", "send it as 'Authorization: Bearer TOKEN'")
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared[:19]) > self.settings.most_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> dict[str, Any]:
        return problem(413, "The request is too large", f"at most {self.settings.most_body_bytes:,} bytes are read")


async def _read_away(receive: Receive) -> None:
    """Read what a refused request still sends, within limits: a connection that is closed before is reset, answer too.

    RFC 9112, 9.6, asks for it: the client learns of the refusal only where what it sends is read.
    """
    length, more = 0, True
    try:
        async with asyncio.timeout(MOST_REFUSED_S):
            while more and length <= MOST_REFUSED_BYTES:
                message = await receive()
                length += len(message.get("body", b""))
                more = bool(message.get("more_body")) and message["type"] == "http.request"
    except TimeoutError:
        return


def _given_token(authorization: str) -> bytes:
    """The token of a request: as a bearer's, or as the password with which a browser answers for a person."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _schemes(path: str) -> str:
    """How a token may be sent: browsers ask a person for it on pages, not behind the API."""
    return (
        "Bearer" if path.startswith("/api/") else 'Basic realm="meshplan: the token is the password", charset="UTF-8"'
    )


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(HEADERS)
        await send(message)

    return sending


async def _answer(send: Send, document: dict[str, Any], *, schemes: str = "Bearer") -> None:
    body = json.dumps(document).encode()
    named = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), **HEADERS}
    if document["status"] == HTTPStatus.UNAUTHORIZED:
        named["www-authenticate"] = schemes
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
    await send({"type": "http.response.start", "status": document["status"], "headers": headers})
    await send({"type": "http.response.body", "body": body})
