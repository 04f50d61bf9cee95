"""
A session at ZooKeeper, and how the sync and async APIs send requests over it.

A request is sent by the thread that makes it, and kazoo's thread reads the answers: a sync call waits for one in the
caller's thread, an async one for an event that kazoo's thread sets. Neither needs a thread per lock or per request.

The server restarts the session timeout with every packet that it gets. lockkit acts on what kazoo reports::

    kazoo reports    what it means                                     what lockkit does
    -------------    ----------------------------------------------    -----------------------------------------------
    CONNECTED        the session is alive, perhaps after a break       confirms every lease at once
    SUSPENDED        no connection; the session may live or not        the same: unanswered, until the deadline
    LOST             the server has ended the session (or we have)     every lease of it is lost; kazoo begins a new one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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

from lockkit.backend import CALL_SECONDS, Host, LossReason, Request, unsent, with_since
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, Connection, outcome, weakly, when_done
from lockkit.backends.zookeeper.engine_calls import EngineCalls
from lockkit.backends.zookeeper.errors import DRIVER_ERRORS, connection_failed, translate, was_unanswered
from lockkit.backends.zookeeper.path import says_broken
from lockkit.backends.zookeeper.quirks import end_session, sync, sync_and_list
from lockkit.backends.zookeeper.wakeup import Watches
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

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
    One session, lockkit's own or the application's.

    Methods take the time until which an answer is useful (``until``, client monotonic clock): they have returned or
    raised `BackendUnavailable` by then, and within `CALL_SECONDS` in any case.

    Attributes:
        client: kazoo's.
        watches: What the server was asked to tell about nodes.
        requested_seconds: Session timeout that was asked for; 0 for the application's session.
        adopted_seconds: Session timeout of the application's session, which kazoo does not tell; 0 before it is known.
        id: The server's name for the session, also while there is no connection; 0 before there is one, and after the
            server has ended it.
        held: The nodes in it that hold locks, by owner.
        ended: Its threads have ended, or will.
        used_at: When it was last wanted, client monotonic clock.
    """

    def __init__(self, host: Host, label: str) -> None:
        """Belong to a host; see `opened` and `adopted`."""
        self._host = host
        self._runtime = host.runtime
        self._label = label
        self._engine_calls = EngineCalls(host.runtime)
        self._mutex = host.runtime.mutex()
        self._connection: Connection | None = None
        self._if_dropped: Any = None
        self.client: Any = None
        self.watches: Watches
        self._listener: Callable[[str], None]
        self.requested_seconds = 0.0
        self.id = 0
        self.adopted_seconds = 0.0
        self._failure: LockError | None = None
        self._failed_rounds_count = 0
        self._started = False
        self._silent_since: float | None = None
        self._closed = False
        self.ended = False
        self._connection_waiters: set[Event] = set()
        self.held: dict[str, LockNode] = {}
        self.used_at = self._runtime.now()
        self._leader_answered = -inf

    @classmethod
    def opened(cls, host: Host, label: str, arguments: Mapping[str, Any], seconds: float) -> Session:
        """Make a session of lockkit's own. Nothing is sent before `connected`."""
        session = cls(host, label)
        session.requested_seconds = seconds
        connection = Connection(arguments, seconds, weakly(session._round_failed), weakly(session._thread_ended))
        session._if_dropped = finalize(session, connection.drop, os.getpid())
        session._if_dropped.atexit = False
        session._connection = connection
        session._use(connection.client)
        return session

    @classmethod
    def adopted(cls, host: Host, label: str, client: Any) -> Session:  # noqa: ANN401 - kazoo has no types
        """Use the session of a client that the application started, and will stop."""
        session = cls(host, label)
        session._use(client)
        session._learn_id()
        return session

    def _use(self, client: Any) -> None:  # noqa: ANN401 - kazoo has no types
        self.client = client
        self.watches = Watches(client, self._request_children_for_woken, self._lease_gone, self._runtime.mutex())
        self._listener = weakly(self._state_changed)
        client.add_listener(self._listener)

    def _learn_id(self) -> None:
        found = self.client.client_id
        self.id = 0 if found is None else found[0]

    @property
    def granted_seconds(self) -> float:
        """Session timeout that the server granted; 0 before that is known."""
        return self.adopted_seconds if self._connection is None else self._connection.session_seconds

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

    @property
    def stopped(self) -> bool:
        """Whether kazoo sends nothing any more: lockkit has ended it, or the application has stopped its client."""
        return self.ended or self.client.client_state == KeeperState.CLOSED

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
        connection = self._connection
        return connection_failed(
            None if connection is None else connection.last_error or connection.refusal, self._label
        )

    def _start(self) -> None:
        if self._connection is None:
            if self.stopped:
                message = "the KazooClient given to from_client() is not running: call its start() first"
                raise ConfigurationError(message)
            return
        is_first = False
        try:
            with self._mutex:
                if self._started or self._closed:
                    return
                self._started = is_first = True
            self.client.start_async()
        except BaseException as error:
            if not is_first:
                raise
            # Interrupted halfway: kazoo's thread may run. Make a new session for the next call.
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

    def send_data(self, node: LockNode, data: bytes | None, send: Callable[[bytes], Any]) -> Any:  # noqa: ANN401 - kazoo's
        """
        Hand over a request that writes the data of a node, and so wakes those that watch it; give what `send` gives.

        Requests are sent in the order of these calls: none brings back older data.
        """
        with self._mutex:
            if data is not None:
                node.data = data
            return send(node.data)

    def _unanswered(self, asked_at: float) -> None:
        """Leave a member that has answered nothing for `ANSWER_SECONDS`, however short the timeouts of its callers."""
        if self._silent_since is None:
            self._silent_since = asked_at
        if self._connection is not None and self._runtime.now() - self._silent_since >= ANSWER_SECONDS * 0.9:
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

    async def children_of_each(self, paths: Sequence[str], until: Instant) -> list[list[str]]:
        """List the children of many nodes, as `children`, with all but one request sent at once."""
        await self.read(lambda: sync(self.client), until)
        found = await self._of_each(self.client.get_children_async, paths, until)
        return [children or [] for children in found]

    async def data_of_each(self, paths: Sequence[str], until: Instant) -> list[tuple[bytes, Any] | None]:
        """Read many nodes, with all requests sent at once: data and ``ZnodeStat`` of each, or None if it is gone."""
        return await self._of_each(self.client.get_async, paths, until)

    async def _of_each(self, request: Callable[[str], Any], paths: Sequence[str], until: Instant) -> list[Any]:
        sent: dict[str, Any] = {}

        def send(path: str) -> Any:  # noqa: ANN401 - kazoo has no types
            if not sent:
                sent.update((each, request(each)) for each in paths)
            result, sent[path] = sent[path], None
            return result or request(path)

        found: list[Any] = []
        for path in paths:
            try:
                found.append(await self.read(partial(send, path), until))
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

    def forget_lease(self, node: LockNode) -> None:
        """Expect that the node of a lease goes away: lockkit is about to delete it."""
        self.watches.forget_lease(node.path)
        self.held.pop(node.owner, None)

    def _lease_gone(self, owner: str) -> None:
        """Notify the holder, in kazoo's thread, when the server has said why its node is gone, or cannot say it."""
        node = self.held.pop(owner, None)
        if node is None:
            return
        result = self.client.get_async(node.directory)

        def notify() -> None:
            reason: LossReason = "gone"
            with suppress(*DRIVER_ERRORS):
                reason = "broken" if says_broken(result.get_nowait()[0], owner) else "gone"
            self._engine_calls.call_soon(partial(self._host.lost, owner, reason))

        when_done(result, notify)

    async def why_gone(self, node: LockNode, until: Instant) -> LossReason:
        """Give the reason for the loss of a node that is gone."""
        try:
            data, _ = await self.answer(self.client.get_async(node.directory), until)
        except (NoNodeError, LockError):
            return "gone"
        return "broken" if says_broken(data, node.owner) else "gone"

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
                for owner in lost:
                    self._engine_calls.call_soon(partial(self._host.lost, owner, "session"))
        else:
            if state == KazooState.CONNECTED:
                self._learn_id()
            if self.held:
                self._engine_calls.call_soon(self._host.confirm_soon)
        self._wake_connection_waiters()

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
        with self._mutex:
            self._closed = True
            started = self._started
        self._wake_connection_waiters()
        if self._connection is None:
            self.client.remove_listener(self._listener)
        return started and self.id != 0 and not self.ended

    def end_soon(self) -> None:
        """End it without waiting for that: nothing is held in it."""
        if self.close() and self.usable and self._connection is not None:
            self.ended = True
            self._if_dropped.detach()  # the request may not have been sent yet
            self._connection.expect_end()
            end_session(self.client)
        else:
            self.stop()

    def stop(self) -> None:
        """Have its threads end, if it is lockkit's own. What it still holds is free after its timeout."""
        self.ended = True
        if self._connection is not None and self._started:
            self._if_dropped.detach()
            self._connection.end()


@dataclass(slots=True, eq=False)
class LockNode:
    """
    The node that lockkit creates for a request: its place in the queue of a lock, then what holds the lock.

    Sequential and ephemeral. It counts from the request that creates it until the server has confirmed that it is gone.

    Attributes:
        session: In which it is created.
        session_id: The session's id then: it gets another one when the server has ended it. Once it has a name, that of
            the session which has it.
        owner: Of the request, and of the lease.
        directory: Path of the lock's directory.
        name: Its name there; None until the server has said that it created it.
        data: What it was created with, or was last told to have: the metadata.
        mark: End of the name of its mark (see `lockkit.backends.zookeeper.path`), once that may exist.
        slot: Of a permit that was granted; None for a lock.
        token: Its ``czxid``; 0 before.
        asked_at: Client monotonic time at which the session was alive for certain, if that was before the attempt that
            found this node to be first.
        ttl: Of the lease, as granted, seconds.
        remove_at: When `lockkit.backends.zookeeper.short_leases` removes it, unless it is renewed, client monotonic
            clock.
        joined_at: When it was created, client monotonic clock.
        since: When the lease was granted, Unix time; None if that is when the server created it.
        missed_at: When it was first looked for by its owner and not found, client monotonic clock; None before.
    """

    session: Session
    owner: str
    directory: str
    session_id: int = field(init=False)
    name: str | None = None
    data: bytes = b""
    mark: str | None = None
    slot: int | None = None
    token: int = 0
    asked_at: float | None = None
    ttl: float = 0.0
    remove_at: float = inf
    joined_at: float = inf
    since: float | None = None
    missed_at: float | None = None

    def __post_init__(self) -> None:
        """Begin in the session as it is now."""
        self.session_id = self.session.id

    def described(self, metadata: str) -> bytes:
        """Give the data that it is to have."""
        return (metadata if self.since is None else with_since(metadata, self.since)).encode()

    @property
    def path(self) -> str:
        """Its path. Only once it has a name."""
        assert self.name is not None
        return f"{self.directory}/{self.name}"

    @property
    def session_lives(self) -> bool:
        """
        Whether the server may still have it: it removes the nodes of a session that ends.

        If the session ends while the request that creates it is handed over, kazoo sends that in the next one.
        """
        if self.name is None:
            return not self.session.stopped
        return self.session.id == self.session_id and not self.session.ended
