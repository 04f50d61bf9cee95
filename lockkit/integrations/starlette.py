"""
Locks, a background leader and idempotency keys for Starlette; those for FastAPI build on them. Needs Starlette.

`lifespan` opens one client per worker process, `locked` holds a lock while an endpoint runs, `lead` runs a coroutine in
only one of the worker processes. `lockkit.integrations.idempotency` answers repeated requests.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from math import ceil
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from lockkit import aio, validation
from lockkit.configuration.name_template import NamePattern
from lockkit.configuration.registry import warn_if_narrow
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, LockTimeout
from lockkit.units import Seconds

__all__ = [
    "client_of",
    "hold",
    "lead",
    "lifespan",
    "locked",
]

T = TypeVar("T")
Work = Callable[[aio.Term], Awaitable[object]]

log = logging.getLogger("lockkit")

STATE = "lockkit"
"""Key of the client in the lifespan's state, so ``request.state.lockkit``."""

CLIENT_CLOSED_REQUEST = 499
"""What nginx logs for a client that went away. No client sees it."""


def lifespan(
    url: str | None = None,
    *,
    profile: str | None = None,
    leading: Mapping[str, Work] | None = None,
    **options: Any,
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """
    Make a lifespan that opens a client when a worker process starts, and closes it when the process ends.

    In a lifespan of your own, yield its state: ``async with lifespan()(app) as state: yield {**state, …}``.

    Args:
        url: As for `lockkit.connect`; no I/O happens at the start. Without a URL or profile, and unless the application
            has ``debug=True``, lockkit warns if workers on other machines would not be locked out.
        profile: As there.
        leading: Election names, and for each a coroutine function that runs in only one of the processes: see `lead`.
        **options: As for `lockkit.connect`.

    Raises:
        ConfigurationError: At the start of the application: the URL, the profile, an option or a work is wrong.
    """

    @asynccontextmanager
    async def run(app: object) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(aio.connect(url, profile=profile, **options))
            if url is None and profile is None and not getattr(app, "debug", False):
                warn_if_narrow(client, "the application locks")
            for name, work in (leading or {}).items():
                await stack.enter_async_context(lead(client.election(name), work))
            yield {STATE: client}

    return run


@asynccontextmanager
async def lead(election: aio.Election, work: Work, *, pause: Seconds | timedelta = 1.0) -> AsyncIterator[None]:
    """
    Run a coroutine while this process leads, as long as the ``async with`` block lasts.

    The coroutine is cancelled when the leader must stop (at the deadline minus the grace of the election, or on a loss)
    and when the block ends. When it returns, the process keeps leading, so that no other process runs it too. When it
    raises an exception, lockkit logs it, and another process may lead.

    Args:
        election: The election of the processes, only one of which runs the coroutine.
        work: Coroutine function, called with the `lockkit.aio.Term` of each term.
        pause: Seconds before this process campaigns again after a loss or an error.

    Raises:
        ConfigurationError: `work` is no coroutine function, or `pause` is wrong.
    """
    given: object = work
    if not callable(given) or not validation.makes_coroutines(given):
        message = (
            "work must be a coroutine function (`async def` without `yield`), called with the term, not "
            f"{validation.shown(given)}"
        )
        raise ConfigurationError(message, name=election.name)
    campaign = _lead(election, work, validation.seconds(pause, "pause"))
    task = asyncio.create_task(campaign, name=f"lockkit-lead-{election.name}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _lead(election: aio.Election, work: Work, pause: Seconds) -> None:
    task = asyncio.current_task()
    assert task is not None, "made by lead()"
    while True:
        try:
            async with election.campaign(cancel_on_stop=True) as term:
                await _work(election, work, term, task)
        except Exception as error:  # whatever it was, this process must campaign again
            known = isinstance(error, LockError)
            log.warning("election %r: this process does not lead: %s", election.name, error, exc_info=not known)
        if task.cancelling():
            return
        await asyncio.sleep(pause)  # noqa: TID251 - the application's event loop runs in real time


async def _work(election: aio.Election, work: Work, term: aio.Term, task: asyncio.Task[Any]) -> None:
    try:
        await work(term)
    except (Exception, asyncio.CancelledError) as error:
        # If this task is not cancelled, something that the work awaited was: an error as any other.
        if isinstance(error, asyncio.CancelledError) and task.cancelling():
            raise
        if isinstance(error, LockLost) and term.lost:  # by term.check(): that is how work ends
            raise
        log.exception("election %r: the leader's work failed", election.name)
        return
    if not task.cancelling():  # otherwise the work has swallowed the cancellation
        await asyncio.get_running_loop().create_future()  # for ever: no other process is to do the work too


def client_of(scope: Scope) -> aio.Client:
    """
    Return the client that `lifespan` opened.

    Raises:
        ConfigurationError: The application has no such lifespan.
    """
    client = scope.get("state", {}).get(STATE)
    if client is None:
        raise ConfigurationError(
            "the application has no lockkit client: give it lifespan=lifespan(), or yield its state from your own "
            "lifespan (a test client must run the lifespan too: use it as a context manager)"
        )
    assert isinstance(client, aio.Client)
    return client


def name_fields(template: str) -> NamePattern:
    """Check a lock name with ``{parameter}`` fields, which the parameters of a request fill."""
    given: object = template
    if not isinstance(given, str):
        raise ConfigurationError(f"lock name must be a str such as 'seat:{{seat}}', not {validation.shown(template)}")
    try:
        fields = NamePattern(template, foreign=True)
    except ValueError as error:
        raise ConfigurationError(f"lock name {template!r} {error}", name=template) from error
    if not fields.plain:
        message = f"lock name {template!r}: a field must be the plain name of a parameter, such as {{seat}}"
        raise ConfigurationError(message, name=template)
    literal = fields.fill(dict.fromkeys(fields.names, ""))
    if literal or not fields.names:  # at least one value of the fields must make a valid name
        validation.lock_name(literal)
    return fields


def filled(fields: NamePattern, values: Mapping[str, object]) -> str:
    """Fill in the fields, percent-encoded, so that no value can imitate another one or the text between."""
    return checked_name(fields.fill({field: str(values[field]) for field in fields.names}))


def checked_name(name: str) -> str:
    """Check a lock name that a request has made: 422 if no lock can have it, which is the client's fault."""
    try:
        return validation.lock_name(name)
    except ConfigurationError as error:
        if not isinstance(name, str):
            raise
        log.debug("%s", error)
        text = "a parameter is empty, too long, or has characters that a lock name cannot have"
        raise HTTPException(422, text) from error


def check_options(timeout: Any, retry_after: object, options: Mapping[str, Any]) -> None:  # noqa: ANN401 - also what is wrong
    """Check the options of a lock when an endpoint is declared, not at its first request."""
    validation.seconds(retry_after, "retry_after")
    # No client is open yet. One in memory checks the same, and sends nothing before a lock is acquired.
    aio.connect("memory://", scope="process").lock("checked", timeout=timeout, **options)


def refusal(status: int, detail: str, retry_after: Seconds | timedelta) -> HTTPException:
    """Return the answer to a request that may come again after `retry_after` seconds."""
    seconds = validation.seconds(retry_after, "retry_after")
    return HTTPException(status, detail, {"Retry-After": str(ceil(seconds))})


def unavailable(retry_after: Seconds | timedelta) -> HTTPException:
    """Return the answer for an outage of the backend."""
    return refusal(503, "the lock service is unavailable", retry_after)


@asynccontextmanager
async def hold(
    request: Request,
    name: str,
    *,
    timeout: Seconds | timedelta | None = 0,
    retry_after: Seconds | timedelta = 1,
    **options: Any,
) -> AsyncIterator[aio.Lease]:
    """
    Hold a lock while a request is handled.

    If the client disconnects while its request waits for the lock, the request leaves the queue; to notice that,
    lockkit reads the body first. A later disconnect has no effect: the block runs to its end, and the lock is released.

    Args:
        request: Of the endpoint.
        name: Of the lock.
        timeout: Seconds to wait; 0 tries once, None waits as long as the client does.
        retry_after: Seconds that a refused client is asked to wait (the ``Retry-After`` header, in whole seconds).
        **options: As for `lockkit.aio.Client.lock`; ``cancel_on_lost`` is true unless given.

    Raises:
        HTTPException: 409: the lock is busy. 503: the backend is unavailable, and the block did not run. 422: no lock
            can have this name, such as one made of a parameter that is too long. 500: the lease was lost before the
            block ended.
        ConfigurationError: The name is no str, or an option is wrong.
    """
    lock = client_of(request.scope).lock(checked_name(name), timeout=timeout, **{"cancel_on_lost": True, **options})
    async with AsyncExitStack() as stack:
        try:
            enter = functools.partial(stack.enter_async_context, lock)
            lease = await (enter() if timeout == 0 else _while_connected(request, enter))
        except LockTimeout as error:
            raise refusal(409, "busy", retry_after) from error
        except BackendUnavailable as error:
            raise unavailable(retry_after) from error
        try:
            async with stack.pop_all():
                yield lease
        except LockLost as error:
            log.warning("%s", error)
            # Not 503: proxies and clients repeat such a request by themselves, and this one may have done its work.
            raise HTTPException(500, "the lock was lost: the outcome is unknown") from error


async def _while_connected(request: Request, wait: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Wait in this task, and cancel that when the client goes away."""
    gone = HTTPException(CLIENT_CLOSED_REQUEST, "the client has gone")
    try:
        # It comes before the disconnect, on the same way, and is kept for the endpoint. Not in the watching task: that
        # would lose a part of it when it is cancelled.
        await request.body()
    except ClientDisconnect:
        raise gone from None
    except RuntimeError as error:  # the endpoint's form has been read from it
        log.debug("%s", error)
    task = asyncio.current_task()
    assert task is not None, "a request is handled in a task"
    cancelling, cancelled = task.cancelling(), False

    async def watch() -> None:
        nonlocal cancelled
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancelled = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="lockkit-disconnect")
    try:
        return await wait()
    except asyncio.CancelledError:
        if cancelled and task.uncancel() <= cancelling:
            raise gone from None
        raise
    finally:
        watcher.cancel()


def locked(
    name: str,
    *,
    timeout: Seconds | timedelta | None = 0,
    retry_after: Seconds | timedelta = 1,
    **options: Any,
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """
    Decorate an endpoint of Starlette: it runs under a lock, with the lease in ``request.state.lease``.

    Args:
        name: Of the lock; fields such as ``{seat}`` are path or query parameters of the request, as the route converts
            them: ``/seats/{seat:int}`` makes one seat of ``/seats/7`` and ``/seats/07``.
        timeout: See `hold`.
        retry_after: See `hold`.
        **options: See `hold`.

    Raises:
        ConfigurationError: The name is no template, an option is wrong, or the function is no coroutine function. At a
            request: the endpoint got no `Request`, because it is that of a WebSocket.
        TypeError: There is no such option.
    """
    fields = name_fields(name)
    check_options(timeout, retry_after, options)

    def decorate(endpoint: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        if not inspect.iscoroutinefunction(endpoint):
            raise ConfigurationError(f"locked({name!r}) cannot decorate {endpoint!r}: make it `async def`", name=name)

        @functools.wraps(endpoint)
        async def run(*arguments: Any, **keywords: Any) -> T:
            request = next((value for value in (*arguments, *keywords.values()) if isinstance(value, Request)), None)
            if request is None:
                message = (
                    f"locked({name!r}) holds a lock for an HTTP request, and {endpoint.__qualname__}() got none: in a "
                    "WebSocket, use `async with websocket.state.lockkit.lock(...)`"
                )
                raise ConfigurationError(message, name=name)
            values = {**request.query_params, **request.path_params}
            if missing := set(fields.names) - values.keys():
                raise HTTPException(422, f"missing: {', '.join(sorted(missing))}")
            named = filled(fields, values)
            settings = {"label": name, **options}
            async with hold(request, named, timeout=timeout, retry_after=retry_after, **settings) as lease:
                request.state.lease = lease
                return await endpoint(*arguments, **keywords)

        return run

    return decorate
