"""
A session at ZooKeeper, and how the sync and async APIs send requests over it.

kazoo's thread sends the requests and reads the answers: a sync call waits for one in the caller's thread, an async one
for an event that kazoo's thread sets. Neither needs a thread per lock or per request.

The server restarts the session timeout with every packet that it gets. lockkit acts on what kazoo reports::

    kazoo reports    what it means                                     what lockkit does
    -------------    ----------------------------------------------    -----------------------------------------------
    CONNECTED        the session is alive, perhaps after a break       confirms every lease at once
    SUSPENDED        no connection; the session may live or not        the same: unanswered, until the deadline
    LOST             the server has ended the session (or we have)     every lease of it is lost; kazoo begins a new one
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any
from weakref import finalize

from kazoo.exceptions import (
    AuthFailedError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState, KeeperState

from lockkit.backend import CALL_SECONDS, Host, LossReason, Request, unsent
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, Connection, outcome, weakly
from lockkit.backends.zookeeper.errors import DRIVER_ERRORS, connection_failed, translate, was_unanswered
from lockkit.backends.zookeeper.path import says_broken
from lockkit.backends.zookeeper.quirks import end_session, sync_and_list
from lockkit.backends.zookeeper.wakeup import Watches
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

MILLISECOND = 0.001
"""ZooKeeper's unit for the session timeout, in seconds."""

EXPECTED = (NoNodeError, NodeExistsError, NotEmptyError)
"""Answers that callers of `Session.answer` handle. It raises them as kazoo does."""

_NOT_TRIED = (RolledBackError, RuntimeInconsistency)
"""What a transaction that failed says of its other operations."""

RECENT_SHARE = 0.05
"""Of the ttl: for so long after an answer of the leader a woken waiter does not ask the leader again. The lease then
counts from before that answer. More makes such leases shorter; less has more waiters ask."""

RETRY_SECONDS = 4.0
"""How long a call waits for a connection, and a read is retried over connections that break. Longer delays callers;
shorter gives up places in the queue when connections break again and again. Must be more than `ANSWER_SECONDS`, or a
call of a client whose first member hangs ends before the second one is tried."""


class Session:
    """
    One session.

    Methods take the time until which an answer is useful (``until``, client monotonic clock): they have returned or
    raised `BackendUnavailable` by then, and within `CALL_SECONDS` in any case.
    """

    def __init__(self, host: Host, arguments: Mapping[str, Any], seconds: float) -> None:
        """Ask for a session timeout of so many seconds. Nothing is sent before `connected`."""
        self._host = host
        self._runtime = host.runtime
        self._label: str = arguments["hosts"]
        self.mutex = host.runtime.mutex()
        self.requested_seconds = seconds
        # The server's name for it, also while there is no connection; 0 before the first one, and after its end.
        self.id = 0
        self.held: dict[str, Any] = {}  # by owner: the `lockkit.backends.zookeeper.node.LockNode` that holds a lock
        self.used_at = self._runtime.now()  # when it was last wanted
        self.ended = False  # its thread has ended, or will
        self._started = False
        self._closed = False
        self._failure: LockError | None = None
        self._failed_rounds_count = 0
        self._silent_since: float | None = None
        self._connection_waiters: set[Event] = set()
        self._leader_answered = -inf
        self._connection = Connection(arguments, seconds, weakly(self._round_failed), weakly(self._thread_ended))
        self._if_dropped = finalize(self, self._connection.drop, os.getpid())
        self._if_dropped.atexit = False
        self.client: Any = self._connection.client
        self.watches = Watches(self.client, self._request_children_for_woken, self._lease_gone, self._runtime.mutex())
        self.client.add_listener(weakly(self._state_changed))

    @property
    def granted_seconds(self) -> float:
        """Session timeout that the server granted; 0 before that is known."""
        return self._connection.session_seconds

    @property
    def now(self) -> float:
        """Client monotonic clock, seconds."""
        return self._runtime.now()

    @property
    def usable(self) -> bool:
        """Whether there is a connection just now."""
        return bool(self.client.connected) and self.id != 0 and self._failure is None

    @property
    def failed(self) -> bool:
        """Whether it will never be connected again: the login failed, or it is closed."""
        return self._failure is not None or self._closed

    def serves(self, seconds: float) -> bool:
        """Tell whether asking for a session with this timeout would give the same one, as far as that is known."""
        granted = self.granted_seconds
        if seconds == self.requested_seconds or not granted:
            return seconds == self.requested_seconds
        # Outside its bounds the server gives the nearest.
        if granted < self.requested_seconds - MILLISECOND:
            return seconds >= granted
        return granted > self.requested_seconds + MILLISECOND and seconds <= granted

    @property
    def in_use(self) -> bool:
        """Whether something is held in it, or a request waits."""
        return bool(self.held or self.watches.in_use or self._connection_waiters)

    # -- connecting ------------------------------------------------------------------------------------------------

    def _until(self, until: Instant, seconds: float = CALL_SECONDS) -> float:
        return min(until, self._runtime.now() + seconds)

    async def connected(self, until: Instant = inf, *, patient: bool = False) -> None:
        """Return when there is a connection."""
        if self.usable and not self._closed:
            return
        rounds_count = self._failed_rounds_count
        self._start()
        await self.reconnected(self._until(until, RETRY_SECONDS), None if patient else rounds_count)
        if self._closed or not self.usable:
            raise self._failure or self._not_connected()

    async def reconnected(self, until: Instant, rounds_count: int | None = None) -> None:
        """Return when there is a connection, or at `until`, or if the members were tried in vain since that round."""
        event = self._runtime.event()
        self._connection_waiters.add(event)
        try:
            while not (self.usable or self.failed) and rounds_count in {None, self._failed_rounds_count}:
                seconds_left = until - self._runtime.now()
                if seconds_left <= 0:
                    return
                await event.wait(seconds_left)
                event.clear()
        finally:
            self._connection_waiters.discard(event)

    def check_usable(self) -> None:
        """Raise `BackendUnavailable` if there is no connection just now."""
        if not self.usable:
            raise unsent(f"no connection to {self._label}")

    def _not_connected(self) -> BackendUnavailable:
        return connection_failed(self._connection.last_error or self._connection.refusal, self._label)

    def _start(self) -> None:
        try:
            with self.mutex:
                if self._started or self._closed:
                    return
                self._started = True
            self.client.start_async()
        except BaseException as error:
            # Interrupted halfway: kazoo's thread may run. The next call makes another session.
            self._failure = unsent(f"connecting to {self._label} was interrupted ({error!r})")
            self._failure.__cause__ = error
            self.stop()
            if isinstance(error, Exception):
                raise self._failure from error
            raise
        if self.ended:
            self._connection.end()  # it was stopped meanwhile, before there was a thread

    # -- requests --------------------------------------------------------------------------------------------------

    async def answer(self, result: Any, until: Instant = inf) -> Any:  # noqa: ANN401 - kazoo has no types
        """Wait for the answer to a request that was handed to kazoo."""
        asked_at = self._runtime.now()
        try:
            found = await outcome(self._runtime, result, self._until(until, ANSWER_SECONDS) - asked_at)
        except EXPECTED:
            self._silent_since = None
            raise
        except DRIVER_ERRORS as error:
            if isinstance(error, KazooTimeoutError):
                self._unanswered(asked_at)
            raise translate(error, self._label) from error
        self._silent_since = None
        return found

    async def committed(self, result: Any, until: Instant = inf) -> int | None:  # noqa: ANN401 - kazoo has no types
        """Wait for the answer to a transaction."""
        for number, found in enumerate(await self.answer(result, until)):
            if isinstance(found, EXPECTED):
                return number
            if isinstance(found, DRIVER_ERRORS) and not isinstance(found, _NOT_TRIED):
                raise translate(found, self._label) from found
        return None

    def _unanswered(self, asked_at: float) -> None:
        """Leave a member that has answered nothing for `ANSWER_SECONDS`, however short the timeouts of its callers."""
        if self._silent_since is None:
            self._silent_since = asked_at
        if self._runtime.now() - self._silent_since >= ANSWER_SECONDS * 0.9:
            self._silent_since = None
            self._connection.hang_up()

    async def read(self, send: Callable[[], Any], until: Instant = inf) -> Any:  # noqa: ANN401 - kazoo has no types
        """Send a request that changes nothing, and again if no answer came. Raises as `answer`."""
        until = self._until(until)
        retry_until = self._until(until, RETRY_SECONDS)
        while True:
            await self.connected(until, patient=True)
            try:
                return await self.answer(send(), until)
            except BackendUnavailable as error:
                if not was_unanswered(error) or self._runtime.now() >= retry_until:
                    raise

    async def children(self, path: str, until: Instant) -> list[str]:
        """
        List the children of a node, as the majority has them; none if it does not exist. Raises as `answer`.

        A member may be behind: ``sync`` has it catch up with the leader, and an answer to it also means that the member
        is not cut off from the leader, which counts the session timeout.
        """
        return await self._children(lambda: self._request_children(path)[1], until)

    async def children_unsynced(self, path: str, until: Instant) -> list[str]:
        """List the children of a node as the member has them, which may be behind. Otherwise the same as `children`."""
        return await self._children(lambda: self.client.get_children_async(path), until)

    async def of_each(self, request: Callable[[str], Any], paths: Sequence[str], until: Instant) -> list[Any]:
        """Send a request for each of many nodes at once; give what is answered, None for each that is gone."""
        found: list[Any] = []
        for result in [request(path) for path in paths]:
            try:
                found.append(await self.answer(result, until))
            except NoNodeError:
                found.append(None)
        return found

    async def children_when_woken(self, path: str, request: Request, until: float) -> tuple[list[str], float]:
        """List the children of a node for a waiter. They may have been requested already when it was woken."""
        asked_at = 0.0

        def send() -> Any:  # noqa: ANN401 - kazoo has no types
            nonlocal asked_at
            asked_at, result = self.watches.take_listing(request) or self._request_children(path)
            return result

        children = await self._children(send, until)
        self.leader_answered(asked_at)
        return children, asked_at

    async def _children(self, send: Callable[[], Any], until: Instant) -> list[str]:
        try:
            found: list[str] = await self.read(send, until)
        except NoNodeError:
            return []
        return found

    def _request_children(self, path: str, watch: Callable[[Any], None] | None = None) -> tuple[float, Any]:
        """Send what `children` needs, in one round trip; give the time before, and kazoo's result."""
        asked_at = self._runtime.now()
        return asked_at, sync_and_list(self.client, path, watch)

    def _request_children_for_woken(
        self, path: str, watch: Callable[[Any], None] | None, ttl: Seconds
    ) -> tuple[float, Any]:
        """
        The same as `_request_children`; without ``sync`` if the leader has answered not long ago.

        What the member may have missed does no harm: those ahead of a contender can only leave, and all of them were
        there before the contender was. So a listing that is old, but shows the contender, shows each that is still
        ahead of it. What the member cannot tell is whether the leader has ended the session. It has not before a
        session timeout has passed since its last answer, and the lease counts from before that.
        """
        if self._runtime.now() - self._leader_answered > RECENT_SHARE * min(ttl, self.granted_seconds):
            return self._request_children(path, watch)
        return self._leader_answered, self.client.get_children_async(path, watch=watch)

    def leader_answered(self, asked_at: Instant) -> None:
        """Note that the leader has answered a request, which means that the session was alive then."""
        self._leader_answered = max(self._leader_answered, asked_at)

    # -- losses ----------------------------------------------------------------------------------------------------

    def forget_lease(self, path: str, owner: str) -> None:
        """Expect that the node of a lease goes away: lockkit is about to delete it."""
        self.watches.forget_lease(path)
        self.held.pop(owner, None)

    def _lease_gone(self, owner: str) -> None:
        """Notify the holder, in kazoo's thread, when the server has said why its node is gone, or cannot say it."""
        node = self.held.pop(owner, None)
        if node is None:
            return
        result = self.client.get_async(node.directory)

        def notify(result: Any) -> None:  # noqa: ANN401 - kazoo's
            reason: LossReason = "gone"
            with suppress(*DRIVER_ERRORS):
                reason = "broken" if says_broken(result.get_nowait()[0], owner) else "gone"
            self._call_engine(partial(self._host.lost, owner, reason))

        result.rawlink(notify)

    async def why_gone(self, directory: str, owner: str, until: Instant) -> LossReason:
        """Give the reason for the loss of a node that is gone."""
        try:
            data, _ = await self.answer(self.client.get_async(directory), until)
        except (NoNodeError, LockError):
            return "gone"
        return "broken" if says_broken(data, owner) else "gone"

    def _state_changed(self, state: str) -> None:
        """Listen to kazoo. In its thread, which must not be delayed."""
        self.watches.connection_changed(connected=state == KazooState.CONNECTED)
        self._silent_since = None
        if state == KazooState.LOST:
            if self.client.client_state == KeeperState.AUTH_FAILED and not self._closed:
                self._failure = self._login_failed()
            self.id = 0
            lost, self.held = self.held, {}
            if not self._closed:
                self._call_engine(*(partial(self._host.lost, owner, "session") for owner in lost))
        else:
            if state == KazooState.CONNECTED:
                self.id = self.client.client_id[0]
            if self.held:
                self._call_engine(self._host.confirm_soon)
        self._wake_connection_waiters()

    def _call_engine(self, *calls: Callable[[], None]) -> None:
        """
        Call the engine outside kazoo's thread, which sends heartbeats and must not be delayed.

        The engine logs when a lease is lost. A log handler may take its time, or use a lock of this client.
        """

        async def make_calls() -> None:
            for call in calls:
                call()

        try:
            self._runtime.spawn("lockkit-zookeeper-notify", make_calls)
        except RuntimeError as error:  # no more threads, or the event loop has ended: the deadlines still tell it
            log.debug("the holders of leases at %s are not notified: %s", self._label, error)

    def _login_failed(self) -> LockError:
        error = AuthFailedError()
        failure = translate(error, self._label)
        if self.watches.connections_count > 1:
            # It worked before. A server that goes down during a login by SASL looks the same to kazoo.
            failure = BackendUnavailable(f"{self._label} ended the connection during the login")
        failure.__cause__ = error
        return failure

    def _round_failed(self) -> None:
        self._failed_rounds_count += 1
        self._wake_connection_waiters()

    def _thread_ended(self) -> None:
        """Note that kazoo's thread has ended: there will be no other, so the next call needs a new session."""
        self.ended = True
        if self._failure is None and not self._closed:
            self._failure = self._not_connected()
        self._wake_connection_waiters()

    def _wake_connection_waiters(self) -> None:
        for event in [*self._connection_waiters]:
            event.set()

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """
        Use it for nothing new. Tell whether the server has to be asked to end it, which frees all that it holds.

        May be called again.
        """
        with self.mutex:
            self._closed = True
            started = self._started
        self._wake_connection_waiters()
        return started and self.id != 0 and not self.ended

    def end_soon(self) -> None:
        """End it without waiting for that: nothing is held in it."""
        if self.close() and self.usable:
            self.ended = True
            self._if_dropped.detach()  # the request may not have been sent yet
            self.client.end_with_connection()
            end_session(self.client)
        else:
            self.stop()

    def stop(self) -> None:
        """Have its thread end. What it still holds is free after its timeout."""
        self.ended = True
        if self._started:
            self._if_dropped.detach()
            self._connection.end()
