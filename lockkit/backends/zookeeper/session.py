"""
A session at ZooKeeper, and how both faces ask over it.

kazoo's threads do the work: the blocking face waits for a result in the caller's thread, asyncio for an event that
kazoo's thread sets. Neither has a thread per lock or per request.

The server counts the session timeout anew with every packet that it gets. What is lost with the session, and when, is
told here::

    kazoo says       what it means                                     what is done
    ---------        ---------------------------------------------    ----------------------------------------------
    CONNECTED        the session is alive, perhaps after a break       everything held is asked for at once
    SUSPENDED        no connection; nobody knows                       the same: it stays unanswered, until the deadline
    LOST             the server has ended the session (or we have)     every lease of it is lost; kazoo begins a new one
"""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import AuthFailedError, NodeExistsError, NoNodeError, NotEmptyError
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Close, Create2, Sync
from kazoo.protocol.states import EventType, KazooState, KeeperState
from kazoo.security import OPEN_ACL_UNSAFE

from lockkit.backend import CALL_SECONDS
from lockkit.backends.zookeeper.connection import ANSWER_SECONDS, CONNECT_SECONDS, Driver, outcome
from lockkit.backends.zookeeper.errors import DRIVER_ERRORS, connection_failed, translate, was_unanswered
from lockkit.backends.zookeeper.notifier import Notifier
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockkit.backend import Host, Request
    from lockkit.runtime import Event

__all__ = ["EXPECTED", "MILLISECOND", "Held", "Session"]

log = logging.getLogger("lockkit")

EPHEMERAL, SEQUENCE, CONTAINER = 1, 2, 4
"""ZooKeeper's ``CreateMode`` flags."""

MILLISECOND = 0.001
"""ZooKeeper's unit for the session timeout, in seconds."""

EXPECTED = (NoNodeError, NodeExistsError, NotEmptyError)
"""Answers that callers of `Session.answer` are prepared for. They leave it as kazoo's."""

READ_SECONDS = 4.0
"""How long a question is asked again over connections that break, seconds. Longer holds up callers; shorter gives up
places in line when connections break again and again."""


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo has no types
    """ZooKeeper's request ``createContainer``, since 3.5.3."""

    type = 19


class _EndSession(Close):  # type: ignore[misc]  # kazoo has no types
    """ZooKeeper's request ``closeSession``, whose answer can be waited for: kazoo's own is false (an empty tuple)."""

    def __bool__(self) -> bool:
        """Be true, so that kazoo hands the answer over."""
        return True

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> bool:
        """Read the answer, which is empty."""
        del data, offset
        return True


class Held:
    """
    A node that holds a lock.

    Attributes:
        session: In which it was created.
        session_id: The session's id then: it gets another one when the server has ended it.
        owner: Of the lease.
        path: Of the node.
        ttl: As granted, seconds.
        until: When the caretaker removes the node unless the lease is renewed, client monotonic clock.
        watched_over: Number of the connection over which the server was asked to tell when the node goes away.
    """

    __slots__ = ("owner", "path", "session", "session_id", "ttl", "until", "watched_over")

    def __init__(self, session: Session, session_id: int, owner: str, path: str) -> None:
        """Hold, for no time yet."""
        self.session = session
        self.session_id = session_id
        self.owner = owner
        self.path = path
        self.ttl = 0.0
        self.until = inf
        self.watched_over = -1


class Session:
    """
    One session, ours or the application's.

    Questions are told until when an answer is worth anything (``until``, client monotonic clock): they have returned or
    raised `BackendUnavailable` by then, and within `CALL_SECONDS` anyhow.

    Attributes:
        client: kazoo's.
        asked: Session timeout that was asked for, seconds; 0 for the application's.
        id: What the server calls the session, also while there is no connection; 0 before there is one, and after the
            server has ended it.
        held: By owner, what is held in it.
        over: Its threads have ended, or will.
        used_at: When somebody last wanted it, client monotonic clock.
    """

    def __init__(self, host: Host, label: str) -> None:
        """Belong to a host; see `opened` and `adopted`."""
        self._host = host
        self._runtime = host.runtime
        self._label = label
        self._notifier = Notifier(host.runtime)
        self._mutex = host.runtime.mutex()
        self._driver: Driver | None = None
        self.client: Any = None
        self.asked = 0.0
        self.id = 0
        self._granted_seconds = 0.0
        self._failure: LockError | None = None
        self._failed_rounds_count = 0
        self._started = False
        self._connections_count = 0
        self._silent_since: float | None = None
        self._closed = False
        self.over = False
        self._anybody: set[Event] = set()
        self._watching: dict[str, set[Request]] = {}
        self._watched: dict[str, Held] = {}
        self._asked: dict[Request, tuple[float, Any]] = {}
        self.held: dict[str, Held] = {}
        self.used_at = self._runtime.now()

    @classmethod
    def opened(cls, host: Host, label: str, arguments: Mapping[str, Any], ttl: float) -> Session:
        """
        Make a session of our own. Nothing is sent before `connected`.

        Raises:
            TypeError: kazoo does not take one of the arguments.
            ValueError: As before.
        """
        session = cls(host, label)
        session.asked = ttl
        driver = session._driver = Driver(arguments, ttl, session._round_failed, session._thread_ended)
        session.client = driver.client
        session.client.add_listener(session._state_changed)
        return session

    @classmethod
    def adopted(cls, host: Host, label: str, client: Any) -> Session:  # noqa: ANN401 - kazoo has no types
        """Use the session of a client that the application started, and will stop."""
        session = cls(host, label)
        session.client = client
        client.add_listener(session._state_changed)
        session._learn_id()
        return session

    def _learn_id(self) -> None:
        found = self.client.client_id
        self.id = 0 if found is None else found[0]

    @property
    def seconds(self) -> float:
        """Session timeout that the server granted; 0 before that is known."""
        return self._granted_seconds if self._driver is None else self._driver.session_seconds

    def learn_seconds(self, seconds: float) -> None:
        """Note the timeout of an application's session, which kazoo does not tell."""
        self._granted_seconds = seconds

    @property
    def usable(self) -> bool:
        """There is a connection just now."""
        return bool(self.client.connected) and self.id != 0 and self._failure is None

    @property
    def failed(self) -> bool:
        """It will never be connected again: the login failed, or it is closed."""
        return self._failure is not None or self._closed

    def keeps(self, timeout: float) -> bool:
        """Tell whether this is what asking for a session with this timeout would give, as far as that is known."""
        if timeout == self.asked or not self.seconds:
            return timeout == self.asked
        # Outside of its bounds the server gives the nearest.
        if self.seconds < self.asked - MILLISECOND:
            return timeout >= self.seconds
        return self.seconds > self.asked + MILLISECOND and timeout <= self.seconds

    @property
    def in_use(self) -> bool:
        """Something is held in it, or somebody waits."""
        return bool(self.held or self._watching or self._asked or self._anybody)

    # -- asking ----------------------------------------------------------------------------------------------------

    def _until(self, until: float, seconds: float = CALL_SECONDS) -> float:
        return min(until, self._runtime.now() + seconds)

    async def connected(self, until: float = inf, *, patient: bool = False) -> None:
        """
        Return when there is a connection.

        Args:
            until: See the class.
            patient: Wait although no member can be reached, and for longer: a place in line is at stake.

        Raises:
            BackendUnavailable: There is none.
            ConfigurationError: The server refuses the login.
        """
        if self.usable and not self._closed:
            return
        event = self._runtime.event()
        self._anybody.add(event)
        try:
            self._start()
            rounds_count = self._failed_rounds_count
            until = self._until(until, READ_SECONDS if patient else CONNECT_SECONDS)
            while self._closed or not self.usable:
                if self._failure is not None:
                    raise self._failure
                left = until - self._runtime.now()
                failed = self._failed_rounds_count != rounds_count and not patient
                if left <= 0 or failed or self._closed:
                    raise connection_failed(None if self._driver is None else self._driver.last_error, self._label)
                await event.wait(left)
                event.clear()
        finally:
            self._anybody.discard(event)

    async def reconnected(self, until: float) -> None:
        """Return when there is a connection, or at `until`."""
        event = self._runtime.event()
        self._anybody.add(event)
        try:
            while not (self.usable or self.failed) and (left := until - self._runtime.now()) > 0:
                await event.wait(left)
                event.clear()
        finally:
            self._anybody.discard(event)

    def _start(self) -> None:
        if self._driver is None:
            if self.client.client_state == KeeperState.CLOSED:
                message = "the KazooClient given to from_client() is not running: call its start() first"
                raise ConfigurationError(message)
            return
        with self._mutex:
            if self._started or self._closed:
                return
            self._started = True
        try:
            self.client.start_async()
        except BaseException as error:
            # Interrupted halfway: nobody knows which of kazoo's threads run. The next session is made anew.
            self._failure = BackendUnavailable(f"connecting to {self._label} was interrupted ({error!r})")
            self._failure.__cause__ = error
            self.over = True
            self.client.handler.stop()
            if isinstance(error, Exception):
                raise self._failure from error
            raise
        if self.over:
            self._driver.stop()  # it was stopped meanwhile, before there was a thread

    async def answer(self, result: Any, until: float = inf) -> Any:  # noqa: ANN401 - kazoo has no types
        """
        Wait for the answer to a request that was handed to kazoo.

        Raises:
            BackendUnavailable: None came, so it may or may not have been done; or it was refused.
            ConfigurationError: It was refused, and would be again.
            NoNodeError: kazoo's, as are NodeExistsError and NotEmptyError: the caller expects them.
        """
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

    def _unanswered(self, asked_at: float) -> None:
        """Leave a member that has answered nothing for `ANSWER_SECONDS`, however impatient each of its callers was."""
        if self._silent_since is None:
            self._silent_since = asked_at
        if self._driver is not None and self._runtime.now() - self._silent_since >= ANSWER_SECONDS * 0.9:
            self._silent_since = None
            self._driver.hang_up()

    def _submit(self, request: Any) -> Any:  # noqa: ANN401 - kazoo has no types
        """Hand a request over, and give kazoo's result."""
        # Some have no method in kazoo (containers); the methods of others take a detour through another of its threads.
        result = self.client.handler.async_result()
        self.client._call(request, result)  # noqa: SLF001 - see above
        return result

    def create_place(self, path: str, data: bytes) -> Any:  # noqa: ANN401 - kazoo has no types
        """Create a sequential ephemeral node; the answer is its whole path, and its state."""
        return self._submit(Create2(self.client.chroot + path, data, self._acl, EPHEMERAL | SEQUENCE))

    def create_directory(self, path: str, *, container: bool) -> Any:  # noqa: ANN401 - kazoo has no types
        """Create an empty node that stays, or a container node."""
        if container:
            return self._submit(_CreateContainer(self.client.chroot + path, b"", self._acl, CONTAINER))
        return self._submit(Create2(self.client.chroot + path, b"", self._acl, 0))

    @property
    def _acl(self) -> Any:  # noqa: ANN401 - kazoo has no types
        return self.client.default_acl or OPEN_ACL_UNSAFE

    def sync(self, path: str = "") -> Any:  # noqa: ANN401 - kazoo has no types
        """Have the member that we talk to catch up with its leader. Only the leader answers."""
        return self._submit(Sync(self.client.chroot + path or "/"))

    async def read(self, ask: Callable[[], Any], until: float = inf) -> Any:  # noqa: ANN401 - kazoo has no types
        """Ask, and again if no answer came: for requests that change nothing. Raises as `answer`."""
        until = self._until(until)
        again_until = self._until(until, READ_SECONDS)
        while True:
            await self.connected(until, patient=True)
            try:
                return await self.answer(ask(), until)
            except BackendUnavailable as error:
                if not was_unanswered(error) or self._runtime.now() >= again_until:
                    raise

    async def children(self, path: str, until: float = inf) -> list[str]:
        """
        List the children of a node, as the majority has them. Raises as `answer`.

        A member may be behind: ``sync`` has it catch up with the leader, and an answer to it also means that the member
        is not cut off from the leader, which counts our session timeout.
        """
        found: list[str] = await self.read(lambda: self._ask_for_children(path)[1], until)
        return found

    async def children_when_woken(self, path: str, request: Request, until: float) -> tuple[list[str], float]:
        """
        List the children of a node for a waiter, who was asked for already when it was woken. Raises as `answer`.

        Gives also the time before it was asked, client monotonic clock: between that and now the whole process may have
        been stopped, and the session may have ended.
        """
        asked_at = 0.0

        def ask() -> Any:  # noqa: ANN401 - kazoo has no types
            nonlocal asked_at
            asked_at, result = self._asked.pop(request) if request in self._asked else self._ask_for_children(path)
            return result

        found: list[str] = await self.read(ask, until)
        return found, asked_at

    def _ask_for_children(self, path: str) -> tuple[float, Any]:
        """Ask what `children` needs, one after the other on one connection: one round trip. Before when, and result."""
        asked_at = self._runtime.now()
        self.sync(path)
        return asked_at, self.client.get_children_async(path)

    # -- being told ------------------------------------------------------------------------------------------------

    def watch(self, path: str, request: Request) -> Any:  # noqa: ANN401 - kazoo has no types
        """Ask to have a request woken when a node goes away or the connection breaks; give kazoo's result."""
        self._watching.setdefault(path, set()).add(request)
        return self.client.get_async(path, watch=self._node_changed)

    def watches(self, path: str, request: Request) -> bool:
        """Tell whether it still will be."""
        return request in self._watching.get(path, ())

    def unwatch(self, path: str, request: Request) -> None:
        """Wake it no more. What the server was asked for stays until it happens, once for each node."""
        self.forget(request)
        requests = self._watching.get(path)
        if requests is not None:
            requests.discard(request)
            if not requests:
                self._watching.pop(path, None)

    def forget(self, request: Request) -> None:
        """Drop what was asked for a waiter when it was woken."""
        self._asked.pop(request, None)

    def keeps_watch(self, held: Held) -> bool:
        """
        Tell whether we would have been told if the node of a lease had gone.

        The server tells that before it answers whatever was asked later. So one heartbeat does for all leases of the
        session, however many.
        """
        return held.watched_over == self._connections_count and held.path in self._watched

    def look_after(self, held: Held) -> Any:  # noqa: ANN401 - kazoo has no types
        """Ask for the node of a lease, and to be told when it goes away; give kazoo's result."""
        self._watched[held.path] = held
        # Before it is sent: should it go over the next connection, it is asked for once more, and not once less.
        held.watched_over = self._connections_count
        return self.client.exists_async(held.path, watch=self._node_changed)

    def let_go(self, held: Held) -> None:
        """Forget a lease, before its node is removed by us."""
        self._watched.pop(held.path, None)
        self.held.pop(held.owner, None)

    def _node_changed(self, event: Any) -> None:  # noqa: ANN401 - kazoo has no types
        # One method for all nodes, so that kazoo keeps it once for each: waits that ended leave nothing behind.
        if event.path is None:
            # The connection broke, and kazoo forgets all watches with it.
            woken, self._watching = self._watching, {}
            self._watched.clear()
        else:
            woken = {event.path: self._watching.pop(event.path, set())}
            held = self._watched.pop(event.path, None)
            if held is not None and event.type == EventType.DELETED:
                self.let_go(held)
                self._notifier.call(partial(self._host.lost, held.owner, "gone"))
        for path, requests in woken.items():
            for request in [*requests]:
                if event.path is not None:
                    # What the waiter will ask first, while its thread wakes up.
                    self._asked[request] = self._ask_for_children(path.rpartition("/")[0])
                request.wake.set()

    def _state_changed(self, state: str) -> None:
        """Hear kazoo. In its thread, which must not be held up."""
        self._asked.clear()  # what was asked over the former connection says nothing about the next one's member
        self._silent_since = None
        if state == KazooState.LOST:
            if self.client.client_state == KeeperState.AUTH_FAILED and not self._closed:
                self._failure = self._login_failed()
            self.id = 0
            lost, self.held = self.held, {}
            if not self._closed:
                for owner in lost:
                    self._notifier.call(partial(self._host.lost, owner, "session"))
        else:
            if state == KazooState.CONNECTED:
                self._connections_count += 1
                self._learn_id()
            if self.held:
                self._notifier.call(self._host.confirm_soon)
        self._tell_all()

    def _login_failed(self) -> LockError:
        error = AuthFailedError()
        failure = translate(error, self._label)
        if self._connections_count > 1:
            # It worked before. A server that goes down during a login by SASL looks the same to kazoo.
            failure = BackendUnavailable(f"{self._label} ended the connection during the login")
        failure.__cause__ = error
        return failure

    def _round_failed(self) -> None:
        self._failed_rounds_count += 1
        self._tell_all()

    def _thread_ended(self) -> None:
        """Hear that kazoo's thread is gone: there will be no other, so the next session is made anew."""
        self.over = True
        if self._failure is None and not self._closed and self._driver is not None:
            self._failure = connection_failed(self._driver.last_error, self._label)
        self._tell_all()

    def _tell_all(self) -> None:
        for event in [*self._anybody]:
            event.set()

    # -- ending ----------------------------------------------------------------------------------------------------

    def begin_to_end(self) -> bool:
        """
        Use it for nothing new. Tell whether the server has to be asked to end it, which frees all that it holds.

        May be called again.
        """
        with self._mutex:
            self._closed = True
            started = self._started
        self._tell_all()
        if self._driver is None:
            self.client.remove_listener(self._state_changed)
        return started and self.id != 0 and not self.over

    def ask_to_end(self) -> Any:  # noqa: ANN401 - kazoo has no types
        """Ask the server to end it; give kazoo's result."""
        return self._submit(_EndSession())

    def end_soon(self) -> None:
        """End it without waiting for that: nothing is held in it."""
        if self.begin_to_end() and self.usable and self._driver is not None:
            self.over = True
            self._driver.expect_end()
            self.ask_to_end()
        else:
            self.stop()

    def stop(self) -> None:
        """Have its threads end, if it is ours. What it still holds is free after its timeout."""
        self.over = True
        if self._driver is not None and self._started:
            self._driver.stop()
