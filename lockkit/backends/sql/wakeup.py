"""
Hearing from PostgreSQL that a lock was released: one listening connection per client, whatever the number of waiters.

A release of a row that is marked as wanted sends NOTIFY on the table's channel with the lock's name.
Every client that listens there is told; those that wait for the name look again, and the first gets the lock.

The order that keeps a wake-up from being missed: LISTEN is committed before a waiter marks the row or finds it marked;
and when the connection ends, all waiters look again, which listens anew.

Behind a pooler that lends out sessions nobody would be told (LISTEN belongs to a session): then waiters poll.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from lockkit.backend import seconds_left
from lockkit.backends.sql.statement import Statement

if TYPE_CHECKING:
    from lockkit.backend import Request
    from lockkit.backends.sql.database import Database
    from lockkit.backends.sql.postgresql import PqLink
    from lockkit.runtime import Event, Runtime

__all__ = ["Ears"]

log = logging.getLogger("lockkit")

LINGER = 60.0
"""Seconds that the connection stays when nobody waits. Shorter listens anew more often, longer keeps a connection of
the server's."""

CLOSE_SECONDS = 1.0
"""What ending the listener may take, seconds. It has nothing to do but to notice."""


class Ears:
    """
    The listening connection of one client.

    Attributes:
        link: It, while it listens; None otherwise.
        deaf: Nobody can listen here: a pooler is in between.
    """

    def __init__(self, runtime: Runtime, database: Database, channel: str) -> None:
        """Listen to nothing yet."""
        self.link: PqLink | None = None
        self.deaf = False
        self._runtime = runtime
        self._database = database
        self._listen = Statement(f'LISTEN "{channel}"')
        self._mutex = runtime.mutex()
        self._waiting: dict[str, Event] = {}
        self._opening: Event | None = None
        self._ended: Event | None = None

    def expect(self, request: Request) -> None:
        """Wake this request from now on."""
        self._waiting[request.name] = request.wake

    def forget(self, request: Request) -> None:
        """Wake it no more."""
        if self._waiting.get(request.name) is request.wake:
            del self._waiting[request.name]

    async def open(self, answer_by: float) -> None:
        """
        Listen, if that has not been done; at most one caller does it, the others wait for it.

        Args:
            answer_by: When the caller must be back, client monotonic time. Nobody may listen then.

        Raises:
            LockError: There is no connection to be had.
        """
        with self._mutex:
            if self.link is not None or self.deaf:
                return
            opening = self._opening
            mine = opening is None
            if opening is None:
                opening = self._opening = self._runtime.event()
        if not mine:
            now = self._runtime.now()
            await opening.wait(seconds_left(answer_by, now))
            return
        try:
            await self._open(answer_by)
        finally:
            with self._mutex:
                self._opening = None
            opening.set()

    async def _open(self, answer_by: float) -> None:
        link = cast("PqLink", await self._database.connect(answer_by))
        try:
            if link.pooled:
                self.deaf = True
                log.info("%s is behind a pooler that lends out sessions: waiters look now and then", self._database.url)
                link.terminate()
                return
            try:
                await link.run(self._listen, (), seconds_left(answer_by, self._runtime.now()))
            except self._database.driver_errors as error:
                raise self._database.translate(error) from error
            ended = self._runtime.event()

            async def hear() -> None:
                await self._hear(link, ended)

            with self._mutex:
                self.link, self._ended = link, ended
            self._runtime.spawn("lockkit-sql-wake", hear)
        except BaseException:
            # Also Ctrl-C between any two lines: nobody may believe that somebody listens.
            with self._mutex:
                self._forget_link(link)
            link.terminate()
            raise

    async def _hear(self, link: PqLink, ended: Event) -> None:
        """Pass on what is told until the connection ends, or nobody has waited for a while. In the background."""
        reason: object = "closed"
        try:
            while await self._worth_listening(link):
                for name in link.notifications():
                    event = self._waiting.get(name.decode("utf-8", "replace"))  # anybody may NOTIFY anything
                    if event is not None:
                        event.set()
        except self._database.driver_errors as error:
            reason = error
        finally:
            with self._mutex:
                self._forget_link(link)
                # They may have been told while nobody listened.
                events = list(self._waiting.values())
                link.terminate()
            ended.set()
            for event in events:
                event.set()
        log.debug("no longer listening at %s: %s", self._database.url, reason)

    async def _worth_listening(self, link: PqLink) -> bool:
        """Wait until there is something to read; False when nobody waits any more, or the end was asked for."""
        while not await self._runtime.readable(link.fileno(), LINGER):
            with self._mutex:
                if not self._waiting:
                    # Under the mutex: whoever comes from here on finds no link, and listens anew.
                    self._forget_link(link)
                    return False
        return self.link is link

    def _forget_link(self, link: PqLink) -> None:
        if self.link is link:
            self.link = None

    async def close(self) -> None:
        """Stop listening."""
        with self._mutex:
            link, self.link = self.link, None
            ended = self._ended
            if link is not None:
                # Not closed here: another thread may be reading. The end of the stream wakes it, and it closes.
                with socket.socket(fileno=os.dup(link.fileno())) as copy, suppress(OSError):  # ended by the server
                    copy.shutdown(socket.SHUT_RDWR)
        if link is not None and ended is not None:
            await ended.wait(CLOSE_SECONDS)
