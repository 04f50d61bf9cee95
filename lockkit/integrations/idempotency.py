"""
Idempotency keys for Starlette and FastAPI: a request that is repeated with the same ``Idempotency-Key`` runs once.

Status codes as in section 2.7 of the IETF draft "The Idempotency-Key HTTP Header Field"
(draft-ietf-httpapi-idempotency-key-header, J. Jena, S. Dalal): 400 for a missing key where one is required, 409 while
the first request is under way, 422 for a key that is used again with another request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from lockkit import validation
from lockkit.errors import BackendUnavailable, ConfigurationError, KeyReused, LockLost, LockTimeout
from lockkit.integrations.starlette import client_of, refusal, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from datetime import timedelta

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lockkit.aio.once import Attempt
    from lockkit.units import Seconds

__all__ = ["IdempotencyMiddleware"]

log = logging.getLogger("lockkit")

HEADER = "idempotency-key"
MISSING = "the header Idempotency-Key is missing or empty"
REPLAYED = (b"idempotent-replayed", b"true")

NOT_STORED = frozenset({b"date", b"set-cookie"})
"""Headers that belong to one answer; a cookie is also a secret."""

ERROR = 400
"""Responses from this status on say that the work was not done."""


class IdempotencyMiddleware:
    """
    Answers a repeated request with the response of the first one, from the record of `lockkit.aio.Client.once`.

    A request with an ``Idempotency-Key`` runs while its key is held. The middleware stores a response below 400 with
    the key before the client gets it. After any other response, or an exception, it stores nothing, and the next
    request with that key runs. The application does not notice that the client has disconnected, so that the client's
    repeat gets the response. The bodies of such requests and responses are kept in memory. The middleware does not
    store a response of more than 64 KiB (as JSON text): its key is done, and repeats get 409 without ``Retry-After``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        caller: Callable[[Request], str],
        keep: Seconds | timedelta = 86_400,
        methods: Collection[str] = ("POST", "PATCH"),
        required: bool = False,
        retry_after: Seconds | timedelta = 1,
    ) -> None:
        """
        Wrap an application: ``app.add_middleware(IdempotencyMiddleware, caller=…)``.

        Args:
            app: The application.
            caller: Returns whose key it is, such as the ``Authorization`` header: a caller never gets another caller's
                stored response. The application's own authentication does not run for a repeat.
            keep: Seconds for which a response is kept.
            methods: Methods for which the header counts, in upper or lower case.
            required: Refuse a request of these methods without the header with 400.
            retry_after: Seconds that a refused client is asked to wait (the ``Retry-After`` header, in whole seconds).

        Raises:
            ConfigurationError: `methods` is a single str, whose letters are no methods; `caller` is a
                coroutine function; or `keep` or `retry_after` is wrong. At a request: `caller` did not return a str.
        """
        if isinstance(methods, str):
            message = f"methods must be a collection such as ['POST'], not the single str {methods!r}"
            raise ConfigurationError(message)
        if validation.makes_coroutines(caller):
            message = "caller must be a plain function: it is called before the application, without its dependencies"
            raise ConfigurationError(message)
        validation.seconds(keep, "keep", exclusive=True)
        validation.seconds(retry_after, "retry_after")
        self._app = app
        self._caller = caller
        self._keep = keep
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            return await self._app(scope, receive, send)
        given = Request(scope).headers.get(HEADER)
        if given is None and not self._required:
            return await self._app(scope, receive, send)
        # The draft has a quoted string (RFC 8941); many clients send it without quotes.
        key = (given or "").strip().removeprefix('"').removesuffix('"')
        if not key:
            return await _refuse(HTTPException(400, MISSING), send)
        body = await _read(receive)
        if body is None:
            return None  # the client has gone before the end of its request
        try:
            return await self._once(scope, key, body, send)
        except HTTPException as refusal:
            return await _refuse(refusal, send)

    async def _once(self, scope: Scope, key: str, body: bytes, send: Send) -> None:
        """
        Run the request, or send the response that is stored for it.

        Raises:
            HTTPException: It was not run.
        """
        caller: object = self._caller(Request(scope))
        if not isinstance(caller, str):
            # With None, callers would get each other's responses.
            message = f"caller of IdempotencyMiddleware must return a str, not {type(caller).__name__}"
            raise ConfigurationError(message)
        name = "idempotency:" + _digest(caller, key)
        match = _digest(scope["method"], scope["path"], scope["query_string"], body)
        once = client_of(scope).once(name, keep=self._keep, timeout=0, match=match, label="idempotency")
        answer = _Answer(send)
        async with AsyncExitStack() as stack:
            stack.push(answer.left)
            try:
                attempt = await stack.enter_async_context(once)
            except LockTimeout as error:
                raise refusal(409, "a request with this key is being processed", self._retry_after) from error
            except KeyReused as error:
                raise HTTPException(422, "this key was used for another request") from error
            except BackendUnavailable as error:
                raise unavailable(self._retry_after) from error
            if not attempt.first:
                await _send_stored(attempt.result, send)
                return
            answer.attempt = attempt
            # No extensions: they would let the response be sent in other messages than these.
            await self._app({**scope, "extensions": {}}, _replaying(body), answer.take)


async def _refuse(refusal: HTTPException, send: Send) -> None:
    response = JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


class _Answer:
    """The response of a request that runs: kept until it is complete and stored, and then sent."""

    attempt: Attempt

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._body = bytearray()
        self._finished = False

    def left(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Log that the key was lost, if the response does not depend on it any more."""
        if not (self._finished and isinstance(error, LockLost)):
            return False
        log.warning("%s", error)
        return True

    async def take(self, message: Message) -> None:
        """Take a message from the application."""
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish()

    async def _finish(self) -> None:
        """Store the response if the work was done, and send it; if the key was lost, others may have run it too."""
        self._finished = True
        start, body = self._start, bytes(self._body)
        if start["status"] < ERROR:
            try:
                await self.attempt.done(_encoded(start, body))
            except (BackendUnavailable, ConfigurationError) as error:
                # The work is done, and an error would make the client repeat it.
                log.warning("%s", error)
            except LockLost as error:
                log.warning("%s", error)
                await _refuse(HTTPException(500, "the key was lost: the outcome is unknown"), self._send)
                return
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})


def _encoded(start: Message, body: bytes) -> dict[str, Any]:
    """Make JSON of a response: bytes are latin-1 characters."""
    headers = [
        [name.decode("latin-1"), value.decode("latin-1")]
        for name, value in start.get("headers", ())
        if name.lower() not in NOT_STORED
    ]
    return {"status": start["status"], "headers": headers, "body": body.decode("latin-1")}


async def _send_stored(stored: Any, send: Send) -> None:  # noqa: ANN401 - JSON
    """
    Send a response again.

    Raises:
        HTTPException: It was too large to be stored.
    """
    if stored is None:
        raise HTTPException(409, "a request with this key was done, and its response is too large to be repeated")
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in stored["headers"]]
    await send({"type": "http.response.start", "status": stored["status"], "headers": [*headers, REPLAYED]})
    await send({"type": "http.response.body", "body": stored["body"].encode("latin-1")})


async def _read(receive: Receive) -> bytes | None:
    """Read a body; None if the client goes away first."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _replaying(body: bytes) -> Receive:
    """
    Give a body that was read to the application, and nothing after it.

    It does not learn that the client has gone: a streaming response would stop then, and its work would be done, but
    not stored, so that the repeat of the client, which has no answer, would do it again.
    """
    bodies = [body]

    async def replay() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        never: Message = await asyncio.get_running_loop().create_future()
        return never

    return replay


def _digest(*parts: str | bytes) -> str:
    """
    Shorten texts to a name: they may be long, and may be private.

    Each goes in with its length before it, so that no two lists have the same digest. In place: as JSON, a body of
    10 MB held up the event loop for a fifth of a second.
    """
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()
