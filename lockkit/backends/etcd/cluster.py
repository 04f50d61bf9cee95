"""
A cluster: the channels to its members, which of them is asked, for how long, and with which login.

Any member answers any call, by asking the leader. The client uses one until it fails; then the next.

A request is sent again only if that does no harm: because the member cannot have executed it, or because the caller
says so (`resend`). A caller whose request must not be executed late is notified of every attempt that ended without an
answer (`on_unknown`).

What lockkit works around in grpcio (seen with 1.80 to 1.85) names the test that fails without it. lockkit leaves the
environment variable ``GRPC_ENABLE_FORK_SUPPORT`` alone: a child of a program that forks works without it; with ``1``,
the fork of a program hangs while another of its threads keeps locking (grpcio 1.85.1).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from lockkit.backend import unsent
from lockkit.backends.etcd import rpc_pb2 as rpc
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
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import Event, Runtime, let_go
from lockkit.units import Seconds

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...] | None

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

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    # The caller decides whether to send a request again: it knows whether that does harm.
    ("grpc.enable_retries", 0),
    # A connection per client: gRPC would share them within the process, and with them the pauses after failures.
    ("grpc.use_local_subchannel_pool", 1),
    # Reconnect soon after an outage, so that renewals succeed before a leader must stop: gRPC's default backs off up to
    # two minutes. Longer ends terms of a few seconds; shorter knocks more often at a member that is down.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Notice within 7.5 s that the member of an idle watch hangs or its host is gone. etcd refuses pings more often than
    # every 5 s. ping_timeout_ms (60 s by default) ends the wait for their answers, not keepalive_timeout_ms; and after
    # two pings without data gRPC would send no more.
    ("grpc.keepalive_time_ms", 5_500),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    # A DNS name that moves is looked up again after this time without a connection. gRPC's own 30 s cost all leases of
    # that length; shorter asks the name servers more often while a member is down.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # A proxy for the web (http_proxy in the environment) leads to no etcd.
    ("grpc.enable_http_proxy", 0),
    # The holders of a lock with many readers, or of a semaphore, with long metadata: gRPC's limit is 4 MiB.
    ("grpc.max_receive_message_length", -1),
)


class Method:
    """One method of etcd's: its path, and the types of request and answer."""

    def __init__(self, path: str, request: Any, answer: Any) -> None:  # noqa: ANN401 - classes that protoc made
        self.path = f"/etcdserverpb.{path}"
        self.request, self.answer = request, answer


TXN = Method("KV/Txn", rpc.TxnRequest, rpc.TxnResponse)
RANGE = Method("KV/Range", rpc.RangeRequest, rpc.RangeResponse)
GRANT = Method("Lease/LeaseGrant", rpc.LeaseGrantRequest, rpc.LeaseGrantResponse)
REVOKE = Method("Lease/LeaseRevoke", rpc.LeaseRevokeRequest, rpc.LeaseRevokeResponse)
TIME_TO_LIVE = Method("Lease/LeaseTimeToLive", rpc.LeaseTimeToLiveRequest, rpc.LeaseTimeToLiveResponse)
# etcd describes it as a stream. One request and one answer are a stream, too, and need neither thread nor task.
KEEP_ALIVE = Method("Lease/LeaseKeepAlive", rpc.LeaseKeepAliveRequest, rpc.LeaseKeepAliveResponse)
AUTHENTICATE = Method("Auth/Authenticate", rpc.AuthenticateRequest, rpc.AuthenticateResponse)
STATUS = Method("Maintenance/Status", rpc.StatusRequest, rpc.StatusResponse)
MEMBER_LIST = Method("Cluster/MemberList", rpc.MemberListRequest, rpc.MemberListResponse)
WATCH = Method("Watch/Watch", rpc.WatchRequest, rpc.WatchResponse)

_UNARY = (TXN, RANGE, GRANT, REVOKE, TIME_TO_LIVE, KEEP_ALIVE, AUTHENTICATE, STATUS, MEMBER_LIST)


class CallError(grpc.RpcError):
    """A call has failed, as grpc's own errors say it; with the default, because the channel was closed."""

    def __init__(self, details: str, code: grpc.StatusCode = grpc.StatusCode.CANCELLED) -> None:
        super().__init__(details)
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self)


class WallClockTimeout(float):
    """
    A timeout for a call, seconds, that does not depend on ``time.time``.

    grpc's Python part adds the timeout to ``time.time()``, and its C core subtracts the system clock. Where the two
    differ (freezegun in an application's tests) every call would time out at once, or never.
    Fails without it: test_wall_clock_decides_nothing_at_the_client, of the conformance suite
    """

    def __radd__(self, now: float) -> float:
        """Take the place of ``time.time() + timeout``."""
        return time.clock_gettime(time.CLOCK_REALTIME) + float(self)


class MemberConnection:
    """The connection to one member, by grpc's blocking API. Makes no I/O itself."""

    def __init__(self, label: str, channel: Any, *, owned: bool) -> None:  # noqa: ANN401 - of one of two classes
        self.label = label  # ``host:port``, for messages
        self._channel = channel
        self._owned = owned
        self.is_outdated: Callable[[], bool] = lambda: False  # whether a new connection would use other certificates
        self._calls = {method: self._prepare(channel.unary_unary, method) for method in _UNARY}

    @staticmethod
    def _prepare(kind: Any, method: Method) -> Any:  # noqa: ANN401 - a method of the channel, and its result
        serialize, deserialize = method.request.SerializeToString, method.answer.FromString
        return kind(method.path, request_serializer=serialize, response_deserializer=deserialize)

    async def call(self, method: Method, request: Any, timeout: Seconds, metadata: Metadata) -> Any:  # noqa: ANN401 - messages
        """Send a request and return the answer."""
        try:
            return await self._send(self._calls[method], request, timeout=WallClockTimeout(timeout), metadata=metadata)
        except ConfigurationError:
            raise
        except (ValueError, grpc.aio.BaseError) as error:
            raise CallError(str(error)) from error

    async def _send(self, call: Any, request: Any, **options: Any) -> Any:  # noqa: ANN401 - see grpc
        try:
            return call(request, **options)
        except (ValueError, grpc.RpcError):
            raise
        except BaseException:
            free_locks(self._channel)
            raise

    def open_stream(self, requests: Any, metadata: Metadata) -> Any:  # noqa: ANN401 - see grpc
        """Open a watch stream, see `lockkit.backends.etcd.wakeup`."""
        try:
            return self._prepare(self._channel.stream_stream, WATCH)(requests, metadata=metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            raise CallError(str(error)) from error

    async def close(self) -> None:
        """Close the channel if this connection owns it."""
        if self._owned:
            self._channel.close()


class ForkedConnection(MemberConnection):
    """grpc's blocking API under asyncio, in a process that was forked after it used ``grpc.aio``."""

    async def _send(self, call: Any, request: Any, **options: Any) -> Any:  # noqa: ANN401 - see grpc
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        future = call.future(request, **options)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
        try:
            await done.wait()
            return future.result()
        finally:
            future.cancel()


class AsyncioConnection(MemberConnection):
    """``grpc.aio``. If the caller is cancelled, so is the call."""

    def __init__(self, label: str, channel: Any, *, owned: bool) -> None:  # noqa: ANN401 - see MemberConnection
        super().__init__(label, channel, owned=owned)
        _aio_state["used"] = True
        _aio_channels[id(channel)] = channel

    async def _send(self, call: Any, request: Any, **options: Any) -> Any:  # noqa: ANN401 - see grpc
        try:
            return await call(request, **options)
        except asyncio.CancelledError as error:
            # Closing the channel cancels its calls, which looks as if the caller had been cancelled.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise CallError("the channel was closed") from error
        except RuntimeError as error:  # asyncio's
            message = (
                f"the channel to etcd at {self.label} belongs to another event loop, or one that has ended: make it in "
                "the loop in which the client is used"
            )
            raise ConfigurationError(message) from error

    async def close(self) -> None:
        if self._owned:
            await self._channel.close()


def open_connection(
    runtime: Runtime, label: str, credentials: grpc.ChannelCredentials | None, server_name: str | None = None
) -> MemberConnection:
    """Make the connection to a member, without I/O: a blocking one unless an event loop runs."""
    kind, factory = MemberConnection, grpc
    if runtime.kind == "asyncio" and not runtime.loop_has_ended():
        kind, factory = (ForkedConnection, grpc) if _aio_state["unusable"] else (AsyncioConnection, grpc.aio)
    options = [*CHANNEL_OPTIONS]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        return kind(label, factory.insecure_channel(label, options=options), owned=True)
    return kind(label, factory.secure_channel(label, credentials, options=options), owned=True)


def free_locks(channel: Any) -> None:  # noqa: ANN401 - a grpc.Channel
    """
    Free those locks of a channel that an interrupted call has left taken.

    A signal handler that raises (Ctrl-C) may strike after ``Condition.__enter__`` has taken a lock and before the
    ``with`` has begun that would free it (the remainder of grpc/grpc#19973). Then every other thread that uses the
    channel hangs: renewals, and the thread that closes it.

    Relies on: a ``grpc.Channel`` has its C part in ``_channel``, also below interceptors, and the C part shows the
    state that holds the lock to the garbage collector. Where this changes, nothing is freed.
    Fails without it: tests/backends/test_interrupts.py
    """
    while (inner := getattr(channel, "_channel", None)) is not None:
        channel = inner
    for state in gc.get_referents(channel):
        for lock in gc.get_referents(state):
            if isinstance(lock, threading.Condition):
                let_go(lock)


# grpc.aio has one poller thread for the whole process. It doesn't exist in a forked child, and cannot be started again
# there. So a child of a process that used grpc.aio uses the blocking API, and neither uses nor collects the channels
# that it inherited: closing one waits for the missing thread.
# Fails without it: test_forked_child_owns_nothing, of the conformance suite
_aio_channels: WeakValueDictionary[int, Any] = WeakValueDictionary()
_kept_for_children: list[list[Any]] = []
_aio_state = {"used": False, "unusable": False}

os.register_at_fork(
    # Before, as other functions that run in the child first drop the clients.
    before=lambda: _kept_for_children.append([channel() for channel in _aio_channels.valuerefs()]),
    after_in_parent=_kept_for_children.pop,
    after_in_child=lambda: _aio_state.update(unusable=_aio_state["used"]),
)


class SharedAttempt:
    """What one caller does while the others wait for it: log in, or open a session. Threads may share it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._pending: Event | None = None

    async def make(self, work: Callable[[], Coroutine[Any, Any, None]], until: float) -> bool:
        """Do some work, unless another caller does: then wait until that has succeeded or failed."""
        done = self._runtime.event()
        with self._mutex:
            pending = self._pending = self._pending or done
        try:
            if pending is not done:
                return await pending.wait(max(0.0, until - self._runtime.now()))
            await work()
            return True
        finally:
            # Also by one that waited in vain: an interrupt may have kept the other caller from doing so.
            with self._mutex:
                if self._pending is pending:
                    self._pending = None
            pending.set()


class Cluster:
    """The members of one cluster, for one client. Threads may share it."""

    def __init__(
        self,
        runtime: Runtime,
        labels: Sequence[str],
        connect: Callable[[str], MemberConnection],
        user: tuple[str | None, str | None] = (None, None),
        client: object = None,
    ) -> None:
        """Log in with a name and a password, or as a client of the application, which logs in by itself."""
        self._runtime = runtime
        self._labels = labels
        self._connect = connect
        self.has_user = user[0] is not None  # so it can get a fresh token
        self._user = rpc.AuthenticateRequest(name=user[0], password=user[1] or "")
        self._client = client
        self._login = SharedAttempt(runtime)
        self._metadata: Metadata = None
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
        attempts_left, logins_left = len(self._labels) + spare, LOGINS_MAX
        may_be_executed = False
        while True:
            if attempts_left <= spare:
                await self._runtime.sleep(RETRY_PAUSE_SECONDS)
            connection = self.connection()
            sent, metadata = False, self.metadata
            try:
                timeout = self._timeout(until, is_last=attempts_left == 1)
                metadata = await self.obtain_login(connection, self._runtime.now() + timeout)
                sent = True
                return await connection.call(method, request, timeout, metadata)
            except DRIVER_ERRORS as error:
                if is_stale_token(error) and self.has_user and logins_left:
                    logins_left -= 1
                    self.discard_login(metadata)
                    continue
                if not is_member_failure(error):
                    raise translate(error, connection.label) from error
                self.switch_from(connection, error)
                attempts_left -= 1
                is_unknown = sent and is_outcome_unknown(error)
                if is_unknown:
                    may_be_executed = True
                    on_unknown()
                is_over = not attempts_left or self._runtime.now() >= until - RETRY_PAUSE_SECONDS
                if is_over or (is_unknown and not resend):
                    label = ", ".join(self._labels) if is_over else connection.label
                    raise translate(error, label, sent=may_be_executed) from error
            except BaseException:
                # Interrupted or cancelled halfway.
                if sent:
                    on_unknown()
                raise

    def _timeout(self, until: float, *, is_last: bool) -> float:
        """Return how long to wait for one member, seconds."""
        left = until - self._runtime.now()
        if left <= 0:
            raise CallError("no time was left to ask it", grpc.StatusCode.DEADLINE_EXCEEDED)
        return left if is_last or len(self._labels) == 1 else min(MEMBER_SECONDS, left / 2)

    @property
    def metadata(self) -> Metadata:
        """What goes with each call: the token of the last login, or what the application's client would send."""
        return self._metadata if self._client is None else getattr(self._client, "metadata", None)

    def discard_login(self, metadata: Metadata) -> None:
        """Log in again before the next call, unless that has happened since the login that failed."""
        if self._metadata is metadata:
            self._metadata = None

    async def obtain_login(self, connection: MemberConnection, until: float) -> Metadata:
        """
        Return the metadata for a call; log in if needed.

        One caller logs in while the others wait: a login costs the member a tenth of a second of CPU time.
        """
        while (metadata := self.metadata) is None and self.has_user:
            if not await self._login.make(lambda: self._log_in(connection, until), until):
                raise CallError("another caller's login took too long", grpc.StatusCode.DEADLINE_EXCEEDED)
        return metadata

    async def _log_in(self, connection: MemberConnection, until: float) -> None:
        if self._metadata is not None:
            return  # another caller has just done so
        timeout = max(0.0, until - self._runtime.now())
        try:
            answer = await connection.call(AUTHENTICATE, self._user, timeout, None)
        except DRIVER_ERRORS as error:
            if "authentication is not enabled" not in details_of(error):
                raise
            self._metadata = ()
        else:
            self._metadata = (("token", answer.token),)  # which all members accept

    def connection(self) -> MemberConnection:
        """Return the connection to the member in use."""
        outside = self._runtime.loop_has_ended()
        with self._mutex:
            if self._closed:
                raise unsent("the connection to etcd is closed")
            connection = self._connections.get((self._index, outside))
            if connection is None:
                connection = self._connect(self._labels[self._index])
                self._connections[self._index, outside] = connection
        if outside and isinstance(connection, AsyncioConnection):
            raise unsent(f"the event loop of the channel to etcd at {connection.label} has ended")
        return connection

    def switch_from(self, connection: MemberConnection, error: Exception) -> None:
        """Use the next member from now on, because this one failed; a new connection if its certificates changed."""
        log.debug("etcd at %s: %s %s", connection.label, code_of(error).name, details_of(error))
        is_outdated = connection.is_outdated()
        with self._mutex:
            if self._labels[self._index] == connection.label:
                self._index = (self._index + 1) % len(self._labels)
            if is_outdated:
                self._connections = {key: one for key, one in self._connections.items() if one is not connection}

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
