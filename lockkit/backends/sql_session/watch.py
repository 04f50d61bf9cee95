"""
Notices at once that the server has closed a connection that is a lock.

Without it the holder learns of an ended session (``pg_terminate_backend``, ``KILL``, a server that stops) by its next
renewal, a third of its ttl later. A server that hangs, or is cut off, closes nothing: for that there is the deadline.

One epoll(7) instance for each client holds the sockets of its sessions and is asked for the end of the connection only
(``EPOLLRDHUP``), so answers wake no thread. A socket stays there while its session is kept for the next lock: it saves
two system calls for each lock. The end of a kept session concerns no holder, and is found when the session is used
again (`lockkit.backends.sql_session.pool`). Under asyncio the event loop watches the instance, and no transport is
disturbed; a blocking client has one thread, which runs while something is held. Systems without epoll go without, and
so do programs on gevent, which removes it because it would block all greenlets.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockkit.backends.sql_session.session import Session
from lockkit.runtime import Runtime

if TYPE_CHECKING:
    import asyncio


_select: Any = select  # epoll is there on Linux only, and not with gevent

log = logging.getLogger("lockkit")

LINGER = 2.0
"""Seconds that the thread, or the event loop's reader, stays when nothing is held any more. Shorter starts it more
often; longer keeps a dropped client."""


class DisconnectWatcher:
    """Watches connections for their end. Its methods may be called from any thread of a blocking client."""

    def __init__(self, runtime: Runtime, tell: Callable[[Session, str], None]) -> None:
        """Watch nothing yet."""
        self._runtime = runtime
        self._tell = tell
        self._mutex = runtime.mutex()
        self._watched: dict[int, tuple[Session, str]] = {}
        self._registered: dict[int, Session] = {}
        self._running = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._epoll: Any = None

    def add(self, session: Session, owner: str) -> None:
        """Watch the connection of a session, which is the lock of a lease, until `forget`."""
        if not hasattr(_select, "epoll"):
            return
        try:
            fd = session.connection.fileno()
            with self._mutex:
                if self._closed:
                    return
                if self._epoll is None:
                    self._epoll = _select.epoll()
                if self._registered.get(fd) is not session:
                    if fd in self._registered:  # a driver closed that socket by itself, and its number is used again
                        self._unregister(fd)
                    self._epoll.register(fd, _select.EPOLLRDHUP)
                    self._registered[fd] = session
                    session.watched = fd
                self._watched[fd] = (session, owner)
                start, self._running = not self._running, True
        except OSError as error:
            log.debug("the end of a connection will be noticed by the next renewal only: %s", error)
            return
        if start:
            self._start()

    def forget(self, session: Session) -> None:
        """Stop watching: the session is no lock any more, and is kept."""
        if session.watched >= 0:
            with self._mutex:
                self._forget(session.watched, session)

    def remove(self, session: Session) -> None:
        """Stop watching for good. Before the connection is closed: its number may be another's then."""
        fd = session.watched
        if fd < 0:
            return
        session.watched = -1
        with self._mutex:
            self._forget(fd, session)
            if self._registered.get(fd) is session:
                self._unregister(fd)

    def _forget(self, fd: int, session: Session) -> None:
        found = self._watched.get(fd)
        if found is None or found[0] is not session:
            return
        del self._watched[fd]
        if not self._watched and self._loop is not None and self._idle is None and not self._loop.is_closed():
            self._idle = self._loop.call_later(LINGER, self._stop_reading)

    def _unregister(self, fd: int) -> None:
        del self._registered[fd]
        with suppress(OSError):  # the driver has closed it by itself
            self._epoll.unregister(fd)

    def _stop_reading(self) -> None:
        """Have the event loop drop its reference, so that a client that was not closed can be garbage-collected."""
        self._idle = None
        if self._loop is not None and not self._watched:
            self._loop.remove_reader(self._epoll.fileno())
            self._loop = None
            self._running = False

    def close(self) -> None:
        """Watch nothing any more. The client is being closed."""
        with self._mutex:
            self._closed = True
            self._watched.clear()
            for fd in list(self._registered):
                self._unregister(fd)
            if self._idle is not None:
                self._idle.cancel()
            self._stop_reading()
            if not self._running:
                self._close_epoll()

    def _close_epoll(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

    def _start(self) -> None:
        try:
            if self._runtime.kind == "asyncio":
                self._read_in_loop()
            else:
                self._runtime.spawn("lockkit-sql-hang-ups", self._run)
        except RuntimeError as error:  # no more threads, or the event loop has ended
            self._running = False
            log.warning("ended connections will be noticed by the next renewal only: %s", error)

    def _read_in_loop(self) -> None:
        import asyncio  # noqa: PLC0415 - a blocking client does without

        loop = asyncio.get_running_loop()
        loop.add_reader(self._epoll.fileno(), self._look, 0.0)
        self._loop = loop

    def _look(self, seconds: float) -> None:
        for fd, _ in self._epoll.poll(seconds):
            self._perhaps_ended(fd)

    async def _run(self) -> None:
        try:
            while True:
                self._look(LINGER)
                with self._mutex:
                    if not self._watched:
                        self._running = False
                        if self._closed:
                            self._close_epoll()
                        return
        except BaseException:
            # The next grant starts it anew; until then renewals notice.
            self._running = False
            log.exception("watching for ended connections failed")
            raise

    def _perhaps_ended(self, fd: int) -> None:
        with self._mutex:
            session = self._registered.get(fd)
            if session is None:
                with suppress(OSError):
                    self._epoll.unregister(fd)
                return
            # The event may be of the former user of this number.
            poll = select.poll()
            poll.register(fd, _select.POLLRDHUP)
            if not poll.poll(0):
                return
            # Once: else it would be reported without end. Where it becomes a lock all the same, `add` registers it.
            session.watched = -1
            self._unregister(fd)
            held = self._watched.get(fd)
            if held is None or held[0] is not session:
                return
            self._forget(fd, session)
        session, owner = held
        try:
            self._tell(session, owner)
        except Exception:
            log.exception("telling that the connection of a lock has ended failed")
