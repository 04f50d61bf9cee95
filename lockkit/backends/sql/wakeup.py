"""
How PostgreSQL notifies waiters that a lock was released: one listening connection per client, for any number of them.

A release of a row that is marked as wanted sends NOTIFY on the table's channel with the lock's name. Every client that
listens there is notified; those that wait for the name retry, and the first gets the lock.

The order that keeps a notification from being missed: LISTEN is committed before a waiter marks the row or finds it
marked; and when the connection ends, all waiters retry, which listens anew.

Behind a pooler that lends out sessions LISTEN does not work, because it belongs to a session: waiters poll then.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, cast

from lockkit.backend import Request, seconds_left
from lockkit.backends.sql.connection import Statement, cut
from lockkit.backends.sql.database import Database
from lockkit.runtime import Event, Runtime

if TYPE_CHECKING:
    from lockkit.backends.sql.postgresql import PsycopgConnection

log = logging.getLogger("lockkit")

LINGER = 60.0
"""How long the connection stays open when no request waits, seconds. Shorter listens anew more often, longer uses up a
connection of the server's."""

CLOSE_SECONDS = 1.0
"""How long ending the listener may take, seconds. All it has to do is notice."""


class WakeupListener:
    """The listening connection of one client."""

    def __init__(self, runtime: Runtime, database: Database, channel: str) -> None:
        self.connection: PsycopgConnection | None = None  # while it listens; None otherwise
        self.cannot_listen = False  # a pooler is in between: LISTEN does not work
        self._runtime = runtime
        self._database = database
        self._listen = Statement(f'LISTEN "{channel}"')
        self._mutex = runtime.mutex()
        self._waiting: dict[str, set[Event]] = {}
        self._opening: Event | None = None
        self._ended: Event | None = None

    def expect(self, request: Request, name: str) -> None:
        """Wake this request when its lock is released, from now on."""
        with self._mutex:
            self._waiting.setdefault(name, set()).add(request.wake)

    def forget(self, request: Request, name: str) -> None:
        """Stop waking it."""
        with self._mutex:
            events = self._waiting.get(name, set())
            events.discard(request.wake)
            if not events:
                self._waiting.pop(name, None)

    async def open(self, answer_by: float) -> None:
        """Listen, unless that is done; one caller does it, the others wait for that one."""
        with self._mutex:
            if self.connection is not None or self.cannot_listen:
                return
            others = self._opening
            opening = self._opening = others or self._runtime.event()
        if others is not None:
            await opening.wait(seconds_left(answer_by, self._runtime.now()))
            return
        try:
            await self._open(answer_by)
        finally:
            with self._mutex:
                self._opening = None
            opening.set()

    async def _open(self, answer_by: float) -> None:
        connection = cast("PsycopgConnection", await self._database.connect(answer_by))
        try:
            if connection.pooled:
                self.cannot_listen = True
                log.info("%s is behind a pooler that lends out sessions: waiters poll", self._database.url)
                connection.terminate()
                return
            try:
                await connection.run(self._listen, (), seconds_left(answer_by, self._runtime.now()))
            except self._database.driver_errors as error:
                raise self._database.translate(error) from error
            ended = self._runtime.event()
            with self._mutex:
                self.connection, self._ended = connection, ended
            self._runtime.spawn("lockkit-sql-wake", partial(self._pass_on, connection, ended))
        except BaseException:
            # Also Ctrl-C between any two lines: no request may rely on a connection that nobody reads.
            with self._mutex:
                self._forget_connection(connection)
            connection.terminate()
            raise

    async def _pass_on(self, connection: PsycopgConnection, ended: Event) -> None:
        """Pass on notifications until the connection ends, or no request has waited for a while. In the background."""
        reason: object = "closed"
        try:
            while await self._worth_listening(connection):
                for name in connection.notifications():
                    with self._mutex:
                        events = list(self._waiting.get(name.decode("utf-8", "replace"), ()))  # others NOTIFY anything
                    for event in events:
                        event.set()
        except self._database.driver_errors as error:
            reason = error
        finally:
            with self._mutex:
                self._forget_connection(connection)
                # Their notifications may have come while nothing listened.
                events = [event for waiting in self._waiting.values() for event in waiting]
                connection.terminate()
            ended.set()
            for event in events:
                event.set()
        log.debug("no longer listening at %s: %s", self._database.url, reason)

    async def _worth_listening(self, connection: PsycopgConnection) -> bool:
        """Wait until there is something to read; False if no request waits any more, or `close` was called."""
        while not await self._runtime.readable(connection.fd, LINGER):
            with self._mutex:
                if not self._waiting:
                    # Under the mutex: the next request finds no connection, and listens anew.
                    self._forget_connection(connection)
                    return False
        return self.connection is connection

    def _forget_connection(self, connection: PsycopgConnection) -> None:
        if self.connection is connection:
            self.connection = None

    async def close(self) -> None:
        """Stop listening."""
        with self._mutex:
            connection, self.connection = self.connection, None
            ended = self._ended
            if connection is not None:
                # Not closed here: another thread may be reading. The end of the stream wakes it, and it closes.
                cut(connection.fd)
        if connection is not None and ended is not None:
            await ended.wait(CLOSE_SECONDS)
