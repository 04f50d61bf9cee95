"""What all parts of one client share: its runtime, its mutex, its backend, and whether it is still open."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import TypeVar

from lockkit.backend import Capabilities, LockBackend
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Event, Runtime, Work
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

T = TypeVar("T")

RENEWAL_SHARE_MAX = 1 / 3
"""Two renewals may fail before the deadline comes near."""

RENEWAL_SHARE_MIN = 0.3
"""Lower spreads the clients sooner and sends more renewals: these are 5 % more than with a third for all."""


def check_host(runtime: Runtime) -> None:
    """
    Refuse a program in which lockkit's waits do not work.

    A program that has not imported eventlet or trio does not use it, so lockkit does not import it to find out.
    """
    host = instead = ""
    find = sys.modules.get
    if runtime.kind == "blocking":
        hub = getattr(getattr(find("eventlet.hubs"), "_threadlocal", None), "hub", None)
        if getattr(find("eventlet.patcher"), "already_patched", None) or getattr(hub, "running", False):
            host, instead = "eventlet", "threads or gevent"
    elif runtime.kind == "asyncio" and (trio := find("trio")) is not None:
        with suppress(AttributeError, RuntimeError):  # no task of trio, or it is being imported
            trio.lowlevel.current_task()
            if getattr(find("asyncio"), "_get_running_loop", lambda: None)() is None:  # else asyncio runs on trio
                host, instead = "trio", "asyncio, or lockkit.connect() in a thread"
    if host:
        message = f"lockkit cannot connect in a program that runs on {host}, which it does not support: use {instead}"
        raise ConfigurationError(message)


class ClientState:
    """The state of one client."""

    def __init__(self, runtime: Runtime, backend: LockBackend, open_backend: Callable[[], LockBackend]) -> None:
        """Start as open."""
        self.runtime = runtime
        # Guards the leases, their renewals and the pending cleanups. Nothing is awaited, started, logged or called back
        # while it is held.
        self.mutex = runtime.mutex()
        # None in a forked child until its first use, and once the client is closed.
        self.backend: LockBackend | None = backend
        self.url = backend.url
        self.closed = False  # `close()` has been called, or the interpreter exits
        self.close_by = inf  # when it returns at the latest
        self.sleeping: set[Event] = set()  # of those who are in `sleep`
        # When the watch over the leases is due. If that is long past, this process, or its event loop, has stood still.
        self.watch_at = inf
        self.begin_anew: Callable[[], None] = self.forked  # all of the client, in an event loop after a closed one
        self._has_loop = runtime.kind == "asyncio"  # each call comes here, and only such a client belongs to a loop
        self._open_backend = open_backend
        self._capabilities = backend.capabilities
        self.draw_renewal_share()

    def forked(self) -> None:
        """Let go of the parent's backend, and of its mutex: another thread of the parent may have held it."""
        self.mutex = self.runtime.mutex()
        self.backend = None
        self.sleeping = set()
        self.watch_at = inf
        self.draw_renewal_share()

    def draw_renewal_share(self) -> None:
        """
        Choose when the leases that are granted or renewed from now on are renewed.

        One share for all leases of a client until it sends the next renewals, so that they go in one batch again.
        Clients draw different ones: were they renewed in step, because all of them began or came back from an outage at
        the same time, they would stay in step.
        """
        self.renewal_share = self.runtime.random.uniform(RENEWAL_SHARE_MIN, RENEWAL_SHARE_MAX)

    @property
    def capabilities(self) -> Capabilities:
        """What the backend promises; a backend may know more precisely once it has seen its server."""
        backend = self.backend
        if backend is not None:
            self._capabilities = backend.capabilities
        return self._capabilities

    def ready(self) -> LockBackend:
        """Return the backend for a call that may do I/O; opens a new one after a fork."""
        if self._has_loop:
            self.check_loop()
        backend = self.backend
        if backend is None:
            if self.closed:
                raise self.closed_error()
            opened = self._open_backend()
            with self.mutex:
                # Another thread of the child may have been faster. A second backend would be collected with its leases.
                backend = self.backend = opened if self.backend is None else self.backend
        return backend

    def check_loop(self) -> None:
        """Check that the caller runs where the client belongs: also in an event loop that comes after a closed one."""
        try:
            self.runtime.bind()
        except RuntimeError as error:
            if self.runtime.loop_is_closed():
                self.begin_anew()
                self.runtime.bind()
                return
            check_host(self.runtime)
            message = (
                f"this asyncio client of {self.url} cannot be used here: {error}. Use one client per event loop, or "
                "one event loop after the other."
            )
            raise LockError(message, backend=self.url) from error

    async def sleep(self, seconds: Seconds) -> None:
        """Sleep until it is worth looking again: so long at most, and not once the client is closed."""
        event = self.runtime.event()
        self.sleeping.add(event)
        try:
            if not self.closed:  # after the add: close() wakes who is in `sleeping`
                await event.wait(seconds)
        finally:
            self.sleeping.discard(event)

    def wake(self) -> None:
        """End each `sleep` early. From any thread."""
        for event in list(self.sleeping):
            event.set()

    def answer_by(self, seconds: Seconds, at_latest: Instant = inf) -> Instant:
        """Return when a call that may take `seconds` must be back: not later than the end of ``close()``."""
        at = self.runtime.now() + seconds
        # Every release comes here, and min() takes three times as long.
        if self.close_by < at:  # noqa: PLR1730
            at = self.close_by
        return at if at < at_latest else at_latest  # noqa: FURB136

    def closed_error(self) -> LockError:
        """Return the error of every call after ``close()``, or while the interpreter exits."""
        assert self.closed, "only a closed client refuses calls"
        why = "is closed; connect again" if self.close_by < inf else "grants nothing more: the process exits"
        return LockError(f"the client of {self.url} {why}", backend=self.url)

    def unavailable(self, error: LockError, action: str, name: str | None) -> LockError:
        """Say what was tried, on which lock and at which backend; the driver's exception stays the cause."""
        message = f"could not {action} at {self.url}: {error}"
        wrapped = type(error)(message, name=name, backend=self.url)
        wrapped.__cause__ = error.__cause__ or error
        return wrapped

    async def asked(self, answer: Awaitable[T], action: str, name: str | None) -> T:
        """Await an answer of the backend; without one, see `unavailable`."""
        try:
            return await answer
        except BackendUnavailable as error:
            raise self.unavailable(error, action, name) from error.__cause__ or error

    def spawn(self, name: str, work: Work) -> bool:
        """Start what is of use but not needed; False if nothing can be started (no more threads, or no event loop)."""
        try:
            self.runtime.spawn(name, work)
        except RuntimeError as error:
            log.debug("%s could not be started: %s", name, error)
            return False
        return True
