"""
A cluster: which member a client asks, for how long, with which login, and when it switches to the next.

Any member answers any call, by asking the leader. The client uses one until it fails; then the next.

A request is sent again only if that does no harm: because the member cannot have executed it, or because the caller
says so (`resend`). A caller whose request must not be executed late is notified of every attempt that ended without an
answer (`on_unknown`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any, TypeVar

import grpc

from lockkit.backend import unsent
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.connection import (
    AUTHENTICATE,
    AsyncioConnection,
    CallError,
    MemberConnection,
    Metadata,
    Method,
)
from lockkit.backends.etcd.errors import (
    DRIVER_ERRORS,
    NO_ANSWER,
    code_of,
    details_of,
    is_member_failure,
    is_outcome_unknown,
    is_stale_token,
    translate,
)
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import Event, Runtime

T = TypeVar("T")

log = logging.getLogger("lockkit")

CLUSTER_SECONDS = 4.5
"""Longest time for one call, whatever the number of members asked. Longer holds up callers in an outage; shorter
mistakes an election, which takes two or three seconds, for one."""

MEMBER_SECONDS = 1.5
"""Longest time for one member of several, but not more than half of the time that is left. Longer switches later from a
member that hangs; shorter switches from one that is only slow."""

LOGINS_MAX = 2
"""Logins for one call. More keeps retrying while an operator changes users one after the other; fewer fails then."""

RETRY_PAUSE_SECONDS = 0.03
"""Before asking a member a second time. Longer delays a failure; shorter finds the connection still broken."""


class SharedAttempts:
    """What one caller does while the others wait for it: log in, or open a session. Threads may share it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._pending: dict[int, Event] = {}

    async def make(self, key: int, work: Callable[[], Coroutine[Any, Any, None]], until: float) -> bool:
        """Do some work, unless another caller does: then wait until that has succeeded or failed."""
        done = self._runtime.event()
        try:
            with self._mutex:
                pending = self._pending.setdefault(key, done)
            if pending is done:
                await work()
            elif not await pending.wait(max(0.0, until - self._runtime.now())):
                self._finish(key, pending)  # in case an interrupt kept the other caller from doing so
                return False
            return True
        finally:
            self._finish(key, done)

    def _finish(self, key: int, pending: Event) -> None:
        with self._mutex:
            if self._pending.get(key) is pending:
                del self._pending[key]
        pending.set()


class Login:
    """
    The login of a client: the metadata that goes with each call. Threads may share it.

    Attributes:
        metadata: With the token of the last login.
    """

    def __init__(self, runtime: Runtime, username: str | None, password: str | None) -> None:
        """Use a name and a password; without a name, calls have no metadata."""
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._username = username
        self._password = password or ""
        self._attempts = SharedAttempts(runtime)
        self.metadata: Metadata = None

    @property
    def has_user(self) -> bool:
        """Whether it can get a fresh token."""
        return self._username is not None

    def discard(self, metadata: Metadata) -> None:
        """Log in again before the next call, unless that has happened since the login that failed."""
        if self.has_user:
            with self._mutex:
                if self.metadata is metadata:
                    self.metadata = None

    async def obtain(self, connection: MemberConnection, until: float) -> Metadata:
        """
        Return the metadata for a call; log in if needed.

        One caller logs in while the others wait: a login costs the member a tenth of a second of CPU time.
        """
        while (metadata := self.metadata) is None and self.has_user:
            if not await self._attempts.make(0, lambda: self._log_in(connection, until), until):
                raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "another caller's login took too long")
        return metadata

    async def _log_in(self, connection: MemberConnection, until: float) -> None:
        if self.metadata is not None:
            return  # another caller has just done so
        timeout = max(0.0, until - self._runtime.now())
        request = rpc.AuthenticateRequest(name=self._username, password=self._password)
        try:
            answer = await connection.call(AUTHENTICATE, request, timeout, None)
        except DRIVER_ERRORS as error:
            if "authentication is not enabled" not in details_of(error):
                raise
            self.metadata = ()
            return
        # All members accept the token.
        self.metadata = (("token", answer.token),)


class BorrowedLogin(Login):
    """The login of an application's client, which logs in by itself."""

    def __init__(self, runtime: Runtime, client: object) -> None:
        """Read the client's metadata at each call."""
        super().__init__(runtime, None, None)
        self._client = client

    @property
    def metadata(self) -> Metadata:
        """What the client would send."""
        return getattr(self._client, "metadata", None)

    @metadata.setter
    def metadata(self, value: Metadata) -> None:
        assert value is None, "only the application's client logs in"


class Cluster:
    """The members of one cluster, for one client. Threads may share it."""

    def __init__(
        self, runtime: Runtime, labels: Sequence[str], connect: Callable[[str], MemberConnection], login: Login
    ) -> None:
        self._runtime = runtime
        self._labels = labels
        self._connect = connect
        self.login = login
        self._mutex = runtime.mutex()
        # Clients that start together spread over the members.
        self._index = runtime.random.randrange(len(labels))
        # Those that are used after the event loop has ended are others.
        self._connections: dict[tuple[int, bool], MemberConnection] = {}
        self._closed = False

    async def call(
        self,
        method: Method,
        request: Any,  # noqa: ANN401 - a message
        *,
        resend: bool,
        on_unknown: Callable[[], None] = lambda: None,
        answer_by: float = inf,
    ) -> Any:  # noqa: ANN401 - messages
        """Send a request and return the answer."""
        until = min(answer_by, self._runtime.now() + CLUSTER_SECONDS)
        # Each member once, and two times more: a connection may have been closed while it was idle, and grpc may need a
        # moment to notice. While the interpreter exits, sleeping is impossible, and all connections are new.
        spare = 0 if self._runtime.loop_has_ended() else 2
        attempts_left = len(self._labels) + spare
        logins_left = LOGINS_MAX
        asked: set[int] = set()
        may_be_executed = False
        while True:
            if attempts_left <= spare:
                await self._runtime.sleep(RETRY_PAUSE_SECONDS)
            connection, index = self.connection()
            asked.add(index)
            timeout = self._timeout(connection, until, is_last=attempts_left == 1, sent=may_be_executed)
            sent = False
            metadata: Metadata = None
            try:
                metadata = await self.login.obtain(connection, self._runtime.now() + timeout)
                sent = True
                return await connection.call(method, request, timeout, metadata)
            except DRIVER_ERRORS as error:
                if is_stale_token(error) and self.login.has_user and logins_left:
                    logins_left -= 1
                    self.login.discard(metadata)
                    continue
                if not is_member_failure(error):
                    raise translate(error, connection.label) from error
                self._switch(index, error)
                await self._close_outdated(connection)
                attempts_left -= 1
                is_unknown = sent and is_outcome_unknown(error)
                if is_unknown:
                    may_be_executed = True
                    on_unknown()
                is_over = not attempts_left or self._runtime.now() >= until - RETRY_PAUSE_SECONDS or self._closed
                if is_over or (is_unknown and not resend):
                    raise self._failure(error, connection, len(asked) - 1, sent=may_be_executed) from error
            except BaseException:
                # Interrupted or cancelled halfway.
                if sent:
                    on_unknown()
                raise

    def _timeout(self, connection: MemberConnection, until: float, *, is_last: bool, sent: bool) -> float:
        """Return how long to wait for one member, seconds."""
        left = until - self._runtime.now()
        if left <= 0:
            error = BackendUnavailable(f"etcd at {connection.label} was not asked: no time was left")
            error.sent = sent
            raise error
        return left if is_last or len(self._labels) == 1 else min(MEMBER_SECONDS, left / 2)

    def connection(self) -> tuple[MemberConnection, int]:
        """Return the connection to the member in use, and the member's index."""
        outside = self._runtime.loop_has_ended()
        with self._mutex:
            if self._closed:
                raise unsent("the connection to etcd is closed")
            index = self._index
            connection = self._connections.get((index, outside))
        if connection is None:
            # Not under the mutex: gRPC starts threads. If another thread is faster, ours goes unused.
            made = self._connect(self._labels[index])
            with self._mutex:
                connection = self._connections.setdefault((index, outside), made)
        if outside and isinstance(connection, AsyncioConnection):
            raise unsent(f"the event loop of the channel to etcd at {connection.label} has ended")
        return connection, index

    def switch_from(self, connection: MemberConnection, error: Exception) -> None:
        """Use the next member from now on, because this one failed."""
        with self._mutex:
            index = next((index for (index, _), one in self._connections.items() if one is connection), None)
        if index is not None:
            self._switch(index, error)

    def _switch(self, index: int, error: Exception) -> None:
        with self._mutex:
            if self._index == index:
                self._index = (index + 1) % len(self._labels)
        log.debug("etcd at %s: %s %s", self._labels[index], code_of(error).name, details_of(error))

    async def _close_outdated(self, connection: MemberConnection) -> None:
        """Close a connection that failed if its certificates have been replaced: the next call makes another one."""
        if not connection.is_outdated():
            return
        with self._mutex:
            self._connections = {key: one for key, one in self._connections.items() if one is not connection}
        await connection.close()

    def _failure(self, error: Exception, connection: MemberConnection, others_count: int, *, sent: bool) -> LockError:
        failure = translate(error, connection.label)
        if others_count:
            members = ", ".join(self._labels)
            failure = type(failure)(f"{failure}; {others_count} other members of {members} failed, too")
        if isinstance(failure, BackendUnavailable):
            failure.sent = sent
        return failure

    async def close(self) -> None:
        """Close the connections, but no channel that the application owns."""
        with self._mutex:
            self._closed = True
            connections = [*self._connections.values()]
            self._connections.clear()
        for connection in connections:
            await connection.close()


async def settle_by(runtime: Runtime, coroutine: Coroutine[Any, Any, T], answer_by: float) -> T:
    """Run a coroutine to its end even if the caller is cancelled (`Runtime.settle`); wait only until `answer_by`."""
    try:
        return await runtime.settle(coroutine, max(0.0, answer_by - runtime.now()))
    except TimeoutError as error:
        raise BackendUnavailable(f"etcd {NO_ANSWER}") from error
