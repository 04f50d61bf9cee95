"""
A session at ZooKeeper, what is asked over it, and what the server reports: who is woken, and which leases are lost.

The server restarts the session timeout with every packet that it gets. A waiter watches a node or a directory; a lease
watches its own node, so that one heartbeat of the session serves all of its leases. Watches end with the connection.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any
from weakref import finalize, ref

from kazoo.exceptions import (
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Close, GetChildren, GetData, Sync

from lockkit.backend import CALL_SECONDS, Host, LossReason, Request
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, Answer, Connection, outcome
from lockkit.backends.zookeeper.errors import DRIVER_ERRORS, connection_failed, translate, was_unanswered
from lockkit.backends.zookeeper.path import says_broken
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

MILLISECOND = 0.001  # ZooKeeper's unit for the session timeout

EXPECTED = (NoNodeError, NodeExistsError, NotEmptyError)
"""Answers that callers of `Session.answer` handle. It raises them as kazoo has them."""

RETRY_SECONDS = 4.0
"""How long a call waits for a connection, and a read is retried over connections that break. Longer delays callers;
shorter gives up places in the queue when connections break again and again. Must be more than `ANSWER_SECONDS`, or a
call of a client whose first member hangs ends before the second one is tried."""

SYNC = Sync("/")  # the path means nothing
"""Has the member catch up with its leader. Only the leader answers it, so the member is not cut off from it."""

END = Close()  # of the session

_DELETED = 2  # kind of an event


class Session(Connection):
    """
    One session.

    Methods take the time until which an answer is useful (``until``, client monotonic clock): they have returned or
    raised `BackendUnavailable` by then, and within `CALL_SECONDS` in any case.
    """

    def __init__(self, host: Host, arguments: Mapping[str, Any], seconds: Seconds) -> None:
        """Ask for a session timeout of so many seconds. Nothing is sent before `connected`."""
        super().__init__(arguments, seconds, host.runtime)
        self._host = ref(host)  # the thread keeps this session, and must not keep a client that was dropped
        self._if_dropped = finalize(host, self._end, os.getpid())
        self._if_dropped.atexit = False
        self.acl: Any = arguments["default_acl"]
        self.requested_seconds = seconds
        self.held: dict[str, Any] = {}  # by owner: the `lockkit.backends.zookeeper.nodes.LockNode` that holds a lock
        self.used_at = self.now  # when it was last wanted
        self.mutex = host.runtime.mutex()
        self._started = False
        self._closed = False
        self._connection_waiters: set[Event] = set()
        self._waiters: dict[str, set[Request]] = {}  # by what they watch
        self._watched: dict[Request, str] = {}  # the reverse
        self._leases: dict[str, str] = {}  # their owners, by the paths of the nodes that are watched

    @property
    def now(self) -> Instant:
        """Client monotonic clock."""
        return self._runtime.now()

    @property
    def failed(self) -> bool:
        """Whether it will never be connected again: the login failed, or it is closed."""
        return self.ended or self._closed

    @property
    def in_use(self) -> bool:
        """Whether something is held in it, or a request waits."""
        return bool(self.held or self._watched or self._connection_waiters)

    # -- connecting ------------------------------------------------------------------------------------------------

    async def connected(self, until: Instant = inf, *, patient: bool = False) -> None:
        """Return when there is a connection. Without patience, raise once all members were tried in vain."""
        self.used_at = self.now
        if self.usable and not self._closed:
            return
        rounds_count = self._failed_rounds_count
        self._start()
        await self.reconnected(self._until(until, RETRY_SECONDS), None if patient else rounds_count)
        if self._closed or not self.usable:
            raise connection_failed(self._last_error, self._label)

    async def reconnected(self, until: Instant, rounds_count: int | None = None) -> None:
        """Return when there is a connection, or at `until`, or if the members were tried in vain since that round."""
        event = self._runtime.event()
        self._connection_waiters.add(event)
        try:
            while not (self.usable or self.failed) and rounds_count in {None, self._failed_rounds_count}:
                if self.now >= until:
                    return
                await event.wait(until - self.now)
                event.clear()
        finally:
            self._connection_waiters.discard(event)

    def _until(self, until: Instant, seconds: Seconds = CALL_SECONDS) -> Instant:
        return min(until, self.now + seconds)

    def _start(self) -> None:
        with self.mutex:
            if self._started or self._closed:
                return
            self._started = True
        try:
            threading.Thread(target=self._run, name="lockkit-zookeeper", daemon=True).start()
        except BaseException as error:  # interrupted, or there are no more threads: the next call makes another session
            self._last_error = error
            self.stop()
            if not isinstance(error, Exception):
                raise

    # -- requests --------------------------------------------------------------------------------------------------

    async def answer(self, sent: Answer, until: Instant = inf) -> Any:  # noqa: ANN401 - of the kind that the request has
        """Wait for the answer to a request."""
        try:
            return await outcome(self._runtime, sent, self._until(until, ANSWER_SECONDS) - self.now)
        except EXPECTED:
            raise
        except DRIVER_ERRORS as error:
            # Leave a member that answers nothing for so long, however short the timeouts of its callers.
            if isinstance(error, KazooTimeoutError) and self._silent_seconds() >= ANSWER_SECONDS * 0.9:
                self._hang_up()
            raise translate(error, self._label) from error

    async def ask(self, request: Any, until: Instant = inf) -> Any:  # noqa: ANN401 - as above
        """Send a request, and wait for the answer."""
        return await self.answer(self.send(request)[0], until)

    async def committed(self, sent: Answer, until: Instant) -> int | None:
        """Wait for the answer to a transaction: the number of what failed in an expected way, None if nothing did."""
        for number, found in enumerate(await self.answer(sent, until)):
            if isinstance(found, EXPECTED):
                return number
            # Of the other operations it says that they were not tried.
            if isinstance(found, DRIVER_ERRORS) and not isinstance(found, (RolledBackError, RuntimeInconsistency)):
                raise translate(found, self._label) from found
        return None

    async def read(self, *requests: Any, until: Instant, waiter: Request | None = None) -> Any:  # noqa: ANN401 - as above
        """
        Send requests that change nothing, and again if no answer came; give the last answer.

        With a waiter, the last request watches a node or a directory for it.
        """
        until = self._until(until)
        retry_until = self._until(until, RETRY_SECONDS)
        while True:
            await self.connected(until, patient=True)
            try:
                if waiter is not None:
                    self._add_waiter(requests[-1].path, waiter)
                return await self.answer(self.send(*requests)[-1], until)
            except BackendUnavailable as error:
                if not was_unanswered(error) or self.now >= retry_until:
                    raise

    async def children(
        self, path: str, until: Instant, *, synced: bool = True, waiter: Request | None = None
    ) -> list[str]:
        """
        List the children of a node; none if it does not exist.

        A member may be behind: `SYNC` has it catch up with the leader first, in the same round trip.
        """
        listing = GetChildren(path, waiter is not None)
        try:
            found: list[str] = await self.read(*((SYNC, listing) if synced else (listing,)), until=until, waiter=waiter)
        except NoNodeError:
            return []
        return found

    async def of_each(self, requests: Sequence[Any], until: Instant) -> list[Any]:
        """Send many requests at once; give what is answered, None for each node that is gone."""
        found: list[Any] = []
        for sent in self.send(*requests):
            try:
                found.append(await self.answer(sent, until))
            except NoNodeError:
                found.append(None)
        return found

    # -- waiters and leases ----------------------------------------------------------------------------------------

    def _add_waiter(self, path: str, request: Request) -> None:
        self.stop_waking(request)
        with self.mutex:
            self._watched[request] = path
            self._waiters.setdefault(path, set()).add(request)

    def wakes(self, path: str, request: Request) -> bool:
        """Tell whether a request will be woken when that node, or what is in that directory, changes."""
        return request in self._waiters.get(path, ())

    def stop_waking(self, request: Request) -> None:
        """Wake a request no more. The server keeps its watch, one for each node, until that changes."""
        if request not in self._watched:
            return
        with self.mutex:
            path = self._watched.pop(request, "")
            requests = self._waiters.get(path, set())
            requests.discard(request)
            if not requests:
                self._waiters.pop(path, None)

    def watch_lease(self, path: str, owner: str) -> Answer | None:
        """
        Read the node of a lease, and watch it; None if it is watched already.

        The server reports that a watched node has gone before it answers any later request.
        """
        if self._leases.get(path) == owner:
            return None
        self._leases[path] = owner  # first: the event may come before `send` returns
        try:
            # Not `exists`, which leaves a watch for the life of the session if the node is gone: it never comes back.
            return self.send(GetData(path, watcher=True))[0]
        except BaseException:
            self._leases.pop(path, None)
            raise

    def forget_lease(self, path: str, owner: str) -> None:
        """Expect that the node of a lease goes away: lockkit is about to delete it."""
        self._leases.pop(path, None)
        self.held.pop(owner, None)

    async def why_gone(self, directory: str, owner: str, until: Instant) -> LossReason:
        """Give the reason for the loss of a node that is gone."""
        with suppress(NoNodeError, LockError):
            data, _ = await self.ask(GetData(directory, None), until)
            if says_broken(data, owner):
                return "broken"
        return "gone"

    # -- in the connection's thread --------------------------------------------------------------------------------

    def _on_event(self, kind: int, path: str) -> None:
        owner = self._leases.pop(path, None)
        if owner is not None and kind == _DELETED and (node := self.held.pop(owner, None)) is not None:
            self._lost([owner], node.directory)
        with self.mutex:
            requests = [*self._waiters.pop(path, ())]
        for request in requests:
            request.wake.set()

    def _on_change(self) -> None:
        if self.ended:
            self._if_dropped.detach()
        for event in [*self._connection_waiters]:
            event.set()

    def _on_connection(self) -> None:
        if not self.usable:
            self._leases.clear()
            with self.mutex:  # their watches have ended: they are to watch again
                self._waiters, waiting = {}, [*self._watched]
            for request in waiting:
                request.wake.set()
        if self.held and (host := self._host()) is not None:
            host.confirm_soon()

    def _on_expired(self) -> None:
        lost, self.held = self.held, {}
        if lost and not self._closed:
            self._lost([*lost])

    def _lost(self, owners: Sequence[str], directory: str | None = None) -> None:
        """
        Notify holders that their session has ended, or that their nodes in a directory are gone.

        In another thread: the engine logs it. A log handler may take its time, or use a lock of this client.
        """

        async def notify() -> None:
            for owner in owners:
                gone = None if directory is None else await self.why_gone(directory, owner, inf)
                if (host := self._host()) is not None:
                    host.lost(owner, gone or "session")

        try:
            self._runtime.spawn("lockkit-zookeeper-notify", notify)
        except RuntimeError as error:  # no more threads, or the event loop has ended: the deadlines still tell it
            log.debug("the holders of leases at %s are not notified: %s", self._label, error)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """
        Use it for nothing new. Tell whether the server has to be asked to end it, which frees all that it holds.

        May be called again.
        """
        with self.mutex:
            self._closed = True
        self._on_change()
        return self.id != 0 and not self.ended

    def end_soon(self) -> None:
        """End it without waiting for that: nothing is held in it."""
        with suppress(BackendUnavailable):
            if self.close():
                self.send(END)
                self.ended = True
                self._if_dropped.detach()  # the thread is to read the answer
                self._stopped.set()
                return
        self.stop()

    def stop(self) -> None:
        """Have its thread end. What it still holds is free after its timeout."""
        self.ended = True
        self._if_dropped.detach()
        self._end()
