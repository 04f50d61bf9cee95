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
import sys
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockkit import validation
from lockkit.aio.once import Attempt, Once
from lockkit.errors import BackendUnavailable, ConfigurationError, KeyReused, LockLost, LockTimeout
from lockkit.integrations.starlette import client_of, refusal, unavailable
from lockkit.units import Seconds

__all__ = ["IdempotencyMiddleware"]

log = logging.getLogger("lockkit")

HEADER = "idempotency-key"
MISSING = "the header Idempotency-Key is missing or empty"
NOBODY = "an Idempotency-Key needs a caller, and this request has none"
REPLAYED = (b"idempotent-replayed", b"true")

NOT_STORED = frozenset({b"date", b"set-cookie"})
"""Headers that belong to one answer; a cookie is also a secret."""

DONE = frozenset(range(400)) - {307, 308}
"""Statuses of responses whose work was done. After these two redirects, clients repeat the request elsewhere."""

STORED_BYTES_MAX = 64 * 1024
"""What `lockkit.aio.Client.once` stores."""

LEFT_SECONDS: Seconds = 10.0
"""How long a response that has begun may go on after its client has left, so that it can be stored for a repeat. An
endless one would hold its key for ever."""


class IdempotencyMiddleware:
    """
    Answers a repeated request with the response of the first one, from the record of `lockkit.aio.Client.once`.

    A request with an ``Idempotency-Key`` runs while its key is held. The middleware stores a response below 400, but
    no redirect with 307 or 308, with the key before the client gets it. After any other response, or an exception, it
    stores nothing, and the next request with that key runs. The application does not notice that the client has
    disconnected, so that the client's repeat gets the response.

    What one request costs is bounded: its body by ``max_body``, and its response in memory and at the lock server by
    ``max_response``. A larger response is sent as the application makes it, ``text/event-stream`` from its beginning;
    its key is done without a response, and repeats get 409 without ``Retry-After``. The application then notices when
    the client disconnects; so it does ten seconds after that if a response has begun and does not end. How many keys a
    caller uses is not bounded here: limit the rate of requests for each caller before this middleware.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        caller: Callable[[Request], str | None],
        keep: Seconds | timedelta = 86_400,
        methods: Collection[str] = ("POST", "PATCH"),
        required: bool = False,
        retry_after: Seconds | timedelta = 1,
        max_body: int = 1024 * 1024,
        max_response: int = STORED_BYTES_MAX,
    ) -> None:
        """
        Wrap an application: ``app.add_middleware(IdempotencyMiddleware, caller=…)``.

        It runs before the routes and the dependencies of the application. Middleware that authenticates, or limits
        requests, must be around it: Starlette puts what is added later around what was added before.

        Args:
            app: The application.
            caller: Returns whose key it is, such as the ``Authorization`` header, or the name of the user with host
                and tenant where one user has several: a caller never gets another caller's stored response. The
                application's own authentication does not run for a repeat. With "" or None the request has no caller:
                it goes to the application as without a key, or with `required` is refused with 400.
            keep: Seconds for which a response is kept.
            methods: Methods for which the header counts, in upper or lower case.
            required: Refuse a request of these methods without the header with 400.
            retry_after: Seconds that a refused client is asked to wait (the ``Retry-After`` header, in whole seconds).
            max_body: Bytes of the largest body of a request with a key; above it the response is 413. The middleware
                compares it with that of the first request, so it reads it before the application does.
            max_response: Bytes of the largest body of a response that is stored, at most 64 KiB.

        Raises:
            ConfigurationError: `methods` is a single str, whose letters are no methods; `caller` is a coroutine
                function; or another option is wrong. At a request: `caller` returned neither a str nor None.
        """
        if isinstance(methods, str):
            raise ConfigurationError(f"methods must be a collection such as ['POST'], not the single str {methods!r}")
        if validation.makes_coroutines(caller):
            message = "caller must be a plain function: it is called before the application, without its dependencies"
            raise ConfigurationError(message)
        validation.seconds(keep, "keep", exclusive=True)
        validation.seconds(retry_after, "retry_after")
        _check_size(max_body, "max_body", sys.maxsize)
        _check_size(max_response, "max_response", STORED_BYTES_MAX)
        self._app = app
        self._caller = caller
        self._keep = keep
        self._methods = frozenset(method.upper() for method in methods)
        self._required = required
        self._retry_after = retry_after
        self._max_body = max_body
        self._max_response = max_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            return await self._app(scope, receive, send)
        request = Request(scope)
        try:
            name = self._name_of(request)
            if name is not None:
                body = await _read(request, receive, self._max_body)
                if body is None:
                    return None  # the client has gone before the end of its request
                match = _digest(scope["method"], scope["path"], scope["query_string"], body)
                once = client_of(scope).once(name, keep=self._keep, timeout=0, match=match, label="idempotency")
                return await self._run(once, _Exchange(scope, body, receive, send, self._max_response))
        except HTTPException as refusal:
            return await _refuse(refusal, scope, receive, send)
        return await self._app(scope, receive, send)

    def _name_of(self, request: Request) -> str | None:
        """Return the name of the request's key; None if it has no key, or no caller."""
        given = request.headers.get(HEADER)
        if given is None and not self._required:
            return None
        # The draft has a quoted string (RFC 8941); many clients send it without quotes.
        key = (given or "").strip().removeprefix('"').removesuffix('"')
        if not key:
            raise HTTPException(400, MISSING)
        caller: object = self._caller(request)
        if caller is not None and not isinstance(caller, str):
            message = f"caller of IdempotencyMiddleware must return a str or None, not {type(caller).__name__}"
            raise ConfigurationError(message)
        if not caller and self._required:
            raise HTTPException(400, NOBODY)
        # A key of nobody would be everybody's, with the response.
        return "idempotency:" + _digest(caller, key) if caller else None

    async def _run(self, once: Once, exchange: _Exchange) -> None:
        """Run the request, or send the response that is stored for it."""
        async with AsyncExitStack() as stack:
            stack.push(exchange.left)
            try:
                attempt = await stack.enter_async_context(once)
            except LockTimeout as error:
                raise refusal(409, "a request with this key is being processed", self._retry_after) from error
            except KeyReused as error:
                raise HTTPException(422, "this key was used for another request") from error
            except BackendUnavailable as error:
                raise unavailable(self._retry_after) from error
            if attempt.first:
                exchange.attempt = attempt
                await self._app(exchange.scope, exchange.receive, exchange.take)
                await exchange.end()
            else:
                await exchange.repeat(attempt.result)


def _check_size(given: object, option: str, most: int) -> None:
    if not isinstance(given, int) or not 0 <= given <= most:
        raise ConfigurationError(f"{option} must be a number of bytes from 0 to {most}, not {validation.shown(given)}")


async def _refuse(refusal: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)(scope, receive, send)


class _Exchange:
    """
    A request whose body is read, and the response of the application: kept until it is stored, and then sent.

    If it is too large for that, or not to be kept, it is streamed: its key is done before the client gets the first
    part, and the others are passed on. The application does not learn at once that the client has gone: a streaming
    response would stop then, and its work would be done, but not stored, so that the repeat of the client, which has no
    answer, could not get it.
    """

    attempt: Attempt

    def __init__(self, scope: Scope, body: bytes, receive: Receive, send: Send, max_response: int) -> None:
        # No extensions: they would let the response be sent in other messages than these.
        self.scope: Scope = {**scope, "extensions": {}}
        self._request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._receive = receive
        self._send = send
        self._max = max_response
        self._start: Message = {}
        self._body = bytearray()
        self._finished = False
        self._refused = False
        self._begun = asyncio.Event()
        self._streams = asyncio.Event()

    async def receive(self) -> Message:
        """Give the application a message of the client."""
        if self._request:
            return self._request.pop()
        message = await self._receive()
        await self._begun.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._streams.wait(), LEFT_SECONDS)
        return message

    async def take(self, message: Message) -> None:
        """Take a message from the application."""
        if message["type"] == "http.response.start":
            self._start = message
            self._begun.set()
            if message["status"] not in DONE or _is_event_stream(message):
                await self._stream()
        elif self._streams.is_set():
            if not self._refused:
                await self._send(message)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish()
            elif len(self._body) > self._max:
                await self._stream()

    async def end(self) -> None:
        """Note that the work was done, if the application has not completed its response: its client has gone."""
        if self._begun.is_set() and not self._finished:
            await self._done(None)

    def left(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        """Log that the key was lost, if the response does not depend on it any more."""
        if not (self._finished and isinstance(error, LockLost)):
            return False
        log.warning("%s", error)
        return True

    async def repeat(self, stored: Any) -> None:  # noqa: ANN401 - JSON
        """Send a response again."""
        if stored is None:
            raise HTTPException(409, "a request with this key was done, and its response was not stored")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in stored["headers"]]
        await self._send({"type": "http.response.start", "status": stored["status"], "headers": [*headers, REPLAYED]})
        await self._send({"type": "http.response.body", "body": stored["body"].encode("latin-1")})

    async def _finish(self) -> None:
        """Store the response, as JSON (bytes are latin-1 characters), and send it."""
        body, headers = bytes(self._body), self._start.get("headers", ())
        texts = [[name.decode("latin-1"), value.decode("latin-1")]
                 for name, value in headers if name.lower() not in NOT_STORED]  # fmt: skip
        stored = {"status": self._start["status"], "headers": texts, "body": body.decode("latin-1")}
        await self._done(stored if len(body) <= self._max else None)
        if not self._refused:
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": body})

    async def _stream(self) -> None:
        """Send what there is of the response, and then the rest as it comes."""
        await self._done(None)
        self._streams.set()
        if not self._refused:
            await self._send(self._start)
            if self._body:
                await self._send({"type": "http.response.body", "body": bytes(self._body), "more_body": True})
                self._body.clear()

    async def _done(self, result: dict[str, Any] | None) -> None:
        """Store what the work has done, if it was done; refuse it if the key was lost: others may have run it too."""
        self._finished = True
        if self._start["status"] not in DONE:
            return
        try:
            await self.attempt.done(result)
        except (BackendUnavailable, ConfigurationError) as error:
            # The work is done, and an error would make the client repeat it.
            log.warning("%s", error)
        except LockLost as error:
            log.warning("%s", error)
            self._refused = True
            lost = HTTPException(500, "the key was lost: the outcome is unknown")
            await _refuse(lost, self.scope, self._receive, self._send)


def _is_event_stream(start: Message) -> bool:
    """Tell whether a response has no end, and its client reads it as it comes."""
    types = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    return any(value.partition(b";")[0].strip().lower() == b"text/event-stream" for value in types)


async def _read(request: Request, receive: Receive, most: int) -> bytes | None:
    """Read a body; None if the client goes away first."""
    body = bytearray()
    length = request.headers.get("content-length", "")
    is_long = length.isdecimal() and int(length) > most
    while not is_long:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        is_long = len(body) > most
        if not is_long and not message.get("more_body", False):
            return bytes(body)
    raise HTTPException(413, f"the body of a request with an Idempotency-Key may have {most} bytes")


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
